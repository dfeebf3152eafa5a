"""`mimose trace`: record the operators of a step, and simulate DTR with less memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from mimose.cli.model_sources import load_step, place, reason
from mimose.comparison import (
    HEURISTICS,
    Failure,
    Simulation,
    Trace,
    read_trace,
    record_trace,
    simulate,
)
from mimose.errors import ArgumentError, MimoseError
from mimose.units import text_of

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Budgets, as shares of the memory that the step uses when nothing is evicted."""


@dataclass(frozen=True)
class Comparison:
    """The simulated outcomes of one trace."""

    calls: int
    milliseconds: float
    peak_bytes: int
    constant_bytes: int
    outcomes: dict[str, list[Simulation]]
    """By heuristic; one outcome for each of `SHARES`."""

    def to_plain(self) -> dict[str, object]:
        """Values for JSON."""
        runs = {
            name: [{**asdict(one), "overhead": one.overhead} for one in row]
            for name, row in self.outcomes.items()
        }
        return {**asdict(self), "outcomes": runs, "shares": SHARES}


def is_trace_file(source: str) -> bool:
    """Whether the user means a file: it exists, or looks like one."""
    return Path(source).exists() or source.endswith(".jsonl")


def load_or_record(source: str, device: str | None) -> Trace:
    """The trace in a file, or of the step that `module:function` returns."""
    trace = read_trace(source) if is_trace_file(source) else _record(source, device)
    if not trace.calls:
        raise ArgumentError(
            f"the step of {source!r} ran no operators: it must run a model forward and backward"
        )
    return trace


def _record(source: str, device: str | None) -> Trace:
    device_type, step = _checked_device(device), load_step(source)
    try:
        return record_trace(step, device=device_type)
    except MimoseError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"the step of {source!r} failed: {reason(error)}{place(error)}. It must run twice: "
            "once to warm up, and once to be recorded"
        ) from None


def _checked_device(device: str | None) -> str:
    if device not in (None, "cpu", "cuda"):
        raise ArgumentError(f"--device {device}: steps can be recorded on cpu or cuda only")
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device cuda: torch finds no CUDA device here. Use --device cpu")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def compare(trace: Trace, heuristics: Sequence[str]) -> Comparison:
    """Simulate a trace at every share of its memory."""
    return Comparison(
        calls=len(trace.calls),
        milliseconds=trace.nanoseconds / 1e6,
        peak_bytes=trace.peak_bytes,
        constant_bytes=trace.constant_bytes,
        outcomes={
            name: [
                simulate(trace, int(trace.peak_bytes * share), HEURISTICS[name]) for share in SHARES
            ]
            for name in heuristics
        },
    )


def known_heuristics(names: Sequence[str]) -> list[str]:
    """These heuristics, or all of them; an error if one is unknown."""
    for name in names:
        if name not in HEURISTICS:
            raise ArgumentError(
                f"--heuristic {name!r} is unknown: use one of {', '.join(HEURISTICS)}"
            )
    return list(names or HEURISTICS)


def trace_table(comparison: Comparison) -> Group:
    """One row per heuristic: the simulated time at each budget, over that of a plain run."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("heuristic", no_wrap=True)
    for share in SHARES:
        table.add_column(f"{share:.0%}", justify="right", no_wrap=True)
    for name, outcomes in comparison.outcomes.items():
        table.add_row(name, *map(_overhead, outcomes))
    lines = (
        f"{comparison.calls} operator calls, {comparison.milliseconds:.1f} ms, peak "
        f"{text_of(comparison.peak_bytes)}, {text_of(comparison.constant_bytes)} of it constants. "
        "Time under DTR relative to the plain step, at these shares of the peak:"
    )
    legend = "–: does not fit; thrash: recomputing takes more than nine times as long as the step"
    return Group(Text(lines), table, Text(legend))


def _overhead(outcome: Simulation) -> str:
    if outcome.failure is None:
        return f"{outcome.overhead:.3f}"
    return "–" if outcome.failure is Failure.out_of_memory else "thrash"
