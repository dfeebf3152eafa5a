"""Objects as arguments: a trial does not change them, a recompute gets them as they were."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mimose
from compare import assert_same_gradients, live_tensors
from loops import block_interceptors
from mimose.errors import MimoseWarning
from mimose.execution.arguments import ArgumentCopies, are_plain

WIDTH, STEPS = 8, 4
Use = Callable[[torch.Tensor, Any], torch.Tensor]


class Block(nn.Module):
    """Returns what `use` makes of its output and the object in its arguments."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.use = use

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        return x + self.use(self.second(torch.tanh(self.first(x))), given)


class Net(nn.Module):
    def __init__(self, use: Use, new: Callable[[], Any], loss: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(use) for _ in range(3))
        self.new, self.loss, self.steps = new, loss, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.new()
        self.steps += 1
        for layer in self.layers:
            x = layer(x, given)
        return x.pow(2).mean() + self.loss(given)


def nothing(given: Any) -> float:
    return 0.0


def losses_of(model: nn.Module) -> list[float]:
    losses = []
    for step in range(STEPS):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(x)
        loss.backward()
        losses.append(loss.item())
    return losses


def assert_as_plain(model: nn.Module) -> list[bool | None]:
    """Assert that it trains as the plain model; return whether each block can be recomputed."""
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        losses = losses_of(model)
        trusted = [interceptor.trusted for interceptor in block_interceptors(model)]
    assert losses == losses_of(plain)
    assert_same_gradients(model, plain)
    return trusted


class Slotted:
    __slots__ = ("__weakref__", "count")

    def __init__(self) -> None:
        self.count = 0


class Collector:
    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor) -> None:
        self.losses.append(loss)


def pops(y: torch.Tensor, given: Any) -> torch.Tensor:
    return y * given.pop()


def takes_the_next(y: torch.Tensor, given: Any) -> torch.Tensor:
    return y * next(given)


def counts(y: torch.Tensor, given: Any) -> torch.Tensor:
    given[0] += 1
    return y * float(given[0])


def counts_in_slots(y: torch.Tensor, given: Any) -> torch.Tensor:
    given.count += 1
    return y * given.count


def adds_to_a_namespace(y: torch.Tensor, given: Any) -> torch.Tensor:
    given.aux = given.aux + y.pow(2).mean()
    return y


def collects(y: torch.Tensor, given: Any) -> torch.Tensor:
    given.losses.append(y.pow(2).mean())
    return y


def calls(y: torch.Tensor, given: Any) -> torch.Tensor:
    given(y.pow(2).mean())
    return y


def draws(y: torch.Tensor, given: Any) -> torch.Tensor:
    return y * given.uniform(0.9, 1.1)


def sum_of(losses: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(losses).sum()


def closure() -> Callable[[torch.Tensor], None]:
    losses: list[torch.Tensor] = []

    def add(loss: torch.Tensor) -> None:
        losses.append(loss)

    return add


NUMBERS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
CHANGED: dict[str, tuple[Use, Callable[[], Any], Callable[[Any], Any]]] = {
    "deque": (pops, lambda: deque(NUMBERS), nothing),
    "set": (pops, lambda: set(NUMBERS), nothing),
    "iterator": (takes_the_next, lambda: iter(NUMBERS), nothing),
    "count": (takes_the_next, lambda: itertools.count(1), nothing),
    "array": (counts, lambda: np.zeros(1), nothing),
    "bytes": (counts, lambda: bytearray(1), nothing),
    "slots": (counts_in_slots, Slotted, nothing),
    "namespace": (adds_to_a_namespace, lambda: SimpleNamespace(aux=0.0), lambda n: n.aux),
    "collector": (collects, Collector, lambda c: sum_of(c.losses)),
    "method": (calls, lambda: Collector().add, lambda add: sum_of(add.__self__.losses)),
    "append": (calls, lambda: [].append, lambda append: sum_of(append.__self__)),
    "partial": (
        calls,
        lambda: functools.partial(Collector.add, Collector()),
        lambda add: sum_of(add.args[0].losses),
    ),
    "closure": (calls, closure, lambda add: sum_of(add.__closure__[0].cell_contents)),
    "generator": (draws, lambda: np.random.default_rng(0), nothing),
    "within a list": (lambda y, given: collects(y, given[0]), lambda: [Collector()], nothing),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_a_block_that_changes_its_arguments_is_kept_from_its_first_run(kind: str) -> None:
    with pytest.warns(
        MimoseWarning,
        match=r"cannot be recomputed: (it changes its arguments|one of its arguments is) ",
    ):
        assert assert_as_plain(Net(*CHANGED[kind])) == [False] * 3


def test_a_block_that_changes_its_arguments_is_never_run_twice() -> None:
    runs: list[int] = []

    def counting(y: torch.Tensor, given: Any) -> torch.Tensor:
        runs.append(1)
        return collects(y, given)

    model = Net(counting, Collector, lambda c: sum_of(c.losses))
    with (
        mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"),
        pytest.warns(MimoseWarning, match=r"it changes its arguments \(a list\)"),
    ):
        losses_of(model)
    assert len(runs) == 3 * STEPS


class Batch:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Graph(nn.Module):
    """Its layers replace the features of a data object, or the model does so itself."""

    def __init__(self, in_layers: bool) -> None:
        super().__init__()
        self.in_layers = in_layers
        self.layers = nn.ModuleList(GraphLayer(in_layers) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = Batch(x)
        for layer in self.layers:
            if self.in_layers:
                layer(batch)
            else:
                batch.x = layer(batch)
        return batch.x.pow(2).mean()


class GraphLayer(nn.Module):
    def __init__(self, sets: bool) -> None:
        super().__init__()
        self.sets, self.first = sets, nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = batch.x + self.second(torch.tanh(self.first(batch.x)))
        if self.sets:
            batch.x = x
        return x


def test_layers_that_replace_features_of_a_data_object_train_as_in_the_plain_model() -> None:
    with pytest.warns(MimoseWarning, match=r"it changes its arguments \(a Batch\)"):
        assert assert_as_plain(Graph(in_layers=True)) == [False] * 3


@pytest.mark.filterwarnings("ignore::mimose.errors.MimoseWarning")
@pytest.mark.parametrize("kind", ["deque", "slots", "collector", "iterator"])
def test_a_forward_that_is_only_looked_at_changes_nothing(kind: str) -> None:
    model = Net(*CHANGED[kind])
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, "1GiB", collector="shuttle"):
        losses = losses_of(model)
    assert losses == losses_of(plain)
    assert_same_gradients(model, plain)


def test_a_recompute_gets_a_data_object_as_it_was_in_the_forward() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", MimoseWarning)
        assert assert_as_plain(Graph(in_layers=False)) == [True] * 3


@pytest.mark.parametrize("in_layers", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_a_graph_held_by_an_argument_object_is_freed(in_layers: bool, backward: bool) -> None:
    before, model = live_tensors(), Graph(in_layers)
    with (
        warnings.catch_warnings(),
        mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"),
    ):
        warnings.simplefilter("ignore", MimoseWarning)
        for _ in range(STEPS):
            loss = model(torch.randn(5, WIDTH))
            if backward:
                loss.backward()
    del model, loss
    gc.collect()
    assert live_tensors() == before


def test_a_block_that_starts_to_change_its_arguments_is_kept_from_then_on() -> None:
    def later(y: torch.Tensor, given: Any) -> torch.Tensor:
        return collects(y, given) if given.on else y

    model = Net(later, Collector, lambda c: sum_of(c.losses) if c.losses else 0.0)
    model.new = lambda: switched(model.steps >= 1)
    plain = copy.deepcopy(model)
    plain.new = lambda: switched(plain.steps >= 1)
    with (
        mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"),
        pytest.warns(MimoseWarning, match=r"it changes its arguments \(a list\)"),
    ):
        losses = losses_of(model)
    assert losses == losses_of(plain)
    assert_same_gradients(model, plain)


def switched(on: bool) -> Collector:
    made: Any = Collector()
    made.on = on
    return made  # type: ignore[no-any-return]


def test_changing_a_tensor_in_an_argument_object_before_the_backward_raises() -> None:
    scale = SimpleNamespace(by=torch.ones(WIDTH))
    model = Net(lambda y, given: y * given.by, lambda: scale, nothing)
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        loss = model(torch.randn(2, WIDTH))
        scale.by.add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace.*exclude"):
            loss.backward()


class CarriesAState(nn.Module):
    """After each layer, writes the layer's new state in place over its old state."""

    def __init__(self, pack: Callable[[list[torch.Tensor]], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TakesAState() for _ in range(3))
        self.pack = pack

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            state = [torch.zeros(WIDTH)]
            x, new = layer(x, self.pack(state))
            state[0].copy_(new.detach())
        return x.pow(2).sum()


class TakesAState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        state = given[0] if isinstance(given, list) else given.state
        y = self.net(x + state)  # adding saves no state: plain training does not mind
        return y, y.mean(0)


@pytest.mark.parametrize(
    "pack",
    [lambda state: state, lambda state: SimpleNamespace(state=state[0])],
    ids=["list", "object"],
)
def test_a_block_whose_argument_the_model_changes_after_its_run_is_kept(pack: Any) -> None:
    model = CarriesAState(pack)
    plain = copy.deepcopy(model)

    def train(model: nn.Module) -> list[float]:
        torch.manual_seed(1)
        losses = [model(torch.randn(2, WIDTH)) for _ in range(3)]
        for loss in losses:
            loss.backward()
        return [loss.item() for loss in losses]

    with (
        mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"),
        pytest.warns(MimoseWarning, match="changes one of its arguments in place after its run"),
    ):
        losses = train(model)
    assert losses == train(plain)
    assert_same_gradients(model, plain)


def test_copies_are_of_the_same_kinds_and_share_tensors() -> None:
    tensor, table = torch.ones(2), np.arange(3)
    original = SimpleNamespace(x=tensor, queue=deque([1, [2]]), table=table, slots=Slotted())
    original.self = original
    original.slots.count = weakref.ref(original.slots)  # type: ignore[assignment]
    given = ArgumentCopies.of((original, [tensor]), {"name": "a"})
    assert given is not None
    twin = given.args[0]
    assert given.problem is None
    assert twin is not original
    assert twin.self is twin
    assert twin.x is tensor
    assert twin.queue == original.queue
    assert twin.queue is not original.queue
    assert twin.queue[1] is not original.queue[1]
    assert isinstance(twin.slots, Slotted)
    assert twin.slots.count() is twin.slots
    assert given.changed() is None


def test_arguments_that_refer_to_very_many_objects_are_not_copied() -> None:
    given = ArgumentCopies.of((SimpleNamespace(many=[[] for _ in range(2000)]),), {})
    assert given is not None
    assert given.problem == "its arguments refer to more than 1000 objects"


def test_tensors_and_plain_values_in_plain_containers_are_not_copied() -> None:
    assert are_plain((torch.ones(1), [1, "a", {"b": (None, torch.float32)}]), {"c": 2.0})
    assert not are_plain((torch.ones(1),), {"c": [deque()]})
