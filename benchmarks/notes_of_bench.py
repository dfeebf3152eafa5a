"""What the results of `mimose bench` come to, in sentences: for BENCHMARKS.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from measured import between, mean_over, none_or, sheet
from mimose.bench.analysis import Sheet, time_ratio
from mimose.bench.lineup import CONTESTANTS
from mimose.bench.time_spent import Overhead
from mimose.bench.workloads import PAPER_TASKS

MAIN, EIGHT = "h200-bench", "h200-bench-scale8"
RIVALS = ("torch-all", "static", "static-drawn", "paper", "greedy+shuttle", "dtr", "oracle")


def notes() -> str:
    """All of them, a list."""
    main, eight = sheet(MAIN), sheet(EIGHT)
    lines: list[str] = []
    if main is not None:
        sources = (_spread, _failures, _static, _papers, _deciding, _losses)
        lines += [line for source in sources for line in source(main)]
    if eight is not None:
        found = {name: mean_over(eight, name) for name in RIVALS}
        means = ", ".join(f"{mean:.2f} (`{name}`)" for name, mean in found.items() if mean)
        lines.append(f"**Eight times the batch**, where arithmetic is the limit: {means}.")
    lines += [*_other_tasks(), *_compiled()]
    return "\n".join(f"- {line}" for line in lines)


def _spread(of: Sheet) -> Iterator[str]:
    """Means by round, and how far rounds lie apart."""
    numbers = sorted({record.round for record in of.results.records.values()})
    by_rival = {name: [_mean_of_round(of, name, n) for n in numbers] for name in RIVALS}
    parts = [
        " and ".join(f"{mean:.3f}" for mean in means if mean is not None) + f" (`{name}`)"
        for name, means in by_rival.items()
        if any(mean is not None for mean in means)
    ]
    apart = max(
        (ratio.high / ratio.low - 1)
        for name in by_rival
        for cell in of.cells_of_paper
        if (ratio := of.ratio(*cell, "mimose", name)) is not None
    )
    yield (
        f"**How far to trust it.** {len(numbers)} rounds of {of.results.conditions['steps']} "
        f"steps gave means over the paper's tasks of {', '.join(parts)}, in the order of rounds; "
        f"single cells lie up to {100 * apart:.0f} % apart."
    )


def _mean_of_round(of: Sheet, rival: str, number: int) -> float | None:
    found = []
    for cell in of.cells_of_paper:
        mine, its = of.runs(*cell, "mimose").get(number), of.runs(*cell, rival).get(number)
        if mine is not None and its is not None and of.fits(*cell, rival):
            found.append(time_ratio(mine, its))
    known = [ratio for ratio in found if ratio is not None]
    return statistics.fmean(known) if known else None


def _failures(of: Sheet) -> Iterator[str]:
    steps = of.results.conditions["steps"]
    whole = f"{steps * len(of.cells_of_paper):,}"
    counts = {
        name: sum(of.out_of_memory(*cell, name) for cell in of.cells_of_paper)
        for name in CONTESTANTS
        if any(of.runs(*cell, name) for cell in of.cells_of_paper)
    }
    others = [f"`{n}` on {count}" for n, count in counts.items() if count and n != "mimose"]
    rest = f"; {', '.join(others)}" if others else "; nor did any other contestant"
    yield (
        f"**Out of memory**, of {whole} steps in the worst round: mimose on "
        f"{none_or(counts['mimose'])} step{rest}. The oracle's reserve is a fixed 3 %."
    )


def _static(of: Sheet) -> Iterator[str]:
    tasks = list(dict.fromkeys(task for task, _ in of.cells_of_paper))
    parts = []
    for task in (task for task in tasks if task not in of.without_longer_data(tasks)):
        survey = of.results.surveys[task]
        parts.append(
            f"on {task} for {max(survey.longest.dims)} tokens, where the longest batch drawn has "
            f"{max(survey.largest.dims)}"
        )
    if parts:
        yield (
            f"**`static` plans for batches that were never drawn**: {'; '.join(parts)}. So means "
            "are given with and without such tasks, and `static-drawn` plans for the longest batch "
            "drawn."
        )
    labels = dict.fromkeys(row["label"] for task in tasks for row in of.limits(task))
    for name in ("static", "static-drawn"):
        means = {label: mean_over(of, name, _at(of, label)) for label in labels}
        shown = ", ".join(f"{mean:.2f} at `{label}`" for label, mean in means.items() if mean)
        if shown:
            yield f"**`{name}` by budget**: {shown}."


def _at(of: Sheet, label: str) -> Callable[[str, int], bool]:
    def counts(task: str, budget: int) -> bool:
        return any(
            row["total_bytes"] == budget and row["label"] == label for row in of.limits(task)
        )

    return counts


def _papers(of: Sheet) -> Iterator[str]:
    for name in ("paper", "greedy+shuttle"):
        ratios = [r.median for c in of.cells_of_paper if (r := of.ratio(*c, "mimose", name))]
        if not ratios:
            continue
        both = [of.recomputed_by_both(*cell, "mimose", name) for cell in of.cells_of_paper]
        more = sum(pair is not None and pair[0] > pair[1] for pair in both)
        collectors = [
            theirs.collector / ours.collector
            for cell in of.cells_of_paper
            for ours, theirs in zip(
                of.overhead(*cell, "mimose"), of.overhead(*cell, name), strict=False
            )
            if ours.collector > 0
        ]
        dearer = f" Its collector costs {statistics.median(collectors):.1f} times as much, in the "
        dearer += f"middle ({between(collectors)})."
        yield (
            f"**Against `{name}`** {statistics.fmean(ratios):.2f} of its time, by cell "
            f"{between(ratios, '.2f', ' to ')}. In steps that both had planned, mimose recomputed "
            f"more in {more} of {len(of.cells_of_paper)} cells: plans that do not reckon with what "
            f"a recompute needs recompute less, and miss the limit.{dearer if collectors else ''}"
        )


def _deciding(of: Sheet) -> Iterator[str]:
    spent: list[Overhead] = [
        each for cell in of.cells_of_paper for each in of.overhead(*cell, "mimose")
    ]
    if not spent:
        return
    thousand, parts, collector = (
        statistics.fmean(values)
        for values in (
            [each.in_thousand_steps for each in spent],
            [each.collector + each.estimator + each.planner for each in spent],
            [each.collector for each in spent],
        )
    )
    plans = [each.plan_milliseconds for each in spent if each.plan_milliseconds]
    iteration = between((each.iteration_milliseconds for each in spent), ".0f", " to ")
    yield (
        f"**What deciding costs**: {parts:.1f} iterations of the oracle in {spent[0].steps} steps "
        f"({collector:.1f} of them for observing), {thousand:.1f} in 1,000, extrapolated. A new "
        f"plan takes {statistics.median(plans):.2f} ms in the middle, an iteration {iteration} ms. "
        "The paper's 3.95 iterations are for an epoch, so the two do not compare."
    )


def _losses(of: Sheet) -> Iterator[str]:
    times = []
    for cell in of.cells_of_paper:
        ours, theirs = (of.loss_difference(*cell, name) for name in ("mimose", "torch-all"))
        if theirs:
            times.append((ours or 0.0) / theirs)
    if times:
        yield (
            f"**Losses** differ from plain training's by at most {max(times):.1f} times as much as "
            "those of `torch-all` do: kernels that add up in any order, as is PyTorch's default, "
            "differ from run to run. With deterministic algorithms they are the same, bit for bit "
            "(`tests/gpu`)."
        )


def _other_tasks() -> Iterator[str]:
    for kind in ("h200-bench", "h200-bench-quick", "h200-bench-t5", "h200-bench-vision"):
        of = sheet(kind)
        for task in of.tasks if of is not None else ():
            if task in PAPER_TASKS or of is None or not of.limits(task):
                continue
            limit = of.limits(task)[0]
            found = {n: of.ratio(task, limit["total_bytes"], "mimose", n) for n in (*RIVALS, "hf")}
            shown = ", ".join(f"{r.median:.2f} (`{n}`)" for n, r in found.items() if r is not None)
            steps = of.results.conditions["steps"]
            yield f"**{task}**, {steps} steps at `{limit['label']}`: {shown}."


def _compiled() -> Iterator[str]:
    of = sheet("h200-bench-compiled")
    if of is None:
        return
    for task in of.tasks:
        limit = of.limits(task)[0]
        names = ("plain", "mimose", "compile-budget", "mimose-compiled")
        runs = {name: of.runs(task, limit["total_bytes"], name).get(0) for name in names}
        known = {name: run for name, run in runs.items() if run is not None}
        middle = ", ".join(
            f"{statistics.median(run.steps.milliseconds):.1f} ms (`{name}`)"
            for name, run in known.items()
        )
        first = ", ".join(
            f"{run.steps.milliseconds[0] / 1e3:.0f} s (`{name}`)"
            for name, run in known.items()
            if name in ("compile-budget", "mimose-compiled")
        )
        yield (
            f"**Compiled**, {task} at `{limit['label']}`: a step in the middle takes {middle}; the "
            f"first step, which compiles, {first}."
        )
