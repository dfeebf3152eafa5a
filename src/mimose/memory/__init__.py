"""The only code that asks a device: meters, the allocator and its limits, the reserve, the clock.

Knows neither blocks nor plans.
"""

from mimose.memory.allocator import (
    ALLOCATOR_SETTINGS,
    VARIABLES,
    AllocatorLease,
    allocator_backend,
    current_settings,
    page_bytes_in,
    refuse_choice,
    set_up_for_good,
    why_left_alone,
)
from mimose.memory.clock import Clock
from mimose.memory.meters import Meter, Reading, meter_for
from mimose.memory.reserve import Reserve, reserve_for

__all__ = [
    "ALLOCATOR_SETTINGS",
    "VARIABLES",
    "AllocatorLease",
    "Clock",
    "Meter",
    "Reading",
    "Reserve",
    "allocator_backend",
    "current_settings",
    "meter_for",
    "page_bytes_in",
    "refuse_choice",
    "reserve_for",
    "set_up_for_good",
    "why_left_alone",
]
