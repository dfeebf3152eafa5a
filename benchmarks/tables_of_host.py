"""Tables of results on activations in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mimose.bench.markdown import table
from writing import span, where


def transfers_quality(result: dict[str, Any]) -> Iterator[str]:
    yield "## Plans with transfers, against brute force\n"
    yield (
        f"{where(result)}. By how much a planned step takes longer than with the best of all plans "
        "of four options, on drawn costs, links and budgets; steps of a second, or of 100 ms.\n"
    )
    short = {f"{name}, 100 ms": row for name, row in result["quality_of_short_steps"].items()}
    rows = [
        [
            name,
            str(row["plans"]),
            f"{row['mean']:.2%}",
            f"{row['largest']:.1%}",
            str(row["over_2_percent"]),
            f"{row['mean_without_link']:.1%}",
            str(row["only_with_link"]),
        ]
        for name, row in {**result["quality"], **short}.items()
    ]
    header = ["blocks", "plans", "mean", "largest", "over 2 %", "mean without a link"]
    yield table([*header, "fit only with a link"], rows) + "\n"
    rows = [
        [name, span(row), f"{row['slowest']:.1f}"] for name, row in result["planning_ms"].items()
    ]
    yield table(["blocks", "planning, ms of processor time", "slowest"], rows) + "\n"


def host(result: dict[str, Any]) -> Iterator[str]:
    small = "" if "NVIDIA" in result["machine"] else "but narrow, "
    varied = "up to " if "mixed" in result or "flat" in result else ""
    yield (
        f"## Activations in host memory: {result['layers']} layers like Llama 8B's, {small}LoRA, "
        f"rows of {varied}{result['tokens']:,} tokens\n"
    )
    yield f"{where(result)}. `enforce=True`.\n"
    if "shares" in result:
        yield from _host_shares(result["shares"]["budgets"])
    if "mixed" in result:
        yield from _host_mixed(result["mixed"])
    if "floor" in result:
        yield from _host_floor(result["floor"])
    if "flat" in result:
        yield from _host_flat(result["flat"])


def _host_flat(case: dict[str, Any]) -> Iterator[str]:
    """What a long run holds, at every other look."""
    yield (
        f"What {case['steps']:,} steps on rows of random lengths hold between steps, each size "
        f"planned for; {case['lost']} lost, {case['plans']:,} plans. The longest rows fit only "
        "with bytes on the host.\n"
    )
    rows = [
        [
            f"{look['step']:,}",
            f"{look['device_bytes']:,}",
            f"{look['pinned_bytes'] / 2**20:.0f}",
            f"{look['moved_bytes'] / 2**30:.2f}",
            f"{look['python_objects']:,}",
        ]
        for look in case["looks"][::2]
    ]
    header = ["step", "in use, bytes", "host memory, MiB", "moved so far, GiB", "Python objects"]
    yield table(header, rows) + "\n"


def _host_shares(budgets: dict[str, Any]) -> Iterator[str]:
    yield (
        "Budgets with room for a share of what a step takes with everything kept; steps of a known "
        "model, after the reserve has had time to settle. Times over plain training's.\n"
    )
    rows = []
    for share, case in budgets.items():
        ways = case["over_plain"]
        for name in ("two options", "all options"):
            run = case["runs"][name][-1]
            steps = sum(run["seconds"]) / len(run["seconds"]) * (len(run["seconds"]) + 10)
            rows.append(
                [
                    f"{float(share):.0%}",
                    f"{case['budget'] / 2**30:.2f}",
                    name,
                    f"{ways[name][-1]:.3f}",
                    f"`{run['plan']}`",
                    f"{run['moved_bytes_a_step'] / 2**30:.2f}",
                    f"{run['stalled_seconds'] / steps:.1%}",
                    f"{run['reserve_share']:.1%}",
                    f"{run['peak_held_over_budget']:.3f}",
                ]
            )
    header = ["room", "budget, GiB", "", "time", "plan", "moved a step, GiB", "waiting"]
    yield table([*header, "reserve", "most held / budget"], rows) + "\n"


def _host_mixed(case: dict[str, Any]) -> Iterator[str]:
    yield (
        f"Whole runs of {len(case['lengths'])} steps on rows of mixed lengths, observing, planning "
        f"and pinning included, budget {case['budget'] / 2**30:.2f} GiB; rounds by turns.\n"
    )
    rows = [
        [
            name,
            str(number + 1),
            f"{sum(run['seconds']):.2f}",
            str(run["lost"]),
            f"{run['runs_recomputed']} of {run['runs_recomputed'] + run['runs_kept']}",
            f"{run['moved_bytes'] / 2**30:.2f}",
            f"{run['planning_seconds']:.2f}",
        ]
        for name, runs in case["runs"].items()
        for number, run in enumerate(runs)
    ]
    header = ["", "round", "seconds", "out of memory", "recomputed of kept and recomputed runs"]
    yield table([*header, "moved, GiB", "deciding and pinning, s"], rows) + "\n"


def _host_floor(case: dict[str, Any]) -> Iterator[str]:
    yield (
        "Budgets that leave room for a share of what recomputing everything needs "
        f"({case['recomputed_bytes'] / 2**30:.2f} GiB above {case['base_bytes'] / 2**30:.2f}); "
        "five steps, nothing known before the first.\n"
    )
    rows = [
        [name, f"{run['lost']} of {len(run['seconds'])}", f"`{run['plan']}`"]
        for name, run in case["tried"].items()
    ]
    yield table(["share", "out of memory", "last plan"], rows) + "\n"
