"""mimose is not alone: threads, other models, interrupts and errors between its steps."""

from __future__ import annotations

import copy
import gc
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mimose
import models
from compare import Storages, assert_same_gradients, live_tensors, no_hooks
from loops import Batch, task, texts, train
from mimose.memory.meters import CpuMeter


def loader(batches: list[Batch]) -> Any:
    """A thread that makes each batch while the one before is trained on."""
    ready: queue.Queue[Batch | None] = queue.Queue(maxsize=2)

    def work() -> None:
        for batch in batches:
            scratch = [torch.ones(64, 64) @ torch.ones(64, 64) for _ in range(20)]
            ready.put({name: value.clone() for name, value in batch.items()})
            del scratch
        ready.put(None)

    thread = threading.Thread(target=work)
    thread.start()
    while (batch := ready.get()) is not None:
        yield batch
    thread.join()


def test_loader_thread_that_allocates_meanwhile_disturbs_nothing() -> None:
    model, batches, budget = task("encoder")
    plain = copy.deepcopy(model)
    expected = train(plain, batches)
    del plain
    with mimose.auto_checkpoint(model, budget, enforce=True) as handle:
        losses = train(model, loader(batches))
        stats = handle.stats()
    assert losses == expected
    assert stats.peak_bytes <= budget
    assert stats.planned_steps > 10
    assert stats.recoveries == 0


def test_backward_in_another_thread_is_part_of_the_step() -> None:
    model, batches = models.Encoder(), texts([40] * 8)
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all") as handle:
        for i, batch in enumerate(batches):
            for each in (plain, model):
                torch.manual_seed(i)
                each.zero_grad()
                loss = models.loss_of(each, batch)
                thread = threading.Thread(target=loss.backward)
                thread.start()
                thread.join()
            assert_same_gradients(model, plain)
        assert handle.stats().planned_steps > 0


def one(model: nn.Module, batch: Batch) -> float:
    loss = models.loss_of(model, batch)
    loss.backward()
    return loss.item()


def test_second_attached_model_trains_between_the_steps_of_the_first() -> None:
    torch.manual_seed(0)
    pair = [models.Encoder(), models.Encoder(layers=4, width=16)]
    plain = copy.deepcopy(pair)
    expected = [[], []]  # type: list[list[float]]
    losses = [[], []]  # type: list[list[float]]
    batches = texts([30, 40, 35, 40, 25, 30, 38, 40, 33, 29])
    handles = [mimose.auto_checkpoint(model, "1GiB") for model in pair]
    for i, batch in enumerate(batches):
        for k in (0, 1):
            for model, into in ((plain[k], expected[k]), (pair[k], losses[k])):
                torch.manual_seed(i)
                model.zero_grad()
                into.append(one(model, batch))
    for handle in handles:
        stats = handle.stats()
        assert stats.planned_steps > 2
        assert stats.worst_shortfall < 0.01
        handle.detach()
    assert losses == expected


def test_two_models_in_one_backward_are_both_planned() -> None:
    """As a generator under its discriminator."""
    torch.manual_seed(0)
    first, second = models.Encoder(), nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    plain = copy.deepcopy((first, second))
    batches = texts([30] * 6)
    with (
        mimose.auto_checkpoint(first, "1GiB", planner="recompute_all") as one_handle,
        mimose.auto_checkpoint(second, "1GiB", blocks=nn.Linear) as other_handle,
    ):
        for i, batch in enumerate(batches):
            for a, b in ((first, second), plain):
                torch.manual_seed(i)
                a.zero_grad()
                b.zero_grad()
                b(a(**batch)).pow(2).sum().backward()
            assert_same_gradients(first, plain[0])
            assert_same_gradients(second, plain[1])
        assert one_handle.stats().planned_steps > 0
        assert other_handle.stats().steps == 6


def stack() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))
    )


def generator_below_discriminator(first: nn.Module, second: nn.Module, x: torch.Tensor) -> None:
    made = first(x)
    (second(x) - second(made.detach())).mean().backward()
    second.zero_grad()
    second(made).mean().backward()


def two_parts_of_one_model(first: nn.Module, second: nn.Module, x: torch.Tensor) -> None:
    second(first(x)).mean().backward()


def two_losses_one_after_the_other(first: nn.Module, second: nn.Module, x: torch.Tensor) -> None:
    losses = first(x).mean(), second(x).mean()
    for loss in losses:
        loss.backward()


def blocks_that_take_turns(first: nn.Sequential, second: nn.Sequential, x: torch.Tensor) -> None:
    for one_block, other_block in zip(first, second, strict=True):
        x = other_block(one_block(x))
    x.mean().backward()


@pytest.mark.parametrize(
    ("step", "rise"),
    [
        (generator_below_discriminator, 2_260_000),
        (two_parts_of_one_model, 1_640_000),
        (two_losses_one_after_the_other, 1_520_000),
        (blocks_that_take_turns, 1_760_000),
    ],
)
def test_steps_of_two_handles_that_are_open_at_once_keep_their_budget(
    step: Callable[..., None], rise: int
) -> None:
    """Each is planned for what the other one keeps, and peaks where it says that it will."""
    torch.manual_seed(0)
    pair = stack(), stack()
    sizes = torch.randint(100, 600, (25,), generator=torch.Generator().manual_seed(1)).tolist()
    meter, peaks = CpuMeter(), []
    budget = meter.read().in_use + rise
    handles = [mimose.auto_checkpoint(each, budget, blocks=list("0123")) for each in pair]
    optimizer = torch.optim.Adam(p for each in pair for p in each.parameters())
    for size in sizes:
        meter.reset_peak()
        step(*pair, torch.randn(size, 32))
        peaks.append(meter.read().peak)
        optimizer.step()
        optimizer.zero_grad()
    meter.close()
    assert max(peaks) <= budget
    for handle in handles:
        stats = handle.stats()
        assert stats.worst_shortfall <= 0.003
        assert stats.planned_steps >= 15
        assert stats.runs_kept > 0
        handle.detach()


def test_failure_of_one_model_leaves_the_other_alone() -> None:
    torch.manual_seed(0)
    first, second = models.Encoder(), models.Encoder()
    batches = texts([30] * 8)
    left = [1]

    def fail(*_: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("planned")

    with (
        mimose.auto_checkpoint(first, "1GiB") as one_handle,
        mimose.auto_checkpoint(second, "1GiB") as other_handle,
    ):
        for batch in batches[:4]:
            one(first, batch)
            one(second, batch)
        first.head.register_forward_pre_hook(fail)
        for batch in batches[4:]:
            one_handle.retry(one, first, batch)
            other_handle.retry(one, second, batch)
        assert one_handle.stats().recoveries == 1
        assert other_handle.stats().recoveries == 0
        assert other_handle.stats().planned_steps == 6


class Trigger:
    """Raises where it is told to, as long as it is armed."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error
        self.armed = False

    def __call__(self, *_: Any) -> None:
        if self.armed:
            raise self._error

    def in_forward(self, model: models.Encoder) -> None:
        model.encoder.layers[1].linear2.register_forward_pre_hook(self)

    def in_backward(self, model: models.Encoder) -> None:
        model.encoder.layers[1].linear2.register_forward_hook(self._watch)

    def between(self, model: models.Encoder) -> None:
        model.head.register_forward_hook(self)

    def _watch(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(self)


PLACES: list[Callable[[Trigger, models.Encoder], None]] = [
    Trigger.in_forward,
    Trigger.in_backward,
    Trigger.between,
]


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("place", PLACES, ids=["forward", "backward", "between"])
@pytest.mark.parametrize("planner", ["keep_all", "recompute_all"])
def test_step_after_an_interrupted_one_works_and_nothing_is_left(
    error: type[BaseException], place: Callable[[Trigger, models.Encoder], None], planner: str
) -> None:
    model, trigger, batches = models.Encoder(), Trigger(error), texts([30] * 12)
    plain = copy.deepcopy(model)
    place(trigger, model)
    with mimose.auto_checkpoint(model, "1GiB", planner=planner) as handle:

        def interrupted(batch: Batch) -> None:
            trigger.armed = True
            with pytest.raises(error):
                one(model, batch)
            trigger.armed = False
            assert no_hooks()
            model.zero_grad()

        def as_plain(i: int) -> None:
            for each in (plain, model):
                torch.manual_seed(i)
                each.zero_grad()
                one(each, batches[i])
            assert_same_gradients(model, plain)

        for i in range(4):
            as_plain(i)
        for i in range(4, 7):
            interrupted(batches[i])
            as_plain(i)
        model.zero_grad()
        plain.zero_grad()
        tensors = live_tensors()
        inputs = [batch["input_ids"] for batch in batches]
        with Storages(model, plain, *inputs) as storages:
            for i in range(7, 12):
                interrupted(batches[i])
                as_plain(i)
            model.zero_grad()
            plain.zero_grad()
            assert storages.live() == 0
        assert live_tensors() <= tensors
        stats = handle.stats()
    assert stats.steps == 12 + 8
    assert stats.worst_shortfall < 0.01


@pytest.mark.parametrize("planner", ["keep_all", "recompute_all"])
def test_forward_whose_backward_never_comes_is_forgotten(planner: str) -> None:
    model, batches = models.Encoder(), texts([30] * 8)
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, "1GiB", planner=planner) as handle:
        for i, batch in enumerate(batches):
            loss = models.loss_of(model, batch)  # somebody looks at the loss, and has seen enough
            graph = weakref.ref(loss)
            del loss
            assert graph() is None
            for each in (plain, model):
                torch.manual_seed(i)
                each.zero_grad()
                one(each, batch)
            assert_same_gradients(model, plain)
        stats = handle.stats()
    assert stats.steps == 16
    assert stats.worst_shortfall < 0.01


def test_loss_that_is_still_held_when_the_next_forward_begins_is_right_as_well() -> None:
    model, batches = models.Encoder(), texts([30] * 8)
    plain, held = copy.deepcopy(model), []
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        for i, batch in enumerate(batches):
            for each in (plain, model):
                torch.manual_seed(i)
                each.zero_grad()
                try:
                    held[:] = [models.loss_of(each, batch)]
                    raise ValueError
                except ValueError:
                    one(each, batch)
            assert_same_gradients(model, plain)
        assert handle.stats().steps >= 8
    held.clear()
    gc.collect()
