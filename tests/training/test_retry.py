"""Memory runs out, and training goes on as if it had not."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mimose
import models
from compare import Storages, assert_same_buffers, assert_same_gradients, live_tensors, same
from loops import Batch, adamw, labelled, lengths, task, texts, tight_budget
from mimose.errors import OutOfMemory
from mimose.tensors.out_of_memory import is_out_of_memory
from mimose.tensors.running_backward import task_id
from parts import Layer

Step = Callable[[nn.Module, Batch], float]


class Fuse:
    """Raises out of memory at the n-th call, as often as it is told to."""

    def __init__(self) -> None:
        self._wait = self._left = 0

    def arm(self, at: int = 0, times: int = 1) -> None:
        self._wait, self._left = at, times

    def __call__(self, *_: Any) -> None:
        if self._left and self._wait == 0:
            self._left -= 1
            raise torch.OutOfMemoryError("the fuse is blown")
        self._wait = max(0, self._wait - 1)

    def on_forward(self, part: nn.Module) -> None:
        part.register_forward_pre_hook(lambda *_: self() if task_id() == -1 else None)

    def on_recompute(self, part: nn.Module) -> None:
        def blow(_: nn.Module, args: Any) -> Any:
            if task_id() != -1:
                self()
            return args  # one that returns nothing only looks on, and no recompute calls it

        part.register_forward_pre_hook(blow)

    def on_backward(self, part: nn.Module) -> None:
        def watch(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            if out.requires_grad and task_id() == -1:
                out.register_hook(lambda _: self())

        part.register_forward_hook(watch)


def seed_all(seed: int = 1) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def draws() -> tuple[float, float, float]:
    """Where the three streams of random numbers have got to."""
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def one_backward(model: nn.Module, batch: Batch) -> float:
    """A loss that depends on all three random number generators."""
    loss = models.loss_of(model, batch) * (1 + random.random() + float(np.random.rand()))
    loss.backward()
    return loss.item()


def two_backwards(model: nn.Module, batch: Batch) -> float:
    return one_backward(model, batch) + one_backward(model, batch)


def train(
    model: nn.Module,
    batches: list[Batch],
    step: Step,
    *,
    call: Callable[..., float] = lambda step, *args: step(*args),
    before: Callable[[int], None] = lambda _: None,
    micro_steps: int = 1,
    set_to_none: bool = True,
) -> list[Any]:
    seed_all()
    losses: list[Any] = []
    with adamw(model) as optimizer:
        for i, batch in enumerate(batches):
            before(i)
            losses.append(call(step, model, batch))
            if (i + 1) % micro_steps == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
    return [*losses, draws()]


def assert_recovers(
    model: nn.Module,
    batches: list[Batch],
    fuse_on: Callable[[Fuse, nn.Module], None],
    step: Step = one_backward,
    *,
    budget: int | str = "1GiB",
    planner: str = "optimal",
    times: Sequence[int] | None = None,
    recoveries: int | None = None,
    **options: Any,
) -> None:
    """With the fuse blown in every step but the first two, training is plain training."""
    often = times or [0, 0, *[1] * (len(batches) - 2)]
    plain, fuse = copy.deepcopy(model), Fuse()
    expected = train(plain, batches, step, **options)
    fuse_on(fuse, model)
    handle = mimose.auto_checkpoint(model, budget, planner=planner)

    def before(i: int) -> None:
        fuse.arm(at=i % 3 if step is two_backwards else 0, times=often[i])

    with handle:
        losses = train(model, batches, step, call=handle.retry, before=before, **options)
    assert losses == expected
    assert_same_buffers(model, plain)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        same(ours, theirs)
        same(ours.grad, theirs.grad)
    assert handle.stats().recoveries >= (sum(often) if recoveries is None else recoveries)


PHASES = {
    "kept forward": ("keep_all", lambda fuse, m: fuse.on_forward(m.encoder.layers[1].linear1)),
    "recomputed forward": (
        "recompute_all",
        lambda fuse, m: fuse.on_forward(m.encoder.layers[1].linear1),
    ),
    "recompute": (
        "recompute_all",
        lambda fuse, m: fuse.on_recompute(m.encoder.layers[1].linear1),
    ),
    "kept backward": ("keep_all", lambda fuse, m: fuse.on_backward(m.encoder.layers[1].linear1)),
    "recomputed backward": (
        "recompute_all",
        lambda fuse, m: fuse.on_backward(m.encoder.layers[1].linear1),
    ),
    "head forward": ("optimal", lambda fuse, m: fuse.on_forward(m.head)),
    "embedding": ("optimal", lambda fuse, m: fuse.on_forward(m.embedding)),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("micro_steps", [1, 3])
def test_step_that_ran_out_of_memory_is_run_again_as_if_it_had_not(
    phase: str, micro_steps: int
) -> None:
    planner, fuse_on = PHASES[phase]
    batches = texts([20, 20, 20, 30, 20, 25, 20])
    assert_recovers(models.Encoder(), batches, fuse_on, planner=planner, micro_steps=micro_steps)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("phase", ["recompute", "kept backward"])
def test_gradients_of_several_backwards_in_one_step_are_right(
    phase: str, set_to_none: bool
) -> None:
    planner, fuse_on = PHASES[phase]
    assert_recovers(
        models.Encoder(),
        texts([20] * 8),
        fuse_on,
        two_backwards,
        planner=planner,
        micro_steps=2,
        set_to_none=set_to_none,
        recoveries=3,
    )


@pytest.mark.parametrize("phase", ["kept backward", "kept forward"])
def test_two_failures_in_a_row_are_survived(phase: str) -> None:
    planner, fuse_on = PHASES[phase]
    # After one that fails the next of either kind is observed: nothing is kept in it.
    often = [0, 0, 2, 0, 0, 2, 0, 0]
    assert_recovers(
        models.Encoder(), texts([20] * 8), fuse_on, planner=planner, times=often, micro_steps=2
    )


def test_batch_norm_counts_each_batch_once() -> None:
    model, batch = models.resnet()
    model.train()

    def fuse_on(fuse: Fuse, each: nn.Module) -> None:
        fuse.on_forward(each.classifier)

    assert_recovers(model, [batch] * 6, fuse_on)


class Tied(nn.Module):
    """The head's weight is the embedding's: its gradient grows twice in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("planner", ["keep_all", "recompute_all"])
def test_tied_weights_get_the_gradient_of_both_uses_once(planner: str) -> None:
    assert_recovers(
        Tied(),
        texts([20] * 8),
        lambda fuse, model: fuse.on_backward(model.layers[0].qkv),
        planner=planner,
        micro_steps=2,
    )


@pytest.mark.parametrize("set_to_none", [True, False])
def test_step_that_clears_gradients_itself_gets_its_own(set_to_none: bool) -> None:
    def clearing(model: nn.Module, batch: Batch) -> float:
        loss = models.loss_of(model, batch)
        for parameter in model.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()
        loss.backward()
        return loss.item()

    model, plain, fuse = models.Encoder(), None, Fuse()
    plain = copy.deepcopy(model)
    fuse.on_backward(model.encoder.layers[1].linear1)
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        for i, batch in enumerate(texts([20] * 5)):
            fuse.arm(times=int(i > 1))
            for each, call in ((plain, lambda step, *args: step(*args)), (model, handle.retry)):
                torch.manual_seed(i)
                call(clearing, each, batch)
            assert_same_gradients(model, plain)
        assert handle.stats().recoveries == 3


def test_gradients_cleared_between_forward_and_backward_are_freed() -> None:
    model = models.Encoder()
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        handle.retry(one_backward, model, texts([20])[0])
        gradients = [weakref.ref(p.grad) for p in model.parameters()]

        def step(batch: Batch) -> None:
            loss = models.loss_of(model, batch)
            model.zero_grad()
            assert all(gradient() is None for gradient in gradients)
            loss.backward()

        handle.retry(step, texts([20])[0])


def test_gradients_are_set_aside_without_a_copy() -> None:
    model, fuse = models.Encoder(), Fuse()
    fuse.on_backward(model.encoder.layers[0].linear1)
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        handle.retry(one_backward, model, texts([20])[0])
        before = {name: p.grad for name, p in model.named_parameters()}
        fuse.arm()
        handle.retry(one_backward, model, texts([20])[0])
        assert all(p.grad is before[name] for name, p in model.named_parameters())


def test_plans_get_stricter_with_each_attempt_and_end_with_everything() -> None:
    model, batches, budget = task("encoder", share=0.8)
    plans: list[str] = []

    def step(batch: Batch) -> None:
        models.loss_of(model, batch)
        plan = handle._engine._now.step.plan  # type: ignore[union-attr]
        plans.append(str(plan))
        if len(plans) % 3:
            raise torch.OutOfMemoryError("")
        raise ValueError

    with mimose.auto_checkpoint(model, budget) as handle:
        for batch in batches:
            handle.retry(lambda b=batch: models.loss_of(model, b).backward())
        with pytest.raises(ValueError):
            handle.retry(step, max(batches, key=lambda b: b["input_ids"].shape[1]))
    kept = [plan.count("K") for plan in plans]
    assert kept[0] > kept[1] > kept[2] == 0


def fails_in_the_fifth_step() -> mimose.Mimose:
    """The handle of a model whose fifth step runs out of memory in every attempt."""
    model, fuse = models.Encoder(), Fuse()
    fuse.on_forward(model.head)
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        for batch in texts([20] * 4):
            handle.retry(one_backward, model, batch)
        fuse.arm(times=99)
        with pytest.raises(OutOfMemory):
            handle.retry(one_backward, model, texts([20])[0])
    return handle


def test_the_log_says_what_is_done_when_memory_runs_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mimose"):
        fails_in_the_fifth_step()
    start = "mimose: memory ran out at input 4×20; the step is "
    assert [line.removeprefix(start) for line in caplog.messages] == [
        "run again with more blocks recomputed",
        "run again with every block recomputed",
        "not run again",
    ]


def test_an_attempt_that_is_given_up_is_not_counted_as_a_retry() -> None:
    stats = fails_in_the_fifth_step().stats()
    assert (stats.recoveries, stats.retries) == (2, 2)


def test_retry_says_what_it_is_called_with() -> None:
    with (
        mimose.auto_checkpoint(models.Encoder(), "1GiB") as handle,
        pytest.raises(mimose.ArgumentError, match=r"handle\.retry\(step, batch\); got Tensor"),
    ):
        handle.retry(torch.ones(1))  # type: ignore[arg-type]


def test_what_does_not_fit_at_all_is_an_error_with_sizes_and_remedy() -> None:
    model, fuse = models.Encoder(), Fuse()
    fuse.on_forward(model.head)
    longer = texts([30])[0]
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        for batch in texts([20] * 3):
            handle.retry(one_backward, model, batch)
        before, rng = copy.deepcopy(dict(model.named_buffers())), torch.get_rng_state()
        python, gradients = random.getstate(), [p.grad.clone() for p in model.parameters()]
        fuse.arm(times=99)
        with pytest.raises(OutOfMemory) as caught:
            handle.retry(one_backward, model, longer)
        assert isinstance(caught.value, torch.OutOfMemoryError)
        said = str(caught.value)
        assert str(pickle.loads(pickle.dumps(caught.value))) == said
        assert "Input 4×30 does not fit with every block recomputed" in said
        assert "the budget is 1.00 GiB" in said
        assert "Raise memory_budget, shorten the batch, or split it" in said
        assert "the fuse is blown" in said
        assert torch.equal(torch.get_rng_state(), rng)
        assert random.getstate() == python
        for name, buffer in model.named_buffers():
            same(buffer, before[name], name)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            same(parameter.grad, gradient)
        fuse.arm(times=0)
        handle.retry(one_backward, model, texts([20])[0])


def test_gradients_that_could_not_be_given_back_are_named() -> None:
    model, fuse = models.Encoder(), Fuse()
    fuse.on_backward(model.encoder.layers[0].linear1)
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        for batch in texts([20] * 2):
            handle.retry(one_backward, model, batch)
        fuse.arm(times=99)
        with pytest.raises(
            OutOfMemory, match=r"\d+ gradients from before this step now contain a part"
        ):
            handle.retry(one_backward, model, texts([20])[0])
        assert all(p.grad is not None for p in model.parameters())
        model.zero_grad()
        fuse.arm(times=99)
        with pytest.raises(OutOfMemory) as caught:
            handle.retry(one_backward, model, texts([20])[0])
        assert "contain a part" not in str(caught.value)
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt("mine")])
@pytest.mark.parametrize("attempt", [1, 2])
def test_other_exceptions_pass_through_untouched(error: BaseException, attempt: int) -> None:
    model, calls = models.Encoder(), []

    def step(batch: Batch) -> None:
        calls.append(1)
        models.loss_of(model, batch).backward()
        if len(calls) < attempt:
            raise torch.OutOfMemoryError("")
        raise error

    with mimose.auto_checkpoint(model, "1GiB") as handle:
        handle.retry(one_backward, model, texts([20])[0])
        with pytest.raises(type(error)) as caught:
            handle.retry(step, texts([20])[0])
        assert caught.value is error
        assert caught.value.__traceback__ is not None
        assert len(calls) == attempt
        assert all(p.grad is not None for p in model.parameters())
        handle.retry(one_backward, model, texts([20])[0])
        assert handle._engine.scheduler.strictness == 0


def test_error_without_words_is_out_of_memory_as_well() -> None:
    model, errors = models.Encoder(), [torch.OutOfMemoryError(), RuntimeError("CUDA out of memory")]

    def step(batch: Batch) -> float:
        loss = models.loss_of(model, batch)
        if errors:
            raise errors.pop()
        loss.backward()
        return 7.0

    with mimose.auto_checkpoint(model, "1GiB") as handle:
        for batch in texts([20] * 3):
            one_backward(model, batch)
        assert handle.retry(step, texts([20])[0]) == 7.0


def test_a_machine_without_memory_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_convolution_that_finds_no_engine_has_run_out_of_memory() -> None:
    words = "GET was unable to find an engine to execute this computation"
    assert is_out_of_memory(RuntimeError(words))
    assert not is_out_of_memory(ValueError(words))


def fails_once(model: nn.Module, before: Callable[[], Any] = lambda: None) -> Callable[..., None]:
    """A step that runs out of memory after its first backward."""
    attempts: list[int] = []

    def step(x: torch.Tensor) -> None:
        attempts.append(1)
        if len(attempts) == 1:
            before()
        model(x).sum().backward()
        if len(attempts) == 1:
            raise torch.OutOfMemoryError("the fuse is blown")

    return step


def chain() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))


def test_gradients_of_parameters_that_took_another_s_place_are_right() -> None:
    model, x = chain(), torch.rand(2, 4)
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        handle.retry(lambda: model(x).sum().backward())
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        model.zero_grad()
        handle.retry(fails_once(model), x)
        handle.retry(fails_once(model), x)
    for _ in range(2):
        plain(x).sum().backward()
    assert_same_gradients(model, plain)


def test_gradients_of_a_part_that_is_added_in_the_attempt_are_right() -> None:
    model, x = chain(), torch.rand(2, 4)
    added = nn.Linear(4, 4)
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        handle.retry(lambda: model(x).sum().backward())
        model.zero_grad()
        handle.retry(fails_once(model, lambda: model.append(added)), x)
    ours = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for mine, parameter in zip(ours, model.parameters(), strict=True):
        assert mine is not None
        assert torch.equal(mine, parameter.grad)


def test_gradient_of_a_frozen_parameter_stays() -> None:
    model, x = chain(), torch.rand(2, 4)
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        handle.retry(lambda: model(x).sum().backward())
        model[0].requires_grad_(False)
        former = model[0][0].weight.grad
        handle.retry(fails_once(model), x)
        assert model[0][0].weight.grad is former


def test_step_that_changed_parameters_is_not_run_again() -> None:
    model = models.Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []

    def step(batch: Batch) -> None:
        calls.append(1)
        one_backward(model, batch)
        optimizer.step()
        raise torch.OutOfMemoryError("later")

    with mimose.auto_checkpoint(model, "1GiB") as handle:
        with pytest.raises(OutOfMemory, match=r"call optimizer\.step\(\) outside"):
            handle.retry(step, texts([20])[0])
        assert len(calls) == 1


def test_exception_that_is_being_dealt_with_keeps_its_frames() -> None:
    model, fuse = models.Encoder(), Fuse()
    fuse.on_forward(model.head)

    def fail(witness: str) -> None:
        raise ValueError(witness)

    with mimose.auto_checkpoint(model, "1GiB") as handle:
        try:
            fail("mine")
        except ValueError as error:
            fuse.arm()
            handle.retry(one_backward, model, texts([20])[0])
            frame = error.__traceback__.tb_next.tb_frame  # type: ignore[union-attr]
            assert frame.f_locals == {"witness": "mine"}


def test_retry_inside_a_retry_is_left_to_the_outer_one() -> None:
    model, fuse, calls = models.Encoder(), Fuse(), []
    plain = copy.deepcopy(model)
    fuse.on_backward(model.encoder.layers[1].linear1)

    def outer(batch: Batch) -> float:
        calls.append(1)
        return handle.retry(one_backward, model, batch)

    with mimose.auto_checkpoint(model, "1GiB") as handle:
        for i, batch in enumerate(texts([20] * 4)):
            fuse.arm(times=i % 2)
            seed_all(i)
            ours = handle.retry(outer, batch)
            seed_all(i)
            assert ours == one_backward(plain, batch)
            assert_same_gradients(model, plain)
    assert len(calls) == 4 + 2


def test_buffers_that_a_forward_replaces_are_put_back() -> None:
    class Growing(nn.Module):
        """Keeps what it has seen the most of, in a buffer that is replaced as it grows."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("longest", torch.zeros(0))
            self.register_buffer("last", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] > len(self.longest):
                self.longest = torch.arange(x.shape[0], dtype=torch.float)
            self.last = x.detach().mean(0)
            return self.inner(x) + self.longest[: x.shape[0], None]

    model = nn.Sequential(Growing(), nn.Linear(4, 4))
    fuse, seen = Fuse(), []
    fuse.on_forward(model[1])

    def step(x: torch.Tensor) -> None:
        seen.append((model[0].longest.clone(), model[0].last))
        model(x).sum().backward()

    with mimose.auto_checkpoint(model, "1GiB", blocks=nn.Linear) as handle:
        fuse.arm()
        handle.retry(step, torch.ones(3, 4))
        fuse.arm()
        handle.retry(step, torch.ones(5, 4))
    (first, none), (again, still_none), (third, last), (fourth, same_last) = seen
    assert len(first) == len(again) == 0
    assert none is still_none is None
    assert len(third) == len(fourth) == 3
    assert last is same_last


@pytest.mark.parametrize("phase", ["kept forward", "recompute", "recomputed backward"])
def test_nothing_is_held_after_a_recovery(phase: str) -> None:
    planner, fuse_on = PHASES[phase]
    model, fuse, batch = models.Encoder(), Fuse(), texts([20])[0]
    fuse_on(fuse, model)
    with mimose.auto_checkpoint(model, "1GiB", planner=planner) as handle:
        for i in range(6):
            fuse.arm(times=i % 2)
            handle.retry(one_backward, model, batch)
            model.zero_grad()
        tensors = live_tensors()
        in_use = handle._engine.setting.meter.read().in_use  # type: ignore[union-attr]
        with Storages(model, batch["input_ids"]) as storages:
            for i in range(9):
                fuse.arm(times=i % 2)
                handle.retry(one_backward, model, batch)
                model.zero_grad()
            assert storages.live() == 0
        assert live_tensors() <= tensors
        assert handle._engine.setting.meter.read().in_use <= in_use  # type: ignore[union-attr]


def test_failed_attempt_is_let_go_of_before_the_next_one() -> None:
    model, alive = models.Encoder(), []

    def step(batch: Batch) -> None:
        gc.collect()
        assert [ref for ref in alive if ref() is not None] == []
        loss = models.loss_of(model, batch)
        alive.append(weakref.ref(loss))
        if len(alive) < 3:
            held = loss  # as a frame of the traceback would
            raise torch.OutOfMemoryError(str(held.shape))
        loss.backward()

    with mimose.auto_checkpoint(model, "1GiB") as handle:
        for batch in texts([20] * 3):
            one_backward(model, batch)
        handle.retry(step, texts([20])[0])
    assert len(alive) == 3


def test_handle_that_was_detached_does_not_keep_its_model() -> None:
    model, batch = models.resnet()
    handle = mimose.auto_checkpoint(model, "1GiB")
    for _ in range(2):
        handle.retry(one_backward, model, batch)
    handle.detach()
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None


def test_detaching_takes_every_hook_along() -> None:
    model, fuse = models.Encoder(), Fuse()
    fuse.on_backward(model.encoder.layers[1].linear1)
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        for _ in range(2):
            fuse.arm()
            handle.retry(one_backward, model, texts([20])[0])
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize("name", ["bert", "encoder"])
def test_memory_that_somebody_else_takes_costs_no_step(name: str) -> None:
    model, batches, budget = task(name)
    plain, taken = copy.deepcopy(model), []
    expected = train(plain, batches, one_backward)

    def before(i: int) -> None:
        """From some step on there is less, all of a sudden, while a step runs."""
        taken.clear()

    def step(each: nn.Module, batch: Batch) -> float:
        loss = models.loss_of(each, batch) * (1 + random.random() + float(np.random.rand()))
        if each is model and handle.stats().planned_steps % 2:
            taken[:] = [torch.zeros(budget // 40)]  # a tenth of the budget
        loss.backward()
        return loss.item()

    with mimose.auto_checkpoint(model, budget, enforce=True) as handle:
        losses = train(model, batches, step, call=handle.retry, before=before)
        stats = handle.stats()
    assert losses == expected
    assert stats.peak_bytes <= budget
    assert stats.planned_steps > 10
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        same(ours, theirs)


ROWS = 3000


class Unsteady(nn.Module):
    """A block that may run out of memory halfway, once, in its forward; it has every state."""

    def __init__(self, *, changes_input: bool = False) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.fails = 0
        self._changes_input = changes_input

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._changes_input and self.fails:
            x.add_(1)
        y = self.inner(self.norm(x))
        x.detach().repeat(1, 16)  # more than its backward takes
        y = self.drop(torch.tanh(y))
        if self.fails and task_id() == -1:
            self.fails -= 1
            raise torch.OutOfMemoryError("halfway")
        return x + y


def guarded(*, changes_input: bool = False) -> tuple[nn.Module, nn.Module, mimose.Mimose]:
    """A model, its plain copy, and a handle under which the last blocks are near the limit."""
    model = nn.Sequential(*(Unsteady(changes_input=changes_input) for _ in range(4)))
    plain = copy.deepcopy(model)
    budget = tight_budget(model, [{"input": torch.randn(ROWS, 8)}] * 3, 0.5, loss_of=squares)
    return model, plain, mimose.auto_checkpoint(model, budget, blocks=Unsteady)


def guarded_block(handle: mimose.Mimose) -> int:
    """The last block that is kept near the limit."""
    step = handle._engine._now.last
    assert step.has_plan
    assert not step.observed
    return max(index for index, nth in step.decision.cached.guarded)


def squares(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch["input"] + 0).pow(2).mean()


def square(model: nn.Module, x: torch.Tensor) -> float:
    loss = model(x + 0).pow(2).mean()
    loss.backward()
    return loss.item()


def test_kept_block_near_the_limit_that_runs_out_is_recomputed_at_once() -> None:
    model, plain, handle = guarded()
    with handle:
        for i in range(10):
            x = torch.randn(ROWS, 8)
            if i == 4:
                near = guarded_block(handle)
            if i in (4, 6, 8):  # each is followed by a step that is observed
                model[near].fails = 1
            torch.manual_seed(i)
            ours, rng = square(model, x), torch.get_rng_state()
            torch.manual_seed(i)
            assert ours == square(plain, x)
            assert torch.equal(torch.get_rng_state(), rng)
            assert_same_gradients(model, plain)
            assert_same_buffers(model, plain)
        assert handle.stats().recoveries == 3
    assert all(int(block.norm.num_batches_tracked) == 10 for block in model)


def test_block_that_has_changed_its_input_is_not_rescued() -> None:
    model, _, handle = guarded(changes_input=True)
    with handle:
        for _ in range(4):
            square(model, torch.randn(ROWS, 8))
        model[guarded_block(handle)].fails = 1
        with pytest.raises(torch.OutOfMemoryError, match="halfway"):
            square(model, torch.randn(ROWS, 8))
        square(model, torch.randn(ROWS, 8))


def test_other_errors_of_a_guarded_block_are_its_own() -> None:
    model, _, handle = guarded()
    with handle:
        for _ in range(4):
            square(model, torch.randn(ROWS, 8))
        assert guarded_block(handle) == 3
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|running_mean"):
            square(model, torch.randn(ROWS, 9))


def test_labels_and_lengths_vary_and_every_step_counts() -> None:
    def fuse_on(fuse: Fuse, model: nn.Module) -> None:
        fuse.on_forward(model.bert.encoder.layer[2].intermediate.dense)

    assert_recovers(models.bert()[0].train(), labelled(lengths(12, 10, 40)), fuse_on)
