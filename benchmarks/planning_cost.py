"""What a decision costs: a plan from the cache, a new one, and one for 96 different blocks.

    python benchmarks/planning_cost.py --out results.json

The first two on a live session of a 12-block model, beside the reading of memory in use, which is
given too. Called again and again, so with warm processor caches: `planner_quality.py` has the times
inside real steps, where they are a few times longer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch

import mimose
from common import bert_base, circumstances, parser_of, save, spread
from mimose.costs import InputSize, Profile, RunCost, peak
from mimose.planning import Optimal


def microseconds(call: Callable[[], Any], calls: int = 300, repeats: int = 15) -> dict[str, float]:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - began) / calls * 1e6)
    return spread(times)


def session_costs(device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = bert_base(hidden_size=64, num_attention_heads=2, intermediate_size=128)
    model = model.to(device).train()
    handle = mimose.auto_checkpoint(model, "100%")

    def batch(length: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(5, 1000, (8, length), device=device)
        return {"input_ids": ids, "labels": torch.zeros(8, dtype=torch.long, device=device)}

    handle._engine._planned = lambda *_: None  # observe first
    for length in (160, 60, 90, 120, 140, 100, 80):
        model(**batch(length)).loss.backward()
        model.zero_grad()
    del handle._engine._planned
    handle._engine.read_observations()
    setting = handle._engine.setting
    assert setting is not None
    reading, size = setting.meter.read(), handle._engine.size_of((), batch(111))
    profile = handle._engine.scheduler.cost_model.predict(size)
    assert profile is not None
    low, high = (peak(profile, [again] * 12) for again in (True, False))
    in_use = setting.budget_bytes - setting.reserve.bytes - (low + high) // 2
    scheduler, tight = handle._engine.scheduler, reading._replace(in_use=in_use)

    def decided_anew() -> None:
        """As if nothing had been planned or predicted since the last observation."""
        scheduler.cache.clear()
        for estimator in scheduler.cost_model._estimators.values():
            estimator._told.clear()
        decision = scheduler.decide(setting, size, tight, 0)
        assert decision is not None
        assert decision.new

    costs = {
        "blocks": 12,
        "reading_us": microseconds(setting.meter.read),
        "size_us": microseconds(lambda: handle._engine.size_of((), batch_111)),
        "cached_plan_us": microseconds(lambda: handle._engine._planned(setting, size, reading)),
        "new_plan_us": microseconds(decided_anew, calls=50),
    }
    handle.detach()
    return costs


batch_111 = {"input_ids": torch.zeros(8, 111), "labels": torch.zeros(8)}


def chain(runs: int, draw: random.Random) -> Profile:
    """Blocks that all differ."""
    costs, level = [], 0
    for _ in range(runs):
        saved = draw.randint(50, 1000) * 10**6
        spike, time_ns = saved + draw.randint(0, 200) * 10**6, draw.randint(100, 900) * 10**3
        back, out = draw.randint(0, 300) * 10**6, draw.randint(5, 50) * 10**6
        costs.append(RunCost(level, level + spike, level, saved, spike, back, 0, 0, 0, time_ns))
        level += out
    return Profile(InputSize((("x", 1),), (1,)), tuple(costs), level, level)


def different_blocks(runs: int = 96, chains: int = 40) -> dict[str, Any]:
    draw = random.Random(0)
    times = []
    for _ in range(chains):
        profile = chain(runs, draw)
        low, high = (peak(profile, [again] * runs) for again in (True, False))
        available = int(low + (high - low) * draw.random())
        began = time.perf_counter()
        Optimal().plan(profile, available)
        times.append((time.perf_counter() - began) * 1e6)
    return {"blocks": runs, "exact_plan_us": spread(times), "slowest_us": max(times)}


def main() -> None:
    parser = parser_of(__doc__)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = {"benchmark": "planning_cost", **circumstances(options.allow_dirty)}
    results["session"] = session_costs(device)
    results["different_blocks"] = different_blocks()
    print(results["session"], results["different_blocks"])
    save(results, options.out)


if __name__ == "__main__":
    main()
