"""Who trains: plain training, checkpointing as others do it, and mimose, behind one interface.

A contestant attaches to a fresh model, is told of each step, says what it did, and detaches.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import nn
from torch.utils.checkpoint import checkpoint

from mimose.bench.arena import Arena, Trainee
from mimose.bench.batches import BatchShape
from mimose.bench.extras import BenchError
from mimose.bench.playback import Playback, everything
from mimose.bench.survey import Survey
from mimose.costs import InputSize, Option, Profile
from mimose.interception import Attachment, find_blocks
from mimose.planning import Plan, Planner


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNote:
    """What a contestant says of a step that is over."""

    recomputed: int | None = None
    """How many runs of blocks were recomputed; None if the step was broken off."""
    observed: bool = False
    predicted_bytes: int | None = None
    untrusted_bytes: int | None = None
    """The peak by the plan, where that was a bound or a prediction that is not trusted."""
    real_bytes: int | None = None
    """The peak of forward and backward, to hold the prediction against."""
    peak_bytes: int = 0
    """A peak that only the contestant saw, since it reset the statistics in the step."""
    held_bytes: int = 0
    """The most that the allocator held, likewise."""


@dataclass(frozen=True, slots=True)
class Match:
    """What a contestant is given: the task, what is known of it, and the budget."""

    arena: Arena
    survey: Survey
    budget_bytes: int | None


class Contestant(ABC):
    """One way to train under a budget."""

    name: ClassVar[str]
    budgeted: ClassVar[bool] = True
    """Whether the budget changes what it does; if not, it runs once for all budgets."""
    capped: ClassVar[bool] = True
    """Whether it runs under the allocator's hard limit."""

    def __init__(self, match: Match) -> None:
        self.match = match

    @classmethod
    def missing(cls, match: Match) -> str | None:
        """Why it cannot run here; None if it can."""
        return None

    @abstractmethod
    def attach(self, trainee: Trainee) -> None:
        """Take the model over, before the first step."""

    def step_begins(self, shape: BatchShape) -> None:  # noqa: B027 (most decide on their own)
        """A step with a batch of this shape is about to start."""

    def step_over(self) -> StepNote:
        """What was done in the step."""
        return StepNote(recomputed=0)

    def detach(self) -> None:  # noqa: B027 (the model is thrown away afterwards)
        """The run is over."""

    def spent(self) -> dict[str, Any]:
        """Where it spent time beside training, for the record."""
        return {}


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


def contestant_named(name: str) -> type[Contestant]:
    """The contestant of this name."""
    from mimose.bench import lineup

    known = lineup.CONTESTANTS
    if name.strip() in known:
        return known[name.strip()]
    raise BenchError(f"there is no contestant {name!r}; they are {', '.join(known)}")


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
