"""What the results of the scripts in `benchmarks/` come to, in paragraphs: for BENCHMARKS.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from measured import between, none_or
from raw_files import loaded
from tables_of_budgets import prediction_errors

Result = dict[str, Any]


def notes() -> str:
    """All paragraphs, each on one script's newest results."""
    written = []
    for kind, write in WRITERS.items():
        result = loaded(kind)
        if result is not None:
            title, text = write(result)
            script, commit = result["benchmark"], result["commit"][:7]
            written.append(f"**{title}** (`{script}.py`, commit {commit}). {text}")
    return "\n\n".join(written)


def _allocator(result: Result) -> tuple[str, str]:
    ours, left = result["auto"], result.get("leave", {})
    steps = result["steps"]
    lost = sum(len(case["out_of_memory"]) for case in ours.values())
    reserves = between(100 * case["reserve_share"] for case in ours.values())
    held = max(case["held_over_budget"] for case in ours.values())
    text = (
        f"{len(ours)} models of different kinds ran for {steps} steps each with `enforce=True`, "
        "each in its own process with an empty environment, under the median peak of plain "
        "training or what every plan needs. "
        f"{none_or(lost).capitalize()} step of {steps * len(ours):,} ran out of memory, at most "
        f"{held:.3f} of the budget was held, and the reserve at the end was {reserves} %."
    )
    failing = {n: len(case["out_of_memory"]) for n, case in left.items() if case["out_of_memory"]}
    fine = [100 * case["most_reserve_share"] for n, case in left.items() if n not in failing]
    if fine:
        text += (
            ' With `allocator="leave"`, which means PyTorch\'s own settings, the reserve rose to '
            f"{between(fine, '.0f')} % on {len(fine)} of {len(left)} models"
        )
        text += "".join(f"; {n} ran out of memory in {c} steps" for n, c in failing.items()) + "."
    return "Budgets with an untouched environment", text


def _promise(result: Result) -> tuple[str, str]:
    cases = result["cases"]
    steps = sum(case["steps"] for case in cases.values())
    lost = sum(len(case["lost"]) for case in cases.values())
    text = (
        f"{steps:,} steps ran under a hard limit with `handle.retry`: {', '.join(cases)}. "
        f"{none_or(lost).capitalize()} step was lost, "
        f"{none_or(sum(case['recoveries'] for case in cases.values()))} step was run again, and at "
        f"most {max(case['held_over_budget'] for case in cases.values()):.4f} of the budget was "
        "held."
    )
    if all("surprising_steps" in case for case in cases.values()):
        surprising = sum(case["surprising_steps"] for case in cases.values())
        text += f" {surprising:,} steps did not go as their plans expected."
    processes = [case["process"] for case in cases.values() if "process" in case]
    grown = [p["grown_bytes"] for p in processes if p["grown_bytes"] is not None]
    if grown:
        text += f" The process's memory grew by at most {max(grown) / 2**20:.0f} MiB in a run."
    return "Surprises", text


def _planning(result: Result) -> tuple[str, str]:
    runs = [run for task in result["tasks"].values() for run in task["runs"].values()]
    summaries = [run["summary"] for run in runs]
    errors = [prediction_errors(run) for run in runs]
    cached, new = (
        [s[name]["median"] for s in summaries if s[name]]
        for name in ("cached_plan_us", "new_plan_us")
    )
    count = f"{len(runs)} run{'s' * (len(runs) > 1)}"
    text = (
        f"{count} of {result['steps']} steps with `enforce=True`, at budgets that plain training "
        f"exceeds on {_tight(runs)} % of the steps: {', '.join(result['tasks'])}. "
        f"{none_or(sum(s['out_of_memory'] for s in summaries)).capitalize()} step ran out of "
        f"memory. Predicted peaks were at most {100 * max(e[0] for e in errors):.2f} % below the "
        f"real ones, and on average at most {100 * max(e[1] for e in errors):.1f} % above them. "
        f"Recompute time was at most {max(s['recompute_over_oracle'] for s in summaries):.3f} "
        "times that of an oracle that knows every size in advance and leaves the same reserve, and "
        f"at most {100 * max(s['could_keep_more'] for s in summaries):.1f} % of the steps of a run "
        f"could have kept one block more. A plan from the cache took {between(cached, '.0f')} µs "
        f"and a new plan {between((us / 1e3 for us in new), '.2f')} ms. The reserve at the end was "
        f"{between(100 * s['reserve_share'] for s in summaries)} % of the budget."
    )
    autocast = ", under autocast" if result["autocast"] else ""
    return f"Plans on real text lengths{autocast}", text


def _tight(runs: list[Result]) -> str:
    return ", ".join(dict.fromkeys(str(run["tight"]) for run in runs))


def _first_steps(result: Result) -> tuple[str, str]:
    runs = result["runs"]
    lost = none_or(sum(len(run["failed"]) for run in runs))
    tasks = ", ".join(dict.fromkeys(run["task"] for run in runs))
    text = (
        f"{len(runs)} short runs of {tasks} took their lengths in random order: {lost} step of "
        f"{sum(run['steps'] for run in runs):,} ran out of memory."
    )
    return "The first steps", text


def _fragments(result: Result) -> tuple[str, str]:
    pinned = [run for run in result["runs"] if run["reserve_share"] == 0.03]
    parts = []
    for task in dict.fromkeys(run["task"] for run in pinned):
        runs = [run for run in pinned if run["task"] == task]
        holes = [100 * at["unusable"] / run["budget"] for run in runs for at in run["at_failure"]]
        lay = (
            f", while {between(holes, joint=' to ')} % of the budget lay in holes" if holes else ""
        )
        failed, steps = sum(len(r["failed"]) for r in runs), sum(r["steps"] for r in runs)
        parts.append(f"{task} in {failed} of {steps} steps{lay}")
    text = (
        "With the reserve pinned to 3 % and PyTorch's own pages of 20 MiB, memory ran out: "
        f"{'; '.join(parts)}."
    )
    return "A reserve that is too small", text


def _recompute(result: Result) -> tuple[str, str]:
    cases = result["cases"]
    shown = ", ".join(f"{case['added_ratio']:.2f} ({name})" for name, case in cases.items())
    kept = result["kept_block"]["microseconds"]["median"]
    text = (
        "With every block recomputed, what mimose adds to plain training over what torch's "
        f"checkpoint adds: {shown}. A kept block costs {kept:.1f} µs."
    )
    return "Recomputing and keeping", text


def _step(result: Result) -> tuple[str, str]:
    added, plain = result["added_seconds"]["mimose"], result["plain_seconds"]["median"]
    text = (
        f"If nothing has to be recomputed, mimose adds {1e3 * added['median']:.2f} ms to a step of "
        f"{1e3 * plain:.1f} ms with BERT-base (median; the quartiles are {1e3 * added['q1']:.2f} "
        f"and {1e3 * added['q3']:.2f} ms)."
    )
    return "A step that keeps everything", text


def _trainer(result: Result) -> tuple[str, str]:
    theirs, plainly = (
        " and ".join(f"{ratio:.2f}" for ratio in result["summary"][f"mimose_over_{name}"])
        for name in ("checkpointing", "plain")
    )
    plain = result["runs"]["plain"]
    held = max(run["held"] for run in plain) / 2**30
    apart = result["summary"]["largest_loss_difference"]["mimose"]
    text = (
        f"{len(plain[0]['losses'])} steps of an SFT-like run of a Llama-like model with 1 billion "
        f"parameters in bf16 took {theirs} of the time of `gradient_checkpointing=True`, and "
        f"{plainly} of the time of plain training. Plain training held {held:.1f} GiB; mimose "
        f"stayed within {result['budget'] / 2**30:.2f} GiB. The logged losses "
        + ("are the same." if apart == 0 else f"differ by up to {apart:.2g}.")
    )
    return "In transformers' `Trainer`", text


def _host(result: Result) -> tuple[str, str]:
    cases = result["shares"]["budgets"].values()
    waits = [case["runs"]["all options"][-1]["stalled_seconds"] for case in cases]
    reserves = {
        name: between((100 * case["runs"][name][-1]["reserve_share"] for case in cases), ".0f")
        for name in ("two options", "all options")
    }
    parts = [
        f"{result['layers']} layers like Llama 8B's with LoRA on all linear layers, in bf16, on "
        f"rows of {result['tokens']:,} tokens; the device waited {between(waits, '.2f')} s for "
        f"copies in a run. The reserve was {reserves['all options']} % of the budget, and "
        f"{reserves['two options']} % without the host, where it had less time to settle."
    ]
    floors = [floor for n in (16, 32) if (floor := loaded(f"h200-host_floor_{n}"))]
    for floor in floors:
        trained = [
            float(name.split()[0])
            for name, run in floor["floor"]["tried"].items()
            if not run["lost"]
        ]
        if trained:
            parts.append(
                f"With {floor['layers']} layers mimose trains from the first step on in "
                f"{min(trained):.2f} of the memory that recomputing everything needs (commit "
                f"{floor['commit'][:7]})."
            )
    mixed = loaded("h200-host_mixed")
    if mixed is not None:
        runs = mixed["mixed"]["runs"]
        two, ours = (runs[name][-1] for name in ("two options", "all options"))
        done = [
            (mine, its)
            for mine, its in zip(ours["seconds"], two["seconds"], strict=True)
            if mine is not None and its is not None
        ]
        ratio = sum(mine for mine, _ in done) / sum(its for _, its in done)
        parts.append(
            f"On rows of mixed lengths a whole run of {len(mixed['mixed']['lengths'])} steps took "
            f"{ratio:.2f} of the time of keeping and recomputing alone, with "
            f"{ours['planning_seconds']:.2f} s for deciding and pinning (commit "
            f"{mixed['commit'][:7]})."
        )
    return "Activations in host memory", " ".join(parts)


def _transfers(result: Result) -> tuple[str, str]:
    parts = [
        f"{name}: {100 * row['mean']:.2f} % longer on average, {row['over_2_percent']} of "
        f"{row['plans']} over 2 %, the worst {100 * row['largest']:.1f} %"
        for name, row in result["quality"].items()
    ]
    return (
        "Plans with transfers",
        "Steps under plans of four options, against the best of all plans, on drawn costs. "
        f"{'; '.join(parts)}.",
    )


WRITERS: dict[str, Callable[[Result], tuple[str, str]]] = {
    "h200-allocator": _allocator,
    "h200-promise": _promise,
    "h200-planner_quality": _planning,
    "h200-planner_quality_autocast": _planning,
    "h200-first_steps": _first_steps,
    "h200-fragmentation": _fragments,
    "h200-host": _host,
    "cpu-transfers_quality": _transfers,
    "h200-recompute_cost": _recompute,
    "h200-step_cost": _step,
    "h200-trainer_sft": _trainer,
}
