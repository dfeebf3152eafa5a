"""What the host buys: mimose with two options, with all, and plain training, by turns.

    python benchmarks/host.py --out results.json --shares 0.76 0.5 0.24

Layers like Llama 8B's with LoRA on all linears, bf16, one row of 16,384 tokens. Plain training
tells how far a step rises with everything kept; budgets leave room for a share of that, the reserve
settled. Under each budget both variants of mimose know the model; after some steps in which the
reserve settles, steps are timed. `--floor` looks for the least budget that trains, in shares of
what recomputing everything needs, from a first step in which nothing is known. `--mixed` trains
whole runs on rows of mixed lengths (instruction tuning's, times 16), observing included, under the
budget that plain training would exceed on half of the steps.
`--flat` trains on rows of mixed lengths under a budget that the longest fit only with the host's
help, and looks now and then at what is held.
"""

from __future__ import annotations

import csv
import gc
import random
import statistics
import time
from typing import Any

import torch

import llama_lora
import mimose
from common import circumstances, parser_of, save
from mimose.bench.batches import LENGTHS
from mimose.bench.measuring import LatestStep
from mimose.costs import Option
from mimose.memory import meter_for
from mimose.planning import KeepAll, RecomputeAll

VARIANTS: dict[str, dict[str, Any]] = {
    "two options": {"choices": ("keep", "recompute")},
    "all options": {},
}


SETTLING = 10
"""Steps near the limit after which the reserve has settled, and a few more."""
MOST_SETTLING = 60
FLAT = 0.95
"""The budget of a long run, as a share of what recomputing everything needs at the longest."""
SHORTEST, LONGEST, TIMES = 512, 32768, 16
"""Of rows of mixed lengths: instruction tuning's lengths, so many times, cut to these."""


class Bench:
    """One model, trained again and again on rows of one length."""

    def __init__(self, layers: int, tokens: int, device: str) -> None:
        self.device, self.cuda = device, device == "cuda"
        self.model = llama_lora.make(layers, device, **({} if self.cuda else llama_lora.SMALL))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, 1e-5)
        top = 32000 if self.cuda else 100
        self.row = torch.randint(0, top, (1, tokens), device=device)
        self.meter = meter_for(torch.device(device))

    def step(self, tokens: int | None = None) -> float:
        self.wait()
        began = time.perf_counter()
        self.model(self.row[:, :tokens]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.wait()
        return time.perf_counter() - began

    def step_or_none(self, tokens: int | None = None) -> float | None:
        """The same; None if memory ran out."""
        try:
            return self.step(tokens)
        except torch.OutOfMemoryError:
            self.optimizer.zero_grad()
            return None

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def plain(self, steps: int) -> list[float]:
        self.step()
        self.step()
        return [self.step() for _ in range(steps)]

    def known(self) -> tuple[dict[str, Any], Any]:
        """What mimose learns of the model without a limit; and its profile of a step."""
        options = {"choices": ("keep", "recompute")}
        with mimose.auto_checkpoint(self.model, "100%", **options) as handle:
            for tokens in (None, None, -1, -2, -3, -5, None):
                self.step(tokens)
            explanation = handle.explain(self.row)
            return handle.state_dict(), explanation

    def clear(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _settle(self, handle: Any) -> None:
        """Train until the reserve has settled and host memory is no longer being pinned."""
        pinned = [-1, -1, -1]
        for number in range(MOST_SETTLING):
            self.step()
            pinned.append(handle.stats().host_bytes_held)
            if number >= SETTLING and len(set(pinned[-3:])) == 1:
                return

    def under(
        self, budget: int, state: dict[str, Any], steps: int, **options: Any
    ) -> dict[str, Any]:
        """Some planned steps under a budget: times, the plan, peaks."""
        self.clear()
        latest = LatestStep()
        handle = mimose.auto_checkpoint(self.model, budget, enforce=True, **options)
        handle.load_state_dict(state)
        handle.subscribe(latest)
        times, peaks = [], []
        self._settle(handle)
        for _ in range(steps):
            seconds = self.step()
            record = latest.record
            if record is not None and record.plan is not None:
                times.append(seconds)
                if record.real_peak_bytes and record.predicted_peak_bytes:
                    peaks.append(record.predicted_peak_bytes / record.real_peak_bytes - 1)
        stats = handle.stats()
        record, plan = latest.record, latest.record.plan if latest.record else None
        handle.detach()
        return {
            "seconds": times,
            "plan": str(plan),
            "planned_extra_seconds": None if plan is None else plan.extra_seconds,
            "prediction_errors": peaks,
            "reserve_share": (stats.reserve_bytes or 0) / budget,
            "peak_held_over_budget": stats.peak_held_bytes / budget,
            "moved_bytes_a_step": None if plan is None else plan.moved_bytes,
            "host_bytes": stats.host_bytes_held,
            "stalled_seconds": stats.stalled_seconds,
            "observed_steps": stats.observed_steps,
        }


def shares(bench: Bench, wanted: list[float], steps: int, rounds: int) -> dict[str, Any]:
    state, explanation = bench.known()
    profile, base = explanation.profile, explanation.base_bytes
    assert profile is not None
    kept = KeepAll().plan(profile, 1 << 62).peak_bytes
    recomputed = RecomputeAll().plan(profile, 1 << 62).peak_bytes
    result: dict[str, Any] = {
        "base_bytes": base,
        "kept_bytes": kept,
        "recomputed_bytes": recomputed,
        "run_cost": list(profile.runs[len(profile.runs) // 2]),
        "budgets": {},
    }
    for share in wanted:
        # Plans leave a reserve of 3 % free once it has settled.
        budget = int((base + share * kept) / 0.97)
        runs: dict[str, list[Any]] = {"plain": [], **{name: [] for name in VARIANTS}}
        for _ in range(rounds):
            bench.clear()
            runs["plain"].append({"seconds": bench.plain(steps)})
            for name, options in VARIANTS.items():
                runs[name].append(bench.under(budget, state, steps, **options))
        plain = statistics.median(s for run in runs["plain"] for s in run["seconds"])
        ratios = {
            name: [statistics.median(run["seconds"]) / plain for run in rows if run["seconds"]]
            for name, rows in runs.items()
        }
        result["budgets"][str(share)] = {"budget": budget, "runs": runs, "over_plain": ratios}
        print(share, f"{budget / 2**30:.2f} GiB", ratios, flush=True)
        for name in VARIANTS:
            print(
                "  ", name, {k: v for k, v in runs[name][-1].items() if k != "seconds"}, flush=True
            )
    return result


def mixed(bench: Bench, steps: int, rounds: int, seed: int = 0) -> dict[str, Any]:
    """Whole runs on rows of mixed lengths, by turns; the first round is slow on a shared host."""
    lengths = drawn_lengths(steps, seed, bench.row.shape[1])
    _, explanation = bench.known()
    profile, base, tokens = explanation.profile, explanation.base_bytes, bench.row.shape[1]
    assert profile is not None
    kept = KeepAll().plan(profile, 1 << 62).peak_bytes
    # Layers with flash attention take memory in proportion to the length.
    budget = int((base + kept * statistics.median(lengths) / tokens) / 0.97)
    runs: dict[str, list[Any]] = {name: [] for name in VARIANTS}
    for name, options in list(VARIANTS.items()) * rounds:
        bench.clear()
        with mimose.auto_checkpoint(bench.model, budget, enforce=True, **options) as handle:
            times = [bench.step_or_none(length) for length in lengths]
            stats = handle.stats()
        run = {
            "seconds": times,
            "lost": times.count(None),
            "observed_steps": stats.observed_steps,
            "runs_kept": stats.runs_kept,
            "runs_recomputed": stats.runs_recomputed,
            "moved_bytes": stats.moved_bytes,
            "stalled_seconds": stats.stalled_seconds,
            "worst_shortfall": stats.worst_shortfall,
            "peak_held_over_budget": stats.peak_held_bytes / budget,
            "planning_seconds": stats.planning_seconds,
            "plans": stats.cache_misses,
        }
        runs[name].append(run)
        shown = {k: v for k, v in run.items() if k != "seconds"}
        print("mixed", name, sum(t or 0 for t in times), shown, flush=True)
    return {"lengths": lengths, "budget": budget, "runs": runs}


def flat(bench: Bench, steps: int, seed: int = 0) -> dict[str, Any]:
    """What is held in a long run: on the device, in host memory, in Python."""
    _, explanation = bench.known()
    profile, base, tokens = explanation.profile, explanation.base_bytes, bench.row.shape[1]
    assert profile is not None
    recomputed = RecomputeAll().plan(profile, 1 << 62).peak_bytes
    budget, draw = int((base + FLAT * recomputed) / 0.97), random.Random(seed)
    looks, lost = list[dict[str, int]](), 0
    bench.clear()
    options = VARIANTS["all options"]
    with mimose.auto_checkpoint(bench.model, budget, enforce=True, **options) as handle:
        for number in range(steps + 1):
            if number % max(1, steps // 20) == 0:
                gc.collect()
                stats = handle.stats()
                looks.append(
                    {
                        "step": number,
                        "device_bytes": bench.meter.read().in_use,
                        "pinned_bytes": stats.host_bytes_held,
                        "moved_bytes": stats.moved_bytes,
                        "python_objects": len(gc.get_objects()),
                    }
                )
            lost += bench.step_or_none(draw.randint(tokens // 16, tokens)) is None
        plans = handle.stats().cache_misses
    print("flat", "lost", lost, "plans", plans, looks[2], looks[-1], flush=True)
    return {"steps": steps, "budget": budget, "lost": lost, "plans": plans, "looks": looks}


def drawn_lengths(steps: int, seed: int, longest: int) -> list[int]:
    with (LENGTHS / "instruct_cl100k.csv").open() as file:
        rows = [(int(row["length"]), int(row["count"])) for row in csv.DictReader(file)]
    values, counts = zip(*rows, strict=True)
    drawn = random.Random(seed).choices(values, counts, k=steps)
    return [min(max(TIMES * n, min(SHORTEST, longest)), min(LONGEST, longest)) for n in drawn]


def floor(bench: Bench, tried: list[float]) -> dict[str, Any]:
    """Which shares of what recomputing everything needs are enough, from the first step on."""
    _, explanation = bench.known()
    assert explanation.profile is not None
    needed, base = (
        RecomputeAll().plan(explanation.profile, 1 << 62).peak_bytes,
        explanation.base_bytes,
    )
    found: dict[str, Any] = {}
    for share in tried:
        budget = int((base + share * needed) / 0.97)
        for name, options in VARIANTS.items():
            bench.clear()
            with mimose.auto_checkpoint(bench.model, budget, enforce=True, **options) as handle:
                lost, seconds = 0, []
                for _ in range(5):
                    took = bench.step_or_none()
                    lost += took is None
                    seconds.append(took)
                stats = handle.stats()
                plan = str(stats.last_plan)
            found[f"{share} {name}"] = {"lost": lost, "seconds": seconds, "plan": plan}
            print("floor", share, name, found[f"{share} {name}"], flush=True)
    return {"recomputed_bytes": needed, "base_bytes": base, "tried": found}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--shares", nargs="*", type=float, default=[0.76, 0.5, 0.24])
    parser.add_argument("--floor", nargs="*", type=float, default=[])
    parser.add_argument("--mixed", type=int, default=0, help="steps on rows of mixed lengths")
    parser.add_argument("--flat", type=int, default=0, help="steps of a long run")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for variant in VARIANTS.values():
        if device == "cpu":
            variant.setdefault("host_memory", "1GiB")
    results: dict[str, Any] = {
        "benchmark": "host",
        **circumstances(options.allow_dirty),
        "layers": options.layers,
        "tokens": options.tokens,
        "options": [option.value for option in Option],
    }
    bench = Bench(options.layers, options.tokens, device)
    if options.shares:
        results["shares"] = shares(bench, options.shares, options.steps, options.rounds)
        save(results, options.out)
    if options.mixed:
        results["mixed"] = mixed(bench, options.mixed, options.rounds)
        save(results, options.out)
    if options.flat:
        results["flat"] = flat(bench, options.flat)
        save(results, options.out)
    if options.floor:
        results["floor"] = floor(bench, options.floor)
        save(results, options.out)


if __name__ == "__main__":
    main()
