"""How one call of a block runs: plainly, or recomputed in the backward with all as it was.

The only code that touches autograd's hooks. Restores random numbers, autocast, buffers and what
else a forward found or left behind. Knows neither models nor plans.
"""

from mimose.execution.arguments import Given, are_plain
from mimose.execution.autograd import Listener, at_end_of_backward, nodes_of, watch_backward
from mimose.execution.buffers import (
    Place,
    Snapshot,
    all_places_in,
    is_norm,
    likely_places,
    may_change,
    norm_places,
    places_in,
)
from mimose.execution.caches import CacheUse, may_take_cache, output_tensors
from mimose.execution.collectives import Spoken, several
from mimose.execution.context import ExecutionContext, is_foreign
from mimose.execution.dry_run import DryRun
from mimose.execution.later_changes import Begun, Build, Later, Moment
from mimose.execution.oom_fallback import Guard
from mimose.execution.recompute import Found, Frame, foreign_hooks, hide_from_compiler
from mimose.execution.saved_arguments import own_containers
from mimose.execution.side_effects import (
    Exchanged,
    FirstLook,
    Imprint,
    SideEffects,
    parameter_places,
    without_a_trace,
)

__all__ = [
    "Begun",
    "Build",
    "CacheUse",
    "DryRun",
    "Exchanged",
    "ExecutionContext",
    "FirstLook",
    "Found",
    "Frame",
    "Given",
    "Guard",
    "Imprint",
    "Later",
    "Listener",
    "Moment",
    "Place",
    "SideEffects",
    "Snapshot",
    "Spoken",
    "all_places_in",
    "are_plain",
    "at_end_of_backward",
    "foreign_hooks",
    "hide_from_compiler",
    "is_foreign",
    "is_norm",
    "likely_places",
    "may_change",
    "may_take_cache",
    "nodes_of",
    "norm_places",
    "output_tensors",
    "own_containers",
    "parameter_places",
    "places_in",
    "several",
    "watch_backward",
    "without_a_trace",
]
