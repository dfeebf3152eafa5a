"""The only code that queries a device: meters, allocator settings and limits, reserve, clock; and
host memory, with the copies that go there and back.

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
from mimose.memory.copy_streams import CopyTimes
from mimose.memory.host_arena import HostArena
from mimose.memory.host_copies import CopyState, HostCopy, HostMemory
from mimose.memory.host_limit import free_host_bytes, host_limit, parse_host_memory
from mimose.memory.host_link import LinkSpeed
from mimose.memory.host_segment import PinningError
from mimose.memory.meters import Meter, Reading, meter_for
from mimose.memory.reserve import Reserve, reserve_for

__all__ = [
    "ALLOCATOR_SETTINGS",
    "ALLOCATOR_VARIABLES",
    "AllocatorLease",
    "Clock",
    "CopyState",
    "CopyTimes",
    "HostArena",
    "HostCopy",
    "HostMemory",
    "LinkSpeed",
    "Meter",
    "PinningError",
    "Reading",
    "Reserve",
    "allocator_backend",
    "configure_for_process",
    "current_settings",
    "free_host_bytes",
    "host_limit",
    "meter_for",
    "page_bytes_in",
    "parse_host_memory",
    "reason_not_to_configure",
    "refuse_allocator_choice",
    "reserve_for",
]
