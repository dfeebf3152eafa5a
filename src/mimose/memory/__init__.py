"""The only code that queries a device: meters, allocator settings and limits, reserve, clock.

Knows neither blocks nor plans.
"""

from mimose.memory.allocator import (
    ALLOCATOR_SETTINGS,
    ALLOCATOR_VARIABLES,
    AllocatorLease,
    allocator_backend,
    configure_for_process,
    current_settings,
    page_bytes_in,
    reason_not_to_configure,
    refuse_allocator_choice,
)
from mimose.memory.clock import Clock
from mimose.memory.meters import Meter, Reading, meter_for
from mimose.memory.reserve import Reserve, reserve_for

__all__ = [
    "ALLOCATOR_SETTINGS",
    "ALLOCATOR_VARIABLES",
    "AllocatorLease",
    "Clock",
    "Meter",
    "Reading",
    "Reserve",
    "allocator_backend",
    "configure_for_process",
    "current_settings",
    "meter_for",
    "page_bytes_in",
    "reason_not_to_configure",
    "refuse_allocator_choice",
    "reserve_for",
]
