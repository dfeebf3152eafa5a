"""Plans for profiles that were measured on a GPU stay what they are, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mimose.costs import Profile, StepObservation
from mimose.planning import planner_named

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GOLDEN = Path(__file__).parent / "golden_plans.json"
PLANNERS = ("optimal", "greedy", "keep_all", "recompute_all")
SHARES = (0.0, 0.15, 0.4, 0.65, 0.9, 1.0)
"""Available bytes, as fractions of the way from all recomputed to all kept."""


def profiles() -> Iterator[tuple[str, Profile]]:
    """Three profiles of each task that was surveyed, with the gradients that its steps allocate."""
    for path in sorted(RESULTS.rglob("*-bench*.jsonl")):
        for line in path.open():
            record = json.loads(line)
            if record["kind"] != "survey":
                continue
            seen = [StepObservation.from_plain(plain) for plain in record["observations"]]
            for at in (0, len(seen) // 2, len(seen) - 2):
                one, known = seen[at], record["gradient_bytes"]
                profile, conditions = one.profile, one.conditions
                if one.all_gradients_allocated is None:  # the oldest files do not have it
                    tail = profile.tail + known - one.gradients_allocated[0]
                    profile = replace(profile, tail=tail)
                yield f"{path.name} {record['task']} {at}", profile.in_step(conditions)


def plans() -> dict[str, Any]:
    """Every golden plan, as it is made now."""
    made: dict[str, Any] = {}
    for name, profile in profiles():
        least = planner_named("recompute_all").plan(profile, 0).peak_bytes
        most = planner_named("keep_all").plan(profile, 0).peak_bytes
        for share in SHARES:
            available = int(least + share * (most - least))
            for planner in PLANNERS:
                plan = planner_named(planner).plan(profile, available)
                made[f"{name} {planner} {share}"] = [str(plan), plan.peak_bytes, plan.fits]
    return made


def test_plans_for_measured_profiles_are_the_golden_ones() -> None:
    golden = json.loads(GOLDEN.read_text())
    made = plans()
    different = {
        name: (golden.get(name), made.get(name))
        for name in golden | made
        if golden.get(name) != made.get(name)
    }
    assert not different
    assert len(made) > 1000


if __name__ == "__main__":  # write new golden plans, after a change that is meant to change plans
    GOLDEN.write_text(json.dumps(plans(), indent=0) + "\n")
