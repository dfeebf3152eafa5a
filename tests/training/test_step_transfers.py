"""Every mixture of options, whatever is released and fetched when: training is that of plain."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mimose
import models
from chains import steady
from compare import assert_same_buffers, assert_same_gradients, live_tensors, no_hooks
from loops import bert, labelled, peak_of_plain, peak_of_recomputing
from mimose.costs import Option, Profile, Run, Transfer
from mimose.execution import Frame, run_saving_on_host
from mimose.interception import Attachment, Directive, find_blocks
from mimose.memory import HostMemory
from mimose.planning import Plan, Planner
from mimose.training import StepRecord, Subscriber
from mimose.training.transfers import StepTransfers
from parts import WIDTH, Faulty, InPlace, Layer, Nested, Normed, bf16, train_under, without_cache

CPU = torch.device("cpu")


class Mixture:
    """A director: each run as drawn, its transfers released and fetched when drawn."""

    def __init__(self, draw: random.Random, options: Sequence[Option] = tuple(Option)) -> None:
        self.host = HostMemory(CPU, 1 << 28)
        self.directed: set[Option] = set()
        self._draw, self._options = draw, options
        self._runs: list[Run] = []
        self._seen: list[Run] = []
        self._transfers: StepTransfers | None = None

    def step_begins(self) -> None:
        """As many runs are expected as the last step had."""
        self._runs, self._seen = self._seen or self._runs, []
        self._chosen = {run: self._draw.choice(self._options) for run in self._runs}
        last = len(self._runs)
        self._transfers = StepTransfers(
            [
                Transfer(k, 0, self._draw.randint(k + 1, last), self._draw.randint(k, last - 1))
                for k, option in enumerate(self._chosen.values())
                if option.moves
            ],
            self._runs,
            host=self.host,
        )

    def forward_ends(self) -> None:
        if self._transfers is not None:
            self._transfers.after_last_forward()

    def direct(self, block: int, args: Any, kwargs: Any) -> Directive:
        nth = sum(run[0] == block for run in self._seen)
        run = block, nth
        self._seen.append(run)
        option = self._chosen.get(run, Option.KEEP)
        self.directed.add(option)
        assert self._transfers is not None
        mover = self._transfers.before_forward(run, args, kwargs)
        evictor = self if option is Option.KEEP and self._draw.random() < 0.5 else None
        after = self._transfers.watch(run)
        return Directive(option, len(self._seen), evictor=evictor, after=after, mover=mover)

    def hold(self, run: int, frame: Frame) -> None:
        """Evicts some of what may be evicted, at once."""
        if self._draw.random() < 0.5:
            frame.evict()

    def make_room(self) -> bool:
        return False

    def ran_out(self, block: int) -> None:
        raise AssertionError("no block is guarded here")


KINDS: list[Callable[[], nn.Module]] = [Layer, Normed, InPlace, Nested]


def assert_nothing_is_left(director: Mixture) -> None:
    gc.collect()
    assert director.host.arena.in_use_bytes == 0
    assert no_hooks()


@steady
@given(data=st.data())
def test_gradients_buffers_and_rng_are_those_of_plain_for_every_mixture(
    data: st.DataObject,
) -> None:
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5))
    director = Mixture(random.Random(data.draw(st.integers(0, 1 << 30))))
    torch.manual_seed(0)
    plain = nn.Sequential(*(kind() for kind in kinds))
    model = copy.deepcopy(plain)
    Attachment(model, find_blocks(model, blocks=[str(i) for i in range(len(kinds))]), director)
    how: dict[str, Any] = {
        "backwards": data.draw(st.sampled_from([1, 1, 2])),
        "context": data.draw(st.sampled_from([nullcontext, bf16])),
    }
    expected = train_under(plain, None, steps=4, **how)
    assert torch.equal(train_under(model, director, steps=4, **how), expected)
    assert_same_gradients(model, plain)
    assert_same_buffers(model, plain)
    assert_nothing_is_left(director)


@pytest.mark.parametrize("context", [nullcontext, bf16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", sorted(models.ALL))
def test_models_that_people_train_do_as_plain_under_every_mixture(
    name: str, context: Callable[[], Any]
) -> None:
    model, batch = models.ALL[name]()
    batch = without_cache(name, batch)
    plain, director = copy.deepcopy(model), Mixture(random.Random(0))
    Attachment(model, find_blocks(model), director)
    states = []
    for each in (plain, model):
        torch.manual_seed(1)
        for _ in range(6):
            director.step_begins()
            with context():
                loss = models.loss_of(each, batch)
            director.forward_ends()
            loss.backward()
            del loss
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert director.host.moved_bytes > 0
    assert director.directed == set(Option)
    assert_same_gradients(model, plain)
    assert_same_buffers(model, plain)
    assert_nothing_is_left(director)


class InTurn(Mixture):
    """All runs of a step have the same option, another one in each step."""

    def __init__(self, *options: Option) -> None:
        super().__init__(random.Random(0))
        self._in_turn = iter(options)

    def step_begins(self) -> None:
        self._options = (next(self._in_turn),)
        super().step_begins()


class Differentiates(Normed):
    """After some runs, its forward follows a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        out = super().forward(x)
        if self.runs < 4:
            return out
        return out - torch.func.grad(lambda t: t.tanh().mean())(out)


def test_a_block_that_begins_to_differentiate_while_it_is_saved_on_the_host_is_kept() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Differentiates(), Differentiates())
    model = copy.deepcopy(plain)
    order = Option.KEEP, Option.RECOMPUTE, *[Option.SAVE_ON_HOST] * 4
    director = InTurn(*order)
    Attachment(model, find_blocks(model, blocks=Differentiates), director)
    expected = train_under(plain, None, steps=6)
    with pytest.warns(mimose.MimoseWarning, match=r"cannot be recomputed: it calls torch\.func"):
        assert torch.equal(train_under(model, director, steps=6), expected)
    assert_same_gradients(model, plain)
    assert_same_buffers(model, plain)
    assert director.host.moved_bytes > 0
    assert_nothing_is_left(director)


class Breaks(nn.Module):
    """Compiled, it is two graphs with plain Python in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        return x + self.second(x).sin()


@pytest.mark.parametrize("kind", [Layer, Breaks])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_blocks_do_as_plain_compiled_ones_under_every_mixture(
    backend: str, kind: Callable[[], nn.Module]
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, director = nn.Sequential(*(kind() for _ in range(4))), Mixture(random.Random(1))
    model = copy.deepcopy(plain)
    for each in (*plain, *model):
        each.compile(backend=backend)
    Attachment(model, find_blocks(model, blocks=["0", "1", "2", "3"]), director)
    assert torch.equal(train_under(model, director, steps=4), train_under(plain, None, steps=4))
    assert director.directed == set(Option)
    assert director.host.moved_bytes > 0
    assert_same_gradients(model, plain)
    assert_nothing_is_left(director)


@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
@pytest.mark.parametrize("option", [Option.SAVE_ON_HOST, Option.RECOMPUTE_FROM_HOST])
def test_an_exception_leaves_nothing_behind(option: Option, phase: str) -> None:
    director = Mixture(random.Random(0), [option])
    model = nn.Sequential(Faulty(), Faulty(), Faulty())
    Attachment(model, find_blocks(model, blocks=Faulty), director)
    x = torch.randn(3, 4)
    for _ in range(2):
        director.step_begins()
        model(x).sum().backward()
    model.zero_grad()
    before = live_tensors()
    model[1].phase = phase
    director.step_begins()
    fails = not (phase == "recompute" and option is Option.SAVE_ON_HOST)  # it does not recompute
    with pytest.raises(ValueError, match="planned") if fails else nullcontext():
        model(x).sum().backward()
    model.zero_grad()
    model[1].phase = "none"
    assert live_tensors() <= before
    assert_nothing_is_left(director)
    director.step_begins()
    model(x).sum().backward()


class AsDrawn(Planner):
    """Chooses at random."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        choices = [self._draw.choice(list(Option)) for _ in profile.runs]
        return Plan.of(profile, choices, available_bytes)


class Peaks(Subscriber):
    """Predicted and real peaks of planned steps, with what their plans moved."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def step_over(self, record: StepRecord) -> None:
        real, predicted = record.real_peak_bytes, record.predicted_peak_bytes
        if record.plan is not None and not record.observed and real and predicted:
            self.seen.append((predicted, real, record.plan.moved_bytes))


@pytest.mark.filterwarnings("ignore:.*raise memory_budget")
@pytest.mark.parametrize("seed", range(2))
def test_predicted_peaks_are_the_real_ones_whatever_moves(seed: int) -> None:
    torch.manual_seed(0)
    model, peaks = bert(), Peaks()
    batches = labelled([40, 90, 140, 60, 110, 130, 75] * 3)
    budget = (peak_of_plain(model, batches) + peak_of_recomputing(model, batches)) // 2
    planner = AsDrawn(random.Random(seed))
    with mimose.auto_checkpoint(model, budget, host_memory="1GiB", planner=planner) as handle:
        handle.subscribe(peaks)
        for batch in batches:
            model(**batch).loss.backward()
            model.zero_grad()
        assert handle.stats().moved_bytes >= sum(moved for *_, moved in peaks.seen)
    assert sum(moved > 0 for *_, moved in peaks.seen) > 5
    assert all(predicted == pytest.approx(real, rel=0.003) for predicted, real, _ in peaks.seen)


def test_moved_tensors_are_released_one_by_one_in_the_backward() -> None:
    """As kept ones are, or the peak of a backward would be higher."""
    host, live = HostMemory(CPU, 1 << 20), []

    class Tap(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            live.append(host.arena.in_use_bytes)
            return grad

    def block(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = Tap.apply(x).exp()
        return x + 0

    out, moved = run_saving_on_host(block, (torch.randn(128, requires_grad=True),), {}, host)
    assert len(moved) == 3
    del moved
    out.sum().backward()
    assert live == [1024, 512, 0]
