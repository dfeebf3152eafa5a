"""Checks of versions, devices, the environment and a budget, for `mimose doctor`."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence

import torch

import mimose
from mimose.api import EXTRAS, NEEDED, missing_from, pip_command, switched_off, version_of
from mimose.cli.findings import NOTE, OK, PROBLEM, Finding
from mimose.memory import (
    ALLOCATOR_SETTINGS,
    ALLOCATOR_VARIABLES,
    Meter,
    meter_for,
    page_bytes_in,
    reason_not_to_configure,
)
from mimose.units import Budget, text_of

_NEEDED_FOR = {
    "cli": "all commands but `mimose doctor`",
    "hf": "transformers' Trainer",
    "lightning": "Lightning's Trainer",
    "bench": "`mimose bench` and pictures of reports",
}
"""The features that need each extra."""


def check_machine() -> Iterator[Finding]:
    """Check versions, optional packages, devices and environment variables."""
    yield from _versions()
    yield from _extras()
    yield from _devices()
    yield from _environment()


def check_budget(budget: Budget) -> tuple[int, Finding]:
    """The budget in bytes, and whether the device has enough memory for it."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    meter = meter_for(device)
    total, free, own = meter.device_bytes, meter.free_bytes(), meter.read().held
    meter.close()
    number = budget.in_bytes(device_bytes=total, free_bytes=free, own_bytes=own)
    what = f"a budget of {text_of(number)} on {device}, which has {text_of(total)}"
    if number > total:
        return number, Finding(PROBLEM, f"{what}: too large", 'use "80%" or "auto"')
    if number > free + own:
        what += f", of which only {text_of(free)} is free"
        return number, Finding(NOTE, what, "stop other processes on the device, or use less")
    return number, Finding(OK, what)


def _versions() -> Iterator[Finding]:
    yield Finding(OK, f"Python {platform.python_version()}, mimose {mimose.__version__}")
    for name, least in NEEDED.items():
        yield _package(name, least, needed=True)
    for name, least in {n: v for extra in EXTRAS.values() for n, v in extra.items()}.items():
        if version_of(name) is not None:
            yield _package(name, least, needed=False)


def _package(name: str, least: str, *, needed: bool) -> Finding:
    version = version_of(name) or "0"
    if _numbers(version) >= _numbers(least):
        return Finding(OK, f"{name} {version}")
    kind = PROBLEM if needed else NOTE
    return Finding(
        kind, f"{name} {version} is older than {least}", f"pip install -U '{name}>={least}'"
    )


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.partition("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)


def _extras() -> Iterator[Finding]:
    """Optional packages that are not installed; each is reported once."""
    reported: set[str] = set()
    if version_of("pytorch-lightning") is not None:
        reported.add("lightning")  # the same library under its other name
    for extra, feature in _NEEDED_FOR.items():
        missing = [name for name in missing_from(extra) if name not in reported]
        reported.update(missing)
        if missing:
            are = "are" if missing[1:] else "is"
            what = f"{_listed(missing)} {are} not installed; needed for {feature}"
            yield Finding(NOTE, what, pip_command(extra, *missing))


def _listed(names: Sequence[str]) -> str:
    """The names as in a sentence: a, b and c."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding(
            NOTE,
            "no CUDA device: budgets also work on the CPU, but counting tensor memory there slows "
            "training",
            "use a machine with an NVIDIA GPU and a CUDA build of torch for real runs",
        )
        return
    for index in range(torch.cuda.device_count()):
        meter = meter_for(torch.device("cuda", index))
        free, total = meter.free_bytes(), meter.device_bytes
        name = torch.cuda.get_device_name(index)
        yield Finding(OK, f"cuda:{index}: {name}, {text_of(free)} of {text_of(total)} free")
        if free < total // 2:
            yield Finding(
                NOTE,
                f"other processes use more than half of cuda:{index}",
                'nvidia-smi lists them; a budget of "auto" uses only the free memory',
            )
        if index == 0:
            yield _allocator(meter)


def _allocator(meter: Meter) -> Finding:
    if not meter.fragments:
        smaller = page_bytes_in(ALLOCATOR_SETTINGS) < meter.page_bytes
        return Finding(
            OK,
            f"expandable segments are on, in pages of {text_of(meter.page_bytes)}",
            f"{ALLOCATOR_SETTINGS} wastes less memory" if smaller else "",
        )
    reason = reason_not_to_configure()
    if reason is None:
        return Finding(OK, f"attaching will configure PyTorch's allocator ({ALLOCATOR_SETTINGS})")
    return Finding(
        NOTE,
        "PyTorch's allocator does not use expandable segments, and mimose does not change that "
        f"because {reason}: batches of varying size fragment its memory, so plans must leave more "
        "free",
        f"configure the allocator with {ALLOCATOR_SETTINGS}, or do not configure it",
    )


def _environment() -> Iterator[Finding]:
    if switched_off():
        yield Finding(PROBLEM, "MIMOSE_DISABLE is set: mimose does nothing", "unset MIMOSE_DISABLE")
    for name in ALLOCATOR_VARIABLES:
        setting = os.environ.get(name)
        if not setting:
            continue
        yield Finding(OK, f"{name}={setting}")
        if "backend:cudaMallocAsync" in setting:
            yield Finding(
                PROBLEM,
                "the cudaMallocAsync allocator does not report fragmentation, so plans must leave "
                "more memory free",
                f"remove backend:cudaMallocAsync from {name}",
            )
