"""The limit on host memory for activations."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from mimose.errors import ArgumentError, BudgetError
from mimose.units import EXAMPLES, parse_budget, text_of

_AUTO_DIVISOR = 4
"""`"auto"` takes the free memory divided by this: data loaders need memory, too."""
_USAGE = "'auto', 0 to switch the host options off, '16GiB', or a number of bytes"
_CAP_IPC_LOCK = 14
"""The capability that lifts the limit on locked memory."""


def parse_host_memory(value: int | str) -> int | None:
    """Bytes for `host_memory=`; None for `"auto"`.

    >>> parse_host_memory("16GiB") == 16 * 2**30, parse_host_memory(0), parse_host_memory("auto")
    (True, 0, None)
    """
    if isinstance(value, str) and value.strip().lower() == "auto":
        return None
    if not isinstance(value, bool) and value in (0, "0"):
        return 0
    try:
        budget = parse_budget(value)
    except BudgetError as error:
        raise ArgumentError(f"host_memory={value!r} {_problem(value, error)}") from None
    if budget.total_bytes is None:
        raise ArgumentError(
            f"host_memory={value!r}: a share of the host is not supported; write 'auto', '16GiB', "
            "or a number of bytes"
        )
    physical = physical_bytes()
    if budget.total_bytes > physical:
        raise ArgumentError(
            f"host_memory={value!r} is more than the {text_of(physical)} that this machine has: "
            "give less, or 'auto'"
        )
    return budget.total_bytes


def _problem(value: object, error: BudgetError) -> str:
    """What is wrong with this value, and what to write instead."""
    problem = str(error).removeprefix(f"memory_budget={value!r} ")
    if isinstance(value, str) or problem.startswith("means"):
        return problem.replace(EXAMPLES, _USAGE)
    return f"is not a memory size; use {_USAGE}"


def host_limit(requested: int | None, device: torch.device) -> int:
    """The bytes of host memory that activations of this device may take; 0 if none.

    `requested` is None for "auto". A device that shares its memory with the host gains nothing from
    moving activations. On a CPU, "auto" means 0: moving is possible there for trials only.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if getattr(properties, "is_integrated", 0):
            return 0
        return automatic_limit() if requested is None else requested
    return (requested or 0) if device.type == "cpu" else 0


def physical_bytes() -> int:
    """The memory of the machine, or of the container if its limit is lower."""
    return min([_machine_bytes(), *(limit for limit, _ in _cgroups())])


def _machine_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system that does not tell
        return 1 << 40


def free_host_bytes() -> int:
    """Free memory of the machine, or less if a limit of this process's control groups is nearer."""
    return min([_available(), *(limit - used for limit, used in _cgroups())])


def automatic_limit() -> int:
    """A quarter of the free memory, divided among the training processes of this machine."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
    share = max(0, free_host_bytes()) // _AUTO_DIVISOR // ranks
    lockable = _lockable()
    return share if lockable is None else min(share, lockable)


def _available() -> int:
    """Memory that new processes could get without swapping."""
    with suppress(OSError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if found:
            return int(found[1]) << 10
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))


def _cgroups() -> Iterator[tuple[int, int]]:
    """The (limit, usage) in bytes of each readable control group that this process belongs to."""
    root = Path("/sys/fs/cgroup")
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from group_and_parents(root, path, "memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                names = "memory.limit_in_bytes", "memory.usage_in_bytes"
                yield from group_and_parents(root / "memory", path, *names)


def group_and_parents(root: Path, path: str, limit: str, used: str) -> Iterator[tuple[int, int]]:
    """The readable limits and usages of a control group and of its parents."""
    folder = root / path.lstrip("/")
    for group in (folder, *folder.parents):
        with suppress(OSError, ValueError):  # "max" means no limit
            most, now = int((group / limit).read_text()), int((group / used).read_text())
            yield most, max(0, now - _cached_bytes(group))
        if group == root:
            return


def _cached_bytes(group: Path) -> int:
    """Bytes of files, datasets for example, that the system caches only while nobody needs them.

    Version 1 tells first what is the group's own, and then, as its usage does, the total with its
    children.
    """
    with suppress(OSError):
        statistics = (group / "memory.stat").read_text()
        found = re.findall(r"^(?:total_)?inactive_file (\d+)$", statistics, re.MULTILINE)
        return int(found[-1]) if found else 0
    return 0


def _lockable() -> int | None:
    """The bytes that this process may lock in memory; None if there is no limit."""
    import resource

    with suppress(OSError):
        found = re.search(r"CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text())
        if found and int(found[1], 16) >> _CAP_IPC_LOCK & 1:
            return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
