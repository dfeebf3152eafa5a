"""A what-if question about a file: a recording, or what `handle.state_dict()` gave."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mimose.costs import InputSize, StepObservation
from mimose.errors import ArgumentError
from mimose.estimation import CostModel
from mimose.planning import planner_named
from mimose.reporting.lengths import padded, parse_lengths
from mimose.reporting.outlook import Outlook
from mimose.reporting.reader import is_recording, read_recording
from mimose.reporting.what_if import Forecast, Lengths, forecast

_RESERVE_SHARE = 0.03
"""What a session starts with, where nothing was learned of it."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is known, and the sizes that it is known of."""

    outlook: Outlook
    sizes: tuple[InputSize, ...]
    """One a step."""
    remark: str = ""
    """What people should know of the file."""

    @classmethod
    def about(cls, file: Path, planner: str | None, floor_bytes: int | None = None) -> Question:
        """The question about this file, whichever of the two it is."""
        with file.open("rb") as opened:
            first = opened.readline(65536).decode(errors="replace")
        if is_recording(first):
            recording = read_recording(file)
            sizes = tuple(step.size for step in recording.steps)
            question = cls(Outlook.of(recording), sizes, recording.remark)
        else:
            question = cls._about_state(_state_in(file), file, floor_bytes)
        if not question.sizes or not question.outlook.cost_model.version:
            raise ArgumentError(f"{file} has nothing learned in it yet: train a few more steps")
        outlook = question.outlook
        if planner is not None:
            outlook = replace(outlook, planner=planner_named(planner))
        if floor_bytes is not None:
            outlook = replace(outlook, floor_bytes=floor_bytes)
        return replace(question, outlook=outlook)

    @classmethod
    def _about_state(
        cls, state: Mapping[str, Any], file: Path, floor_bytes: int | None
    ) -> Question:
        if floor_bytes is None:
            raise ArgumentError(
                f"{file} tells what blocks cost, not what is in use before a step (parameters, "
                "optimizer state): add --floor, like --floor 2GiB"
            )
        try:
            plain = state["chapters"][-1]["knowledge"]
            observations = [StepObservation.from_plain(o) for o in plain["observations"]]
            cost_model = CostModel.from_plain(plain)
        except (KeyError, IndexError, TypeError, ValueError):
            raise ArgumentError(f"{file} has nothing learned in it") from None
        born = max(
            (b for o in observations for b in (*o.born_bytes, o.all_born_bytes or 0)), default=0
        )
        outlook = Outlook(
            cost_model=cost_model.of(born=born > 0),
            planner=planner_named("optimal"),
            floor_bytes=floor_bytes,
            missing_bytes=born,
            reserve_share=_RESERVE_SHARE,
        )
        return cls(outlook, tuple(o.size for o in observations))

    def weights(self, lengths: str | None, *, samples: bool) -> dict[InputSize, float]:
        """How often each size comes: as recorded, or as these lengths say."""
        if lengths is None:
            return {size: float(times) for size, times in Counter(self.sizes).items()}
        known = Lengths(self.sizes)
        asked = parse_lengths(lengths)
        if samples:
            asked = padded(asked, known.batch)
        weights: dict[InputSize, float] = {}
        for length, weight in asked.items():
            size = known.at(length)
            weights[size] = weights.get(size, 0.0) + weight
        return weights

    def forecast(
        self, weights: Mapping[InputSize, float], budgets: Sequence[int] | None = None
    ) -> Forecast:
        """What these budgets would mean."""
        return forecast(self.outlook, weights, budgets, Lengths(self.sizes))


def _state_in(file: Path) -> Mapping[str, Any]:
    """The session's state in a file of JSON or of torch.save, alone or inside a checkpoint."""
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError):
        loaded = _torch_load(file)
    for state in _mappings(loaded, depth=2):
        if "chapters" in state:
            return state
    raise ArgumentError(
        f"{file} is neither a recording nor a saved handle.state_dict(): record a run with "
        'auto_checkpoint(..., record="run.jsonl")'
    )


def _torch_load(file: Path) -> Any:
    import torch

    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception:
        return None


def _mappings(value: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
        if depth:
            for inner in value.values():
                yield from _mappings(inner, depth - 1)
