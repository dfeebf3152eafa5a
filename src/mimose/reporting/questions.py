"""What-if questions about a file: a recording or a saved `handle.state_dict()`."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from mimose.costs import InputSize, StepObservation
from mimose.errors import ArgumentError
from mimose.estimation import CostModel
from mimose.planning import PLANNER_NAMES, Planner, planner_named
from mimose.reporting.lengths import padded, parse_lengths
from mimose.reporting.outlook import Outlook
from mimose.reporting.reader import (
    NOTHING_WRITTEN,
    is_recording,
    read_recording,
    refuse_without_steps,
)
from mimose.reporting.recorded_lengths import RecordedLengths
from mimose.reporting.what_if import Forecast, forecast

_RESERVE_SHARE = 0.03
"""The initial reserve of a run; a state_dict does not contain the learned one."""
_ZIP = b"PK"
"""The first bytes of a file that `torch.save` wrote."""


@dataclass(frozen=True, slots=True)
class Question:
    """The contents of one file, ready for forecasts."""

    outlook: Outlook
    sizes: tuple[InputSize, ...]
    """The input size of each step."""
    remark: str = ""
    """A remark about damage to the file; empty if there is none."""
    from_state: bool = False
    """Whether the file is a saved state, which does not tell how often each size came."""

    @classmethod
    def about(cls, file: Path, planner: str | None, floor_bytes: int | None = None) -> Question:
        """Read a recording or a saved state_dict."""
        with file.open("rb") as opened:
            first = opened.readline(65536).decode(errors="replace")
        if not first:
            raise ArgumentError(NOTHING_WRITTEN.format(path=file))
        if is_recording(first):
            recording = read_recording(file)
            if recording.unreadable:
                refuse_without_steps(recording, file)
            sizes = tuple(step.size for step in recording.steps)
            question = cls(Outlook.of(recording), sizes, recording.remark)
        else:
            question = cls._about_state(_state_in(file), file, floor_bytes)
        if not question.sizes or not question.outlook.cost_model.observed:
            raise ArgumentError(f"{file} has no observed steps yet: train a few more steps")
        outlook = question.outlook
        if planner is not None:
            outlook = replace(outlook, planner=_typed_planner(planner))
        if floor_bytes is not None:
            outlook = replace(outlook, floor_bytes=floor_bytes)
        return replace(question, outlook=outlook)

    @classmethod
    def _about_state(
        cls, state: Mapping[str, Any], file: Path, floor_bytes: int | None
    ) -> Question:
        if floor_bytes is None:
            raise ArgumentError(
                f"{file} contains the costs of blocks, but not the memory in use before a step "
                "(parameters, optimizer state): add --floor, such as --floor 2GiB"
            )
        try:
            plain = state["chapters"][-1]["knowledge"]
            observations = [StepObservation.from_plain(o) for o in plain["observations"]]
            cost_model = CostModel.from_plain(plain)
        except (KeyError, IndexError, TypeError, ValueError):
            raise ArgumentError(
                f"{file} contains no observed steps: save handle.state_dict() after training"
            ) from None
        allocated = max((o.conditions.all_gradients_allocated for o in observations), default=0)
        outlook = Outlook(
            cost_model=cost_model,
            planner=planner_named("optimal"),
            floor_bytes=floor_bytes,
            missing_bytes=allocated,
            reserve_share=_RESERVE_SHARE,
        )
        return cls(outlook, tuple(o.size for o in observations), from_state=True)

    @property
    def remark_on_frequencies(self) -> str:
        """What the sizes of a saved state do not tell."""
        count = len(set(self.sizes))
        only = f"only the {count} sizes that were" if count > 1 else "only the size that was"
        return f"a saved state has {only} measured, not how often each came: give --lengths"

    def weights(self, lengths: str | None, *, samples: bool) -> dict[InputSize, float]:
        """The frequency of each size: as recorded, or from these lengths.

        With `samples`, the lengths are those of single samples and are padded to batches.
        """
        if lengths is None:
            return {size: float(times) for size, times in Counter(self.sizes).items()}
        recorded = RecordedLengths(self.sizes)
        by_length = parse_lengths(lengths)
        if samples:
            by_length = padded(by_length, recorded.batch)
        weights: dict[InputSize, float] = {}
        for length, weight in by_length.items():
            size = recorded.at(length)
            weights[size] = weights.get(size, 0.0) + weight
        return weights

    def forecast(
        self, weights: Mapping[InputSize, float], budgets: Sequence[int] | None = None
    ) -> Forecast:
        """The expected time and memory under each budget."""
        return forecast(self.outlook, weights, budgets, RecordedLengths(self.sizes))


def _state_in(file: Path) -> Mapping[str, Any]:
    """The state_dict in a JSON or torch.save file, by itself or inside a checkpoint."""
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
    """The contents of a file that `torch.save` wrote; None for another file."""
    import torch

    with file.open("rb") as opened:
        is_zip = opened.read(len(_ZIP)) == _ZIP
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        if not is_zip:
            return None
        _refuse_saved(file, error)


def _refuse_saved(file: Path, error: Exception) -> NoReturn:
    """Say why a file that `torch.save` wrote cannot be loaded."""
    if isinstance(error, pickle.UnpicklingError):
        raise ArgumentError(
            f"{file} contains more than tensors and plain values, which only the program that "
            "saved it can load: save handle.state_dict() to a file of its own"
        ) from None
    raise ArgumentError(
        f"{file} is damaged: torch.load cannot read it. Save handle.state_dict() again"
    ) from None


def _typed_planner(name: str) -> Planner:
    """The planner of this name on the command line."""
    if name not in PLANNER_NAMES:
        raise ArgumentError(f"--planner {name!r} is unknown: use one of {', '.join(PLANNER_NAMES)}")
    return planner_named(name)


def _mappings(value: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
        if depth:
            for inner in value.values():
                yield from _mappings(inner, depth - 1)
