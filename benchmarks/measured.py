"""What was measured, in one table: a row a question, from the newest raw files."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from mimose.bench.analysis import Sheet
from mimose.bench.markdown import table
from mimose.bench.records import read
from raw_files import age, latest, loaded
from tables_of_content import beyond_oracle
from tables_of_training import ends, largest_difference, plain_of, time_over

RIVALS = {
    "torch-all": "recomputing everything",
    "inputs-on-host": "the same from inputs on the host",
    "all-on-host": "saving everything on the host",
    "mimose-two-options": "mimose without the host",
    "oracle": "the oracle",
}
CONTENT = {
    "moe": "a mixture of experts",
    "rows": "blocks that run on a part of the rows",
    "detector": "Faster R-CNN on COCO's image sizes",
}
TASKS = "BERT, RoBERTa and XLNet on four tasks with real text lengths"


class Row(NamedTuple):
    """A question and its answer."""

    question: str
    run: str
    result: str
    commit: str
    benchmark: str


def rows() -> Iterator[Row]:
    """All questions that the raw files answer."""
    for source in (
        _budget,
        _surprises,
        _content,
        _against_others,
        _larger,
        _fine_tuning,
        _convergence,
        _trainer,
        _host,
        _kept,
    ):
        yield from source()


def measured() -> str:
    """The table of README.md."""
    header = ["question", "what was run", "result", "commit"]
    return table(header, [[row.question, row.run, row.result, row.commit] for row in rows()])


def ages() -> str:
    """How old the rows are, in a sentence; as git tells now."""
    old = {age(commit, row.benchmark) for row in rows() for commit in row.commit.split(", ")}
    if old == {"current"}:
        return "All rows are about the code as it is."
    counts = sorted(int(text.split()[0]) for text in old if text[0].isdigit())
    current = (
        "Some rows are about the code as it is. Since the others were measured, "
        if "current" in old
        else ""
    )
    least, most = counts[0], counts[-1]
    commits = (
        f"between {least} and {most} commits"
        if least < most
        else f"{most} commit{'s' * (most > 1)}"
    )
    touched = f"{commits} have touched the code that each row measures"
    where = "([by file](benchmarks/results/README.md))."
    return f"{current or 'Since then, '}{touched} {where}"


def between(values: Iterable[float], form: str = ".1f", joint: str = "–") -> str:
    """The smallest and the largest."""
    known = sorted(f"{value:{form}}" for value in sorted(values))
    ordered = sorted(known, key=float)
    return ordered[0] if ordered[0] == ordered[-1] else f"{ordered[0]}{joint}{ordered[-1]}"


def none_or(count: int) -> str:
    return f"{count:,}" if count else "no"


@functools.cache
def sheet(kind: str) -> Sheet | None:
    """The newest results of `mimose bench` of a kind, such as `h200-bench`."""
    path = latest(kind)
    return None if path is None else Sheet(read(path))


def commits_of(of: Sheet) -> str:
    """The commits that made a file's runs, in the order in which they came."""
    return ", ".join(dict.fromkeys(r.code.commit[:7] for r in of.results.records.values()))


def mean_over(
    of: Sheet, rival: str, counts: Callable[[str, int], bool] = lambda *_: True
) -> float | None:
    """mimose's time over another's on the paper's tasks: the mean over tasks and budgets."""
    cells = [c for c in of.cells_of_paper if counts(*c) and of.fits(*c, rival)]
    found = [ratio.median for c in cells if (ratio := of.ratio(*c, "mimose", rival)) is not None]
    return statistics.fmean(found) if found else None


def _budget() -> Iterator[Row]:
    result = loaded("h200-allocator")
    if result is None:
        return
    cases = result["auto"].values()
    lost = sum(len(case["out_of_memory"]) for case in cases)
    exceeded = between((100 * case["plain_exceeds"] for case in cases), ".0f")
    held = max(case["held_over_budget"] for case in cases)
    yield Row(
        "Does the budget hold?",
        f"{len(cases)} models for text, images and speech, {result['steps']} steps each under a "
        f"hard limit; plain training exceeds these budgets on {exceeded} % of the steps",
        f"{none_or(lost)} out-of-memory in {result['steps'] * len(cases):,} steps, at most "
        f"{held:.3f} of the budget held",
        result["commit"][:7],
        "allocator",
    )


def _surprises() -> Iterator[Row]:
    result = loaded("h200-promise")
    if result is None:
        return
    cases = result["cases"].values()
    lost, steps = sum(len(case["lost"]) for case in cases), sum(case["steps"] for case in cases)
    again = sum(case["recoveries"] for case in cases)
    held = max(case["held_over_budget"] for case in cases)
    yield Row(
        "With surprises?",
        f"{steps:,} steps of {len(cases)} models under a hard limit with `handle.retry`: layers "
        "unfrozen and autocast switched on during a run, memory that depends on content, detectors",
        f"{none_or(lost)} step lost, {again} run again, at most {held:.3f} of the budget held",
        result["commit"][:7],
        "promise",
    )


def _content() -> Iterator[Row]:
    files = [loaded(f"h200-content_{name}") for name in CONTENT]
    cases = {name: case for file in files if file for name, case in file["cases"].items()}
    if not cases:
        return
    summaries = [case["summary"] for case in cases.values()]
    beyond = between((100 * beyond_oracle(case) for case in cases.values()), ".1f", " to ")
    held = max(summary["held_over_budget"] for summary in summaries)
    steps = sum(case["steps"] for case in cases.values())
    yield Row(
        "If memory depends on more than the size?",
        f"{', '.join(CONTENT[name] for name in cases)}; {steps:,} steps under a hard limit",
        f"{none_or(sum(s['lost'] for s in summaries))} step lost, at most {held:.3f} of the budget "
        f"held; an oracle that knew what each step really needs would save {beyond} % of the time",
        ", ".join(dict.fromkeys(file["commit"][:7] for file in files if file)),
        "content",
    )


def _against_others() -> Iterator[Row]:
    main = sheet("h200-bench")
    if main is None:
        return
    budgets = {row["label"] for task in main.tasks for row in main.limits(task)}
    run = (
        f"{TASKS}, {len(budgets)} budgets, {main.results.conditions['steps']} steps each, "
        "observing and planning included"
    )
    questions = {
        "torch-all": "Is it faster than checkpointing every block?",
        "static": "Is it faster than one fixed plan?",
        "paper": "Is it faster than the paper's system?",
        "oracle": "How far is it from the optimum?",
    }
    what = {
        "torch-all": run,
        "static": "the same runs, and the best plan for the longest batch of the data",
        "paper": "the same runs, and the paper's system written from its text",
        "oracle": "the same runs, and an oracle that knows every size's costs in advance",
    }
    for rival, question in questions.items():
        found = mean_over(main, rival)
        if found is not None:
            result = f"{found:.2f} of its time{_aside(main, rival)}"
            if rival == "torch-all":
                result = f"{found:.2f} of the time of `torch.utils.checkpoint` on every block"
            yield Row(question, what[rival], result, commits_of(main), "bench")


def _aside(of: Sheet, rival: str) -> str:
    """What the mean would be without tasks in which the other is at a disadvantage."""
    tasks = list(dict.fromkeys(task for task, _ in of.cells_of_paper))
    if rival == "static":
        odd = [task for task in tasks if task not in of.without_longer_data(tasks)]
        why = "whose runs never drew the longest batch"
    elif rival == "oracle":
        failures = {
            task: sum(
                of.out_of_memory(*cell, "oracle") for cell in of.cells_of_paper if cell[0] == task
            )
            for task in tasks
        }
        odd = [
            task for task, count in failures.items() if count > of.results.conditions["steps"] // 50
        ]
        why = "in which the oracle, with its fixed reserve, runs out of memory"
    else:
        return ""
    rest = mean_over(of, rival, lambda task, _: task not in odd)
    return "" if not odd or rest is None else f"; {rest:.2f} without {', '.join(odd)}, {why}"


def _larger() -> Iterator[Row]:
    eight = sheet("h200-bench-scale8")
    if eight is None:
        return
    names = {
        "torch-all": "checkpointing every block",
        "static": "the fixed plan",
        "paper": "the paper's system",
        "oracle": "the oracle",
    }
    found = {name: mean_over(eight, name) for name in names}
    parts = [f"{mean:.2f} of {names[name]}" for name, mean in found.items() if mean is not None]
    yield Row(
        "With larger batches?",
        f"the same tasks with eight times the batch, {eight.results.conditions['steps']} steps",
        ", ".join(parts),
        commits_of(eight),
        "bench",
    )


def _fine_tuning() -> Iterator[Row]:
    result = loaded("h200-sft_8b")
    if result is None:
        return
    parts = []
    longest = ", ".join(
        f"up to {case['longest']:,} tokens at {cap}" for cap, case in result["caps"].items()
    )
    for cap, case in result["caps"].items():
        runs = {name: run for name, run in case["runs"].items() if "missing" not in run}
        ours = runs["mimose"]
        lost = sum("failure" in row for row in (*ours["rows"], ours["longest"]))
        over = {name: time_over(ours, runs[name]) for name in RIVALS if name in runs}
        shown = ", ".join(f"{o:.2f} of {RIVALS[n]}" for n, o in over.items() if o is not None)
        parts.append(f"{cap}: {shown}; {none_or(lost)} out-of-memory")
    yield Row(
        "On the workload of today?",
        f"{result['layers']} layers like Llama 8B's with LoRA in bf16, rows with the spread of "
        f"instruction lengths, {longest}",
        ". ".join(parts),
        result["commit"][:7],
        "sft_8b",
    )


def _convergence() -> Iterator[Row]:
    on_gpu = loaded("h200-convergence")
    result = on_gpu or loaded("cpu-convergence")
    if result is None:
        return
    where = "at the paper's learning rates" if on_gpu else "on a CPU"
    ours = [run for run in result["runs"] if run["way"] == "mimose"]
    exact = [run for run in ours if run["deterministic"]]
    same = all(run["weights"] == plain_of(result, run)["weights"] for run in exact)
    apart = max(largest_difference(run, plain_of(result, run)) for run in exact)
    falls = [ends(run["losses"]) for run in exact]
    yield Row(
        "Does it converge as plain training does?",
        f"a BERT-like encoder learns topics of texts, {result['epochs']} epochs {where}, under a "
        "budget that plain training exceeds on "
        f"{result['plain_exceeds']:.0%} of the steps".replace("%", " %"),
        f"the loss falls from {falls[0][0]:.2f} to "
        f"{between((last for _, last in falls), '.2f')}; with deterministic algorithms "
        + (
            "losses and weights are the same, bit for bit"
            if same and not apart
            else f"losses differ by up to {apart:.2g}"
        ),
        result["commit"][:7],
        "convergence",
    )


def _trainer() -> Iterator[Row]:
    sft = loaded("h200-trainer_sft")
    if sft is None:
        return
    theirs, plainly = (
        " and ".join(f"{ratio:.2f}" for ratio in sft["summary"][f"mimose_over_{name}"])
        for name in ("checkpointing", "plain")
    )
    held = max(run["held"] for run in sft["runs"]["plain"]) / 2**30
    plain = sft["runs"]["plain"]
    yield Row(
        "In transformers' `Trainer`?",
        "a Llama-like model with 1 billion parameters in bf16, "
        f"{len(plain)} rounds of {len(plain[0]['losses'])} steps",
        f"{theirs} of the time of `gradient_checkpointing=True`, {plainly} of that of plain "
        f"training, which holds {held:.1f} GiB where mimose stays within "
        f"{sft['budget'] / 2**30:.2f} GiB",
        sft["commit"][:7],
        "trainer_sft",
    )


def _host() -> Iterator[Row]:
    result = loaded("h200-host")
    if result is None or "shares" not in result:
        return
    budgets: dict[str, Any] = result["shares"]["budgets"]
    ours, two = (
        ", ".join(f"{case['over_plain'][name][-1]:.2f}" for case in budgets.values())
        for name in ("all options", "two options")
    )
    *most, last = (f"{100 * float(share):.0f}" for share in budgets)
    yield Row(
        "What does host memory buy?",
        f"{result['layers']} layers like Llama 8B's with LoRA, rows of {result['tokens']:,} "
        f"tokens, room for {', '.join(most)} and {last} % of what a step takes with everything "
        "kept",
        f"{ours} of the time of plain training; without the host {two}",
        result["commit"][:7],
        "host",
    )


def _kept() -> Iterator[Row]:
    step = loaded("h200-step_cost")
    if step is None:
        return
    added, plain = step["added_seconds"]["mimose"], step["plain_seconds"]["median"]
    yield Row(
        "What does it cost if everything fits?",
        "BERT-base, 12 texts of 144–150 tokens",
        f"{1e3 * added['median']:.2f} ms of a step of {1e3 * plain:.1f} ms",
        step["commit"][:7],
        "step_cost",
    )
