"""What a decision costs: a plan from the cache, a new one, and one for 96 different blocks.

    python benchmarks/planning_cost.py --out results.json

The first two by what was observed of a 12-block model, beside the reading of memory in use, which
is given too. Called again and again, so with warm processor caches: `planner_quality.py` has the
times inside real steps, where they are a few times longer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch

from common import bert_base, circumstances, parser_of, save, spread
from mimose.bench.measuring import Observer
from mimose.costs import InputSize, Option, Profile, RunCost, peak
from mimose.planning import Optimal

NEW_LENGTHS = [n for n in range(62, 158, 2) if n % 10]
"""Between those that are observed."""


def microseconds(call: Callable[[], Any], calls: int = 300, repeats: int = 15) -> dict[str, float]:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - began) / calls * 1e6)
    return spread(times)


def batch_of(length: int, device: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 1000, (8, length), device=device)
    return {"input_ids": ids, "labels": torch.zeros(8, dtype=torch.long, device=device)}


def session_costs(device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = bert_base(hidden_size=64, num_attention_heads=2, intermediate_size=128)
    model = model.to(device).train()
    observer = Observer(model, Optimal())
    for length in (160, 160, 60, 90, 120, 140, 100, 80):  # the first observation does not count
        model(**batch_of(length, device)).loss.backward()
        model.zero_grad()
    seen, engine = observer.observation(), observer.engine
    setting, scheduler = engine.setting, engine.scheduler
    assert seen is not None
    assert setting is not None
    batches = {n: batch_of(n, device) for n in (111, *NEW_LENGTHS)}
    sizes = {n: engine.size_of((), batch, engine.argument_names) for n, batch in batches.items()}
    reading, size = setting.meter.read(), sizes[111]
    prediction = scheduler.cost_model.predict(size)
    assert prediction is not None
    low, high = extremes(prediction.profile)
    tight = reading._replace(in_use=setting.available(0) - (low + high) // 2)

    def decided_anew() -> float:
        """Microseconds for a size of which nothing was predicted since the last observation."""
        scheduler.learn(seen)
        scheduler.cache.clear()  # what is as predicted leaves plans as they are
        began = time.perf_counter()
        for n in NEW_LENGTHS:
            assert scheduler.decide(setting, sizes[n], tight).new
        return (time.perf_counter() - began) / len(NEW_LENGTHS) * 1e6

    costs = {
        "blocks": 12,
        "reading_us": microseconds(setting.meter.read),
        "size_us": microseconds(lambda: engine.size_of((), batches[111], engine.argument_names)),
        "cached_plan_us": microseconds(lambda: scheduler.decide(setting, size, reading)),
        "new_plan_us": spread([decided_anew() for _ in range(15)]),
    }
    observer.detach()
    return costs


def extremes(profile: Profile) -> tuple[int, int]:
    """The peaks of a step with every block recomputed, and with every block kept."""
    runs = len(profile.runs)
    return peak(profile, [Option.RECOMPUTE] * runs), peak(profile, [Option.KEEP] * runs)


def chain(runs: int, draw: random.Random) -> Profile:
    """Blocks that all differ."""
    costs, level, boundary = [], 0, 0
    for _ in range(runs):
        saved = draw.randint(50, 1000) * 10**6
        spike, time_ns = saved + draw.randint(0, 200) * 10**6, draw.randint(100, 900) * 10**3
        back, out = draw.randint(0, 300) * 10**6, draw.randint(5, 50) * 10**6
        costs.append(
            RunCost(
                boundary=boundary,
                forward_peak=spike,
                backward_entry=0,
                saved=saved,
                recompute_peak=spike,
                backward_peak=back,
                output_saved=0,
                droppable_input=0,
                nanoseconds=time_ns,
            )
        )
        level, boundary = level + out, out
    return Profile(InputSize((("x", 1),), (1,)), tuple(costs), level, level)


def different_blocks(runs: int = 96, chains: int = 40) -> dict[str, Any]:
    draw = random.Random(0)
    times = []
    for _ in range(chains):
        profile = chain(runs, draw)
        low, high = extremes(profile)
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
