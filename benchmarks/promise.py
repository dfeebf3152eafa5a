"""Does the budget hold? 20,000 steps under a hard cap, surprises included, in parts.

    python benchmarks/promise.py --out promise.json --time-limit 500

The same command goes on where the last one stopped, until every case of `promise_cases.py` has its
steps. Each run begins anew, with another seed, and trains through `handle.retry` with
`enforce=True`; the case that has least of its steps is next. Counted are steps lost, steps and
blocks run again, evictions, steps that did not go as their plans expected, the most that the
allocator held, and what the process itself takes: its memory and the number of its objects.

A budget is the median peak of plain training over the first steps of a case, or, where that is
more, what recomputing everything needs at its hardest step, with the first reserve.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mimose
from common import circumstances, parser_of, save
from mimose.bench.circumstances import settle_device
from mimose.interception import find_blocks
from mimose.memory import meter_for
from mimose.training import StepRecord, Subscriber
from promise_cases import CASES, Case, Loss, Where

PROBED = 24
"""Steps of plain training that the budget is made from."""
FLOOR_MARGIN = 1.13
"""A budget leaves the reserve (8 % at first) free above what recomputing everything needs."""
HIGHER = 1.03
"""A peak that is more than this over the predicted one is a surprise."""
LOOK_EVERY = 100
"""Steps between two looks at the process; the first after as many."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Surprises(Subscriber):
    """Counts what plans did not expect."""

    def __init__(self) -> None:
        self.steps = 0
        self.kinds: Counter[str] = Counter()

    def step_over(self, record: StepRecord) -> None:
        found = {surprise.name.lower() for surprise in record.surprises}
        if record.evictions:
            found.add("evicted")
        predicted, real = record.predicted_peak_bytes, record.real_peak_bytes
        if record.comparable and predicted and real and real > HIGHER * predicted:
            found.add("peak_higher")
        self.steps += bool(found)
        self.kinds.update(found)


class Process:
    """What the process takes: its memory, and the number of Python's objects."""

    def __init__(self) -> None:
        self.looks: list[tuple[int, int, int]] = []

    def look(self, step: int) -> None:
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
        self.looks.append((step, resident, len(gc.get_objects())))

    def told(self) -> dict[str, Any]:
        """All looks, and what was added from the first to the last."""
        if len(self.looks) < 2:
            return {"looks": self.looks, "grown_bytes": None, "grown_objects": None}
        (_, *first), (_, *last) = self.looks[0], self.looks[-1]
        return {
            "looks": self.looks,
            "grown_bytes": last[0] - first[0],
            "grown_objects": last[1] - first[1],
        }


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-5, fused=torch.cuda.is_available() or None)


def peaks(case: Case, where: Where, *, checkpointed: bool) -> list[int]:
    """The peak of each of a case's first steps, and of its hardest."""
    meter = meter_for(torch.device(where.device))
    model = case.make(where).train()
    if checkpointed:
        for block in find_blocks(model):
            forward = functools.partial(checkpoint, block.module.forward, use_reentrant=False)
            block.module.forward = forward  # type: ignore[method-assign]
    optimizer, found = optimizer_of(model), []
    for loss in _probed(case, model, where, hardest=checkpointed):
        meter.reset_peak()
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        found.append(meter.read().peak)
    meter.close()
    return found


def _probed(case: Case, model: nn.Module, where: Where, *, hardest: bool) -> Iterator[Loss]:
    yield from case.losses(model, where, PROBED, 0)
    if hardest and case.hardest is not None:
        yield case.hardest(model, where)


def budget_of(case: Case, where: Where) -> int:
    kept = peaks(case, where, checkpointed=False)[2:]  # with the optimizer's state
    clear(where)
    least = max(peaks(case, where, checkpointed=True))
    clear(where)
    return max(int(statistics.median(kept)), int(FLOOR_MARGIN * least))


def clear(where: Where) -> None:
    gc.collect()
    if where.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def train(
    case: Case, where: Where, budget: int, *, steps: int, seed: int, deadline: float
) -> dict[str, Any]:
    """One run, from a new model to as many steps as there is time for."""
    torch.manual_seed(seed)
    clear(where)
    meter = meter_for(torch.device(where.device))
    before = meter.read()
    model = case.make(where).train()
    optimizer = optimizer_of(model)
    options = {**case.options(where)}
    handle = mimose.auto_checkpoint(model, budget, enforce=True, **options)
    surprises, process = Surprises(), Process()
    handle.subscribe(surprises)
    lost, held, done, began = [], 0, 0, time.monotonic()
    gc.freeze()  # only what is made from here on counts, or each look would take long
    for number, loss in enumerate(case.losses(model, where, steps, seed)):
        if time.monotonic() > deadline:
            break
        message = _tried(handle, loss)
        if message is None:
            optimizer.step()
        else:
            lost.append([number, message])
        optimizer.zero_grad()
        held, done = max(held, meter.read().peak_held), done + 1
        if done % LOOK_EVERY == 0:
            process.look(done)
    gc.unfreeze()
    stats, after = handle.stats(), meter.read()
    handle.detach()
    meter.close()
    return {
        "seed": seed,
        "steps": done,
        "seconds": time.monotonic() - began,
        "lost": lost,
        "recoveries": stats.recoveries,
        "evictions": stats.evictions,
        "surprising_steps": surprises.steps,
        "surprises": dict(surprises.kinds),
        "observed_steps": stats.observed_steps,
        "planned_steps": stats.planned_steps,
        "runs_recomputed": stats.runs_recomputed,
        "runs_kept": stats.runs_kept,
        # An observed step resets the allocator's peaks.
        "held_over_budget": max(held, stats.peak_held_bytes) / budget,
        "reserve_share": (stats.reserve_bytes or 0) / budget,
        "allocator_retries": after.retries - before.retries,
        "process": process.told(),
    }


def _tried(handle: mimose.Mimose, loss: Loss) -> str | None:
    """Forward and backward; what the error says if the step is lost."""
    try:
        handle.retry(lambda: loss().backward())  # type: ignore[no-untyped-call]
    except torch.OutOfMemoryError as error:
        return str(error)[:300]
    return None


ADDED = (
    *("steps", "seconds", "recoveries", "evictions", "surprising_steps", "observed_steps"),
    *("planned_steps", "runs_recomputed", "runs_kept", "allocator_retries"),
)


def together(budget: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """All runs of a case as one."""
    before = itertools.accumulate((run["steps"] for run in runs), initial=0)
    kinds: Counter[str] = Counter()
    for run in runs:
        kinds.update(run["surprises"])
    return {
        "budget": budget,
        **{name: sum(run[name] for run in runs) for name in ADDED},
        "surprises": dict(kinds),
        "lost": [
            [first + number, message]
            for first, run in zip(before, runs, strict=False)
            for number, message in run["lost"]
        ],
        "held_over_budget": max((run["held_over_budget"] for run in runs), default=0.0),
        "reserve_share": runs[-1]["reserve_share"] if runs else 0.0,
        "process": {
            name: max((run["process"][name] for run in runs if known(run, name)), default=None)
            for name in ("grown_bytes", "grown_objects")
        },
        "runs": runs,
    }


def can_run(name: str, case: Case) -> bool:
    """Whether the packages are there that a case needs."""
    missing = [package for package in case.needs if importlib.util.find_spec(package) is None]
    if missing:
        print(f"{name} is left out: {', '.join(missing)} is not installed", flush=True)
    return not missing


def known(run: dict[str, Any], name: str) -> bool:
    """Whether a run was long enough to tell by how much the process grew."""
    return run["process"][name] is not None


class Parts:
    """The file, and what is still to be done."""

    def __init__(self, out: Path, header: dict[str, Any], wanted: dict[str, int]) -> None:
        self._out, self._wanted = out, wanted
        self.results = self._opened(header)

    def _opened(self, header: dict[str, Any]) -> dict[str, Any]:
        if not self._out.exists():
            return {**header, "cases": {}}
        known: dict[str, Any] = json.loads(self._out.read_text())
        for name in ("source_tree", "machine", "torch"):
            if known.get(name) != header[name]:
                raise SystemExit(
                    f"{self._out} was measured with {name} {known.get(name)}, and here it is "
                    f"{header[name]}: write to another --out"
                )
        return known

    def next_case(self) -> str | None:
        """The case that has the smallest share of its steps; None if all have theirs."""
        shares = {
            name: self.results["cases"].get(name, {}).get("steps", 0) / steps
            for name, steps in self._wanted.items()
        }
        name = min(shares, key=lambda name: shares[name])
        return name if shares[name] < 1 else None

    def left(self, name: str) -> int:
        done: int = self.results["cases"].get(name, {}).get("steps", 0)
        return self._wanted[name] - done

    def budget(self, name: str, where: Where) -> int:
        known: dict[str, Any] | None = self.results["cases"].get(name)
        return int(known["budget"]) if known else budget_of(CASES[name], where)

    def add(self, name: str, budget: int, run: dict[str, Any]) -> None:
        runs = [*self.results["cases"].get(name, {}).get("runs", []), run]
        self.results["cases"][name] = together(budget, runs)
        save(self.results, self._out)


def measure(parts: Parts, where: Where, deadline: float, slice_seconds: float) -> None:
    """Run after run, until all is done or time is up."""
    while (name := parts.next_case()) is not None and time.monotonic() < deadline:
        budget = parts.budget(name, where)
        case, known = CASES[name], parts.results["cases"].get(name, {}).get("runs", [])
        until = min(deadline, time.monotonic() + slice_seconds)
        steps = min(case.run_steps, parts.left(name))
        run = train(case, where, budget, steps=steps, seed=1 + len(known), deadline=until)
        parts.add(name, budget, run)
        shown = {k: v for k, v in run.items() if k not in ("process", "lost")}
        print(name, f"{budget / 2**30:.2f} GiB", shown, f"lost {len(run['lost'])}", flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--share", type=float, default=1.0, help="of each case's steps")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument("--slice", type=float, default=60.0, help="seconds of one run at most")
    options = parser.parse_args()
    deadline = time.monotonic() + options.time_limit
    device = settle_device(None)
    header = {"benchmark": "promise", **circumstances(options.allow_dirty)}
    wanted = {
        name: max(20, int(CASES[name].steps * options.share))
        for name in options.cases
        if can_run(name, CASES[name])
    }
    parts = Parts(options.out, header, wanted)
    measure(parts, Where(device, small=device == "cpu"), deadline, options.slice)
    done = sum(case["steps"] for case in parts.results["cases"].values())
    print(f"{done:,} of {sum(wanted.values()):,} steps are in {options.out}")


if __name__ == "__main__":
    main()
