"""What every test starts from and leaves behind: a seed, one thread, quiet libraries, no hooks."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start

import pytest
import torch
import torch._dynamo  # before the first freeze: the first operation that is counted would load it

import compare
from mimose.memory.clock import Clock
from recorded_runs import browser, known, recorded, recorded_with_host, recording_file

__all__ = [
    "browser",
    "known",
    "recorded",
    "recorded_with_host",
    "recording_file",
]  # fixtures of all folders

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--unsteady",
        type=int,
        metavar="SEED",
        help="measured times and garbage collections by chance: no test may depend on either",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before any fixture, of whatever scope: on a CPU memory is counted by process, and none may
    find the rubbish of others."""
    gc.collect()
    gc.freeze()  # what lives on (modules, mostly) is not looked through again


@pytest.fixture(autouse=True)
def _as_on_another_machine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    seed = request.config.getoption("--unsteady")
    if seed is None:
        yield
        return
    dice = random.Random(f"{seed} {request.node.nodeid}")
    steady, former = Clock.seconds, gc.get_threshold()

    def seconds(clock: Clock, start: Any, end: Any) -> float | None:
        took = steady(clock, start, end)
        return None if took is None else took * 4 ** dice.uniform(-1, 1)

    monkeypatch.setattr(Clock, "seconds", seconds)
    gc.set_threshold(dice.choice([50, 700, 10_000_000]))
    yield
    gc.set_threshold(*former)


@pytest.fixture(autouse=True)
def _same_start_and_clean_end() -> Iterator[None]:
    torch.manual_seed(0)
    random.seed(0)
    yield
    assert compare.no_hooks(), "a saved-tensor hook was left behind"
