"""Unusual blocks train as in the plain model, and mimose plans for them."""

from __future__ import annotations

import functools
import gc
import itertools
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import weight_norm

import mimose
from compare import assert_same_buffers, live_tensors, same
from loops import block_interceptors
from mimose.bench.measuring import LatestStep
from mimose.errors import ConflictError
from parts import Regimes


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def batches(steps: int = 24) -> list[torch.Tensor]:
    draw = random.Random(0)
    torch.manual_seed(0)
    return [torch.randn(4, draw.randint(8, 40), 16) for _ in range(steps)]


def train(
    model: nn.Module, between: Callable[[nn.Module, int], object] = lambda *_: None
) -> list[float]:
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for number, batch in enumerate(batches()):
        between(model, number)
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_trains_as_plain(
    make: Callable[[], nn.Module], between: Callable[[nn.Module, int], object] = lambda *_: None
) -> mimose.reporting.Stats:
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    model = make()
    expected = train(plain, between)
    with mimose.auto_checkpoint(model, "64MiB", planner="recompute_all") as handle:
        assert train(model, between) == expected
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        same(a, b, name)
    assert_same_buffers(model, plain)
    return handle.stats()


class InPlace(Stack):
    """Changes the output of some blocks in place: a linear layer's is a view."""

    at: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            hidden = layer(x)
            if number in self.at:
                hidden += x
            else:
                hidden = hidden + x
            x = hidden
        return x


@pytest.mark.parametrize("at", [(0,), (2,), (0, 1, 2, 3, 4)])
def test_outputs_that_are_views_may_be_changed_in_place(at: tuple[int, ...]) -> None:
    def make() -> nn.Module:
        model = InPlace()
        model.at = at
        return model

    stats = assert_trains_as_plain(make)
    assert stats.observed_steps <= 10
    assert stats.observed_steps + stats.planned_steps == 24


class Lazy(Layer):
    """Its buffer `average` is None before its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean((0, 1))
        self.average = mean if self.average is None else 0.9 * self.average + 0.1 * mean
        return super().forward(x - self.average)


class Lazier(Lazy):
    """It has no buffer `average` before its first forward."""

    def __init__(self) -> None:
        super().__init__()
        del self._buffers["average"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "average" not in self._buffers:
            self.register_buffer("average", None)
        return super().forward(x)


@pytest.mark.parametrize("make", [Lazy, Lazier])
def test_buffers_created_in_the_first_forward_are_updated_once(
    make: Callable[[], nn.Module],
) -> None:
    assert_trains_as_plain(lambda: Stack(make))


def pruned() -> nn.Module:
    layer = Layer()
    prune.l1_unstructured(layer.up, "weight", 0.5)
    return layer


def test_buffers_may_be_deleted_while_training() -> None:
    def remove(model: nn.Module, number: int) -> None:
        if number == 12:
            for layer in model.layers:
                prune.remove(layer.up, "weight")

    assert_trains_as_plain(lambda: Stack(pruned), remove)


class Nests(Stack):
    """Passes its blocks one nested tensor of rows with different lengths."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [row[: len(row) - 2 * number] for number, row in enumerate(x.unbind())]
        nested = torch.nested.as_nested_tensor(rows, layout=self.layout)
        return super().forward(nested).to_padded_tensor(0.0)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_blocks_of_nested_tensors_are_recomputed(layout: torch.layout) -> None:
    stats = assert_trains_as_plain(lambda: Nests(layout))  # without a warning
    assert stats.planned_steps > 10


class ReadsTwice(Stack):
    """Runs its layers, whose weights are parametrized, twice before each backward."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            weight_norm(layer.up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + super().forward(2 * x)


class Cached(ReadsTwice):
    """Computes its weights once a forward, in the forwards `cached`."""

    def __init__(self, cached: Callable[[int], bool]) -> None:
        super().__init__()
        self.cached, self.forwards = cached, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        with parametrize.cached() if self.cached(self.forwards) else nullcontext():
            return super().forward(x)


@pytest.mark.parametrize("first", [2, 1], ids=["from the second step on", "from the first one on"])
def test_blocks_are_kept_while_their_parametrized_weights_are_cached(first: int) -> None:
    make = functools.partial(Cached, lambda number: number % 7 == first)
    with pytest.warns(
        mimose.MimoseWarning, match=r"kept while torch.*cached\(\) is active"
    ) as told:
        stats = assert_trains_as_plain(make)
    assert len(told) == 1
    assert stats.planned_steps > 10


def test_blocks_without_parametrizations_are_recomputed_under_its_cache() -> None:
    torch.manual_seed(0)
    model, batch = Stack(), batches(1)[0]
    with (
        mimose.auto_checkpoint(model, "64MiB", planner="recompute_all"),
        parametrize.cached(),
    ):
        loss = model(batch).pow(2).mean()
        interceptor = block_interceptors(model)[0]
        loss.backward()
        assert interceptor.trusted


_RUNS = itertools.count()


class Fickle(Layer):
    """Saves another number of tensors every time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1 + next(_RUNS) % 3):
            x = torch.tanh(x)
        return super().forward(x)


def test_a_block_that_cannot_be_recomputed_leaves_no_tensor_of_its_trial() -> None:
    batch = batches(1)[0]
    before = live_tensors()
    model = Stack(Fickle)
    handle = mimose.auto_checkpoint(model, "64MiB", planner="recompute_all")
    with pytest.warns(mimose.MimoseWarning, match="cannot be recomputed"):
        model(batch).pow(2).mean().backward()
    handle.detach()
    model.zero_grad()
    del model, handle
    gc.collect()
    assert live_tensors() == before


def test_parameters_of_another_dtype_are_another_regime() -> None:
    model = Stack().to(torch.bfloat16)
    regimes, latest = Regimes(), LatestStep()
    with mimose.auto_checkpoint(model, "64MiB") as handle:
        handle.subscribe(regimes)
        handle.subscribe(latest)
        for number, batch in enumerate(batches(30)):
            if number == 15:
                model.float()
            model(batch.to(model.layers[0].up.weight.dtype)).pow(2).mean().backward()
            model.zero_grad()
            if number == 15:
                assert regimes.entered[-1][0].dtype == "torch.float32"
                assert latest.record is not None
                assert latest.record.plan is None  # nothing is known of it
    assert len(handle.state_dict()["chapters"]) == 2


def counts_in_a_tensor(layer: nn.Module) -> None:
    layer.state[0] += 1


def counts_in_an_array(layer: nn.Module) -> None:
    layer.state[0] += 1


def appends(layer: nn.Module) -> None:
    layer.state.append(len(layer.state))


def counts(layer: nn.Module) -> None:
    layer.state["runs"] += 1


def appends_within(layer: nn.Module) -> None:
    layer.state["runs"].append(len(layer.state["runs"]))


STATES: dict[str, tuple[Callable[[], Any], Callable[[nn.Module], None]]] = {
    "tensor": (lambda: torch.zeros(3), counts_in_a_tensor),
    "array": (lambda: np.zeros(3), counts_in_an_array),
    "deque": (lambda: deque(maxlen=7), appends),
    "defaultdict": (lambda: defaultdict(int), counts),
    "counter": (Counter, counts),
    "dict of lists": (lambda: {"runs": []}, appends_within),
}


@pytest.mark.parametrize("state", STATES)
def test_state_in_an_attribute_advances_once_per_run(state: str) -> None:
    new, advance = STATES[state]
    made: list[Stack] = []

    class Counting(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.state = new()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            advance(self)
            return out

    def make() -> nn.Module:
        made.append(Stack(Counting))
        return made[-1]

    assert_trains_as_plain(make)
    plain, model = ([str(layer.state) for layer in stack.layers] for stack in made)
    assert model == plain


@pytest.mark.parametrize(
    "generator",
    [random.Random, np.random.default_rng, np.random.RandomState],
    ids=["Python", "NumPy", "older NumPy"],
)
@pytest.mark.parametrize("together", [True, False])
def test_a_block_may_have_a_generator_of_its_own(
    generator: Callable[[int], Any], together: bool
) -> None:
    class Throwing(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.dice = [generator(1)] if together else generator(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dice = self.dice[0] if together else self.dice
            size = dice.random() if hasattr(dice, "random") else dice.random_sample()
            return super().forward(x) * size

    assert_trains_as_plain(lambda: Stack(Throwing))


SPECIAL: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(16).to_sparse(),
    "compressed": lambda: torch.eye(16).to_sparse_csr(),
    "meta": lambda: torch.ones(16, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("special", SPECIAL)
def test_a_block_may_have_special_tensors_in_attributes(special: str) -> None:
    class Holding(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.held = SPECIAL[special]()

    assert_trains_as_plain(lambda: Stack(Holding))


class Differentiates(Layer):
    """From run `begins` on, its forward follows a gradient, as a test-time-training layer does.

    Before that, it draws random numbers and changes buffers and attributes.
    """

    begins = 1

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.register_buffer("count", torch.zeros(()))
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        self.count = self.count + 1
        x = self.drop(self.norm(x.flatten(0, 1)).view_as(x)) * random.uniform(0.9, 1.1)
        out = super().forward(x)
        if self.runs < self.begins:
            return out
        aim = x.detach()
        return out - torch.func.grad(lambda t: (t.tanh() - aim).pow(2).mean())(out)


class DifferentiatesLater(Differentiates):
    begins = 8


class Appends(Differentiates):
    """Appends to a list that the model holds, too."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(x.norm().item())
        return super().forward(x)


class AppendsLater(Appends):
    begins = 8


class DoublesItsInput(Differentiates):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.mul_(2)
        return super().forward(x)


@pytest.mark.parametrize("block", [Differentiates, DifferentiatesLater, Appends])
def test_blocks_that_differentiate_in_their_forward_are_kept(block: type[Differentiates]) -> None:
    made: list[Stack] = []

    def make() -> nn.Module:
        made.append(Stack(block))
        made[-1].logs = [getattr(layer, "log", None) for layer in made[-1].layers]
        return made[-1]

    with pytest.warns(mimose.MimoseWarning, match=r"cannot be recomputed: it calls torch\.func"):
        assert_trains_as_plain(make, lambda _, number: random.seed(number))
    plain, model = made
    assert [layer.runs for layer in model.layers] == [24] * 5
    assert model.logs == plain.logs
    assert model.logs[0] is getattr(model.layers[0], "log", None)


@pytest.mark.parametrize(("block", "lost"), [(AppendsLater, 8), (DoublesItsInput, 1)])
def test_a_block_that_cannot_run_again_ends_one_step_with_advice(
    block: type[Differentiates], lost: int
) -> None:
    model, step = Stack(block), 0
    with mimose.auto_checkpoint(model, "64MiB", planner="recompute_all", blocks="layers.0"):
        for step, batch in enumerate(batches(), 1):
            if step == lost:
                with pytest.raises(ConflictError, match=r"exclude='layers\.0'"):
                    model(batch)
            else:
                model(batch).pow(2).mean().backward()


def test_code_that_forbids_hooks_for_its_own_reasons_is_noticed() -> None:
    class Forbids(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
                return super().forward(x)

    with pytest.warns(mimose.MimoseWarning, match="cannot be recomputed"):
        assert_trains_as_plain(lambda: Stack(Forbids))
