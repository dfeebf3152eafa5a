"""Tensors in nested values, their storages, parameters, gradients and the size of a batch.

Also detects out-of-memory errors and the running backward. Knows neither blocks nor plans.
"""

from mimose.tensors.batch_size import (
    SizeFunction,
    argument_names,
    custom_input_size,
    input_size,
    refuse_other_arguments,
)
from mimose.tensors.gradients import Gradients
from mimose.tensors.nested import (
    allocated_bytes,
    argument_tensors,
    bytes_of,
    dense_parts,
    equal_values,
    local_tensor,
    map_tensors,
    new_bytes,
    shape_of,
    storage_bytes,
    storage_of,
    storages_in,
    tensors_in,
    version_of,
)
from mimose.tensors.out_of_memory import is_out_of_memory, release_traceback
from mimose.tensors.parameters import Parameters, is_parameter
from mimose.tensors.previous_outputs import PreviousOutputs
from mimose.tensors.running_backward import keeps_graph, task_id, unknown_task

__all__ = [
    "Gradients",
    "Parameters",
    "PreviousOutputs",
    "SizeFunction",
    "allocated_bytes",
    "argument_names",
    "argument_tensors",
    "bytes_of",
    "custom_input_size",
    "dense_parts",
    "equal_values",
    "input_size",
    "is_out_of_memory",
    "is_parameter",
    "keeps_graph",
    "local_tensor",
    "map_tensors",
    "new_bytes",
    "refuse_other_arguments",
    "release_traceback",
    "shape_of",
    "storage_bytes",
    "storage_of",
    "storages_in",
    "task_id",
    "tensors_in",
    "unknown_task",
    "version_of",
]
