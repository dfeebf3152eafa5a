"""Tables of steps whose memory depends on more than their size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mimose.bench.markdown import table
from writing import span, where


def content(result: dict[str, Any]) -> Iterator[str]:
    yield "## Memory that the size does not tell\n"
    yield f"{where(result)}. `enforce=True`, with `handle.retry`.\n"
    if "cases" in result:
        yield (
            "Each step is held against the best plan for its own exact profile. In brackets the "
            "second half of the run. Evictable steps may drop what they keep.\n"
        )
        yield _cases(result["cases"])
    if "outlier" in result:
        yield from _outlier(result["outlier"])
    if "evictable" in result:
        yield "Milliseconds a step with everything kept; the four take turns.\n"
        yield _evictable(result["evictable"])
    if "passes" in result:
        yield "Several passes or models in one step; predictions that were trusted.\n"
        yield _passes(result["passes"])


def _cases(cases: dict[str, Any]) -> str:
    header = ["case", "steps", "budget, GiB", "plain exceeds it on", "out of memory", "evictions"]
    header += ["blocks recomputed after a failure", "observed / evictable / bounded / trusted"]
    header += ["runs recomputed (oracle)", "recompute time / oracle's"]
    header += ["recompute time beyond the oracle's", "most held / budget", "seconds"]
    header += ["torch's checkpoint, seconds"]
    return table(header, [_case(name, case) for name, case in cases.items()]) + "\n"


def _case(name: str, case: dict[str, Any]) -> list[str]:
    s = case["summary"]
    return [
        name,
        str(case["steps"]),
        f"{case['budget'] / 2**30:.2f}",
        f"{case['plain_exceeds']:.0%}",
        str(s["lost"]),
        str(s["evictions"]),
        str(s["recoveries"]),
        kinds(s),
        f"{s['runs_recomputed']} ({s['runs_recomputed_by_oracle']})",
        f"{_ratio(s['recompute_over_oracle'])} "
        f"({_ratio(s['recompute_over_oracle_in_second_half'])})",
        f"{beyond_oracle(case):.1%}",
        f"{s['held_over_budget']:.4f}",
        f"{s['seconds']:.1f}",
        f"{s['torch_all_seconds']:.1f}" if "torch_all_seconds" in s else "–",
    ]


def beyond_oracle(case: dict[str, Any]) -> float:
    """The time of recomputes that the oracle does not need, as a share of the run's time."""
    ours, best, seconds = (
        sum(value or 0 for value in case["rows"][name])
        for name in ("recompute_ns", "best_recompute_ns", "seconds")
    )
    return float((ours - best) / 1e9 / seconds)


def kinds(summary: dict[str, Any]) -> str:
    """How many steps ran in each way."""
    names = ("observed", "evictable", "bounded", "trusted")
    return " / ".join(str(summary["kinds"].get(name, 0)) for name in names)


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _outlier(outlier: dict[str, Any]) -> Iterator[str]:
    s = outlier["summary"]
    recomputed, budget, kept = (outlier[key] / 2**30 for key in ("recomputed", "budget", "kept"))
    yield (
        f"BERT-base, {outlier['steps']} batches of 32 to 96 tokens, then one of 960, then 20 like "
        f"the first. The long one needs {recomputed:.2f} GiB recomputed and {kept:.2f} GiB kept; "
        f"the budget is {budget:.2f} GiB. Out of memory: {s['lost']}; evictions: {s['evictions']}; "
        f"blocks recomputed after a failure: {s['recoveries']}; the long step was "
        f"{s['outlier_was'] or 'lost'}; most held / budget: {s['held_over_budget']:.4f}.\n"
    )


def _evictable(models: dict[str, Any]) -> str:
    ways = list(next(iter(models.values()))["seconds"])
    rows = [
        [name, *(_over(case["seconds"][way], case["over_kept"][way]) for way in ways)]
        for name, case in models.items()
    ]
    return table(["model", *ways], rows) + "\n"


def _over(seconds: dict[str, float], ratio: float) -> str:
    return f"{span(seconds, 1e3)}, ×{ratio:.3f}"


def _passes(loops: dict[str, Any]) -> str:
    rows = [
        [
            name,
            str(run["steps"]),
            f"{run['budget'] / 2**30:.2f}",
            f"{run['plain_exceeds']:.0%}",
            str(len(run["lost"])),
            f"{run['observed_steps']} / {run['planned_steps']}",
            str(run["compared"]),
            f"{run['worst_under']:.3%}",
            f"{run['mean_over']:.2%}",
            f"{run['held_over_budget']:.4f}",
        ]
        for name, run in loops.items()
    ]
    header = ["loop", "steps", "budget, GiB", "plain exceeds it on", "out of memory"]
    header += ["observed / planned", "predictions compared", "peak under-predicted, worst"]
    return table([*header, "over-predicted, mean", "most held / budget"], rows) + "\n"
