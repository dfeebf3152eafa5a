"""Blocks that change, or start to have side effects, long after they were tried."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm as older_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import mimose
from compare import assert_same_buffers, assert_same_gradients
from loops import block_interceptors
from mimose.bench.measuring import LatestStep
from mimose.errors import ConflictError, MimoseWarning, RecomputeError
from parts import Observations

WIDTH, STEPS = 8, 5
Change = Callable[[Any], None]


class Notes:
    def __init__(self) -> None:
        self.runs = 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between: nn.Module = nn.Dropout(0.0)
        self.on, self.runs, self.list, self.notes = False, 0, [0], Notes()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("large", torch.zeros(1 << 15))
        self.tensor = torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x) if self.on else x
        return x + self.second(torch.tanh(self.between(self.first(x))))

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def switch_on(self) -> None:
        self.on = True


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def losses_of(model: nn.Module, change: Change, passes: int = 1) -> list[float]:
    losses = []
    for step in range(STEPS):
        if step == 2:
            torch.manual_seed(0)
            change(model)
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = torch.stack([model(x + i).pow(2).mean() for i in range(passes)]).sum()
        loss.backward()
        losses.append(loss.item())
    return losses


def assert_as_plain(model: Net, change: Change, passes: int = 1) -> list[bool | None]:
    """Assert that it trains as the plain model; return whether each block can be recomputed."""
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        losses = losses_of(model, change, passes)
        trusted = [interceptor.trusted for interceptor in block_interceptors(model)]
    assert losses == losses_of(plain, change, passes)
    assert_same_gradients(model, plain)
    assert_same_buffers(model, plain)
    return trusted


def puts_in_batch_norm(model: Any) -> None:
    for layer in model.layers:
        layer.between = nn.BatchNorm1d(WIDTH)


def adds_spectral_norm(model: Any) -> None:
    for layer in model.layers:
        spectral_norm(layer.first)


def adds_older_spectral_norm(model: Any) -> None:
    for layer in model.layers:
        older_spectral_norm(layer.first)


def adds_weight_norm(model: Any) -> None:
    for layer in model.layers:
        weight_norm(layer.first)


def prepares_quantisation(model: Any) -> None:
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    torch.ao.quantization.prepare_qat(model, inplace=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "change",
    [
        puts_in_batch_norm,
        adds_spectral_norm,
        adds_older_spectral_norm,
        adds_weight_norm,
        prepares_quantisation,
    ],
)
def test_a_block_with_replaced_modules_is_tried_again(change: Change) -> None:
    assert assert_as_plain(Net(), change) == [True] * 3


def test_the_peak_of_a_step_in_which_blocks_are_tried_again_is_no_measure() -> None:
    model, x = Net(), torch.randn(5, WIDTH)
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all") as handle:
        seen, latest, comparable = Observations(), LatestStep(), []
        handle.subscribe(seen)
        handle.subscribe(latest)
        for step in range(8):
            if step == 6:
                puts_in_batch_norm(model)
            model(x).sum().backward()
            assert latest.record is not None
            comparable.append(latest.record.comparable)
    assert comparable == 2 * [False] + 4 * [True] + 2 * [False]
    assert [observation.provisional for observation in seen.all] == [True, False] * 2


def test_batch_norms_that_are_made_synchronous_are_updated_once() -> None:
    model = Net()
    puts_in_batch_norm(model)
    assert_as_plain(model, lambda m: nn.SyncBatchNorm.convert_sync_batchnorm(m))


@pytest.mark.parametrize("when", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_added_after_the_trial_is_called_once_per_run(when: str) -> None:
    calls: list[int] = []

    def add_hook(model: Any) -> None:
        for layer in model.layers:
            getattr(layer.first, when)(lambda *call: calls.append(1))

    assert_as_plain(Net(), add_hook)
    assert len(calls) == 2 * 3 * 3  # both models, three layers, the last three steps


class MovesABuffer(Block):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return x * (1 + self.mean.clone())


class ReplacesABuffer(Block):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        return x * (1 + self.mean)


class MovesATensor(Block):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.tensor += x.detach().mean(0)
        return x * (1 + self.tensor.clone())


class CountsItsRuns(Block):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x * (1 + self.runs)


class AddsAnAttribute(Block):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.more = getattr(self, "more", 0) + 1
        return x * (1 + self.more)


class Appends(Block):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.list.append(1)
        return x * len(self.list)


class AppendsToADeque(Block):
    def __init__(self) -> None:
        super().__init__()
        self.queue = deque([0], maxlen=4)

    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.queue.append(len(self.queue))
        return x * sum(self.queue)


class AppendsToAListInATuple(Block):
    def __init__(self) -> None:
        super().__init__()
        self.lists = ([0],)

    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.lists[0].append(len(self.lists[0]))
        return x * sum(self.lists[0])


class AppendsToALaterList(Block):
    def __init__(self) -> None:
        super().__init__()
        self.losses: Any = None

    def switch_on(self) -> None:
        self.on, self.losses = True, []

    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.losses.append(len(self.losses))
        return x * (1 + sum(self.losses))


class TakesNotes(Block):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.notes.runs += 1
        return x * self.notes.runs


def switch_on(model: Any) -> None:
    for layer in model.layers:
        layer.switch_on()


@pytest.mark.parametrize(
    "kind",
    [
        MovesABuffer,
        ReplacesABuffer,
        MovesATensor,
        CountsItsRuns,
        AddsAnAttribute,
        Appends,
        AppendsToADeque,
        AppendsToAListInATuple,
        AppendsToALaterList,
        TakesNotes,
    ],
)
def test_the_recompute_gets_the_old_value_of_what_a_block_starts_to_change(
    kind: type[nn.Module],
) -> None:
    assert assert_as_plain(Net(kind), switch_on) == [True] * 3


class HandsOutNotes(Net):
    """Gives each block a new object in each forward, with what the former one held."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            layer.notes = copy.copy(layer.notes)
        return super().forward(x)


@pytest.mark.parametrize("since", ["the first step", "a later one"])
def test_objects_that_a_model_replaces_in_each_forward_are_followed(since: str) -> None:
    model = HandsOutNotes(TakesNotes)
    if since == "the first step":
        switch_on(model)
    assert assert_as_plain(model, switch_on) == [True] * 3


@pytest.mark.parametrize("kind", [CountsItsRuns, AddsAnAttribute, Appends, TakesNotes])
def test_a_forward_that_is_only_looked_at_leaves_no_trace(kind: type[nn.Module]) -> None:
    model = Net(kind)
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, "1GiB", collector="shuttle"):
        losses = losses_of(model, switch_on)
    assert losses == losses_of(plain, switch_on)
    assert_same_gradients(model, plain)


def halves(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor | None:
    return out / 2 if module.active else None


def halves_in_place(module: Any, args: Any, out: torch.Tensor) -> None:
    if module.active:
        out.mul_(0.5)


def halves_before(module: Any, args: tuple[torch.Tensor]) -> torch.Tensor | None:
    return args[0] / 2 if module.active else None


@pytest.mark.parametrize("since", ["the first step", "a later one"])
@pytest.mark.parametrize("hook", [halves, halves_in_place, halves_before])
def test_recomputes_call_a_hook_from_the_forward_on_in_which_it_acts(
    hook: Callable[..., Any], since: str
) -> None:
    def activate(model: Any) -> None:
        for layer in model.layers:
            layer.first.active = True

    model = Net()
    for layer in model.layers:
        layer.first.active = since == "the first step"
        if hook is halves_before:
            layer.first.register_forward_pre_hook(hook)
        else:
            layer.first.register_forward_hook(hook)
    assert assert_as_plain(model, activate) == [True] * 3


def sets_a_scale(module: Any, args: Any) -> None:
    module.scale = 0.5 if module.active else 1.0


class IsScaled(nn.Linear):
    active, scale = False, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def test_recomputes_call_a_pre_hook_that_begins_to_set_an_attribute() -> None:
    def activate(model: Any) -> None:
        for layer in model.layers:
            layer.first.active = True

    model = Net()
    for layer in model.layers:
        layer.first = IsScaled(WIDTH, WIDTH)
        layer.first.scale = 1.0
        layer.first.register_forward_pre_hook(sets_a_scale)
    assert_as_plain(model, activate)


def test_a_checkpoint_around_blocks_that_begins_later_is_refused_by_name() -> None:
    model = Net()
    x = torch.randn(5, WIDTH, requires_grad=True)
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        for _ in range(3):
            model(x).sum().backward()
        with pytest.raises(ConflictError, match=r"torch.utils.checkpoint"):
            checkpoint(nn.Sequential(*model.layers), x, use_reentrant=False).sum().backward()


class AddsAHook(Block):
    """Adds a hook to a module with a hook, and removes its first hook: each once."""

    def __init__(self) -> None:
        super().__init__()
        self.first.active = True
        self.first.register_forward_hook(lambda *_: None)
        handle = self.first.register_forward_hook(lambda *_: handle.remove())

    def before(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.first._forward_hooks) == 1:
            self.first.register_forward_hook(halves)
        return x


def test_hooks_that_are_added_and_removed_in_a_forward_stay_so() -> None:
    torch.manual_seed(0)
    model, plain = Net(AddsAHook), Net(AddsAHook)
    plain.load_state_dict(model.state_dict())
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        losses = losses_of(model, switch_on)
    assert losses == losses_of(plain, switch_on)
    assert_same_gradients(model, plain)
    assert [len(layer.first._forward_hooks) for layer in model.layers] == [2] * 3


class MovesALargeBuffer(Block):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.large.add_(1)
        return x * (1 + self.large[0].clone())


class FillsALargeBuffer(Block):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        self.large[1000:].fill_(1)
        return x * (1 + self.large[1000].clone())


def test_a_large_buffer_with_unknown_old_value_raises_before_a_gradient_is_wrong() -> None:
    with pytest.raises(RecomputeError, match=r"'layers.0' has begun to change 'large'.*exclude="):
        assert_as_plain(Net(MovesALargeBuffer), switch_on)


class DecaysItsWeight(Block):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.first.weight.mul_(0.9)
        return x


def test_a_block_that_begins_to_change_its_weight_raises_before_a_gradient_is_wrong() -> None:
    with pytest.raises(
        RecomputeError, match=r"begun to change or replace its parameter 'first.weight'"
    ):
        assert_as_plain(Net(DecaysItsWeight), switch_on)


def test_a_large_buffer_may_be_filled_with_the_same_values_each_time() -> None:
    assert assert_as_plain(Net(FillsALargeBuffer), switch_on) == [True] * 3


class CarriesAState(Block):
    """Its state has a graph that leads into the previous run."""

    state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.state is not None:
            x = x * torch.sigmoid(self.state)
        self.state = torch.tanh(x)
        return super().forward(x)


class CarriesALargeState(CarriesAState):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.repeat(8000, 1))[:5]


class Recurrent(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.runs % 2 == 0:  # two passes have one backward
            for layer in self.layers:
                layer.state = None
        self.runs += 1
        return super().forward(x)

    runs = 0


def test_a_state_with_its_graph_is_that_of_the_forward() -> None:
    assert assert_as_plain(Recurrent(CarriesAState), lambda m: None, passes=2) == [True] * 3


def test_a_block_that_reads_a_state_too_large_to_copy_is_kept() -> None:
    with pytest.warns(MimoseWarning, match="cannot be recomputed: its outputs have other values"):
        trusted = assert_as_plain(Recurrent(CarriesALargeState), lambda m: None, passes=2)
    assert trusted[1:] == [False] * 2  # the first one's state has no graph


class TakesAPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.pair: tuple[torch.Tensor, float] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        return x if self.pair is None else x + self.pair[0] * self.pair[1]


class SetsPairs(Net):
    """Sets an attribute of its blocks for one forward."""

    def __init__(self) -> None:
        super().__init__(TakesAPair)
        self.made: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            layer.pair = x * 2, 0.5
            self.made.append(weakref.ref(layer.pair[0]))
            x = layer(x)
            layer.pair = None
        return x


def test_what_a_forward_found_in_attributes_is_freed_with_its_graph() -> None:
    model = SetsPairs()
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        for _ in range(STEPS):
            model.made.clear()
            model(torch.randn(5, WIDTH)).sum().backward()
        gc.collect()
        assert [ref() for ref in model.made] == [None] * 3
