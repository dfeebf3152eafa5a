"""`mimose trace`: record the operators of a step, and what DTR would cost at less memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mimose.cli.model_sources import load_step, reason
from mimose.comparison import HEURISTICS, Simulation, Trace, read_trace, record_trace, simulate
from mimose.errors import ArgumentError, MimoseError

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
    if is_trace_file(source):
        return read_trace(source)
    where, step = _chosen(device), load_step(source)
    try:
        return record_trace(step, device=where)
    except MimoseError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"the step of {source!r} failed: {reason(error)}. It must run twice: once to warm up, "
            "and once to be recorded"
        ) from None


def _chosen(device: str | None) -> str:
    if device not in (None, "cpu", "cuda"):
        raise ArgumentError(f"--device {device}: a step is recorded on cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device cuda: this torch sees no CUDA device. Use --device cpu")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def compare(trace: Trace, heuristics: Sequence[str]) -> Comparison:
    """Simulate a trace at every share of its memory."""
    if not trace.calls:
        raise ArgumentError("the trace has no operator calls: the step must run a model")
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
                f"--heuristic {name!r} is none of {', '.join(HEURISTICS)}: use one of these"
            )
    return list(names or HEURISTICS)
