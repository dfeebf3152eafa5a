"""`handle.explain(**batch)`: from the arguments of a forward to the explanation of its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mimose.costs import InputSize, Layout, arguments_in_words
from mimose.errors import ArgumentError
from mimose.reporting import Explanation, explain_plan
from mimose.tensors import refuse_other_arguments
from mimose.training import Engine


def explain_batch(
    engine: Engine, base_bytes: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Explanation:
    """Explain the plan of a batch; `base_bytes` were in use when the last step began."""
    if not args and not kwargs:
        raise ArgumentError(
            "explain() needs the arguments of the model's forward, such as explain(**batch)"
        )
    engine.read_observations()
    cost_model = engine.scheduler.cost_model
    if engine.setting is not None and engine.setting.open:
        engine.scheduler.turn_to_coming_step(engine.setting)
    size = engine.size_of(args, kwargs, engine.argument_names)
    trained = cost_model.layouts
    if size.layout not in trained and engine.options.input_size is None:
        refuse_other_arguments(engine.model.forward, args, kwargs)
    explanation = explain_plan(engine, cost_model.expected_size(size), base_bytes)
    note = _note_on_handle(engine, planned=explanation.plan is not None)
    if not note and trained and size.layout not in trained:
        note = _note_on_arguments(size, trained[0])
    return replace(explanation, note=note or explanation.note)


def _note_on_handle(engine: Engine, *, planned: bool) -> str:
    if not engine.attached:
        would = "; if it were attached, it would use this plan" if planned else ""
        return f"mimose is not attached: the model trains without it{would}"
    if engine.has_unread_state:
        return "the loaded state_dict takes effect at the first training step"
    return ""


def _note_on_arguments(size: InputSize, trained: Layout) -> str:
    return (
        f"training passed {arguments_in_words(trained)} to the model, but explain() got "
        f"{arguments_in_words(size.layout)}: pass the same arguments as in training"
    )
