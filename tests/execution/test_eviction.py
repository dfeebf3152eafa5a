"""Kept activations can be dropped at any moment: training goes on as if nothing had happened."""

from __future__ import annotations

import copy
import random
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import models
from chains import steady
from compare import Storages, assert_same_buffers, assert_same_gradients, live_tensors, no_hooks
from mimose.costs.options import Option
from mimose.errors import RecomputeError
from mimose.execution.autograd import Listener, nodes_of
from mimose.execution.recompute import Frame
from mimose.interception.attachment import Attachment
from mimose.interception.blocks import find_blocks
from mimose.interception.directive import Directive
from mimose.tensors.running_backward import task_id
from parts import (
    WIDTH,
    Counted,
    Faulty,
    InPlace,
    Layer,
    Nested,
    Normed,
    bf16,
    train_under,
    without_cache,
)


class Evictor:
    """Evicts what it is told to, as far as that can be evicted."""

    def __init__(self) -> None:
        self.frames: dict[int, weakref.ref[Frame]] = {}
        self.evicted: list[int] = []
        self.asked = 0

    def hold(self, run: int, frame: Frame) -> None:
        self.frames[run] = weakref.ref(frame)

    def make_room(self) -> bool:
        self.asked += 1
        before = len(self.evicted)
        self.evict(self.frames)
        return len(self.evicted) > before

    def evict(self, runs: Any) -> None:
        for run in sorted(runs):
            frame = self.frame(run)
            if frame is not None and frame.can_be_evicted:
                frame.evict()
                self.evicted.append(run)

    def frame(self, run: int) -> Frame | None:
        return self.frames.get(run, lambda: None)()

    @property
    def alive(self) -> int:
        """How many frames there still are."""
        return sum(frame() is not None for frame in self.frames.values())


class Script:
    """A director: keeps or recomputes each run, and evicts some at the moments of a script."""

    def __init__(
        self,
        recomputed: frozenset[int] = frozenset(),
        at_head: frozenset[int] = frozenset(),
        at_entry: Mapping[int, frozenset[int]] | None = None,
        *,
        observed: bool = False,
    ) -> None:
        self.evictor = Evictor()
        self.ran_out_in: list[int] = []
        self._recomputed, self._at_head, self._at_entry = recomputed, at_head, at_entry or {}
        self._listener = Listener() if observed else None
        self._run = 0

    def step_begins(self) -> None:
        self._run = 0

    def forward_ends(self) -> None:
        self.evictor.evict(self._at_head)

    def direct(self, block: int, args: Any, kwargs: Any) -> Directive:
        run, self._run = self._run, self._run + 1
        option = Option.of(run in self._recomputed)
        after = self._at_backward_of(run)
        return Directive(option, run, self._listener, self.evictor, after=after)

    def _at_backward_of(self, run: int) -> Callable[[Any, Any], None]:
        def enter(*_: Any) -> None:
            self.evictor.evict(self._at_entry.get(run, ()))

        def watch(_: Any, out: Any) -> None:
            for node in nodes_of([out] if isinstance(out, torch.Tensor) else []):
                node.register_prehook(enter)

        return watch

    def ran_out(self, block: int) -> None:
        self.ran_out_in.append(block)


KINDS: list[Callable[[], nn.Module]] = [Layer, Normed, InPlace, Nested]


def attach(model: nn.Module, director: Script, **selection: Any) -> None:
    Attachment(model, find_blocks(model, **selection), director)


def stack(*kinds: Callable[[], nn.Module], director: Script) -> tuple[nn.Sequential, nn.Sequential]:
    """A plain model, and its twin under the director."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(kind() for kind in kinds))
    model = copy.deepcopy(plain)
    attach(model, director, blocks=[str(i) for i in range(len(kinds))])
    return plain, model


def first_step(model: nn.Module, x: torch.Tensor, director: Script) -> None:
    """The step in which each block is tried, and nothing is left to evict."""
    director.step_begins()
    model(x).sum().backward()
    model.zero_grad()
    director.evictor.evicted.clear()
    director.step_begins()


def runs(most: int) -> st.SearchStrategy[frozenset[int]]:
    return st.frozensets(st.integers(0, most - 1))


@steady
@given(data=st.data())
def test_gradients_buffers_and_rng_are_those_of_plain_whatever_is_evicted_when(
    data: st.DataObject,
) -> None:
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    count = len(kinds)
    director = Script(
        recomputed=data.draw(runs(count)),
        at_head=data.draw(runs(count)),
        at_entry=data.draw(st.dictionaries(st.integers(0, count - 1), runs(count))),
        observed=data.draw(st.booleans()),
    )
    plain, model = stack(*kinds, director=director)
    how: dict[str, Any] = {
        "backwards": data.draw(st.sampled_from([1, 1, 2])),
        "context": data.draw(st.sampled_from([nullcontext, bf16])),
    }
    expected = train_under(plain, None, **how)
    assert torch.equal(train_under(model, director, **how), expected)
    assert_same_gradients(model, plain)
    assert_same_buffers(model, plain)
    assert director.evictor.alive == 0


class ByChance(Script):
    """Evicts each run or not, at each moment, as the dice say."""

    def __init__(self, *, observed: bool) -> None:
        super().__init__(observed=observed)
        self._dice = random.Random(0)

    def forward_ends(self) -> None:
        self._evict_some()

    def _at_backward_of(self, run: int) -> Callable[[Any, Any], None]:
        def watch(_: Any, out: Any) -> None:
            tensors = out if isinstance(out, tuple) else (out,)
            for node in nodes_of(t for t in tensors if isinstance(t, torch.Tensor)):
                node.register_prehook(lambda *_: self._evict_some())

        return watch

    def _evict_some(self) -> None:
        self.evictor.evict([run for run in self.evictor.frames if self._dice.random() < 0.2])


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("context", [nullcontext, bf16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "resnet", "swin", "encoder"])
def test_models_that_people_train_do_as_plain_whatever_is_evicted_when(
    name: str, context: Callable[[], Any], observed: bool
) -> None:
    model, batch = models.ALL[name]()
    plain, director = copy.deepcopy(model), ByChance(observed=observed)
    batch = without_cache(name, batch)
    attach(model, director)
    states = []
    for each in (plain, model):
        torch.manual_seed(1)
        for _ in range(4):
            director.step_begins()
            with context():
                loss = models.loss_of(each, batch)
            if each is model:
                director.forward_ends()
            loss.backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert director.evictor.evicted
    assert_same_gradients(model, plain)
    assert_same_buffers(model, plain)


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("evicted", [frozenset(), frozenset({1}), frozenset({0, 1, 2})])
def test_double_backward_is_that_of_plain(evicted: frozenset[int], observed: bool) -> None:
    director = Script(at_head=evicted, observed=observed)
    plain, model = stack(Normed, InPlace, Nested, director=director)
    first_step(model, torch.randn(2, 3, WIDTH), director)
    model.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    for each in (plain, model):
        torch.manual_seed(1)
        out = each(x)
        if each is model:
            director.forward_ends()
        (slope,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
    assert sorted(director.evictor.evicted) == sorted(evicted)
    assert_same_gradients(model, plain)


def test_what_is_evicted_is_recomputed_and_nothing_else_is() -> None:
    director = Script(at_head=frozenset({1}), at_entry={2: frozenset({0})})
    model = nn.Sequential(Counted(), Counted(), Counted(), Counted())
    attach(model, director, blocks=Counted)
    x = torch.randn(3, 4)
    first_step(model, x, director)
    before = [block.starts for block in model]
    out = model(x)
    director.forward_ends()
    out.sum().backward()
    assert [block.starts - was for block, was in zip(model, before, strict=True)] == [2, 2, 1, 1]
    assert director.evictor.evicted == [1, 0]


def test_a_run_whose_backward_has_begun_is_not_evicted() -> None:
    director = Script()
    model = nn.Sequential(Deep())
    attach(model, director, blocks=Deep)
    x = torch.randn(3, 4)
    first_step(model, x, director)
    told = []

    def look() -> None:
        frame = director.evictor.frame(0)
        told.append(frame is not None and frame.can_be_evicted)

    with heard(lambda stage: look()):
        loss = model(x).sum()
        look()
        loss.backward()
    assert told == [True] + [False] * Deep.stages


STAGES: list[Callable[[int], None]] = []
"""Called with the number of a stage when a backward has left it."""


@contextmanager
def heard(listener: Callable[[int], None]) -> Iterator[None]:
    """Call `listener` for each stage of a `Deep` block."""
    STAGES.append(listener)
    yield
    STAGES.clear()


class Tap(torch.autograd.Function):
    """Tells when the backward comes by; saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: int) -> torch.Tensor:
        ctx.stage = stage
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        for listener in STAGES:
            listener(ctx.stage)
        return grad, None


class Deep(nn.Module):
    """Stages that save one tensor each; tells when the backward has left one."""

    stages = 4

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for stage in range(self.stages):
            x = Tap.apply(x, stage).exp()
        return x


def kept_in(frame: Frame) -> list[torch.Tensor]:
    kept = (ref() for ref in frame.kept)
    return [each.tensor for each in kept if each is not None and each.tensor is not None]


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("retain", [False, True])
def test_kept_tensors_are_released_one_by_one_unless_the_graph_is_retained(
    retain: bool, observed: bool
) -> None:
    director = Script(observed=observed)
    model, x = nn.Sequential(Deep()), torch.randn(3, 4)
    attach(model, director, blocks=Deep)
    first_step(model, x, director)
    loss = model(x).sum()
    frame = director.evictor.frame(0)
    assert frame is not None
    known = {t.untyped_storage()._cdata for t in (x, model[0].scale)}
    storages = {
        t.untyped_storage()._cdata: StorageWeakRef(t.untyped_storage())
        for t in kept_in(frame)
        if t.untyped_storage()._cdata not in known
    }
    del frame
    assert len(storages) == Deep.stages
    live: list[int] = []
    with heard(lambda _: live.append(sum(not ref.expired() for ref in storages.values()))):
        loss.backward(retain_graph=retain)
    assert live == ([4, 4, 4, 4] if retain else [3, 2, 1, 0])
    assert sum(not ref.expired() for ref in storages.values()) == (4 if retain else 0)


@pytest.mark.parametrize("evicted", [False, True])
def test_a_second_backward_through_a_retained_graph_is_that_of_plain(evicted: bool) -> None:
    director = Script(at_entry={2: frozenset({0, 1})} if evicted else {})
    plain, model = stack(Layer, Normed, Nested, director=director)
    rngs = [train_under(plain, None, backwards=3), train_under(model, director, backwards=3)]
    assert torch.equal(*rngs)
    assert bool(director.evictor.evicted) == evicted
    assert_same_gradients(model, plain)


def test_without_retain_graph_a_second_backward_is_refused_as_in_plain_autograd() -> None:
    director = Script()
    plain, model = stack(Normed, Normed, director=director)
    x = torch.randn(2, 3, WIDTH)
    first_step(model, x, director)
    for each in (plain, model):
        loss = each(x).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


class EndsInExp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).exp()


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("retain", [False, True])
def test_an_in_place_change_of_a_kept_tensor_raises_as_in_plain_autograd(
    retain: bool, observed: bool
) -> None:
    director, plain = Script(observed=observed), nn.Sequential(EndsInExp())
    model, x = copy.deepcopy(plain), torch.randn(3, 4)
    attach(model, director, blocks=EndsInExp)
    first_step(model, x, director)
    for each in (plain, model):
        out = each(x)
        out.data.add_(0)  # unseen by autograd
        out.detach().add_(1)  # seen by autograd
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward(retain_graph=retain)


class Reads(torch.autograd.Function):
    """Reads what it has saved as often as it is told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, times: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.times = times
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        for _ in range(ctx.times):
            (x,) = ctx.saved_tensors
        return grad * x.cos(), None


class Reader(nn.Module):
    times = 1

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Reads.apply(self.linear(x).tanh(), self.times)


@pytest.mark.parametrize("observed", [False, True])
def test_a_kept_tensor_can_be_read_twice_in_one_backward(
    monkeypatch: pytest.MonkeyPatch, observed: bool
) -> None:
    director, plain = Script(observed=observed), nn.Sequential(Reader())
    model, x = copy.deepcopy(plain), torch.randn(3, 4)
    attach(model, director, blocks=Reader)
    first_step(model, x, director)
    monkeypatch.setattr(Reader, "times", 2)
    for each in (plain, model):
        each(x).sum().backward()
    assert_same_gradients(model, plain)


def test_looking_at_a_saved_tensor_outside_of_a_backward_releases_nothing() -> None:
    director, plain = Script(), nn.Sequential(EndsInExp())
    model, x = copy.deepcopy(plain), torch.randn(3, 4)
    attach(model, director, blocks=EndsInExp)
    first_step(model, x, director)
    plain(x).sum().backward()
    out = model(x)
    for _ in range(3):
        assert torch.equal(out.grad_fn._saved_result, out)
    out.sum().backward()
    assert_same_gradients(model, plain)


def test_a_kept_forward_that_raises_holds_only_what_the_surviving_graph_holds() -> None:
    early: list[torch.Tensor] = []

    def fails(x: torch.Tensor) -> torch.Tensor:
        early.append(x.exp())
        x.exp().tanh().sigmoid()
        raise KeyError("late")

    def alive_after(call: Callable[[torch.Tensor], Any]) -> int:
        x = torch.ones(1000, requires_grad=True)
        with Storages(x) as storages:
            with pytest.raises(KeyError):
                call(x)
            alive = storages.live()
        early.clear()
        return alive

    plain = alive_after(fails)
    assert alive_after(lambda x: Frame(fails, (x,), {}, keeping=True).forward((x,), {})) == plain


def test_a_forward_whose_backward_never_comes_leaves_nothing() -> None:
    director = Script()
    _, model = stack(Layer, Normed, Nested, director=director)
    x = torch.randn(2, 3, WIDTH)
    first_step(model, x, director)
    with Storages(model, x) as storages:
        for _ in range(3):
            director.step_begins()
            model(x)
            assert director.evictor.alive == 0
        assert storages.live() == 0


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("evicted", [frozenset(), frozenset({0, 1, 2})], ids=["kept", "evicted"])
@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
def test_an_exception_leaves_nothing_behind(
    phase: str, evicted: frozenset[int], observed: bool
) -> None:
    director = Script(at_head=evicted, observed=observed)
    model, x = nn.Sequential(Faulty(), Faulty(), Faulty()), torch.randn(3, 4)
    attach(model, director, blocks=Faulty)
    first_step(model, x, director)
    fails = phase != "recompute" or bool(evicted)
    tensors = live_tensors()
    with Storages(model, x) as storages:
        for model[1].phase in (phase, "none", phase):
            director.step_begins()
            expected = fails and model[1].phase != "none"
            with pytest.raises(ValueError, match="planned") if expected else nullcontext():
                out = model(x)
                director.forward_ends()
                out.sum().backward()
            out = None
            model.zero_grad()
            assert no_hooks()
            assert director.evictor.alive == 0
        assert storages.live() == 0
    assert live_tensors() <= tensors


LEFT = [0]
"""How often a `Hungry` block runs out of memory from now on."""


class Hungry(nn.Module):
    """Runs out of memory in its recompute, or in its forward, as often as it is told to."""

    in_recompute = True

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if LEFT[0] and (task_id() != -1) == self.in_recompute:
            LEFT[0] -= 1
            raise torch.OutOfMemoryError("planned")
        return self.head(x).sin()


class HungryInForward(Hungry):
    in_recompute = False


class Peckish(Hungry):
    """The same, but never out of memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)).sin()


def among(kind: type[Hungry], director: Script) -> tuple[nn.Sequential, nn.Sequential, Any]:
    """A plain model and its twin, which has run once; the second block of three is of this kind."""
    LEFT[0] = 0
    torch.manual_seed(0)
    plain, x = nn.Sequential(Peckish(), kind(), Peckish()), torch.randn(3, 4)
    model = copy.deepcopy(plain)
    attach(model, director, blocks=list("012"))
    first_step(model, x, director)
    model.load_state_dict(plain.state_dict())
    return plain, model, x


def one_step(model: nn.Module, x: torch.Tensor, director: Script | None = None) -> float:
    torch.manual_seed(1)
    out = model(x)
    if director is not None:
        director.forward_ends()
    out.sum().backward()
    return torch.rand(1).item()


@pytest.mark.parametrize("observed", [False, True])
def test_a_recompute_that_runs_out_of_memory_evicts_others_and_is_tried_again(
    observed: bool,
) -> None:
    director = Script(at_head=frozenset({1}), observed=observed)
    plain, model, x = among(Hungry, director)
    expected = one_step(plain, x)
    LEFT[0] = 1
    assert one_step(model, x, director) == expected
    assert LEFT[0] == 0
    assert director.evictor.asked == 1
    assert director.evictor.evicted == [1, 0]
    assert_same_gradients(model, plain)
    assert_same_buffers(model, plain)


def test_a_run_that_was_to_be_recomputed_evicts_others_as_well() -> None:
    director = Script(recomputed=frozenset({1}))
    plain, model, x = among(Hungry, director)
    one_step(plain, x)
    LEFT[0] = 1
    one_step(model, x, director)
    assert director.evictor.evicted == [0]
    assert_same_gradients(model, plain)


def test_a_recompute_is_tried_again_only_once() -> None:
    director = Script(at_head=frozenset({1}))
    _, model, x = among(Hungry, director)
    LEFT[0] = 3
    with pytest.raises(torch.OutOfMemoryError, match="planned"):
        one_step(model, x, director)
    assert LEFT[0] == 1
    assert director.evictor.asked == 1
    assert director.evictor.alive == 0
    assert no_hooks()


def test_a_recompute_is_not_tried_again_where_nothing_can_be_evicted() -> None:
    director = Script(at_head=frozenset({0, 1, 2}))
    _, model, x = among(Hungry, director)
    LEFT[0] = 2
    with pytest.raises(torch.OutOfMemoryError, match="planned"):
        one_step(model, x, director)
    assert LEFT[0] == 1
    assert director.evictor.asked == 1


def test_another_error_in_a_recompute_evicts_nothing() -> None:
    director = Script(at_head=frozenset({1}))
    model, x = nn.Sequential(Faulty(), Faulty(), Faulty()), torch.randn(3, 4)
    attach(model, director, blocks=Faulty)
    first_step(model, x, director)
    model[1].phase = "recompute"
    with pytest.raises(ValueError, match="planned"):
        one_step(model, x, director)
    assert director.evictor.asked == 0
    assert director.evictor.evicted == [1]


def test_an_error_that_is_being_handled_keeps_its_traceback() -> None:
    director = Script(at_head=frozenset({1}))
    _, model, x = among(Hungry, director)
    LEFT[0] = 1
    try:
        raise ValueError("somebody else's")
    except ValueError as error:
        before = traceback.format_exception(error)
        one_step(model, x, director)
        after = traceback.format_exception(error)
    assert after == before
    assert director.evictor.asked == 1


@pytest.mark.parametrize("observed", [False, True])
def test_a_kept_forward_that_runs_out_of_memory_evicts_others_and_is_recomputed(
    observed: bool,
) -> None:
    director = Script(observed=observed)
    plain, model, x = among(HungryInForward, director)
    expected = one_step(plain, x)
    LEFT[0] = 1
    assert one_step(model, x, director) == expected
    assert director.ran_out_in == [1]
    assert director.evictor.evicted == [0]
    assert director.evictor.frame(2) is None
    assert_same_gradients(model, plain)
    assert_same_buffers(model, plain)


class HungryCounter(HungryInForward):
    """Counts its calls, before it runs out of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x * self.calls)


def test_a_forward_with_side_effects_that_runs_out_of_memory_has_them_once() -> None:
    director = Script()
    plain, model, x = among(HungryCounter, director)
    plain[1].calls = model[1].calls
    expected = one_step(plain, x)
    LEFT[0] = 1
    assert one_step(model, x, director) == expected
    assert director.ran_out_in == [1]
    assert model[1].calls == plain[1].calls
    assert_same_gradients(model, plain)


def test_hooks_of_a_block_run_once_if_its_forward_runs_out_of_memory() -> None:
    director, calls = Script(), list[str]()
    _, model, x = among(HungryInForward, director)
    model[1].register_forward_pre_hook(lambda *_: calls.append("before"))
    model[1].register_forward_hook(lambda *_: calls.append("after"))
    LEFT[0] = 1
    one_step(model, x, director)
    assert director.ran_out_in == [1]
    assert calls == ["before", "after"]


@pytest.mark.parametrize("observed", [False, True])
def test_a_forward_to_be_recomputed_that_runs_out_of_memory_evicts_others_and_runs_again(
    observed: bool,
) -> None:
    director = Script(recomputed=frozenset({1}), observed=observed)
    plain, model, x = among(HungryInForward, director)
    expected = one_step(plain, x)
    LEFT[0] = 1
    assert one_step(model, x, director) == expected
    assert director.ran_out_in == [1]
    assert director.evictor.evicted == [0]
    assert_same_gradients(model, plain)
    assert_same_buffers(model, plain)


def test_a_forward_to_be_recomputed_fails_where_nothing_can_be_evicted() -> None:
    director = Script(recomputed=frozenset({0, 1, 2}))
    _, model, x = among(HungryInForward, director)
    LEFT[0] = 1
    with pytest.raises(torch.OutOfMemoryError):
        one_step(model, x, director)
    assert director.ran_out_in == []


class Fickle(nn.Module):
    """Saves another tensor in its recompute than in its forward, once it is told to."""

    fickle = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).sin()
        return x[:1].exp() if self.fickle and task_id() != -1 else x.exp()


@pytest.mark.parametrize("evicted", [False, True])
def test_a_block_that_runs_otherwise_the_second_time_is_named_if_it_was_evicted(
    monkeypatch: pytest.MonkeyPatch, evicted: bool
) -> None:
    director = Script(at_head=frozenset({0} if evicted else ()))
    model, x = nn.Sequential(Fickle()), torch.randn(3, 4)
    attach(model, director, blocks=Fickle)
    first_step(model, x, director)
    monkeypatch.setattr(Fickle, "fickle", True)
    with pytest.raises(RecomputeError, match="block '0'") if evicted else nullcontext():
        one_step(model, x, director)
    assert director.evictor.alive == 0
