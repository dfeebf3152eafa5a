"""How good plans with transfers are, and how long they take to find.

    python benchmarks/transfers_quality.py --out results.json

Plans for chains of a few blocks are compared with brute force over all four options: by how much a
step takes longer than with the best plan there is, and than without a link. Half of the chains
are copies of one transformer layer, half are blocks that all differ; links and budgets vary. Times
of planning are those of the process, for chains that no brute force could plan.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from common import circumstances, parser_of, save, spread
from mimose.costs import InputSize, Link, Moments, Option, Profile, RunCost, costs_of
from mimose.planning import KeepAll, Optimal, Plan, RecomputeAll

SIZE = InputSize((("x", 1),), (1,))
CHAINS = {5: 60, 6: 40, 7: 16, 8: 8}
"""How many chains of each kind are planned, by their number of blocks."""
SHARES = (0.0, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95)
"""How much of the way from all recomputed to all kept is available."""

SECOND = 1_000_000_000

Making = Callable[[int, random.Random], Profile]


def step_nanoseconds(profile: Profile) -> int:
    return sum(r.nanoseconds + (r.backward_nanoseconds or r.nanoseconds) for r in profile.runs)


def lasting(nanoseconds: int, profile: Profile) -> Profile:
    """The same with all times scaled, those of copies too, so that a step takes so long: for a
    shorter step, less time is spent on its plan."""
    assert profile.link is not None
    factor = nanoseconds / step_nanoseconds(profile)
    runs = [
        run._replace(
            nanoseconds=round(factor * run.nanoseconds),
            backward_nanoseconds=round(factor * run.backward_nanoseconds),
        )
        for run in profile.runs
    ]
    to_host, from_host, *rest = profile.link
    link = Link(to_host / factor, from_host / factor, *rest)
    return replace(profile, runs=tuple(runs), link=link)


def equal_layers(count: int, draw: random.Random) -> Profile:
    """Copies of one transformer layer, and a link that takes up to six forwards for one of them."""
    saved, forward = draw.randint(200, 3000), draw.randint(500, 2000)
    boundary = int(saved * draw.choice([0.02, 0.045, 0.1, 0.2]))
    layer = RunCost(
        boundary=boundary,
        forward_peak=int(saved * draw.uniform(0.1, 0.4)),
        backward_entry=boundary,
        saved=saved,
        recompute_peak=int(1.1 * saved),
        backward_peak=int(saved * draw.uniform(0.1, 0.4)),
        output_saved=0,
        droppable_input=0,
        nanoseconds=forward,
        input_movable=True,
        backward_nanoseconds=int(forward * draw.uniform(1.5, 2.2)),
    )
    head = count * boundary + int(saved * draw.choice([0.1, 1.4]))
    pace = saved / (forward * draw.uniform(0.5, 6))
    return lasting(
        SECOND, Profile(SIZE, (layer,) * count, head, head, link=Link(pace, pace, 1 << 60))
    )


def different_blocks(count: int, draw: random.Random) -> Profile:
    runs, level, boundary = list[RunCost](), 0, draw.randint(0, 50)
    for _ in range(count):
        saved, forward = draw.randint(20, 300), draw.randint(100, 1000)
        level += boundary
        runs.append(
            RunCost(
                boundary=boundary,
                forward_peak=draw.randint(0, 100),
                backward_entry=draw.randint(0, 20),
                saved=saved,
                recompute_peak=saved + draw.randint(0, 100),
                backward_peak=draw.randint(0, 150),
                output_saved=draw.choice([0, 0, 0, 10]),
                droppable_input=draw.choice([0, 0, 5]),
                between_blocks_peak=draw.choice([0, 0, 50]),
                nanoseconds=forward,
                fixed=draw.random() < 0.1,
                input_movable=draw.random() < 0.8,
                backward_nanoseconds=int(forward * draw.uniform(1, 2.2)),
            )
        )
        boundary = draw.randint(0, 40)
    pace = 0.3 / draw.choice([0.3, 1, 2, 3, 6])
    link = Link(pace, pace * draw.choice([1, 0.7]), draw.choice([1 << 60, 500]))
    heads = level + draw.randint(0, 200), level + draw.randint(0, 200)
    return lasting(SECOND, Profile(SIZE, tuple(runs), *heads, link=link))


KINDS: dict[str, Making] = {"equal layers": equal_layers, "different blocks": different_blocks}


def budgets(profile: Profile) -> list[int]:
    """From the least that trains with inputs on the host to nearly all kept."""
    all_moved = [Option.RECOMPUTE_FROM_HOST] * len(profile.runs)
    lowest = Plan.of(profile, all_moved, 0).peak_bytes
    least, most = (planner.plan(profile, 0).peak_bytes for planner in (RecomputeAll(), KeepAll()))
    return [lowest, *(int(least + share * (most - least)) for share in SHARES)]


def every_plan(profile: Profile) -> list[tuple[int, int]]:
    """Peak and extra time of every plan that the host can hold."""
    assert profile.link is not None
    options = [[Option.KEEP] if run.fixed else list(Option) for run in profile.runs]
    plans = []
    for choices in itertools.product(*options):
        moments = Moments(profile, costs_of(profile, choices))
        moved = sum(transfer.moved_bytes for transfer in moments.schedule.transfers)
        if moved <= profile.link.host_bytes:
            plans.append((moments.peak, moments.extra_nanoseconds))
    return plans


def distances(profile: Profile) -> Iterator[tuple[float, float | None]]:
    """For each budget: by which share a step takes longer than with the best plan, with the link
    and without one (None if nothing fits then)."""
    plans, whole = every_plan(profile), step_nanoseconds(profile)
    for available in budgets(profile):
        best = min((time for peak, time in plans if peak <= available), default=None)
        if best is None:
            continue
        plan = Optimal().plan(profile, available)
        without = Optimal().plan(replace(profile, link=None), available)
        ours, theirs = (whole + one.extra_seconds * 1e9 for one in (plan, without))
        longer = ours / (whole + best) - 1 if plan.fits else float("inf")
        yield longer, theirs / (whole + best) - 1 if without.fits else None


def quality(make: Making, count: int, chains: int, nanoseconds: int) -> dict[str, Any]:
    draw = random.Random(count)
    made = (lasting(nanoseconds, make(count, draw)) for _ in range(chains))
    found = [pair for profile in made for pair in distances(profile)]
    ours, without = [one for one, _ in found], [one for _, one in found if one is not None]
    return {
        "plans": len(ours),
        "mean": sum(ours) / len(ours),
        "largest": max(ours),
        "over_2_percent": sum(one > 0.02 for one in ours),
        "mean_without_link": sum(without) / len(without),
        "only_with_link": len(ours) - len(without),
    }


def long_chain(count: int, draw: random.Random | None) -> Profile:
    """Blocks of a language model, equal or different, and a link of 55 GB/s."""
    runs = []
    for _ in range(count):
        scale = draw.uniform(0.1, 1) if draw else 1.0
        took = int(17_000_000 * (draw.uniform(0.1, 1) if draw else 1.0))
        saved = int(scale * 2.8 * (1 << 30))
        runs.append(
            RunCost(
                boundary=1 << 27,
                forward_peak=saved // 8,
                backward_entry=1 << 27,
                saved=saved,
                recompute_peak=int(1.1 * saved),
                backward_peak=int(0.3 * saved),
                output_saved=0,
                droppable_input=0,
                nanoseconds=took,
                input_movable=True,
                backward_nanoseconds=int(1.9 * took),
            )
        )
    head = (count << 27) + (4 << 30)
    return Profile(SIZE, tuple(runs), head, head, link=Link(55, 55, 1 << 60))


def milliseconds(profiles: list[Profile]) -> dict[str, Any]:
    times = []
    for profile in profiles:
        for available in budgets(profile)[1:]:
            began = time.process_time()
            Optimal().plan(profile, available)
            times.append((time.process_time() - began) * 1e3)
    return {**spread(times), "slowest": max(times)}


def main() -> None:
    options = parser_of(__doc__).parse_args()
    results = {"benchmark": "transfers_quality", **circumstances(options.allow_dirty)}
    results["quality"] = {
        f"{count} {kind}": quality(make, count, chains, SECOND)
        for count, chains in CHAINS.items()
        for kind, make in KINDS.items()
    }
    results["quality_of_short_steps"] = {
        f"{count} {kind}": quality(make, count, CHAINS[count], SECOND // 10)
        for count in (5, 6)
        for kind, make in KINDS.items()
    }
    results["planning_ms"] = {
        "32 equal": milliseconds([long_chain(32, None)] * 3),
        "32 different": milliseconds([long_chain(32, random.Random(s)) for s in range(5)]),
        "96 different": milliseconds([long_chain(96, random.Random(s)) for s in range(3)]),
    }
    for name, row in {**results["quality"], **results["planning_ms"]}.items():
        print(name, row)
    save(results, options.out)


if __name__ == "__main__":
    main()
