"""Explain which plan a batch would get, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mimose.costs import InputSize
from mimose.estimation import CostModel, State
from mimose.planning import KeepAll, Plan, Planner, strictest
from mimose.reporting.explanation import Explanation
from mimose.training import Setting


@dataclass(frozen=True, slots=True)
class Floor:
    """The memory of a model that needs no training to know."""

    budget_bytes: int | None
    """None for "auto" or a percentage until the first step."""
    parameter_bytes: int
    gradient_bytes: int


def explain_plan(
    *,
    size: InputSize,
    blocks: list[str],
    cost_model: CostModel,
    planner: Planner,
    setting: Setting | None,
    base_bytes: int,
    floor: Floor,
) -> Explanation:
    """Explain the plan for this size."""
    common: dict[str, Any] = {
        "size": size,
        "blocks": tuple(blocks),
        "budget_bytes": floor.budget_bytes,
        "base_bytes": base_bytes,
        "parameter_bytes": floor.parameter_bytes,
        "gradient_bytes": floor.gradient_bytes,
    }
    if setting is None:
        return Explanation(**common)
    common["reserve_bytes"] = setting.reserve.bytes
    missing = _missing_bytes(setting)
    estimate, pattern = cost_model.predict(size), cost_model.pattern_for(size)
    if estimate is None or pattern is None:
        return Explanation(**common)
    profile = estimate.profile
    if profile.prelude and setting.open:
        common["base_bytes"] = base_bytes = setting.meter.read().in_use + profile.prelude
    profile = profile.in_step(cost_model.conditions(pattern, missing))
    if estimate.state is State.SUSPECT:
        common["note"] = (
            "memory depends on more than the size: a step keeps everything until memory runs "
            "short, then evicts. By the most that was observed:"
        )
    uncertainty = (1 + cost_model.uncertainty(size)) * (1 + estimate.uncertainty)
    available = int(setting.available(base_bytes) / uncertainty)
    host, regular = setting.host, cost_model.regular and len(size.passes) == 1
    # The host is not asked for before a plan could use it.
    if regular and host.memory is not None and host.serves(profile, available):
        profile = replace(profile, link=host.link(trusted=estimate.trusted))
    strict = strictest(profile, available)
    common["blocks"] = tuple(blocks[index] for index, _ in pattern)
    return Explanation(
        **common,
        profile=profile,
        plan=planner.plan(profile, available),
        peak_kept_bytes=base_bytes + KeepAll().plan(profile, available).peak_bytes,
        peak_recomputed_bytes=base_bytes + strict.peak_bytes,
        at_most_as=estimate.bound_of,
        largest_batch=_largest_batch(size, strict, available),
    )


def _missing_bytes(setting: Setting) -> int:
    """Bytes of gradients that the next step will allocate; after `detach`, those of all
    parameters."""
    if not setting.open:
        return setting.gradient_bytes
    return setting.gradients.missing_bytes(setting.gradients.missing())


def _largest_batch(size: InputSize, strict: Plan, available: int) -> int | None:
    """Scale in proportion: slightly low, since part of the peak does not grow with the batch."""
    if not size.layout[0][1] or strict.peak_bytes <= 0:
        return None
    return max(0, int(size.dims[0] * available / strict.peak_bytes))
