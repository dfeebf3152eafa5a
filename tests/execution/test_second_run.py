"""A forward that ran out of memory finds the arguments of the second run as those of the first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_same_gradients, no_hooks
from mimose.costs.options import Option
from mimose.interception.attachment import Attachment
from mimose.interception.blocks import find_blocks
from mimose.interception.directive import KEEP, Directive

WIDTH = 4
LEFT = [0]
"""How often memory still runs out."""


class Director:
    """Gives each call the same directive."""

    def __init__(self, directive: Directive) -> None:
        self.directive = directive
        self.ran_out_in: list[int] = []

    def direct(self, block: int, args: Any, kwargs: Any) -> Directive:
        return self.directive

    def ran_out(self, block: int) -> None:
        self.ran_out_in.append(block)


class Evictor:
    def hold(self, run: int, frame: Any) -> None: ...

    def make_room(self) -> bool:
        return True


PLAINLY = Directive(Option.KEEP, evictor=Evictor(), guarded=True, plainly=True)
KEPT = [
    pytest.param(Directive(Option.KEEP, guarded=True), id="guarded"),
    pytest.param(PLAINLY, id="plainly"),
    pytest.param(Directive(Option.KEEP, evictor=Evictor()), id="evictable"),
    pytest.param(Directive(Option.RECOMPUTE, evictor=Evictor()), id="recomputed"),
]


@dataclass
class Record:
    all: list[torch.Tensor] = field(default_factory=list)
    last: torch.Tensor | None = None


def put_in_list(found: list[Any], x: torch.Tensor) -> None:
    found.append(x)


def put_in_inner_list(found: tuple[list[Any]], x: torch.Tensor) -> None:
    found[0].append(x)


def put_in_dict(found: dict[int, Any], x: torch.Tensor) -> None:
    found[len(found)] = x


def put_in_record(found: Record, x: torch.Tensor) -> None:
    found.last = x if found.last is None else found.last + x


def put_nowhere(found: Any, x: torch.Tensor) -> None: ...


class Block(nn.Module):
    """Puts something into its second argument, and runs out of memory then."""

    put: Callable[[Any, torch.Tensor], None]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, found: Any) -> torch.Tensor:
        x = self.linear(x).tanh()
        type(self).put(found, x)
        run_out()
        return x.sin()


def run_out() -> None:
    if LEFT[0]:
        LEFT[0] -= 1
        raise torch.OutOfMemoryError("planned")


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module], argument: Callable[[], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))
        self.argument = argument

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        argument = self.argument()
        for layer in self.layers:
            x = layer(x, argument)
        return x.sum()


def twins(
    kind: type[nn.Module], argument: Callable[[], Any], directive: Directive
) -> tuple[Net, Net, Director]:
    """A plain model and its twin, whose blocks are tried."""
    LEFT[0] = 0
    plain = Net(kind, argument)
    model, director = copy.deepcopy(plain), Director(Directive(Option.RECOMPUTE))
    Attachment(model, find_blocks(model, blocks=kind), director)
    for _ in range(2):  # a cache is filled in the first forward
        step(model)
    model.zero_grad()
    director.directive = directive
    return plain, model, director


def step(model: nn.Module) -> float:
    loss: torch.Tensor = model(torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH))
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("directive", KEPT)
@pytest.mark.parametrize(
    ("argument", "put"),
    [
        (list, put_in_list),
        (lambda: ([],), put_in_inner_list),
        (dict, put_in_dict),
        (Record, put_in_record),
    ],
)
def test_a_forward_that_has_filled_a_container_does_not_run_again(
    monkeypatch: pytest.MonkeyPatch, argument: Any, put: Any, directive: Directive
) -> None:
    """It would fill it twice. The whole step can be retried."""
    monkeypatch.setattr(Block, "put", put, raising=False)
    _, model, director = twins(Block, argument, directive)
    LEFT[0] = 1
    with pytest.raises(torch.OutOfMemoryError):
        step(model)
    assert director.ran_out_in == []
    assert no_hooks()


@pytest.mark.parametrize("directive", KEPT[1:])
@pytest.mark.parametrize(
    "argument",
    [lambda: [torch.ones(WIDTH), {"of": (2, "two")}], lambda: ([1],), Record, lambda: {"a": [0.5]}],
)
def test_containers_that_are_as_they_were_keep_no_forward_from_running_again(
    monkeypatch: pytest.MonkeyPatch, argument: Any, directive: Directive
) -> None:
    monkeypatch.setattr(Block, "put", put_nowhere, raising=False)
    plain, model, director = twins(Block, argument, directive)
    expected = step(plain)
    LEFT[0] = 1
    assert step(model) == expected
    assert director.ran_out_in == [0]
    assert_same_gradients(model, plain)


class Cache:
    """Keys of all calls, one after the other."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []

    def get_seq_length(self) -> int:
        return len(self.keys)

    def update(self, keys: torch.Tensor) -> torch.Tensor:
        self.keys.append(keys)
        return torch.cat(self.keys)


class Decoder(nn.Module):
    """Puts its keys into a cache, and runs out of memory then."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, past_key_values: Cache) -> torch.Tensor:
        keys = past_key_values.update(self.linear(x))
        run_out()
        return x + (keys @ x.T).mean().sin()


@pytest.mark.parametrize("directive", KEPT)
def test_a_second_run_finds_the_cache_that_the_first_one_found(directive: Directive) -> None:
    _, model, director = twins(Decoder, Cache, KEEP)
    expected = step(model)  # each block gets a cache of its own
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    director.directive = directive
    LEFT[0] = 1
    assert step(model) == expected
    assert director.ran_out_in == [0]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


class Counting(Block):
    """The same, with a count that a second run must not advance twice."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor, found: Any) -> torch.Tensor:
        self.calls += 1
        return super().forward(x * self.calls, found)


@pytest.mark.parametrize("hooked", [False, True], ids=["counting", "hooked"])
def test_a_block_that_cannot_run_twice_without_a_frame_is_kept_in_one(hooked: bool) -> None:
    class Own(Block if hooked else Counting):  # type: ignore[misc]
        put = staticmethod(put_nowhere)

    plain, model, director = twins(Own, lambda: None, PLAINLY)
    for layer, own in zip(model.layers, plain.layers, strict=True):
        if hooked:
            layer.register_forward_pre_hook(lambda *_: None)
        else:
            own.calls = layer.calls
    LEFT[0] = 1
    loss = step(model)
    assert director.ran_out_in == [0]
    assert step(plain) == loss
    assert_same_gradients(plain, model)
    for layer, own in zip(model.layers, plain.layers, strict=True):
        assert getattr(layer, "calls", 0) == getattr(own, "calls", 0)


@pytest.mark.parametrize("directive", KEPT)
def test_a_forward_whose_observing_hook_was_called_does_not_run_again(
    monkeypatch: pytest.MonkeyPatch, directive: Directive
) -> None:
    """What the hook has collected would be there twice."""
    monkeypatch.setattr(Block, "put", put_nowhere, raising=False)
    LEFT[0], features = 0, []
    model, director = Net(Block, lambda: None), Director(Directive(Option.RECOMPUTE))
    for layer in model.layers:
        layer.linear.register_forward_hook(lambda *all: features.append(all[-1]))
    Attachment(model, find_blocks(model, blocks=Block), director)
    step(model)
    director.directive, LEFT[0] = directive, 1
    features.clear()
    with pytest.raises(torch.OutOfMemoryError):
        step(model)
    assert len(features) == 1
    assert director.ran_out_in == []
