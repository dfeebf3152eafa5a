"""What training costs: values and arithmetic.

The size of a batch, the options for a call of a block, the cost of each in bytes and nanoseconds,
the timeline that computes a step's peak from these costs, and the observation of a step. Knows
neither torch nor devices.
"""

from mimose.costs.input_size import MOST_PASSES, InputSize, Layout, arguments_in_words
from mimose.costs.link import Link
from mimose.costs.observations import Pattern, Run, StepObservation, in_one_order
from mimose.costs.options import Option
from mimose.costs.pace import Pace
from mimose.costs.regime import Regime
from mimose.costs.run_cost import SUBTRACTED, OptionCost, RunCost
from mimose.costs.timeline import (
    Levels,
    Moments,
    Profile,
    StepConditions,
    costs_of,
    extra_nanoseconds,
    levels,
    peak,
    transfers_of,
)
from mimose.costs.transfers import Schedule, Transfer

__all__ = [
    "MOST_PASSES",
    "SUBTRACTED",
    "InputSize",
    "Layout",
    "Levels",
    "Link",
    "Moments",
    "Option",
    "OptionCost",
    "Pace",
    "Pattern",
    "Profile",
    "Regime",
    "Run",
    "RunCost",
    "Schedule",
    "StepConditions",
    "StepObservation",
    "Transfer",
    "arguments_in_words",
    "costs_of",
    "extra_nanoseconds",
    "in_one_order",
    "levels",
    "peak",
    "transfers_of",
]
