"""Tables of results on others' methods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from field_page import about as about_same_graph
from field_page import least_memory
from mimose.bench.estimator_tables import by_samples, estimators
from mimose.bench.markdown import table
from writing import where


def operator_memory(result: dict[str, Any]) -> Iterator[str]:
    yield "## Memory of operators (`operator_memory.py`)\n"
    yield (
        f"{where(result)}. What a forward leaves in use at its end, by the class of the operators "
        "that made it, at the smallest and the largest of the sizes traced; and the least degree "
        "of a polynomial of the input's size that is nowhere more than 1 % of the largest off.\n"
    )
    rows = []
    for task, found in result["tasks"].items():
        first, last = found["rows"][0], found["rows"][-1]
        span = f"{first['extent']:g} to {last['extent']:g}"
        for name, degree in found["degrees"].items():
            ends = (one["bytes"].get(name, 0) / 2**20 for one in (first, last))
            grows = "none" if degree is None else str(degree)
            rows.append([task, found["axis"], span, name, *(f"{n:.1f}" for n in ends), grows])
    header = ["task", "size", "from – to", "operators", "least, MiB", "most, MiB", "degree"]
    yield table(header, rows) + "\n"


def dtr_against_simrd(result: dict[str, Any]) -> Iterator[str]:
    yield "## Our DTR against the authors'\n"
    runs = [
        pair for log in result["logs"].values() for pairs in log["runs"].values() for pair in pairs
    ]
    apart = max(abs(run["mimose"]["overhead"] / run["simrd"]["overhead"] - 1) for run in runs)
    same = sum(run["mimose"]["failure"] == run["simrd"]["failure"] for run in runs)
    yield (
        f"{where(result)}. The same operator logs and the same budgets in bytes, once in the "
        "simulator of the DTR paper's authors (`simrd`) and once in `mimose.comparison`. Time over "
        "that of an unlimited run, at shares of its peak. One figure where both agree to three "
        f"decimals, else theirs / ours. Of {len(runs)} runs {same} end in the same way (a dash: "
        f"out of memory; ∞: recomputing takes more than {result['overhead_limit'] - 1:g} × the "
        f"step), and the times up to there differ by {apart:.4%} at most. An empty cell: "
        f"theirs did not end within {result['seconds_limit']:.0f} s for the whole row. The last "
        "column is the speed of ours at half of the memory.\n"
    )
    shares = sorted({run["simrd"]["share"] for run in runs}, reverse=True)
    rows = [
        [name, heuristic, *_by_share(pairs, shares), _calls_per_second(log["calls"], pairs)]
        for name, log in result["logs"].items()
        for heuristic, pairs in log["runs"].items()
    ]
    header = ["log", "heuristic", *(f"{share:.0%}" for share in shares), "calls a second"]
    yield table(header, rows) + "\n"


def _by_share(pairs: list[dict[str, Any]], shares: list[float]) -> Iterator[str]:
    by_share = {pair["simrd"]["share"]: pair for pair in pairs}
    for share in shares:
        pair = by_share.get(share)
        ends = () if pair is None else (_end(pair["simrd"]), _end(pair["mimose"]))
        yield " / ".join(dict.fromkeys(ends))


def _end(run: dict[str, Any]) -> str:
    if run["failure"] is None:
        return f"{run['overhead']:.3f}"
    return "–" if run["failure"] == "out of memory" else "∞"


def _calls_per_second(calls: int, pairs: list[dict[str, Any]]) -> str:
    half = [pair["mimose"] for pair in pairs if pair["simrd"]["share"] == 0.5]
    return f"{calls / half[0]['seconds']:,.0f}" if half and half[0]["failure"] is None else ""


def solvers(result: dict[str, Any]) -> Iterator[str]:
    yield "## Planners of other papers: time, and distance from the best\n"
    yield (
        f"{where(result)}. Chains of blocks, all equal or all different, at 20, 50 and 80 % of the "
        "way from everything recomputed to everything kept. Extra: the plan's recomputes, in "
        "percent of the step. Gap: by how much, at most, the plan is slower than the best of its "
        "form, in percent of the step; 0 is proven to be the best. Checkmate stops after "
        f"{result['seconds_limit']:g} s. At each budget in turn, or the most of the three.\n"
    )
    rows = []
    kinds = dict.fromkeys((row["blocks"], row["kind"]) for row in result["rows"])
    for blocks, kind in kinds:
        found = [row for row in result["rows"] if (row["blocks"], row["kind"]) == (blocks, kind)]
        gaps = [row["checkmate_gap"] for row in found]
        rows.append(
            [
                f"{blocks} {kind}",
                f"{max(row['rotor_seconds'] for row in found):.2f}",
                _percentages(row["rotor_extra"] for row in found),
                f"{max(row['checkmate_seconds'] for row in found):.1f}",
                _percentages(row["checkmate_extra"] for row in found),
                "unknown" if None in gaps else f"{100 * max(gaps):.2f}",
                str(sum(row["timed_out"] for row in found)),
            ]
        )
    header = ["blocks", "rotor, s", "rotor's extra, %", "checkmate, s", "checkmate's extra, %"]
    yield table([*header, "gap, %", "out of time"], rows) + "\n"


def _percentages(shares: Iterable[float]) -> str:
    return ", ".join(f"{100 * share:.2f}" for share in shares)


def same_graph(result: dict[str, Any]) -> Iterator[str]:
    yield "## Same graph, every planner\n"
    yield f"{about_same_graph(result)}\n"
    yield least_memory(result) + "\n"
    yield "`docs/field.md` has the times by budget.\n"


def estimators_on_surveys(result: dict[str, Any]) -> Iterator[str]:
    yield "## Estimators on sizes that were observed (the paper's Table 3)\n"
    yield (
        f"{where(result)}. Learned from and judged by what `{result['surveyed']}` observed on "
        f"{result['surveyed_machine']}: the peak above the step's start with everything kept, and "
        "what each layer saves. Mimose learns all quantities at once; the others have a model for "
        "the peak and one for each layer.\n"
    )
    yield estimators(result["tasks"]) + "\n"
    yield "Mean error of the peak by the number of samples, averaged over the tasks:\n"
    yield by_samples(result["tasks"]) + "\n"
    yield (
        "One of the first four samples is a half-full batch, so batch and length vary: with four "
        "samples mimose predicts full batches alone, and does not trust its predictions yet.\n"
    )
