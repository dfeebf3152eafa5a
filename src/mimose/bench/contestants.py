"""Contestants that do not plan while they train: plain, static checkpointing, and the oracle."""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, final

from torch import nn
from torch.utils.checkpoint import checkpoint

from mimose.bench.arena import Trainee
from mimose.bench.batches import BatchShape
from mimose.bench.contestant import Contestant, Match, StepNote
from mimose.bench.playback import Playback, everything
from mimose.bench.survey import Survey
from mimose.costs import InputSize, Option, Profile
from mimose.interception import Attachment, find_blocks
from mimose.planning import Plan, Planner


@final
class Plain(Contestant):
    """Training without checkpointing, and without a limit."""

    name = "plain"
    budgeted = capped = False

    def attach(self, trainee: Trainee) -> None:
        pass


class _Fixed(Contestant):
    """Recomputes the same blocks in every step, whatever the batch."""

    recomputed = 0

    def step_over(self) -> StepNote:
        return StepNote(recomputed=self.recomputed)


@final
class TorchAll(_Fixed):
    """Every block through `torch.utils.checkpoint`, non-reentrant."""

    name = "torch-all"
    budgeted = False

    def attach(self, trainee: Trainee) -> None:
        self.recomputed = len(self.match.survey.observations[0].pattern)
        for block in find_blocks(trainee.model):
            module = block.module
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)


@final
class Transformers(_Fixed):
    """transformers' own `gradient_checkpointing_enable()`: every layer."""

    name = "hf"
    budgeted = False

    @classmethod
    def missing(cls, match: Match) -> str | None:
        return _without_checkpointing(match)

    def attach(self, trainee: Trainee) -> None:
        _enable(trainee.model)
        self.recomputed = len(self.match.survey.observations[0].pattern)


@final
class TransformersEveryN(_Fixed):
    """transformers' own, on every n-th layer: the largest n whose peak fits at the largest size."""

    name = "hf-every-n"

    @classmethod
    def missing(cls, match: Match) -> str | None:
        return _without_checkpointing(match, "every_n_layers")

    def attach(self, trainee: Trainee) -> None:
        every = self._largest_that_fits()
        self.recomputed = self._choices(every).count(Option.RECOMPUTE)
        self._every = every
        _enable(trainee.model, every_n_layers=every)

    def spent(self) -> dict[str, Any]:
        return {"every_n_layers": self._every}

    def _choices(self, every: int) -> tuple[Option, ...]:
        pattern = self.match.survey.observations[0].pattern
        return tuple(Option.of(block % every == 0) for block, _ in pattern)

    def _largest_that_fits(self) -> int:
        survey, budget = self.match.survey, self.match.budget_bytes
        assert budget is not None
        for every in range(len(survey.blocks), 1, -1):
            if survey.plan(survey.longest, budget, Given(self._choices(every))).fits:
                return every
        return 1


@final
class Given(Planner):
    """A plan that is given, whatever the budget."""

    def __init__(self, choices: Iterable[Option]) -> None:
        self._choices = tuple(choices)

    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        return Plan.of(profile, self._choices, available_bytes)


class _Played(Contestant):
    """Plans known in advance, on mimose's own recompute."""

    def __init__(self, match: Match) -> None:
        super().__init__(match)
        self._playback = Playback()
        self._attachment: Attachment | None = None

    def attach(self, trainee: Trainee) -> None:
        self._attachment = Attachment(trainee.model, find_blocks(trainee.model), self._playback)
        # Each block's first recompute is a trial of it. What is known in advance needs none.
        self._playback.begin(everything(self.match.survey.observations[0].pattern))
        trainee.warm_up(min(self.match.arena.shapes))

    def step_over(self) -> StepNote:
        return StepNote(recomputed=self._playback.recomputed)

    def detach(self) -> None:
        if self._attachment is not None:
            self._attachment.detach()


class StaticPlan(_Played):
    """One plan for all sizes, after the paper's Sublinear.

    With some advantages: the plan is optimal, what it is made from is known before the first step,
    and blocks are recomputed by mimose's own code. If not even recomputing everything fits, that is
    the plan.
    """

    def __init__(self, match: Match) -> None:
        super().__init__(match)
        assert match.budget_bytes is not None
        self._plan = self.plan(match.survey, match.budget_bytes)
        self._choices = match.survey.choices(self._plan)

    @classmethod
    def plan(cls, survey: Survey, budget_bytes: int) -> Plan:
        """Its only plan."""
        return survey.plan(cls.planned_for(survey), budget_bytes)

    @staticmethod
    @abstractmethod
    def planned_for(survey: Survey) -> InputSize:
        """The size that the plan is made for."""

    def step_begins(self, shape: BatchShape) -> None:
        self._playback.begin(self._choices)

    def spent(self) -> dict[str, Any]:
        return {"plan_fits": self._plan.fits}


@final
class StaticForData(StaticPlan):
    """Plans for the largest batch that the data could give: a static tool cannot know the draw.

    Where a run draws no batch as long as the data's longest (TC-Bert, SFT-Llama, T5-base), it
    recomputes more than these runs need: read comparisons with and without such tasks.
    """

    name = "static"

    @staticmethod
    def planned_for(survey: Survey) -> InputSize:
        return survey.longest


@final
class StaticForDrawn(StaticPlan):
    """Plans for the largest batch that the run draws, as if that were known in advance."""

    name = "static-drawn"

    @staticmethod
    def planned_for(survey: Survey) -> InputSize:
        return survey.largest


@final
class Oracle(_Played):
    """The best plan of each size, known in advance: no observing, no planning."""

    name = "oracle"

    def __init__(self, match: Match) -> None:
        super().__init__(match)
        arena, survey, budget = match.arena, match.survey, match.budget_bytes
        assert budget is not None
        self._plans = {
            shape: survey.choices(survey.plan(arena.size_of(shape), budget))
            for shape in set(arena.shapes)
        }

    def step_begins(self, shape: BatchShape) -> None:
        self._playback.begin(self._plans[shape])


def _without_checkpointing(match: Match, argument: str | None = None) -> str | None:
    import transformers

    enable = transformers.PreTrainedModel.gradient_checkpointing_enable
    if argument is not None and argument not in inspect.signature(enable).parameters:
        return f"transformers {transformers.__version__} has no {argument}"
    with match.arena.device:  # cheap: asked of a small one
        model = match.arena.task.make(True, match.arena.attention)
    if not getattr(model, "supports_gradient_checkpointing", False):
        return f"transformers' {type(model).__name__} has no gradient checkpointing"
    return None


def _enable(model: nn.Module, **more: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False}, **more)  # type: ignore[operator]
