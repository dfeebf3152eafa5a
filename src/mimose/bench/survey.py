"""What is found out about a task before anything is timed.

Memory is a function of the batch's size, so a few observed steps over the range tell all that is
needed: the peak of plain training at every length (hence the budgets), what recomputing everything
needs (hence the floor), and the profiles that an oracle knows. Nobody's time is counted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from mimose.bench.arena import Arena, Trainee, synchronize
from mimose.bench.batches import BatchShape
from mimose.bench.measuring import Observer
from mimose.bench.playback import Plans, Playback, everything, only
from mimose.costs import InputSize, Profile, StepObservation
from mimose.estimation import Estimator, Prediction, with_shared_times
from mimose.interception import Attachment, find_blocks
from mimose.memory import Reserve
from mimose.planning import KeepAll, Optimal, Plan, Planner, RecomputeAll


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What is known of a task."""

    task: str
    blocks: tuple[str, ...]
    observations: tuple[StepObservation, ...]
    largest: InputSize
    """That covers every batch of the run."""
    longest: InputSize
    """The largest that the data could give, drawn or not: what a static tool has to plan for."""
    base_bytes: int
    """In use before a step: parameters and optimizer state; in older files the batch, too."""
    gradient_bytes: int
    needed_bytes: int
    """The peak of a whole step of the largest size with every block recomputed, as measured."""
    hole_bytes: int
    single_block_bytes: tuple[int, ...]
    """The peak of the largest size if one block alone is recomputed, as measured; by block, as far
    as the device was large enough."""

    @cached_property
    def estimator(self) -> Estimator:
        """An estimator that has seen every observed size of a full batch."""
        estimator = Estimator(self.observations[0].pattern)
        for observation in self.full_batches:
            estimator.learn(observation)
        return estimator

    @property
    def full_batches(self) -> list[StepObservation]:
        """Without the last batch's, which is half full."""
        return [o for o in self.observations if o.size.dims[0] == self.largest.dims[0]]

    def profile(self, size: InputSize) -> Profile:
        """What a size costs, in a step in which all gradients come into being."""
        seen = next((o for o in self.observations if o.size == size), None)
        if seen is not None:
            # Equal blocks share their time, as for the estimator: an oracle must not choose by
            # noise.
            profile = with_shared_times(seen).profile
        else:
            prediction = planned_with(self.estimator, size)
            assert prediction is not None, "sizes over the whole range were observed"
            profile = prediction.profile
        return profile.in_step(self.observations[-1].conditions)

    def plan(self, size: InputSize, budget_bytes: int, planner: Planner | None = None) -> Plan:
        """The best plan of a size, with the least reserve."""
        profile = self.profile(size)
        reserve = Reserve(budget_bytes, self.hole_bytes)
        available = budget_bytes - reserve.bytes - self.base_bytes - (profile.prelude or 0)
        return (planner or Optimal()).plan(profile, available)

    def peak(self, size: InputSize, planner: Planner) -> int:
        """The peak of the process at a size under a planner that needs no budget."""
        profile = self.profile(size)
        return self.base_bytes + (profile.prelude or 0) + planner.plan(profile, 0).peak_bytes

    def kept_bytes(self, size: InputSize) -> int:
        """The peak of plain training."""
        return self.peak(size, KeepAll())

    def recomputed_bytes(self, size: InputSize) -> int:
        """The peak with every block recomputed."""
        return self.peak(size, RecomputeAll())

    def choices(self, plan: Plan) -> Plans:
        """A plan by run, ready to be played back."""
        return dict(zip(self.observations[0].pattern, plan.choices, strict=True))

    def to_plain(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts alone, for files."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain["observations"] = [o.to_plain() for o in self.observations]
        for name in ("largest", "longest"):
            size = getattr(self, name)
            plain[name] = [[list(tensor) for tensor in size.layout], size.dims]
        return plain

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Survey:
        """What `to_plain` gave."""
        own = {"longest": plain["largest"], **plain}  # older files know of one size
        own = {name: own[name] for name in cls.__dataclass_fields__}
        own["blocks"] = tuple(own["blocks"])
        own["single_block_bytes"] = tuple(own["single_block_bytes"])
        # Older files do not tell all gradients of a step apart from those of the model.
        seen = ({"all_born": plain["gradient_bytes"], **o} for o in plain["observations"])
        own["observations"] = tuple(map(StepObservation.from_plain, seen))
        for name in ("largest", "longest"):
            layout, dims = own[name]
            own[name] = InputSize(tuple((tensor, rank) for tensor, rank in layout), tuple(dims))
        return cls(**own)


def planned_with(estimator: Estimator, size: InputSize) -> Prediction | None:
    """What mimose plans a size with: a prediction, a larger size's costs, or a generous guess."""
    return estimator.predict(size) or estimator.bound(size) or estimator.guess(size)


def survey(arena: Arena) -> Survey:
    """Observe a task's sizes; measure what recomputing all, and one block alone, needs."""
    with arena.trainee() as trainee:
        blocks = find_blocks(trainee.model)
        trainee.warm_up(min(arena.shapes))
        seen, base, needed = _observed(arena, trainee, samples(arena))
        return Survey(
            task=arena.task.name,
            blocks=tuple(block.name for block in blocks),
            observations=tuple(seen),
            largest=arena.size_of(arena.largest),
            longest=arena.size_of(arena.longest),
            base_bytes=base,
            gradient_bytes=sum(p.nbytes for p in trainee.model.parameters() if p.requires_grad),
            needed_bytes=needed,
            hole_bytes=trainee.meter.hole_bytes,
            single_block_bytes=tuple(_single_blocks(arena, trainee, seen[0])),
        )


def observe(arena: Arena, count: int) -> list[StepObservation]:
    """What full batches of so many sizes cost; fewer if the run has fewer."""
    with arena.trainee() as trainee:
        trainee.warm_up(min(arena.shapes))
        shapes = arena.task.source.samples(arena.shapes, count)
        return _observed(arena, trainee, shapes)[0]


def _observed(
    arena: Arena, trainee: Trainee, shapes: Sequence[BatchShape]
) -> tuple[list[StepObservation], int, int]:
    """Observations, bytes in use before a step, and the measured peak of the largest size."""
    observer = Observer(trainee.model, input_size=arena.input_size)
    seen, base, needed = [], 0, 0
    meter = trainee.meter
    # The first step makes the optimizer's state and tries out every block: it is not counted.
    for number, shape in enumerate([arena.largest, arena.largest, *shapes]):
        meter.reset_peak()
        before = meter.read().in_use  # a batch of images counts by its size, like activations
        trainee.forward(trainee.batch(shape, number)).backward()
        start, record = observer.start, observer.record
        assert start is not None
        assert record is not None
        trainee.optimizer.step()
        if number == 1:
            base, needed = before, max(record.peak_bytes or 0, meter.read().peak)
        trainee.optimizer.zero_grad()
        synchronize(arena.device)  # or some of its times would not be known yet
        observation = observer.observation()
        if number and observation is not None:
            profile = replace(observation.profile, prelude=start.reading.in_use - before)
            seen.append(replace(observation, profile=profile))
    observer.detach()
    return seen, base, needed


def samples(arena: Arena) -> list[BatchShape]:
    """Sizes over the whole range, the largest first; then the longest of the data, and the run's
    last, a half batch."""
    shapes = arena.task.source.samples(arena.shapes)
    more = [] if arena.longest in shapes else [arena.longest]
    return [*shapes, *more, arena.shapes[-1]]


def _single_blocks(arena: Arena, trainee: Trainee, seen: StepObservation) -> Iterable[int]:
    """The measured peak of a step of the largest size in which one block alone is recomputed."""
    playback = Playback()
    attachment = Attachment(trainee.model, find_blocks(trainee.model), playback)
    playback.begin(everything(seen.pattern))  # a block's first recompute is a trial of it
    trainee.warm_up(min(arena.shapes))
    try:
        for block in range(len(attachment.interceptors)):
            playback.begin(only(block, seen.pattern))
            trainee.meter.reset_peak()
            trainee.forward(trainee.batch(arena.largest, block)).backward()
            yield trainee.meter.read().peak
            trainee.optimizer.zero_grad()
    except torch.OutOfMemoryError:
        return  # the device is too small for a largest batch that keeps all but one
    finally:
        attachment.detach()
