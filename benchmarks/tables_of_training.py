"""Tables of results on whole training runs: convergence, and LoRA on a model of 8 billion."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from mimose.bench.markdown import table
from writing import where

Run = dict[str, Any]


def convergence(result: dict[str, Any]) -> Iterator[str]:
    setting = result["setting"]
    yield "## Does training converge as plain training does?\n"
    yield (
        f"{where(result)}. A BERT-like encoder ({setting['layers']} layers, width "
        f"{setting['width']}) learns the topics of texts of {setting['shortest']} to "
        f"{setting['longest']} words: {result['epochs']} epochs of {setting['batches']} batches of "
        f"{setting['batch']}. mimose under {result['budget'] / 2**30:.2f} GiB, which plain "
        f"training exceeds on {result['plain_exceeds']:.0%} of the steps. Loss: the mean of the "
        "first and of the last twentieth of the steps.\n"
    )
    rows = []
    for run in sorted(result["runs"], key=lambda run: (-run["deterministic"], -run["rate"])):
        plain = plain_of(result, run)
        first, last = ends(run["losses"])
        rows.append(
            [
                f"{run['rate']:g}",
                "deterministic" if run["deterministic"] else "default",
                run["way"],
                f"{first:.4f}",
                f"{last:.4f}",
                f"{run['accuracy']:.1%}",
                f"{largest_difference(run, plain):.2g}",
                "the same" if run["weights"] == plain["weights"] else "others",
                f"{run['recomputed']:.0%}" if "recomputed" in run else "–",
            ]
        )
    header = ["rate", "algorithms", "way", "loss, first", "loss, last", "held-out accuracy"]
    header += ["largest loss difference from plain", "final weights, to the bit", "recomputed"]
    yield table(header, rows) + "\n"


def plain_of(result: dict[str, Any], run: Run) -> Run:
    """Plain training at the same rate with the same algorithms."""
    kind = ("rate", "deterministic")
    (plain,) = (
        other
        for other in result["runs"]
        if other["way"] == "plain" and all(other[name] == run[name] for name in kind)
    )
    return dict(plain)


def largest_difference(run: Run, plain: Run) -> float:
    return max(abs(a - b) for a, b in zip(run["losses"], plain["losses"], strict=True))


def ends(losses: list[float]) -> tuple[float, float]:
    """The mean of the first and of the last twentieth."""
    few = max(1, len(losses) // 20)
    return statistics.fmean(losses[:few]), statistics.fmean(losses[-few:])


def sft_8b(result: dict[str, Any]) -> Iterator[str]:
    yield f"## LoRA on {result['layers']} layers like Llama 8B's, under caps\n"
    yield (
        f"{where(result)}. bf16, a chunked loss, one row a step, with the spread of real "
        "instruction lengths. Seconds of the timed rows, observing, planning and pinning "
        "included (all-on-host had its memory pinned before). × torch-all: of the rows that both "
        "finished. The longest row has a time of its own.\n"
    )
    rows = []
    for cap, case in result["caps"].items():
        for name, run in case["runs"].items():
            rows.append([*_cap(cap, case), name, *_cells(case, run)])
    header = ["cap", "rows, tokens", "contestant", "seconds", "× torch-all", "longest, s"]
    header += ["failed of all rows", "most held / cap", "recomputed when planned", "moved, GiB"]
    yield table([*header, "largest loss difference from torch-all"], rows) + "\n"


def _cap(cap: str, case: dict[str, Any]) -> list[str]:
    lengths = case["lengths"]
    timed = f"{len(lengths)} of {min(lengths):,}–{max(lengths):,}"
    return [cap, f"{timed}; {case['longest']:,}"]


def _cells(case: dict[str, Any], run: Run) -> list[str]:
    if "missing" in run:
        return [run["missing"], *["–"] * 7]
    base = case["runs"].get("torch-all", run)
    over = time_over(run, base)
    return [
        f"{seconds(run):.2f}",
        "–" if over is None else f"{over:.3f}",
        f"{run['longest']['seconds']:.2f}" if "seconds" in run["longest"] else "–",
        failures(run),
        f"{run['held_over_cap']:.3f}",
        "–" if run.get("recomputed") is None else f"{run['recomputed']:.0%}",
        f"{run['moved_bytes'] / 2**30:.1f}" if "moved_bytes" in run else "–",
        _loss_difference(run, base),
    ]


def seconds(run: Run) -> float:
    return sum(row.get("seconds", 0.0) for row in run["rows"])


def time_over(run: Run, other: Run) -> float | None:
    """The time of the rows that both finished, over the other's."""
    pairs = [
        (mine["seconds"], its["seconds"])
        for mine, its in zip(run["rows"], other["rows"], strict=True)
        if "seconds" in mine and "seconds" in its
    ]
    return sum(a for a, _ in pairs) / sum(b for _, b in pairs) if pairs else None


def failures(run: Run) -> str:
    """How many rows failed, the longest among them, and why."""
    reasons = [row["failure"] for row in (*run["rows"], run["longest"]) if "failure" in row]
    if not reasons:
        return "0"
    return ", ".join(f"{reasons.count(reason)}: {reason}" for reason in dict.fromkeys(reasons))


def _loss_difference(run: Run, base: Run) -> str:
    found = [
        abs(mine["loss"] - its["loss"])
        for mine, its in zip(run["rows"], base["rows"], strict=True)
        if "loss" in mine and "loss" in its
    ]
    return f"{max(found):.2g}" if found else "–"


def sft_8b_fixed(result: dict[str, Any]) -> Iterator[str]:
    yield "## Rows of one length on compiled layers, against the compiler's budget\n"
    yield (
        f"{where(result)}. {result['layers']} layers like Llama 8B's with LoRA, each compiled, "
        f"rows of {result['tokens']:,} tokens. mimose is given the memory that the compiler's "
        "plan held.\n"
    )
    plain = statistics.median(result["runs"]["compiled"]["seconds"])
    rows = [
        [
            name,
            f"{statistics.median(run['seconds']):.3f}",
            f"{statistics.median(run['seconds']) / plain:.3f}",
            f"{run['peak'] / 2**30:.2f}",
            f"{run['held'] / 2**30:.2f}",
            f"`{run['plan']}`" if "plan" in run else "–",
        ]
        for name, run in result["runs"].items()
    ]
    header = ["", "seconds a step, median", "× compiled", "peak, GiB", "most held, GiB", "plan"]
    yield table(header, rows) + "\n"
