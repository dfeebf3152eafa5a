"""Facts about tensors: in nested values, their storages, parameters and gradients.

Also what running out of memory is, and which backward is running. Knows neither blocks nor plans.
"""

from mimose.tensors.batch_size import (
    SizeFunction,
    argument_names,
    input_size,
    measured_by,
    refuse_other_arguments,
)
from mimose.tensors.gradients import Gradients
from mimose.tensors.nested import (
    argument_tensors,
    bytes_given,
    bytes_of,
    local,
    map_tensors,
    storage_bytes,
    storage_of,
    storages_in,
    tensors_in,
)
from mimose.tensors.out_of_memory import forget, is_out_of_memory
from mimose.tensors.parameters import Parameters
from mimose.tensors.previous_outputs import PreviousOutputs
from mimose.tensors.running_backward import keeps_graph, task_id, unknown_task

__all__ = [
    "Gradients",
    "Parameters",
    "PreviousOutputs",
    "SizeFunction",
    "argument_names",
    "argument_tensors",
    "bytes_given",
    "bytes_of",
    "forget",
    "input_size",
    "is_out_of_memory",
    "keeps_graph",
    "local",
    "map_tensors",
    "measured_by",
    "refuse_other_arguments",
    "storage_bytes",
    "storage_of",
    "storages_in",
    "task_id",
    "tensors_in",
    "unknown_task",
]
