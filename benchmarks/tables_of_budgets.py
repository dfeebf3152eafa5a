"""Tables of results on budgets: do they hold, and how good are the plans?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mimose.bench.markdown import table
from writing import span, where


def planner_quality(result: dict[str, Any]) -> Iterator[str]:
    kind = ", bf16 autocast" if result["autocast"] else ""
    yield f"## Plans on real lengths under a hard cap{kind}\n"
    yield f"{where(result)}. {result['steps']} steps each, `enforce=True`, expandable segments.\n"
    rows = []
    for task, runs in result["tasks"].items():
        for run in runs["runs"].values():
            s = run["summary"]
            under, over = prediction_errors(run)
            rows.append(
                [
                    task,
                    f"{run['tight']} %" + (" (floor)" if run["at_floor"] else ""),
                    f"{run['budget'] / 2**30:.2f}",
                    str(s["out_of_memory"]),
                    f"{s['held_over_budget']:.4f}",
                    str(s["observed_steps"]),
                    f"{s['could_keep_more']:.1%}",
                    f"{s['recompute_over_oracle']:.3f}",
                    _reserve(s),
                    f"{under:.3%}",
                    f"{over:.2%}",
                    span(s["cached_plan_us"], digits=0) if s["cached_plan_us"] else "–",
                    span(s["new_plan_us"], digits=0) if s["new_plan_us"] else "–",
                ]
            )
    if "note" in result:
        yield f"{result['note']}\n"
    header = [
        "task",
        "plain exceeds it on",
        "budget, GiB",
        "out of memory",
        "most held / budget",
        "steps observed",
        "steps that could keep one more",
        "recompute time / oracle's",
        "reserve at the end (mean)",
        "peak under-predicted, worst",
        "over-predicted, mean",
        "cached plan in a step, µs",
        "new plan in a step, µs",
    ]
    yield table(header, rows) + "\n"


def prediction_errors(run: dict[str, Any]) -> tuple[float, float]:
    """Of all planned steps: the worst under-prediction of a peak, the mean over-prediction."""
    planned = [row for row in run["rows"] if row["planned"]]
    known = [row for row in planned if row["predicted"] is not None]  # else only bounded
    errors = [(row["predicted"] - row["peak"]) / row["peak"] for row in known]
    return max(0.0, -min(errors)), sum(max(e, 0.0) for e in errors) / len(errors)


def _reserve(summary: dict[str, Any]) -> str:
    mean = summary.get("mean_reserve_share")
    return f"{summary['reserve_share']:.1%}" + ("" if mean is None else f" ({mean:.1%})")


def first_steps(result: dict[str, Any]) -> Iterator[str]:
    yield "## The first steps, in many orders\n"
    yield (
        f"{where(result)}. `enforce=True`, expandable segments, a plain loop. Every run begins "
        "anew and takes its lengths in another order.\n"
    )
    rows = []
    for task, budget in dict.fromkeys((run["task"], run["budget"]) for run in result["runs"]):
        runs = [r for r in result["runs"] if (r["task"], r["budget"]) == (task, budget)]
        shares = sorted(run["reserve"] / budget for run in runs)
        rows.append(
            [
                task,
                f"{budget / 2**30:.2f}",
                str(len(runs)),
                str(sum(run["steps"] for run in runs)),
                str(sum(len(run["failed"]) for run in runs)),
                f"{shares[0]:.1%}–{shares[-1]:.1%}",
            ]
        )
    yield table(["task", "budget, GiB", "runs", "steps", "out of memory", "reserve"], rows) + "\n"


def allocator(result: dict[str, Any]) -> Iterator[str]:
    yield "## Does the budget hold with an untouched environment?\n"
    yield (
        f"{where(result)}. {result['steps']} steps each, a process each, `enforce=True`, no "
        "`handle.retry`. `auto`: mimose sets the allocator up; `leave`: PyTorch's own settings.\n"
    )
    rows = []
    for way in ("auto", "leave"):
        for name, case in result[way].items():
            if "failed" in case:
                rows.append([name, way, "did not run", *["–"] * 6])
                continue
            unused = [
                lost["unused_share"] for lost in case["out_of_memory"] if "unused_share" in lost
            ]
            rows.append(
                [
                    name,
                    way,
                    f"{case['budget'] / 2**30:.2f}",
                    f"{case['plain_exceeds']:.0%}",
                    str(len(case["out_of_memory"])),
                    f"{case['held_over_budget']:.4f}",
                    str(case["observed_steps"]),
                    f"{case['reserve_share']:.1%} ({case['most_reserve_share']:.1%})",
                    f"{min(unused):.1%}–{max(unused):.1%}" if unused else "–",
                ]
            )
    header = ["model", "allocator", "budget, GiB", "plain exceeds it on", "out of memory"]
    header += ["most held / budget", "steps observed", "reserve at the end (most)"]
    yield table([*header, "held and unused when it ran out"], rows) + "\n"


def fragmentation(result: dict[str, Any]) -> Iterator[str]:
    yield "## What is lost between tensors\n"
    yield (
        f"{where(result)}. `enforce=True`, expandable segments, a pinned reserve. Lost: free bytes "
        "that fill no whole page, as a share of the budget.\n"
    )
    rows = []
    for run in result["runs"]:
        share = 100 / run["budget"]
        after = sorted(seen["unusable"] * share for seen in run["after_forward"])
        failures = [seen["unusable"] * share for seen in run["at_failure"]]
        rows.append(
            [
                run["task"],
                f"{run['budget'] / 2**30:.2f}",
                f"{run.get('page_bytes', 20 << 20) >> 20} MiB",
                f"{run['reserve_share']:.0%}",
                str(run["steps"]),
                str(len(run["failed"])),
                str(run["rescued"]),
                str(run["retries"]),
                f"{after[len(after) // 2]:.1f} % ({after[-1]:.1f} %)",
                f"{min(failures):.1f}–{max(failures):.1f} %" if failures else "–",
            ]
        )
    header = ["task", "budget, GiB", "pages", "reserve", "steps", "out of memory"]
    header += ["rescued in the forward", "allocator's retries"]
    header += ["lost after a forward: median (most)", "lost at a failure"]
    yield table(header, rows) + "\n"


def promise(result: dict[str, Any]) -> Iterator[str]:
    yield "## Does the budget hold?\n"
    yield (
        f"{where(result)}. `enforce=True`, `handle.retry`, expandable segments. Surprises: steps "
        "that did not go as their plans expected. Grown: what the process takes, from the 100th "
        "step of a run to its end, in the worst run.\n"
    )
    rows = [[name, *_promised(case)] for name, case in result["cases"].items()]
    cases = result["cases"].values()
    steps, lost = sum(case["steps"] for case in cases), sum(len(case["lost"]) for case in cases)
    rows.append(["**all**", "", f"**{steps:,}**", f"**{lost}**", *[""] * 8])
    header = ["case", "budget, GiB", "steps", "lost", "recoveries", "evictions", "surprises"]
    header += ["observed", "most held / budget", "reserve", "allocator's retries", "grown"]
    yield table(header, rows) + "\n"
    for name, case in result["cases"].items():
        for number, message in case["lost"]:
            yield f"Lost in {name}, step {number}: {message.split(' (')[0]}.\n"


def _promised(case: dict[str, Any]) -> list[str]:
    process = case.get("process")
    grown = "–"
    if process is not None and process["grown_bytes"] is not None:
        grown = f"{process['grown_bytes'] / 2**20:.0f} MiB, {process['grown_objects']:,} objects"
    return [
        f"{case['budget'] / 2**30:.2f}",
        str(case["steps"]),
        str(len(case["lost"])),
        str(case["recoveries"]),
        str(case.get("evictions", "–")),
        str(case.get("surprising_steps", "–")),
        str(case["observed_steps"]),
        f"{case['held_over_budget']:.4f}",
        f"{case['reserve_share']:.1%}",
        str(case["allocator_retries"]),
        grown,
    ]
