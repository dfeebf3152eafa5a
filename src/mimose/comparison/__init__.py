"""Published planners and a simulation of DTR, on the costs of the same recorded run.

Methods that do not choose one option for each block (segments, nested recomputes, eviction of
single tensors) are expressed here as schedules and traces, whose peak and time are evaluated. They
are for comparison, not for training: only the command line imports this package.
"""

from mimose.comparison.checkmate import Checkmate
from mimose.comparison.compare import (
    WITH_HOST,
    Cell,
    Comparison,
    Planners,
    SizeComparison,
    cell_of,
    cell_of_dtr,
    compare,
    compare_size,
    planners_of_the_field,
)
from mimose.comparison.drawing import draw
from mimose.comparison.dtr import Simulation, simulate
from mimose.comparison.dtr_heuristics import HEURISTICS, Heuristic
from mimose.comparison.dtr_runtime import Action, Failure
from mimose.comparison.evaluation import Evaluation, evaluate
from mimose.comparison.operator_classes import class_of, kept_by_class
from mimose.comparison.rotor import Rotor
from mimose.comparison.schedules import Schedule, ScheduleError, schedule_of
from mimose.comparison.stages import Chain, Outcome, Stage
from mimose.comparison.sublinear import Sublinear
from mimose.comparison.tables import (
    LEGEND,
    cells,
    columns,
    headline,
    markdown_of_comparison,
    page_of_comparison,
)
from mimose.comparison.trace import Call, Constant, Event, Output, Release, Trace
from mimose.comparison.trace_file import FORMAT as TRACE_FORMAT
from mimose.comparison.trace_file import read_trace, write_trace
from mimose.comparison.tracer import record_trace

__all__ = [
    "HEURISTICS",
    "LEGEND",
    "TRACE_FORMAT",
    "WITH_HOST",
    "Action",
    "Call",
    "Cell",
    "Chain",
    "Checkmate",
    "Comparison",
    "Constant",
    "Evaluation",
    "Event",
    "Failure",
    "Heuristic",
    "Outcome",
    "Output",
    "Planners",
    "Release",
    "Rotor",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "SizeComparison",
    "Stage",
    "Sublinear",
    "Trace",
    "cell_of",
    "cell_of_dtr",
    "cells",
    "class_of",
    "columns",
    "compare",
    "compare_size",
    "draw",
    "evaluate",
    "headline",
    "kept_by_class",
    "markdown_of_comparison",
    "page_of_comparison",
    "planners_of_the_field",
    "read_trace",
    "record_trace",
    "schedule_of",
    "simulate",
    "write_trace",
]
