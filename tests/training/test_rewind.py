"""A step that is run again starts from the state that the failed attempt found."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import mimose
from compare import assert_same_buffers, assert_same_gradients, same
from mimose.errors import OutOfMemory

pytestmark = pytest.mark.filterwarnings("ignore:Using backward:UserWarning")


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Counting(Part):
    """Sets a number, appends to a list, and carries a state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.losses, self.state = 0, [], torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = super().forward(x + self.state)
        self.losses.append(y.sum())
        self.state = y.detach().mean(0)
        return y


class Remembering(Part):
    """Sets an attribute in its first forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x) * self.calls


class Record:
    """An object that a module holds."""

    def __init__(self) -> None:
        self.calls = 0


class CountingElsewhere(Part):
    def __init__(self) -> None:
        super().__init__()
        self.record = Record()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.record.calls += 1
        return super().forward(x) * self.record.calls


class Noisy(Part):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.randn(x.shape, generator=self.generator)


class LargeBuffer(Part):
    """Changes a buffer of more than 1 MiB in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(600, 600))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.queue += 1
        return super().forward(x) * self.queue[0, 0]


class LateBuffer(Part):
    """Registers its buffer in the first forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "count" not in self._buffers:
            self.register_buffer("count", torch.zeros(1))
        self.count = self.count + 1
        return super().forward(x) * self.count


class Codebook(Part):
    """Updates a frozen parameter in place."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.ones(size), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.codes += 1
        return super().forward(x) * self.codes[0]


class LargeCodebook(Codebook):
    def __init__(self) -> None:
        super().__init__(1 << 16)


def chain(part: Callable[[], nn.Module] = Part) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(part(), part(), nn.Linear(4, 1))


def squares(model: nn.Module, x: torch.Tensor, fuse: Fuse) -> None:
    """One forward, one backward; memory may run out between them."""
    loss = model(x).pow(2).mean()
    fuse()
    loss.backward()


class Fuse:
    """Raises out of memory once, if it is armed."""

    def __init__(self) -> None:
        self.armed = False

    def __call__(self, *_: Any) -> None:
        armed, self.armed = self.armed, False
        if armed:
            raise torch.OutOfMemoryError("the fuse is blown")


def never(*_: Any) -> None:
    """What a plain model has in place of a fuse."""


def assert_recovers(
    model: nn.Module,
    fails: Sequence[bool],
    step: Callable[[nn.Module, torch.Tensor, Any], None] = squares,
    before: Callable[[int, nn.Module], None] = lambda *_: None,
) -> nn.Module:
    """Train a model and its plain copy; the former runs out of memory in these steps."""
    plain, fuse = copy.deepcopy(model), Fuse()
    with mimose.auto_checkpoint(model, "1GiB", blocks=Part) as handle:
        for i, fuse.armed in enumerate(fails):
            before(i, model)
            before(i, plain)
            x = torch.randn(3, 4)
            step(plain, x, never)
            handle.retry(step, model, x, fuse)
        assert handle.stats().retries == sum(fails)
    assert_same_gradients(model, plain)
    assert_same_buffers(model, plain)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        same(ours, theirs)
    return plain


FAILS = {"first step": [True, False, False], "later step": [False, False, True, False]}


@pytest.mark.parametrize("fails", FAILS.values(), ids=FAILS)
def test_attributes_that_blocks_change_are_restored(fails: list[bool]) -> None:
    model = chain(Counting)
    plain = assert_recovers(model, fails)
    assert model[0].calls == plain[0].calls == len(fails)
    assert len(model[0].losses) == len(fails)
    same(model[0].state, plain[0].state)


def test_attribute_that_is_new_in_the_attempt_is_removed() -> None:
    model = chain(Remembering)
    assert_recovers(model, FAILS["first step"])
    assert model[0].calls == 3


def test_list_that_other_code_holds_too_gets_its_former_items() -> None:
    model = chain(Counting)
    losses = model[0].losses
    assert_recovers(model, FAILS["later step"])
    assert model[0].losses is losses


def test_attributes_of_objects_that_blocks_hold_are_restored() -> None:
    model = chain(CountingElsewhere)
    assert_recovers(model, FAILS["later step"])
    assert model[0].record.calls == 4


@pytest.mark.parametrize("fails", FAILS.values(), ids=FAILS)
def test_generators_of_blocks_are_restored(fails: list[bool]) -> None:
    model = chain(Noisy)
    plain = assert_recovers(model, fails)
    same(model[0].generator.get_state(), plain[0].generator.get_state())


@pytest.mark.parametrize("fails", FAILS.values(), ids=FAILS)
def test_buffers_that_are_registered_in_the_attempt_are_removed(fails: list[bool]) -> None:
    assert_recovers(chain(LateBuffer), fails)


def test_buffers_of_modules_that_are_put_in_between_steps_are_restored() -> None:
    class Normed(Part):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.norm(x))

    def put_in(i: int, model: nn.Module) -> None:
        if i == 2:
            torch.manual_seed(1)
            model[1] = Normed()

    assert_recovers(chain(), FAILS["later step"], before=put_in)


def test_large_buffers_that_a_block_changes_are_restored() -> None:
    assert_recovers(chain(LargeBuffer), FAILS["later step"])


def test_large_buffer_outside_of_blocks_is_restored_once_it_has_changed() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = chain()
            self.register_buffer("queue", torch.zeros(600, 600))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.queue += 1
            return self.inner(x) * self.queue[0, 0]

    assert_recovers(Outer(), FAILS["later step"])
    with pytest.raises(OutOfMemory, match=r"changed a buffer of 1\.37 MiB in place"):
        assert_recovers(Outer(), FAILS["first step"])


@pytest.mark.filterwarnings("ignore:block '0' cannot be recomputed")
@pytest.mark.parametrize("fails", FAILS.values(), ids=FAILS)
def test_frozen_parameters_that_a_forward_updates_are_restored(fails: list[bool]) -> None:
    assert_recovers(chain(Codebook), fails)


@pytest.mark.filterwarnings("ignore:block '0' cannot be recomputed")
def test_large_frozen_parameter_is_restored_once_it_has_changed() -> None:
    assert_recovers(chain(LargeCodebook), FAILS["later step"])
    with pytest.raises(OutOfMemory, match=r"changed a frozen parameter of 256 KiB in place"):
        assert_recovers(chain(LargeCodebook), FAILS["first step"])


def test_large_tensor_of_a_block_that_is_changed_in_place_is_not_retried() -> None:
    class LargeState(Part):
        def __init__(self) -> None:
            super().__init__()
            self.state = torch.zeros(600, 600)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state += 1
            return super().forward(x) * self.state[0, 0]

    with (
        pytest.warns(UserWarning, match="cannot be recomputed"),
        pytest.raises(OutOfMemory, match=r"changed a tensor of 1\.37 MiB in place"),
    ):
        assert_recovers(chain(LargeState), FAILS["later step"])


def with_graph(model: nn.Module, x: torch.Tensor, fuse: Any) -> None:
    y = model[1](model[0](x))
    y.register_hook(fuse)  # in the middle of the backward
    model[2](y).pow(2).mean().backward(create_graph=True)


def test_gradients_that_a_backward_with_a_graph_replaces_are_restored() -> None:
    assert_recovers(chain(), [False, True, False, True], with_graph)


def test_gradients_with_a_graph_that_are_cleared_in_the_step_are_its_own() -> None:
    def step(model: nn.Module, x: torch.Tensor, fuse: Any) -> None:
        model.zero_grad()
        with_graph(model, x, fuse)

    assert_recovers(chain(), [False, True, False, True], step)


def added(model: nn.Module, x: torch.Tensor) -> None:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(x).sum(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None
        parameter.grad.add_(gradient)


def replaced(model: nn.Module, x: torch.Tensor) -> None:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(x).sum(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None
        parameter.grad = parameter.grad + gradient


def scaled(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def scaled_between(model: nn.Module, x: torch.Tensor) -> None:
    scaled(model, x)
    model(x).sum().backward()


def replaced_after(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5


def with_graph_for_the_first_time(model: nn.Module, x: torch.Tensor) -> None:
    model(x).pow(2).mean().backward(create_graph=True)


@pytest.mark.parametrize(
    "change",
    [added, replaced, scaled, scaled_between, replaced_after, with_graph_for_the_first_time],
)
def test_step_that_changed_gradients_otherwise_than_by_adding_is_not_run_again(
    change: Callable[[nn.Module, torch.Tensor], None],
) -> None:
    model, attempts = chain(), []

    def step(x: torch.Tensor) -> None:
        attempts.append(1)
        change(model, x)
        raise torch.OutOfMemoryError("the fuse is blown")

    with mimose.auto_checkpoint(model, "1GiB", blocks=Part) as handle:
        model(torch.randn(3, 4)).sum().backward()
        with pytest.raises(
            OutOfMemory, match=r"replaced or changed \d gradients from before"
        ) as it:
            handle.retry(step, torch.randn(3, 4))
    assert len(attempts) == 1
    assert "clear them before you train on" in str(it.value)


def test_gradients_in_one_buffer_are_restored() -> None:
    """Views share a version, so additions to one look like changes of all others."""
    model = chain()
    plain = copy.deepcopy(model)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    parts = flat.split([p.numel() for p in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)
    fuse, x = Fuse(), torch.randn(3, 4)
    with mimose.auto_checkpoint(model, "1GiB", blocks=Part) as handle:
        for fuse.armed in (False, True):
            squares(plain, x, never)
            handle.retry(lambda: (squares(model, x, never), fuse()))
    assert_same_gradients(model, plain)
    assert all(p.grad is not None and p.grad._base is flat for p in model.parameters())


def test_nothing_that_blocks_carry_is_held_after_a_step() -> None:
    model = chain(Counting)
    with mimose.auto_checkpoint(model, "1GiB", blocks=Part) as handle:
        for _ in range(3):
            handle.retry(squares, model, torch.randn(3, 4), never)
        state = weakref.ref(model[0].state)
        handle.retry(squares, model, torch.randn(3, 4), never)
        assert state() is None
