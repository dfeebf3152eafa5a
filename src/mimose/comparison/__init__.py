"""The rest of the field on the same costs: other planners and DTR, simulated.

What one choice for each block cannot express (segments, nested recomputes, eviction of single
operators) is a schedule or a trace here, with its peak and its time. For comparing, not for
training: no other package imports this one, except for the command line.
"""

from mimose.comparison.dtr import Outcome, simulate
from mimose.comparison.dtr_heuristics import HEURISTICS, Heuristic
from mimose.comparison.dtr_runtime import Action, Failure
from mimose.comparison.trace import Call, Constant, Event, Output, Release, Trace
from mimose.comparison.trace_file import read_trace, write_trace
from mimose.comparison.tracer import record_trace

__all__ = [
    "HEURISTICS",
    "Action",
    "Call",
    "Constant",
    "Event",
    "Failure",
    "Heuristic",
    "Outcome",
    "Output",
    "Release",
    "Trace",
    "read_trace",
    "record_trace",
    "simulate",
    "write_trace",
]
