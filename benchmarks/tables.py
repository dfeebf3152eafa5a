"""Markdown tables of the results under `benchmarks/results/`.

python benchmarks/tables.py benchmarks/results/*.json > benchmarks/results/README.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from field_page import about as about_same_graph
from field_page import least_memory
from tables_of_content import content
from writing import span, where


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


INTRODUCTION = """\
# Results

Made by `benchmarks/tables.py` from the JSON files beside this page. Figures hold for the commits
that are named; `git diff COMMIT -- src/mimose` shows what has changed since. In files without
`source_tree` the commit was typed in by hand and not checked.
"""


def recompute_cost(result: dict[str, Any]) -> Iterator[str]:
    yield "## Every block recomputed: what it adds to plain training\n"
    yield f"{where(result)}. Milliseconds a step, medians with quartiles; the three take turns.\n"
    rows = []
    for name, case in result["cases"].items():
        seconds, added = case["seconds"], case["added_seconds"]
        rows.append(
            [
                name,
                *(span(seconds[way], 1e3) for way in ("plain", "torch", "mimose")),
                *(span(added[way], 1e3) for way in ("torch", "mimose")),
                f"{case['added_ratio']:.3f}",
                span(case["added_ratio_by_round"], digits=2),
            ]
        )
    header = ["case", "plain", "torch", "mimose", "torch adds", "mimose adds", "ratio of medians"]
    yield table([*header, "ratio by round"], rows) + "\n"
    kept = result["kept_block"]["microseconds"]
    yield f"A kept block's call costs {span(kept, digits=2)} µs more than an unattached one's.\n"


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


def planning_cost(result: dict[str, Any]) -> Iterator[str]:
    yield "## A decision, called again and again\n"
    yield f"{where(result)}. Microseconds, medians with quartiles.\n"
    session, different = result["session"], result["different_blocks"]
    rows = [
        ["reading memory in use", span(session["reading_us"])],
        ["a plan from the cache, 12 blocks", span(session["cached_plan_us"])],
        ["a new plan, estimate included, 12 blocks", span(session["new_plan_us"])],
        ["an exact plan for 96 different blocks", span(different["exact_plan_us"], digits=0)],
        ["the slowest of these", f"{different['slowest_us']:.0f}"],
    ]
    yield table(["", "µs"], rows) + "\n"


def transfers_quality(result: dict[str, Any]) -> Iterator[str]:
    yield "## Plans with transfers, against brute force\n"
    yield (
        f"{where(result)}. By how much a planned step takes longer than with the best of all plans "
        "of four options, on drawn costs, links and budgets.\n"
    )
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
        for name, row in result["quality"].items()
    ]
    header = ["blocks", "plans", "mean", "largest", "over 2 %", "mean without a link"]
    yield table([*header, "fit only with a link"], rows) + "\n"
    rows = [
        [name, span(row), f"{row['slowest']:.1f}"] for name, row in result["planning_ms"].items()
    ]
    yield table(["blocks", "planning, ms of processor time", "slowest"], rows) + "\n"


def host(result: dict[str, Any]) -> Iterator[str]:
    yield (
        f"## Activations in host memory: {result['layers']} layers like Llama 8B's, LoRA, "
        f"rows of {'up to ' if 'mixed' in result else ''}{result['tokens']:,} tokens\n"
    )
    yield f"{where(result)}. `enforce=True`.\n"
    if "shares" in result:
        yield from _host_shares(result["shares"]["budgets"])
    if "mixed" in result:
        yield from _host_mixed(result["mixed"])
    if "floor" in result:
        yield from _host_floor(result["floor"])


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


def step_cost(result: dict[str, Any]) -> Iterator[str]:
    yield "## A step that keeps everything: what it adds to plain training\n"
    plain = span(result["plain_seconds"], 1e3)
    yield f"{where(result)}. BERT-base 12×144–150, plain {plain} ms a step; all take turns.\n"
    rows = [
        [name, span(added, 1e6, digits=0), f"{1e6 * result['added_mean_seconds'][name]:.0f}"]
        for name, added in result["added_seconds"].items()
    ]
    yield table(["", "µs, median with quartiles", "mean"], rows) + "\n"


def promise(result: dict[str, Any]) -> Iterator[str]:
    yield "## Does the budget hold?\n"
    yield f"{where(result)}. `enforce=True`, `handle.retry`, expandable segments.\n"
    rows = []
    for name, case in result["cases"].items():
        rows.append(
            [
                name,
                f"{case['budget'] / 2**30:.2f}",
                str(case["steps"]),
                str(len(case["lost"])),
                str(case["recoveries"]),
                str(case.get("corrections", "–")),  # older versions corrected plans in mid-step
                str(case.get("evictions", "–")),
                str(case["observed_steps"]),
                f"{case['held_over_budget']:.4f}",
                f"{case['reserve_share']:.1%}",
                str(case["allocator_retries"]),
            ]
        )
    header = ["case", "budget, GiB", "steps", "lost", "recoveries", "corrections"]
    header += ["evictions", "observed"]
    yield table([*header, "most held / budget", "reserve", "allocator's retries"], rows) + "\n"
    for name, case in result["cases"].items():
        for number, message in case["lost"]:
            yield f"Lost in {name}, step {number}: {message.split(' (')[0]}.\n"


def trainer_sft(result: dict[str, Any]) -> Iterator[str]:
    yield "## A Llama-like model of 1 billion through transformers' Trainer\n"
    steps = len(result["runs"]["plain"][0]["losses"])
    budget = result["budget"] / 2**30
    yield (
        f"{where(result)}. {steps} steps of instruction lengths in bf16, batch 8; mimose under "
        f"{budget:.2f} GiB with `enforce=True`, the others without a limit. The three take turns.\n"
    )
    summary, rows = result["summary"], []
    for way, runs in result["runs"].items():
        rows.append(
            [
                way,
                " / ".join(f"{run['seconds']:.2f}" for run in runs),
                f"{max(run['peak'] for run in runs) / 2**30:.2f}",
                f"{max(run['held'] for run in runs) / 2**30:.2f}",
                f"{summary['largest_loss_difference'][way]:.2g}",
            ]
        )
    header = ["way", "seconds, by round", "peak in use, GiB", "most held, GiB"]
    yield table([*header, "largest loss difference from plain"], rows) + "\n"
    ratios = {
        "gradient_checkpointing=True": summary["mimose_over_checkpointing"],
        "plain": summary["mimose_over_plain"],
    }
    for other, by_round in ratios.items():
        yield f"mimose / {other}, by round: {', '.join(f'{ratio:.2f}' for ratio in by_round)}.\n"


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


def ablation(result: dict[str, Any]) -> Iterator[str]:
    yield "## What each mechanism is worth\n"
    yield (
        f"{where(result)}. Each mechanism switched off in turn, `enforce=True`, no `handle.retry`. "
        "Runs of blocks recomputed, and steps that ran out of memory; in brackets seconds. The two "
        "runs as it is differ by noise alone, the first by the host's slow start: times that "
        f"differ by no more than theirs show nothing. {result['note']}\n"
    )
    names = next(iter(result["cases"].values()))["variants"]
    rows = [
        [name, str(case["steps"]), *(_outcome(case["variants"].get(variant)) for variant in names)]
        for name, case in result["cases"].items()
    ]
    yield table(["case", "steps", *names], rows) + "\n"


def _outcome(run: dict[str, Any] | None) -> str:
    if run is None:
        return "–"
    lost = f", {run['out_of_memory']} out of memory" if run["out_of_memory"] else ""
    return f"{run['runs_recomputed']}{lost} ({run['seconds']:.1f})"


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


def same_graph(result: dict[str, Any]) -> Iterator[str]:
    yield "## Same graph, every planner\n"
    yield f"{about_same_graph(result)}\n"
    yield least_memory(result) + "\n"
    yield "`docs/field.md` has the times by budget.\n"


WRITERS = {
    "ablation": ablation,
    "allocator": allocator,
    "content": content,
    "operator_memory": operator_memory,
    "dtr_against_simrd": dtr_against_simrd,
    "first_steps": first_steps,
    "fragmentation": fragmentation,
    "host": host,
    "promise": promise,
    "trainer_sft": trainer_sft,
    "recompute_cost": recompute_cost,
    "same_graph": same_graph,
    "planner_quality": planner_quality,
    "planning_cost": planning_cost,
    "step_cost": step_cost,
    "transfers_quality": transfers_quality,
}


def page(paths: Iterable[Path]) -> str:
    """The whole page."""
    results = [json.loads(path.read_text()) for path in sorted(paths)]
    written = (part for result in results for part in WRITERS[result["benchmark"]](result))
    return "\n".join([INTRODUCTION, *written])


def main() -> None:
    print(page(map(Path, sys.argv[1:])))


if __name__ == "__main__":
    main()
