"""Run one call of a block: as usual, with its saved tensors moved to the host, or recomputed.

Only this package uses autograd's saved-tensor hooks. A recompute runs with the RNG, autocast state,
buffers and attributes of its forward. Knows neither models nor plans.
"""

from mimose.execution.arguments import ArgumentCopies, are_plain
from mimose.execution.attributes import AttributeSlot
from mimose.execution.autograd import (
    ForwardEnd,
    Listener,
    at_end_of_backward,
    next_node,
    nodes_of,
    top_hooks,
    watch_backward,
    with_graph,
)
from mimose.execution.before_forward import BeforeForward
from mimose.execution.buffers import (
    BufferSlot,
    BufferSnapshot,
    all_buffer_slots,
    buffers_a_call_may_change,
    buffers_in,
    is_norm,
    may_change,
    norm_buffers,
)
from mimose.execution.caches import CacheUse, holds_cache, may_take_cache, output_tensors
from mimose.execution.collectives import CollectivesIssued, is_distributed
from mimose.execution.compiler import hide_from_compiler
from mimose.execution.context import ExecutionContext, on_unsupported_device
from mimose.execution.dry_run import DryRun
from mimose.execution.foreign_hooks import foreign_hooks
from mimose.execution.former_attributes import AllAttributes, FormerAttributes
from mimose.execution.generators import Generator, OtherGenerators
from mimose.execution.hook_watch import Hook, HookWatch
from mimose.execution.later_changes import (
    ChangeDetector,
    NewChanges,
    StateBeforeForward,
)
from mimose.execution.module_structure import ModuleStructure
from mimose.execution.on_host import ArgumentsOfStep, MovedStorage, run_saving_on_host
from mimose.execution.recompute import Frame, RunAsFound
from mimose.execution.saved_arguments import copy_containers
from mimose.execution.side_effects import (
    AttributeSnapshot,
    FirstRunObserver,
    SideEffects,
    run_without_side_effects,
)
from mimose.execution.swapped_parameters import parameter_slots, swapped_parameters
from mimose.execution.temporary_values import Entry, run_with, run_with_former
from mimose.execution.undo import refuses_hooks

__all__ = [
    "AllAttributes",
    "ArgumentCopies",
    "ArgumentsOfStep",
    "AttributeSlot",
    "AttributeSnapshot",
    "BeforeForward",
    "BufferSlot",
    "BufferSnapshot",
    "CacheUse",
    "ChangeDetector",
    "CollectivesIssued",
    "DryRun",
    "Entry",
    "ExecutionContext",
    "FirstRunObserver",
    "FormerAttributes",
    "ForwardEnd",
    "Frame",
    "Generator",
    "Hook",
    "HookWatch",
    "Listener",
    "ModuleStructure",
    "MovedStorage",
    "NewChanges",
    "OtherGenerators",
    "RunAsFound",
    "SideEffects",
    "StateBeforeForward",
    "all_buffer_slots",
    "are_plain",
    "at_end_of_backward",
    "buffers_a_call_may_change",
    "buffers_in",
    "copy_containers",
    "foreign_hooks",
    "hide_from_compiler",
    "holds_cache",
    "is_distributed",
    "is_norm",
    "may_change",
    "may_take_cache",
    "next_node",
    "nodes_of",
    "norm_buffers",
    "on_unsupported_device",
    "output_tensors",
    "parameter_slots",
    "refuses_hooks",
    "run_saving_on_host",
    "run_with",
    "run_with_former",
    "run_without_side_effects",
    "swapped_parameters",
    "top_hooks",
    "watch_backward",
    "with_graph",
]
