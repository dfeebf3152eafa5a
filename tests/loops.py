"""Training under a budget on the CPU: batches, a loop, peaks, and a planner that throws dice."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import mimose
import models
from mimose.bench.measuring import LatestStep
from mimose.costs import Option, Profile
from mimose.interception import BlockInterceptor
from mimose.memory.storage_counter import StorageCounter
from mimose.planning import Plan
from mimose.tensors import tensors_in
from mimose.training import LaterBackward, Scheduler, Subscriber
from parts import Assembled

Batch = dict[str, Any]
Loss = Callable[[nn.Module, Batch], torch.Tensor]


def lengths(count: int, low: int = 20, high: int = 120, seed: int = 0) -> list[int]:
    dice = random.Random(seed)
    return [dice.randint(low, high) for _ in range(count)]


def texts(of_lengths: Sequence[int], batch: int = 4) -> list[Batch]:
    return [{"input_ids": torch.randint(5, 50, (batch, length))} for length in of_lengths]


def labelled(of_lengths: Sequence[int], batch: int = 4) -> list[Batch]:
    return [{**text, "labels": torch.randint(0, 2, (batch,))} for text in texts(of_lengths, batch)]


def once(make: Callable[..., Any]) -> Any:
    """Make a thing once and keep it; whether it is there already changes no random number."""

    @functools.cache
    def kept(*args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return make(*args, **kwargs)

    return kept


@once
def _bert() -> nn.Module:
    return models.bert()[0]


def bert() -> nn.Module:
    """A fresh copy of one small BERT."""
    return copy.deepcopy(_bert())


BATCHES = {"bert": labelled, "encoder": texts}
MODELS: dict[str, Callable[[], nn.Module]] = {"bert": bert, "encoder": models.Encoder}


def train(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    loss_of: Loss = models.loss_of,
    micro_steps: int = 1,
    set_to_none: bool = True,
    after_step: Callable[[], None] = lambda: None,
) -> list[float]:
    """Train from a fixed seed; the losses."""
    torch.manual_seed(1)
    losses = []
    with adamw(model) as optimizer:
        for i, batch in enumerate(batches):
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.item())
            if (i + 1) % micro_steps == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
            after_step()
    return losses


@contextmanager
def adamw(model: nn.Module) -> Iterator[torch.optim.AdamW]:
    """Its state goes at the end: by itself it would go with some later garbage collection.

    Fused, a step is one operation instead of eight for each parameter. Each operation is counted in
    Python, and these eight are about a third of the time that a small model trains.
    """
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=1e-3, fused=True)
    try:
        yield optimizer
    finally:
        optimizer.state.clear()


@contextmanager
def counted() -> Iterator[StorageCounter]:
    """Count live storages apart from any session; `peak` is the highest count."""
    counter = StorageCounter()
    counter._count_live_tensors()
    with counter:
        yield counter


def decisive(batches: Sequence[Batch]) -> list[Batch]:
    """What has the peak of training on all of these: the first, then the largest some times."""

    def elements(batch: Batch) -> int:
        return sum(tensor.numel() for tensor in tensors_in(batch))

    return [batches[0], *[max(batches, key=elements)] * 3]


def peak_of_plain(model: nn.Module, batches: Sequence[Batch], **options: Any) -> int:
    plain = copy.deepcopy(model)
    with counted() as counter:
        train(plain, decisive(batches), **options)
        return counter.peak


def peak_of_recomputing(model: nn.Module, batches: Sequence[Batch], **options: Any) -> int:
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(plain, "1GiB", planner="recompute_all") as handle:
        train(plain, decisive(batches), **options)
        return handle.stats().peak_bytes


def tight_budget(
    model: nn.Module, batches: Sequence[Batch], share: float = 0.4, **options: Any
) -> int:
    """Between what all recomputed and what plain training needs."""
    low = peak_of_recomputing(model, batches, **options)
    high = peak_of_plain(model, batches, **options)
    return between(low, high, share)


def between(low: int, high: int, share: float) -> int:
    assert low < 0.9 * high
    return int(low + share * (high - low))


@once
def _task(name: str) -> tuple[nn.Module, list[Batch], int, int]:
    model, batches = MODELS[name](), BATCHES[name](lengths(25))
    return model, batches, peak_of_recomputing(model, batches), peak_of_plain(model, batches)


def task(name: str, share: float = 0.4) -> tuple[nn.Module, list[Batch], int]:
    """A model, batches of 20 to 120 tokens, and a budget under which not all can be kept."""
    model, batches, low, high = _task(name)
    return copy.deepcopy(model), batches, between(low, high, share)


@once
def plain_losses(name: str) -> list[float]:
    """Of plain training on all batches of a task."""
    model, batches, *_ = _task(name)
    return train(copy.deepcopy(model), batches)


class Dice:
    """A planner that recomputes each run or not, as the dice say."""

    def __init__(self, seed: int = 0) -> None:
        self._dice = random.Random(seed)

    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        again = tuple(not run.fixed and self._dice.random() < 0.5 for run in profile.runs)
        return Plan.of(profile, again, available_bytes)


def throwing_dice(
    model: nn.Module, budget: int | str, *, seed: int = 0, **options: Any
) -> Assembled:
    """mimose with a planner that decides by chance, anew in each step."""
    attached = Assembled(model, budget, planner=Dice(seed), **options)
    attached.subscribe(_WithoutCache(attached.scheduler))
    return attached


class _WithoutCache(Subscriber):
    """Forgets all plans before each step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def step_opens(self) -> None:
        self._scheduler.cache.clear()


class Predictions(LatestStep):
    """Compares predicted and real peaks after every planned step."""

    def __init__(self, handle: mimose.Mimose | Assembled) -> None:
        super().__init__()
        self.errors: list[float] = []
        self.plans: set[tuple[Option, ...]] = set()
        self._later_peak: int | None = None
        handle.subscribe(self)

    def later_backward_over(self, later: LaterBackward) -> None:
        self._later_peak = later.real_peak_bytes

    def __call__(self) -> None:
        record, self.record = self.record, None
        later_peak, self._later_peak = self._later_peak, None
        if record is None or record.observed or record.plan is None:
            return
        real = later_peak or record.real_peak_bytes
        assert real is not None
        if record.predicted_peak_bytes is not None and not record.is_bound:
            self.errors.append((record.predicted_peak_bytes - real) / real)
        self.plans.add(record.plan.choices)

    def assert_exact(
        self, *, steps: int, plans: int = 3, over: float = 0.03, under: float = 0.003
    ) -> None:
        assert len(self.errors) >= steps
        assert len(self.plans) >= plans
        assert min(self.errors) >= -under
        assert max(self.errors) < over


def places(model: nn.Module) -> list[dict[str, Any]]:
    """What is in every module."""
    return [dict(module.__dict__) for module in model.modules()]


def interceptors(model: nn.Module) -> list[Any]:
    found = [module.__dict__.get("_compiled_call_impl") for module in model.modules()]
    return [interceptor for interceptor in found if interceptor is not None]


def block_interceptors(model: nn.Module) -> list[BlockInterceptor]:
    """Without the one on the model itself."""
    return [each for each in interceptors(model) if isinstance(each, BlockInterceptor)]
