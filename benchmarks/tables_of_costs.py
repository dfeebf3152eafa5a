"""Tables of results on what mimose itself costs, and on what each mechanism is worth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mimose.bench.markdown import table
from writing import span, where


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


def step_cost(result: dict[str, Any]) -> Iterator[str]:
    yield "## A step that keeps everything: what it adds to plain training\n"
    plain = span(result["plain_seconds"], 1e3)
    yield f"{where(result)}. BERT-base 12×144–150, plain {plain} ms a step; all take turns.\n"
    rows = [
        [name, span(added, 1e6, digits=0), f"{1e6 * result['added_mean_seconds'][name]:.0f}"]
        for name, added in result["added_seconds"].items()
    ]
    yield table(["", "µs, median with quartiles", "mean"], rows) + "\n"


def before_after(result: dict[str, Any]) -> Iterator[str]:
    yield f"## A step that keeps everything, against mimose at {result['before_commit']}\n"
    yield (
        f"{where(result)}. Both versions and plain training take turns in one process, "
        f"{result['rounds']} rounds. Microseconds, medians with quartiles.\n"
    )
    rows = []
    for model, found in result["models"].items():
        added, deciding = found["added_seconds"], found["deciding_seconds"]
        rows += [
            [
                f"{model}: added to a plain step",
                *(span(added[way], 1e6, digits=0) for way in _WAYS),
            ],
            [f"{model}: deciding", *(span(deciding[way], 1e6, digits=0) for way in _WAYS)],
            [
                f"{model}: after less before",
                "",
                span(found["after_less_before_seconds"], 1e6, digits=0),
            ],
        ]
    yield table(["", *_WAYS], rows) + "\n"


_WAYS = ("before", "after")


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
