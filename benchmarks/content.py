"""Steps whose memory depends on more than the size; evicting; several passes in one step.

    python benchmarks/content.py --out results.json --cases rows moe detector --steps 500
    python benchmarks/content.py --out results.json --outlier --evictable --passes

`--cases`: an observing run tells the exact profile of every single step, hence the budget that
plain training exceeds on half of the steps (at least 1.05 times what recomputing everything needs).
Then mimose trains on the same steps under `enforce=True` with `handle.retry`, and each step is held
against the best plan for its own exact profile. Step k has the content of seed k, and the
learning rate is 0: routers choose the same in every run.
`--outlier`: after 500 short batches one ten times as long, which fits only recomputed.
`--evictable`: what steps cost whose kept activations may be dropped, or that are observed.
`--passes`: a GAN, contrastive learning and distillation: lost steps and under-predicted peaks.
"""

from __future__ import annotations

import functools
import statistics
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import mimose
from common import circumstances, parser_of, save
from content_cases import CASES, Case, Trained, fresh, with_outlier
from content_evictable import evictable_models
from content_passes import LOOPS, passes
from mimose.bench.circumstances import settle_device
from mimose.bench.measuring import LatestStep, Observer
from mimose.costs import Profile, StepObservation, extra_nanoseconds
from mimose.estimation import with_shared_times
from mimose.interception import find_blocks
from mimose.memory import meter_for
from mimose.planning import KeepAll, Optimal, RecomputeAll
from mimose.training import StepRecord, StepStart

ENDLESS = 1 << 62
PRICES = ("evictions", "recomputed", "best_recomputed", "recompute_ns", "best_recompute_ns")


def observed(case: Case, device: str, numbers: list[int]) -> tuple[int, dict[int, StepObservation]]:
    """What is in use at most when a step begins, and the exact profile of every step."""
    trained, seen, base = Trained(case.model, device), {}, 0
    observer = Observer(case.model, **case.options)
    for number in [numbers[0], *numbers]:  # blocks are tried in the first
        trained.step(number, case.loss(number))
        observation, start = observer.observation(), observer.start
        if observation is not None and start is not None:
            # Equal blocks share their time, or the oracle would choose by the clock's noise.
            seen[number], base = with_shared_times(observation), max(base, start.reading.in_use)
    observer.detach()
    return base, seen


def exact(truth: StepObservation) -> Profile:
    return truth.profile.in_step(truth.conditions)


def budget_of(base: int, profiles: list[Profile]) -> dict[str, Any]:
    kept = [base + KeepAll().plan(each, ENDLESS).peak_bytes for each in profiles]
    least = [base + RecomputeAll().plan(each, ENDLESS).peak_bytes for each in profiles]
    budget = max(int(statistics.median(kept)), int(1.05 * max(least)))
    return {
        "budget": budget,
        "base": base,
        "plain_exceeds": sum(peak > budget for peak in kept) / len(kept),
        "plain_peaks": kept,
    }


def judged(
    budget: int, start: StepStart, record: StepRecord, truth: StepObservation | None
) -> dict[str, int]:
    """What a step recomputed beside the best plan of the same bytes; both by its own profile."""
    if truth is None:
        return {}
    profile = replace(exact(truth), link=start.link)
    best = Optimal().plan(profile, budget - start.reserve_bytes - start.reading.in_use).choices
    done = RecomputeAll().plan(profile, 0).choices if record.plan is None else record.plan.choices
    if len(done) != len(best):
        return {}
    ours, theirs = extra_nanoseconds(profile, done), extra_nanoseconds(profile, best)
    recomputed = (sum(option.recomputes for option in options) for options in (done, best))
    return dict(zip(PRICES, (record.evictions, *recomputed, ours, theirs), strict=True))


def kind_of(record: StepRecord) -> str:
    """How a step ran: observed, trusted, within a bound, or with activations to be dropped."""
    if record.observed or record.plan is None:
        return "observed"
    if record.predicted_peak_bytes is None or (record.is_bound and not record.plan.fits):
        return "evictable"
    return "bounded" if record.is_bound else "trusted"


class Tally(LatestStep):
    """Counts how steps ran, and what their plans did not expect."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()
        self.surprises: Counter[str] = Counter()

    def step_over(self, record: StepRecord) -> None:
        super().step_over(record)
        self.kinds[kind_of(record)] += 1
        self.surprises.update(surprise.name.lower() for surprise in record.surprises)


def train(
    case: Case,
    device: str,
    numbers: list[int],
    budget: int,
    oracle: dict[int, StepObservation],
    **options: Any,
) -> dict[str, Any]:
    """Train on these steps under a hard cap."""
    meter, trained, tally = meter_for(torch.device(device)), Trained(case.model, device), Tally()
    held, rows = 0, []
    with mimose.auto_checkpoint(
        case.model, budget, enforce=True, **case.options, **options
    ) as handle:
        handle.subscribe(tally)
        for number in numbers:
            meter.reset_peak()
            row: dict[str, Any] = {"seconds": trained.step(number, case.loss(number), handle.retry)}
            held = max(held, meter.read().peak_held)
            if row["seconds"] is not None and tally.start and tally.record:
                row["kind"] = kind_of(tally.record)
                row |= judged(budget, tally.start, tally.record, oracle.get(number))
            rows.append(row)
        stats = handle.stats()
    meter.close()
    return {
        "lost": [n for n, row in zip(numbers, rows, strict=True) if row["seconds"] is None],
        "evictions": stats.evictions,
        "recoveries": stats.recoveries,
        "retries": stats.retries,
        "surprises": dict(tally.surprises),
        "kinds": dict(tally.kinds),
        "held_over_budget": held / budget,
        "reserve_share": (stats.reserve_bytes or 0) / budget,
        "moved_bytes": stats.moved_bytes,
        "rows": {name: [row.get(name) for row in rows] for name in ("seconds", "kind", *PRICES)},
    }


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """The figures of one run."""
    rows, half = run["rows"], len(run["rows"]["seconds"]) // 2
    total = {name: sum(x or 0 for x in rows[name]) for name in ("seconds", *PRICES)}
    return {
        "lost": len(run["lost"]),
        "evictions": run["evictions"],
        "recoveries": run["recoveries"],
        "retries": run["retries"],
        "surprises": run["surprises"],
        "kinds": run["kinds"],
        "priced_steps": sum(x is not None for x in rows["recompute_ns"]),
        "runs_recomputed": total["recomputed"],
        "runs_recomputed_by_oracle": total["best_recomputed"],
        "recompute_over_oracle": over_oracle(rows),
        "recompute_over_oracle_in_second_half": over_oracle(rows, half),
        "held_over_budget": run["held_over_budget"],
        "seconds": total["seconds"],
    }


def over_oracle(rows: dict[str, list[Any]], first: int = 0) -> float | None:
    """Recompute time over the oracle's, from a step on; None if the oracle recomputes nothing."""
    ours, best = (sum(x or 0 for x in rows[name][first:]) for name in PRICES[-2:])
    return ours / best if best else None


def content(name: str, device: str, steps: int, torch_all: bool, **options: Any) -> dict[str, Any]:
    make, numbers = functools.partial(CASES[name], device, steps), list(range(steps))
    base, oracle = observed(fresh(make, device), device, numbers)
    limit = budget_of(base, [exact(each) for each in oracle.values()])
    run = train(fresh(make, device), device, numbers, limit["budget"], oracle, **options)
    told = summary(run)
    if torch_all:
        run["torch_all_seconds"] = checkpointed(fresh(make, device), device, numbers)
        told["torch_all_seconds"] = sum(run["torch_all_seconds"])
    exceeded = f"exceeded on {limit['plain_exceeds']:.0%}"
    print(name, f"{limit['budget'] / 2**30:.3f} GiB,", exceeded, told, flush=True)
    return {"steps": steps, **limit, **run, "summary": told}


def checkpointed(case: Case, device: str, numbers: list[int]) -> list[float | None]:
    """Seconds of each step with every block under torch's own checkpoint."""
    for block in find_blocks(case.model):
        forward = functools.partial(checkpoint, block.module.forward, use_reentrant=False)
        block.module.forward = forward  # type: ignore[method-assign]
    trained = Trained(case.model, device)
    return [trained.step(number, case.loss(number)) for number in numbers]


def outlier(device: str, steps: int) -> dict[str, Any]:
    """Many short batches, one ten times as long as the longest of them, and 20 short ones."""
    make = functools.partial(with_outlier, device, steps)
    base, seen = observed(fresh(make, device), device, [steps])
    profile = exact(seen[steps])
    kept = base + KeepAll().plan(profile, ENDLESS).peak_bytes
    least = base + RecomputeAll().plan(profile, ENDLESS).peak_bytes
    budget = int(1.1 * least)
    run = train(fresh(make, device), device, list(range(steps + 21)), budget, seen)
    found = {"steps": steps, "budget": budget, "kept": kept, "recomputed": least, **run}
    found["summary"] = {**summary(run), "outlier_was": run["rows"]["kind"][steps]}
    limit = f"{budget / 2**30:.3f} GiB, kept {kept / 2**30:.3f}"
    print("outlier", limit, found["summary"], flush=True)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", nargs="*", default=[], choices=list(CASES))
    parser.add_argument("--steps", type=int, nargs="+", default=[500], help="one, or one a case")
    parser.add_argument("--choices", nargs="+", help="what plans may choose from for each block")
    parser.add_argument("--torch-all", action="store_true", help="time torch's checkpoint, too")
    parser.add_argument("--outlier", nargs="?", type=int, const=500, help="after so many steps")
    parser.add_argument("--evictable", nargs="?", type=int, const=20, help="so many rounds")
    parser.add_argument("--passes", nargs="?", type=int, const=120, help="so many steps")
    asked = parser.parse_args()
    if len(asked.steps) not in (1, len(asked.cases)):
        parser.error("--steps takes one number, or one for each of --cases")
    device = settle_device(None)
    results: dict[str, Any] = {"benchmark": "content", **circumstances(asked.allow_dirty)}
    options = {"choices": asked.choices} if asked.choices else {}
    for name, steps in zip(asked.cases, asked.steps * len(asked.cases), strict=False):
        found = content(name, device, steps, asked.torch_all, **options)
        results.setdefault("cases", {})[name] = found
        save(results, asked.out)
    if asked.outlier:
        results["outlier"] = outlier(device, asked.outlier)
        save(results, asked.out)
    if asked.evictable:
        results["evictable"] = evictable_models(device, asked.evictable)
        save(results, asked.out)
    for name in LOOPS if asked.passes else ():
        results.setdefault("passes", {})[name] = passes(name, device, asked.passes)
        save(results, asked.out)


if __name__ == "__main__":
    main()
