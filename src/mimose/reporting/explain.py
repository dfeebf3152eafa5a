"""Explain which plan a batch would get, and why."""

from __future__ import annotations

from dataclasses import replace

from mimose.costs import InputSize, Profile
from mimose.estimation import Prediction, State
from mimose.planning import KeepAll, Plan, strictest
from mimose.reporting.explanation import Explanation
from mimose.tensors import bytes_of
from mimose.training import Engine, Setting

_SUSPECT = (
    "memory depends on more than the input size, so a step of this size keeps everything and "
    "evicts if memory runs short. What follows is based on the highest costs observed:"
)


def explain_plan(engine: Engine, size: InputSize, base_bytes: int) -> Explanation:
    """Explain the plan for this size; `base_bytes` were in use when the last step began."""
    explanation = _without_plan(engine, size, base_bytes)
    setting = engine.setting
    prediction = engine.scheduler.cost_model.predict(size)
    if setting is None:
        return explanation
    if prediction is None:
        return replace(explanation, guess=_guess(engine, setting, size, base_bytes))
    pattern = prediction.pattern
    if prediction.profile.prelude and setting.open:
        base_bytes = setting.meter.read().in_use + prediction.profile.prelude
    profile, available = _conditions(engine, setting, prediction, size, base_bytes)
    strict = strictest(profile, available)
    return replace(
        explanation,
        blocks=tuple(engine.block_names[index] for index, _ in pattern),
        base_bytes=base_bytes,
        profile=profile,
        plan=engine.scheduler.planner.plan(profile, available),
        peak_kept_bytes=base_bytes + KeepAll().plan(profile, available).peak_bytes,
        peak_recomputed_bytes=base_bytes + strict.peak_bytes,
        at_most_as=prediction.bound_of,
        note=_SUSPECT if prediction.state is State.SUSPECT else "",
        largest_batch=largest_batch(profile, available),
    )


def _conditions(
    engine: Engine, setting: Setting, prediction: Prediction, size: InputSize, base_bytes: int
) -> tuple[Profile, int]:
    """The costs of the next step of this size, and the bytes that it may rise by."""
    cost_model = engine.scheduler.cost_model
    profile = prediction.profile_as_run.in_step(
        cost_model.conditions(prediction.pattern, _missing_bytes(setting))
    )
    uncertainty = (1 + cost_model.uncertainty(size)) * (1 + prediction.uncertainty)
    available = int(setting.available(base_bytes) / uncertainty)
    if cost_model.regular and len(size.passes) == 1:
        profile = _with_link(profile, setting, available, trusted=prediction.trusted)
    return profile, available


def _guess(engine: Engine, setting: Setting, size: InputSize, base_bytes: int) -> Plan | None:
    """The plan under which the next step of this size is observed; None if it has none."""
    cost_model = engine.scheduler.cost_model
    guessed = cost_model.for_planning(size)
    if guessed is None or cost_model.reliability.suspects(size):
        return None
    profile, available = _conditions(engine, setting, guessed, size, base_bytes)
    return engine.scheduler.planner.plan(profile, available)


def _without_plan(engine: Engine, size: InputSize, base_bytes: int) -> Explanation:
    """What is known before any training: the budget, the parameters and their gradients."""
    setting = engine.setting
    if setting is not None:
        parameter_bytes, gradient_bytes = setting.parameter_bytes, setting.gradient_bytes
    else:
        parameters = list(engine.model.parameters())
        parameter_bytes = bytes_of(parameters)
        gradient_bytes = bytes_of(p for p in parameters if p.requires_grad)
    return Explanation(
        size=size,
        blocks=tuple(engine.block_names),
        budget_bytes=engine.budget_bytes,
        reserve_bytes=setting.reserve.bytes if setting else None,
        base_bytes=base_bytes,
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
    )


def _missing_bytes(setting: Setting) -> int:
    """Bytes of gradients that the next step will allocate; after `detach`, those of all
    parameters."""
    if not setting.open:
        return setting.gradient_bytes
    return setting.gradients.bytes_to_allocate(setting.gradients.missing())


def _with_link(profile: Profile, setting: Setting, available: int, *, trusted: bool) -> Profile:
    """The profile with the link to host memory, if a plan could use it.

    Until then host memory is not reserved.
    """
    host = setting.host
    if host.memory is None or not host.serves(profile, available):
        return profile
    return host.connected(profile, trusted=trusted)


def largest_batch(profile: Profile, available: int) -> int | None:
    """The largest batch of inputs like these that fits if every block is recomputed.

    Scaled in proportion, with what the model's forward adds before the first block: slightly low,
    since part of the peak does not grow with the batch.
    """
    layout, prelude = profile.size.layout, profile.prelude or 0
    if not layout or not layout[0][1]:
        return None
    rise = strictest(profile, 0).peak_bytes + prelude
    return max(0, int(profile.size.dims[0] * (available + prelude) / max(1, rise)))
