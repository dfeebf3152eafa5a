"""Claims of `claims.py` that rest on the results of `mimose bench`."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Iterator

from claims import PAGE, README, RESULTS, Claim, between
from mimose.bench.analysis import Overhead, Sheet, time_ratio
from mimose.bench.harness import Run
from mimose.bench.records import read
from mimose.bench.survey import Survey
from mimose.costs import InputSize, Option
from mimose.planning import Greedy


def claims() -> Iterator[Claim]:
    """All of them."""
    for source in (_against_others, _static, _papers, _overhead, _single):
        yield from source()


@functools.cache
def _sheet(name: str) -> Sheet:
    return Sheet(read(RESULTS / f"2026-11-16-h200-bench{name}.jsonl"))


def _main() -> Sheet:
    return _sheet("")


def _eightfold() -> Sheet:
    return _sheet("-scale8")


def _means(sheet: Sheet, rival: str, counts: Callable[[str, int], bool] = lambda *_: True) -> float:
    cells = [c for c in sheet.cells_of_paper if counts(*c) and sheet.fits(*c, rival)]
    ratios = [sheet.ratio(*cell, "mimose", rival) for cell in cells]
    return statistics.fmean(ratio.median for ratio in ratios if ratio is not None)


def _without(task: str) -> Callable[[str, int], bool]:
    return lambda its_task, _: its_task != task


def _label(sheet: Sheet, task: str, budget: int) -> str:
    return next(row["label"] for row in sheet.limits(task) if row["total_bytes"] == budget)


def _commits(sheet: Sheet) -> str:
    """The commits that made the file's runs, in the order in which they came."""
    return ", ".join(dict.fromkeys(r.code.commit[:7] for r in sheet.results.records.values()))


def _against_others() -> Iterator[Claim]:
    """The paper's tasks, against everybody."""
    main, eight = _main(), _eightfold()
    all_, static, paper, oracle = (
        _means(main, rival) for rival in ("torch-all", "static", "greedy+shuttle", "oracle")
    )
    fair, three = _means(main, "static", _without("TC-Bert")), _without("QA-XLNet")
    larger = [_means(eight, rival) for rival in ("torch-all", "static", "greedy+shuttle", "oracle")]
    larger_fair = _means(eight, "static", _without("TC-Bert"))
    yield Claim(
        README,
        f"{all_:.2f} of the time of `torch.utils.checkpoint` on every block | {_commits(main)} |",
    )
    yield Claim(
        README,
        f"{static:.2f} of its time; {fair:.2f} without the task in which no such batch was drawn | "
        f"{_commits(main)} |",
    )
    yield Claim(
        README,
        f"{oracle:.2f} of its time; {_means(main, 'oracle', three):.2f} on the three tasks in "
        f"which the oracle hardly ever runs out of memory | {_commits(main)} |",
    )
    yield Claim(
        README,
        f"{larger[0]:.2f} of checkpointing every block, {larger[1]:.2f} of the fixed plan "
        f"({larger_fair:.2f} without that task), {larger[3]:.2f} of the oracle | "
        f"{_commits(eight)} |",
    )
    yield Claim(
        PAGE,
        f"{all_:.2f} of the time of torch's checkpoint on every block, {static:.2f} of one "
        "plan for "
        f"the longest batch of the data ({fair:.2f} without TC-Bert), {paper:.2f} of the paper's "
        f"scheduler and collector, {oracle:.2f} of an oracle, and no step out of memory. With "
        "eight "
        f"times the batch {larger[0]:.2f}, {larger[1]:.2f} ({larger_fair:.2f} without TC-Bert), "
        f"{larger[2]:.2f} and {larger[3]:.2f}",
    )
    yield Claim(PAGE, f"it takes {all_:.2f} of the time where launches are the limit and")
    by_round = [
        " and ".join(f"{_mean_of_round(rival, n):.3f}" for n in (0, 1)) + f" (`{rival}`)"
        for rival in ("torch-all", "static", "greedy+shuttle", "oracle")
    ]
    apart = max(
        (ratio.high - ratio.low) / ratio.low
        for rival in ("torch-all", "static", "greedy+shuttle", "oracle", "plain")
        for cell in main.cells_of_paper
        if (ratio := main.ratio(*cell, "mimose", rival)) is not None
    )
    means = f"gave means of {', '.join(by_round)}; single cells lie up to {apart:.0%} apart"
    yield Claim(PAGE, means.replace("%", " %"))
    yield Claim(PAGE, f"Whole runs one after another lay up to {100 * _whole_runs():.0f} % apart")
    yield from _out_of_memory()
    yield Claim(
        PAGE,
        f"**Against the oracle** {oracle:.2f} on average, which flatters: on QA-XLNet mimose took "
        f"{_means(main, 'oracle', lambda task, _: task == 'QA-XLNet'):.2f} of its time",
    )
    at_eight = [_means(eight, "oracle", lambda t, _, of=t: t == of) for t in eight.tasks[1:]]
    assert eight.tasks[0] == "QA-XLNet"
    yield Claim(
        PAGE,
        f"On the other three tasks it is {_means(main, 'oracle', three):.2f}, in 200 steps, and "
        f"{between(at_eight, '.2f', ' to ')} at scale 8",
    )
    times = [_loss_ratio(task, budget) for task, budget in main.cells_of_paper]
    yield Claim(PAGE, f"by at most {max(t for t in times if t):.1f} times as much as those of")


def _loss_ratio(task: str, budget: int) -> float | None:
    ours, theirs = (_main().loss_difference(task, budget, n) for n in ("mimose", "torch-all"))
    if not theirs:
        assert not ours
        return None
    return (ours or 0.0) / theirs


def _mean_of_round(rival: str, number: int) -> float:
    main = _main()
    runs = [
        (main.runs(*cell, "mimose")[number], main.runs(*cell, rival)[number])
        for cell in main.cells_of_paper
        if main.fits(*cell, rival)
    ]
    ratios = [time_ratio(one, other) for one, other in runs]
    return statistics.fmean(ratio for ratio in ratios if ratio is not None)


def _whole_runs() -> float:
    """How far the same work lay apart where whole runs were made one after another."""
    seconds: dict[str, list[float]] = {}
    sheet = Sheet(read(RESULTS / "2026-11-15-h200-bench-whole-runs-150.jsonl"))
    for record in sheet.results.records.values():
        if record.contestant == "torch-all":
            seconds.setdefault(record.task, []).append(record.run.seconds)
    return max(max(times) / min(times) - 1 for times in seconds.values())


def _out_of_memory() -> Iterator[Claim]:
    """Of one round; both are alike."""
    main = _main()

    def failed(contestant: str, tasks: Iterable[str]) -> int:
        cells = [cell for cell in main.cells_of_paper if cell[0] in tasks]
        rounds = [
            sum(main.runs(*cell, contestant)[n].out_of_memory for cell in cells) for n in (0, 1)
        ]
        assert rounds[0] == rounds[1]
        return rounds[0]

    assert failed("mimose", main.tasks) == 0
    assert failed("greedy+shuttle", main.tasks) == 1
    runs = 2 * len(main.cells_of_paper)
    yield Claim(PAGE, f"No step ran out of memory in {200 * runs:,}")
    yield Claim(
        PAGE,
        f"did on {failed('oracle', ['QA-XLNet'])} of 600 steps of each round (and on "
        f"{failed('oracle', ['QA-Bert', 'TC-Bert'])} of 1,200 of QA-Bert and TC-Bert)",
    )
    yield Claim(PAGE, f"on one of {100 * runs:,} steps of each round")


def _static() -> Iterator[Claim]:
    """One plan for all batches."""
    main = _main()
    survey, budgets = main.results.surveys["TC-Bert"], main.limits("TC-Bert")
    ran = [main.runs("TC-Bert", row["total_bytes"], "static")[0] for row in budgets]
    done = [max(n for n in run.steps.recomputed if n is not None) for run in ran]
    plans = [survey.plan(survey.largest, row["total_bytes"]) for row in budgets]
    enough = [plan.count(Option.RECOMPUTE) for plan in plans]
    yield Claim(
        PAGE,
        f"On TC-Bert it plans for {max(survey.longest.dims)} tokens, the longest of the data; the "
        f"longest batch drawn has {max(survey.largest.dims)}. It recomputes {done[0]}, "
        f"{done[1]} and "
        f"{done[2]} of {len(survey.blocks)} blocks at the three budgets, where {enough[0]}, "
        f"{enough[1]} and {enough[2]} would be enough for the batches drawn, and at `tight 90` its "
        f"own batch would need {survey.recomputed_bytes(survey.longest) / 2**30:.2f} GiB with "
        f"everything recomputed, of {budgets[0]['total_bytes'] / 2**30:.2f}",
    )
    sft = _sheet("-quick").results.surveys["SFT-Llama"]
    t5 = _sheet("-t5").results.surveys["T5-base"]
    yield Claim(
        PAGE,
        f"SFT-Llama ({max(sft.longest.dims)} tokens, {max(sft.largest.dims)} drawn) and T5-base "
        f"({t5.longest.dims[-1]} tokens out, {t5.largest.dims[-1]} drawn)",
    )

    def at(percent: int, *without: str) -> str:
        def counts(task: str, budget: int) -> bool:
            return task not in without and _label(main, task, budget) == f"tight {percent}"

        return f"{_means(main, 'static', counts):.2f}"

    yield Claim(
        PAGE,
        f"{at(90)} at `tight 90`, {at(50)} at `tight 50` and {at(10)} at `tight 10`; without "
        "TC-Bert "
        f"{at(90, 'TC-Bert')}, {at(50, 'TC-Bert')} and {at(10, 'TC-Bert')}",
    )


def _papers() -> Iterator[Claim]:
    """The paper's scheduler and collector."""
    main, eight = _main(), _eightfold()
    cells = main.cells_of_paper
    ratios = [ratio for cell in cells if (ratio := main.ratio(*cell, "mimose", "greedy+shuttle"))]
    yield Claim(
        PAGE,
        f"{_means(main, 'greedy+shuttle'):.2f} of their time on average, between "
        f"{between([r.median for r in ratios], '.2f', ' and ')} by cell; at scale 8 "
        f"{_means(eight, 'greedy+shuttle'):.2f}",
    )
    collectors = [
        theirs.collector / ours.collector
        for cell in cells
        for ours, theirs in zip(
            main.overhead(*cell, "mimose"), main.overhead(*cell, "greedy+shuttle"), strict=True
        )
    ]
    yield Claim(
        PAGE,
        f"Its collector costs {between(collectors, '.1f', ' to ')} times as much "
        f"({statistics.median(collectors):.1f} in the middle)",
    )
    both = [main.recomputed_by_both(*cell, "mimose", "greedy+shuttle") for cell in cells]
    more = sum(pair is not None and pair[0] > pair[1] for pair in both)
    yield Claim(PAGE, f"mimose recomputed more in {more} of {len(cells)} cells")
    missed = [100 * _missed_by_greedy(*cell) for cell in cells]
    yield Claim(PAGE, f"on {between(missed, '.0f', ' to ')} % of the steps, worked out from")


def _missed_by_greedy(task: str, budget: int) -> float:
    """The share of steps for which the paper's scheduler makes a plan that does not fit."""
    survey, steps = (
        _main().results.surveys[task],
        _main().runs(task, budget, "greedy+shuttle")[0].steps,
    )
    shapes = [(rows, length) for rows, (length,) in zip(steps.rows, steps.lengths, strict=True)]
    fits = {s: survey.plan(_size(survey, *s), budget, Greedy()).fits for s in set(shapes)}
    return statistics.fmean(not fits[shape] for shape in shapes)


def _size(survey: Survey, rows: int, length: int) -> InputSize:
    """The size of a batch in the layout that the file has: older ones name no arguments."""
    largest = survey.largest
    changed = {largest.dims[0]: rows, max(largest.dims): length}
    return InputSize(largest.layout, tuple(changed.get(dim, dim) for dim in largest.dims))


def _overhead() -> Iterator[Claim]:
    """What deciding costs."""
    main = _main()
    spent: list[Overhead] = [
        each for cell in main.cells_of_paper for each in main.overhead(*cell, "mimose")
    ]
    thousand = statistics.fmean(each.in_thousand_steps for each in spent)
    parts = statistics.fmean(each.collector + each.estimator + each.planner for each in spent)
    larger = [
        each.in_thousand_steps
        for cell in _eightfold().cells_of_paper
        for each in _eightfold().overhead(*cell, "mimose")
    ]
    quick = _sheet("-quick")
    (sft,) = quick.overhead("SFT-Llama", quick.limits("SFT-Llama")[0]["total_bytes"], "mimose")
    yield Claim(
        PAGE,
        f"{thousand:.1f} iterations in 1,000 steps beyond the oracle, where 2 was the goal "
        f"({statistics.fmean(larger):.1f} at scale 8, {sft.in_thousand_steps:.1f} for SFT-Llama). "
        f"They are extrapolated from 200 steps, in which it was {parts:.2f}",
    )
    pairs = [
        (main.runs(*cell, "mimose")[n], main.runs(*cell, "oracle")[n])
        for cell in main.cells_of_paper
        for n in (0, 1)
    ]
    yield from _observing(spent, pairs)
    cells = main.cells_of_paper
    checkpointed = [_observed_over_checkpointed(*cell, n) for cell in cells for n in (0, 1)]
    yield Claim(
        PAGE,
        f"Together the observed steps of a run took {between(checkpointed, '.2f', ' to ')} of the "
        "time of the same steps with every block checkpointed by torch",
    )
    yield from _deciding(pairs)


def _observing(spent: list[Overhead], pairs: list[tuple[Run, Run]]) -> Iterator[Claim]:
    first, later, more, count = [], [], [], []
    for ours, best in pairs:
        seen = [k for k, observed in enumerate(ours.steps.observed) if observed]
        both = [k for k in seen if not best.steps.out_of_memory[k]]
        longer = {k: ours.steps.milliseconds[k] - best.steps.milliseconds[k] for k in both}
        first.append(longer.pop(seen[0]))
        later += longer.values()
        more += [(ours.steps.recomputed[k] or 0) - (best.steps.recomputed[k] or 0) for k in longer]
        count.append(len(seen) - 1)
    assert (min(count), max(count)) == (4, 8)
    assert (min(more), max(more)) == (1, 7)
    collector = statistics.fmean(each.collector for each in spent)
    yield Claim(
        PAGE,
        f"Observing takes {collector:.1f} of them, on average: the first step "
        f"{between(first, '.0f', ' to ')} ms more than the oracle's, since it recomputes and "
        "looks "
        f"at everything, the four to eight others {statistics.median(later):.0f} ms in the middle, "
        "since one to seven blocks more are recomputed",
    )


def _observed_over_checkpointed(task: str, budget: int, number: int) -> float:
    ours, theirs = (
        _main().runs(task, budget, name)[number].steps for name in ("mimose", "torch-all")
    )
    both = zip(ours.milliseconds, theirs.milliseconds, ours.observed, strict=True)
    pairs = [(mine, its) for mine, its, observed in both if observed]
    return sum(mine for mine, _ in pairs) / sum(its for _, its in pairs)


def _deciding(pairs: list[tuple[Run, Run]]) -> Iterator[Claim]:
    new, again, new_us, again_us, steps_ms = [], [], [], [], []
    for (ours, best), (task, _) in zip(
        pairs, (cell for cell in _main().cells_of_paper for _ in (0, 1)), strict=True
    ):
        spent, iteration = ours.spent, best.seconds / len(best.steps.loss)
        more_sizes = _main().sizes(task, 1000) / _main().sizes(task, 200)
        repeating, repeats = spent["repeating_seconds"], spent["repeated_decisions"]
        for_new = spent["deciding_seconds"] - repeating
        new.append(for_new / iteration * more_sizes)
        again.append(repeating / iteration * 1000 / repeats)
        new_us.append(1e6 * for_new / (spent["planned_steps"] - repeats))
        again_us.append(1e6 * repeating / repeats)
        steps_ms.append(1e3 * iteration)
    yield Claim(
        PAGE,
        f"Decisions for sizes that come for the first time take {statistics.fmean(new):.1f} "
        f"({between(new_us, '.0f', ' to ')} µs each), those for just what was planned for before "
        f"{statistics.fmean(again):.1f} ({between(again_us, '.0f', ' to ')} µs each). A step "
        "of the "
        f"oracle takes {between(steps_ms, '.0f', ' to ')} ms on average at this batch",
    )


def _single() -> Iterator[Claim]:
    """Tasks that were run at one budget each: SFT-Llama, T5-base, compiled."""
    quick, t5 = _sheet("-quick"), _sheet("-t5")
    budget = quick.limits("SFT-Llama")[0]["total_bytes"]
    ours, oracle = (quick.runs("SFT-Llama", budget, n)[0] for n in ("mimose", "oracle"))
    to = {
        n: _ratio(quick, "SFT-Llama", n)
        for n in ("torch-all", "static", "greedy+shuttle", "oracle")
    }
    seen = sum(ours.steps.observed)
    yield Claim(
        PAGE,
        f"SFT-Llama takes {to['torch-all']} of `torch-all`, {to['static']} of `static`, "
        f"{to['greedy+shuttle']} of `greedy+shuttle` and {to['oracle']} of the oracle, in 40 "
        f"steps of which {seen} are "
        "observed. T5-base, with two lengths that vary, takes "
        f"{_ratio(t5, 'T5-base', 'torch-all')} "
        f"of `torch-all`, {_ratio(t5, 'T5-base', 'hf')} of transformers' own checkpointing and "
        f"{_ratio(t5, 'T5-base', 'oracle')} of the oracle",
    )
    blocks = len(quick.results.surveys["SFT-Llama"].observations[0].pattern)
    shares = [
        statistics.fmean(n for n in run.steps.recomputed if n is not None) / blocks
        for run in (ours, oracle)
    ]
    rows = zip(ours.steps.held_bytes, ours.steps.peak_bytes, ours.steps.observed, strict=True)
    unused = max((held - peak) / 2**20 for held, peak, observed in rows if observed)
    yield Claim(
        PAGE,
        f"SFT-Llama recomputed {100 * shares[0]:.0f} % of its runs where the oracle did "
        f"{100 * shares[1]:.0f} %: {seen} of 40 steps were observed, and in these the "
        "allocator came "
        f"to hold up to {unused:.0f} MiB more than was in use",
    )
    yield Claim(PAGE, f"to hold {100 * ours.spent['reserve_bytes'] / budget:.1f} % of the budget")
    main = _main()
    former = [
        100 * run.spent["reserve_bytes"] / row["total_bytes"]
        for row in main.limits("QA-XLNet")
        for run in main.runs("QA-XLNet", row["total_bytes"], "mimose").values()
    ]
    yield Claim(PAGE, f"which held {between(former, '.1f', ' to ')} % by the former rule")
    yield from _compiled()


def _ratio(sheet: Sheet, task: str, rival: str) -> str:
    found = sheet.ratio(task, sheet.limits(task)[0]["total_bytes"], "mimose", rival)
    assert found is not None
    return f"{found.median:.2f}"


def _compiled() -> Iterator[Claim]:
    sheet = _sheet("-compiled")
    budget = sheet.limits("QA-Bert")[0]["total_bytes"]
    names = ("plain", "mimose", "compile-budget", "mimose-compiled")
    runs = {name: sheet.runs("QA-Bert", budget, name)[0] for name in names}
    middle = {name: statistics.median(run.steps.milliseconds) for name, run in runs.items()}
    first = {name: run.steps.milliseconds[0] / 1e3 for name, run in runs.items()}
    peak = max(runs["compile-budget"].steps.peak_bytes) / 2**30
    yield Claim(
        PAGE,
        f"{first['mimose-compiled']:.0f} s for BERT-base's block, "
        f"{first['compile-budget']:.0f} s for "
        "the whole model with `activation_memory_budget`. After that `compile-budget` took "
        f"{middle['compile-budget']:.1f} ms a step in the middle, as plain training did "
        f"({middle['plain']:.1f}), within a fixed plan that peaked at {peak:.2f} of "
        f"{budget / 2**30:.2f} GiB; `mimose-compiled` {middle['mimose-compiled']:.0f} ms, where "
        f"mimose on the same blocks as they are took {middle['mimose']:.0f}",
    )
    errors = [100 * e for e in sheet.prediction_errors("QA-Bert", budget, "mimose-compiled")]
    yield Claim(PAGE, f"predictions are {between(errors, '.1f', ' to ')} % high there")
