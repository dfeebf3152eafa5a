"""How good the plans are: real lengths, a hard cap, every step held against the best plan there is.

    python benchmarks/planner_quality.py --out results.json --tasks TC-Bert --tight 10 50 90

For each task: plain training tells the peak at each length, hence budgets that it would exceed on
so many percent of the steps (none below 1.05 times what recomputing everything needs). An observing
run tells the exact profile of every length: what an oracle would know. Then mimose trains under
`enforce=True`, and each of its planned steps is held against the oracle's plan for the same bytes.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import torch

import mimose
from common import circumstances, parser_of, save, spread
from mimose.bench.circumstances import settle_device
from mimose.bench.measuring import LatestStep, Observer
from mimose.costs import StepObservation, extra_nanoseconds
from mimose.estimation import with_shared_times
from mimose.memory import meter_for
from mimose.planning import Optimal, RecomputeAll
from mimose.training import StepRecord, StepStart
from tasks import TASKS, Task


class Bench:
    """One task on one device, its model trained again from the same start for each run."""

    def __init__(self, task: Task, device: str, steps: int, autocast: bool) -> None:
        self.task, self.device, self.autocast = task, device, autocast
        self.lengths = task.padded_lengths(steps)
        self.cuda = device == "cuda"
        self.meter = meter_for(torch.device(device))

    def fresh(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
        torch.manual_seed(0)
        model = self.task.make().to(self.device, self.task.dtype).train()
        return model, torch.optim.AdamW(model.parameters(), 1e-5, fused=self.cuda or None)

    def step(self, model: Any, optimizer: Any, length: int) -> tuple[float, int]:
        """One step: seconds, and the peak of forward and backward."""
        batch = self.task.batch(length, self.device)
        if self.cuda:
            torch.cuda.synchronize()
        self.meter.reset_peak()
        began = time.perf_counter()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            loss = model(**batch).loss
        loss.backward()
        highest = self.meter.read().peak
        optimizer.step()
        optimizer.zero_grad()
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began, highest

    def plain_peaks(self) -> dict[int, int]:
        """Peak by length without checkpointing: lengths over the range, joined by a quadratic."""
        model, optimizer = self.fresh()
        low, high = min(self.lengths), max(self.lengths)
        at = sorted({round(x) for x in np.linspace(low, high, 10)})
        for length in at[:2]:
            self.step(model, optimizer, length)
        peaks = [self.step(model, optimizer, length)[1] for length in at]
        curve = np.polyfit(at, peaks, 2)
        return {n: int(np.polyval(curve, n)) for n in set(self.lengths)}

    def exact_profiles(self) -> dict[int, StepObservation]:
        """Every length observed: what an oracle knows."""
        model, optimizer = self.fresh()
        observer = Observer(model)
        seen: dict[int, StepObservation] = {}
        order = sorted(set(self.lengths), reverse=True)
        for length in [order[0], *order]:
            self.step(model, optimizer, length)
            observation = observer.observation()
            if observation is not None:
                # Equal blocks share their time, or the oracle would choose by the clock's noise.
                seen[length] = with_shared_times(observation)
        observer.detach()
        return seen

    def train(self, budget: int, oracle: dict[int, StepObservation]) -> dict[str, Any]:
        model, optimizer = self.fresh()
        retries = self.meter.read().retries
        handle, latest = mimose.auto_checkpoint(model, budget, enforce=True), LatestStep()
        handle.subscribe(latest)
        rows, out_of_memory, held = [], 0, 0
        for length in self.lengths:
            retried = self.meter.read().retries
            try:
                seconds, highest = self.step(model, optimizer, length)
            except torch.OutOfMemoryError:
                out_of_memory += 1
                optimizer.zero_grad()
                continue
            held = max(held, self.meter.read().peak_held)
            start, record = latest.start, latest.record
            assert start is not None
            assert record is not None
            rows.append(
                {
                    "length": length,
                    "seconds": seconds,
                    "peak": highest,
                    "planned": False,
                    "planning_us": start.planning_seconds * 1e6,
                    "retries": self.meter.read().retries - retried,
                    "from_cache": not record.new_plan,
                    **judged(budget, start, record, oracle[length]),
                }
            )
        stats = handle.stats()
        handle.detach()
        return {
            "budget": budget,
            "out_of_memory": out_of_memory,
            "peak_held": held,
            "observed_steps": stats.observed_steps,
            "reserve": stats.reserve_bytes,
            "evictions": stats.evictions,
            "leave_one_out_error": stats.prediction_error,
            "retries": self.meter.read().retries - retries,
            "rows": rows,
        }


def judged(
    budget: int, start: StepStart, record: StepRecord, truth: StepObservation
) -> dict[str, Any]:
    """A planned step beside the plan that exact knowledge would have made of the same bytes."""
    ours = record.plan
    if ours is None or record.observed:
        return {}
    exact = truth.profile.in_step(truth.conditions)
    best = Optimal().plan(exact, budget - start.reserve_bytes - start.reading.in_use)
    return {
        "planned": True,
        "predicted": None if record.is_bound else record.predicted_peak_bytes,
        "reserve": start.reserve_bytes,
        "recomputes": not ours.keeps_all,
        "kept": ours.kept,
        "best_kept": best.kept,
        "recompute_ns": extra_nanoseconds(exact, ours.choices),
        "best_recompute_ns": extra_nanoseconds(exact, best.choices),
    }


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """The figures of one run."""
    planned = [row for row in run["rows"] if row["planned"]]
    observed = {row["length"] for row in run["rows"] if not row["planned"]}
    unseen = [
        row
        for row in planned
        if row["predicted"] is not None
        and row["length"] not in observed
        and min(observed) <= row["length"] <= max(observed)
    ]
    errors = [(row["predicted"] - row["peak"]) / row["peak"] for row in unseen] or [0.0]
    ours = sum(row["recompute_ns"] for row in planned)
    best = sum(row["best_recompute_ns"] for row in planned)
    left = [row["reserve"] for row in planned if row["recomputes"]] or [run["reserve"]]
    hits = [row["planning_us"] for row in planned if row["from_cache"]]
    new = [row["planning_us"] for row in planned if not row["from_cache"]]
    return {
        "out_of_memory": run["out_of_memory"],
        "held_over_budget": run["peak_held"] / run["budget"],
        "observed_steps": run["observed_steps"],
        "planned_steps": len(planned),
        "could_keep_more": sum(row["best_kept"] > row["kept"] for row in planned) / len(planned),
        "recompute_over_oracle": ours / best if best else (1.0 if not ours else float("inf")),
        "reserve_share": run["reserve"] / run["budget"],
        "mean_reserve_share": float(np.mean(left)) / run["budget"],
        "worst_under": -min(*errors, 0.0),
        "mean_over": float(np.mean([max(e, 0.0) for e in errors])),
        "cached_plan_us": spread(hits) if len(hits) > 1 else None,
        "new_plan_us": spread(new) if len(new) > 1 else None,
        "median_seconds": float(np.median([row["seconds"] for row in run["rows"]])),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", nargs="+", default=[name for name in TASKS if name != "tiny"])
    parser.add_argument("--tight", nargs="+", type=int, default=[10, 50, 90])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--autocast", action="store_true", help="bf16 autocast")
    options = parser.parse_args()
    device = settle_device(None)
    results: dict[str, Any] = {
        "benchmark": "planner_quality",
        **circumstances(options.allow_dirty),
        "steps": options.steps,
        "autocast": options.autocast,
        "tasks": {},
    }
    for name in options.tasks:
        bench = Bench(TASKS[name], device, options.steps, options.autocast)
        plain = bench.plain_peaks()
        oracle = bench.exact_profiles()
        largest = oracle[max(oracle)]
        model, _ = bench.fresh()
        parameters = sum(p.nbytes for p in model.parameters())
        del model, _
        profile = largest.profile.in_step(largest.conditions)
        needed, fixed = RecomputeAll().plan(profile, 0), 3 * parameters
        results["tasks"][name] = task = {"lengths": bench.lengths, "runs": {}}
        floor = int(1.05 * (needed.peak_bytes + fixed))
        for percent in options.tight:
            share = np.percentile([plain[n] for n in bench.lengths], 100 - percent)
            budget = max(int(share), floor)
            run = bench.train(budget, oracle)
            run["tight"], run["at_floor"] = percent, budget == floor
            run["summary"] = summary(run)
            task["runs"][str(percent)] = run
            print(name, percent, f"{budget / 2**30:.2f} GiB", run["summary"], flush=True)
            save(results, options.out)


if __name__ == "__main__":
    main()
