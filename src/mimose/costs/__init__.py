"""What training costs: values and arithmetic.

The size of a batch, the bytes and seconds of each run of a block, the timeline that makes a step's
peak of them, and what was observed of a step. Knows neither torch nor a device.
"""

from mimose.costs.input_size import FINEST, MOST_PASSES, InputSize, Layout, arguments_in_words
from mimose.costs.observations import Observation, Pattern, Run, StepObservation, in_one_order
from mimose.costs.pace import Pace
from mimose.costs.regime import Regime
from mimose.costs.timeline import (
    TAKEN_OFF,
    InStep,
    Profile,
    RunCost,
    levels,
    peak,
    recompute_nanoseconds,
)

__all__ = [
    "FINEST",
    "MOST_PASSES",
    "TAKEN_OFF",
    "InStep",
    "InputSize",
    "Layout",
    "Observation",
    "Pace",
    "Pattern",
    "Profile",
    "Regime",
    "Run",
    "RunCost",
    "StepObservation",
    "arguments_in_words",
    "in_one_order",
    "levels",
    "peak",
    "recompute_nanoseconds",
]
