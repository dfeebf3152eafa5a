"""Side effects of a forward happen once, as in plain training, recomputed or not."""

from __future__ import annotations

import copy
import random
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, vmap
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import mimose
from compare import assert_same_buffers, assert_same_gradients
from loops import counted
from mimose.errors import MimoseWarning
from mimose.execution.side_effects import AttributeSnapshot, FirstRunObserver, SideEffects

STEPS = 4
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.second(torch.sin(self.first(x)))


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x  # type: ignore[no-any-return]


class StoresALoss(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        self.loss = y.pow(2).mean()
        return y


class AppendsALoss(Block):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        self.losses.append(y.pow(2).mean())
        return y


class Collector:
    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.runs = 0


class HoldsACollector(Block):
    def __init__(self) -> None:
        super().__init__()
        self.inner = [Collector()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        self.inner[0].runs += 1
        self.inner[0].losses.append(y.pow(2).mean())
        return y * self.inner[0].runs


class HasAState(Block):
    state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x if self.state is None else x + 0.1 * self.state)
        self.state = y.detach()
        return y


class CountsItsCalls(Block):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = super().forward(x)
        return y * (1 + 0.1 * self.calls)


class PassesADictOn(Block):
    def forward(self, x: Any) -> Any:
        state = x if isinstance(x, OrderedDict) else OrderedDict(x=x)
        state["x"] = super().forward(state["x"])
        return state


def stored(model: Net) -> torch.Tensor:
    return sum((layer.loss for layer in model.layers), torch.zeros(()))  # type: ignore[misc]


def appended(model: Net) -> torch.Tensor:
    losses = [loss for layer in model.layers for loss in layer.losses]  # type: ignore[union-attr]
    for layer in model.layers:
        layer.losses = []
    return torch.stack(losses).sum()


def collected(model: Net) -> torch.Tensor:
    collectors = [layer.inner[0] for layer in model.layers]  # type: ignore[index]
    losses = [loss for collector in collectors for loss in collector.losses]
    for collector in collectors:
        collector.losses = []
    return torch.stack(losses).sum()


def nothing(model: Net) -> torch.Tensor:
    return torch.zeros(())


def steps_of(model: nn.Module, more: Callable[[Any], torch.Tensor] = nothing) -> list[float]:
    """The losses; gradients accumulate on the model."""
    losses = []
    for step in range(STEPS):
        out = model(torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step)))
        out = out["x"] if isinstance(out, dict) else out
        loss = out.pow(2).mean() + more(model)
        loss.backward()
        losses.append(loss.item())
    return losses


def assert_as_plain(model: nn.Module, more: Callable[[Any], torch.Tensor] = nothing) -> None:
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        losses = steps_of(model, more)
    assert losses == steps_of(plain, more)
    assert_same_gradients(model, plain)
    assert_same_buffers(model, plain)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (StoresALoss, stored),
        (AppendsALoss, appended),
        (HoldsACollector, collected),
        (HasAState, nothing),
        (CountsItsCalls, nothing),
        (PassesADictOn, nothing),
    ],
)
def test_side_effects_happen_once_and_recomputes_start_from_the_earlier_state(
    kind: type[nn.Module], more: Callable[[Any], torch.Tensor]
) -> None:
    assert_as_plain(Net(kind), more)


def test_a_stored_loss_holds_no_rebuilt_activations() -> None:
    model, x = Net(StoresALoss), torch.randn(1000, WIDTH)
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"), counted() as counter:
        for _ in range(STEPS):
            (model(x).mean() + stored(model)).backward()
            model.zero_grad()
        before = counter.in_use
    assert before < x.nbytes * 2  # the input alone, not three blocks of four tensors each


@pytest.mark.parametrize("when", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_that_only_observe_are_called_once_a_step(when: str) -> None:
    features: list[torch.Tensor] = []

    def gathered(model: Net) -> torch.Tensor:
        total = torch.stack([feature.pow(2).mean() for feature in features]).sum()
        seen.append(len(features))
        features.clear()
        return total

    seen: list[int] = []
    model = Net()
    for layer in model.layers:
        getattr(layer.first, when)(lambda *call: features.append(as_tensor(call[-1])))
    assert_as_plain(model, gathered)
    assert seen == [3] * 2 * STEPS


def as_tensor(given: Any) -> torch.Tensor:
    return given[0] if isinstance(given, tuple) else given  # type: ignore[no-any-return]


def llama(layers: int, **options: Any) -> nn.Module:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        **options,
    )
    return LlamaForCausalLM(config).train()


class Scaled(Block):
    scale: Any = 1.0
    mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale if self.mask is None else x * self.mask
        return super().forward(x)  # type: ignore[no-any-return]


class SetsAScale(Net):
    """Sets an attribute of its blocks for a forward, and puts the former one back."""

    def __init__(self) -> None:
        super().__init__(Scaled)
        for layer in self.layers:
            layer.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            layer.scale = 0.5
        try:
            return super().forward(x)
        finally:
            for layer in self.layers:
                layer.scale = 1.0


class ClearsAMask(Net):
    """Gives its blocks a mask that is gone after the forward."""

    def __init__(self) -> None:
        super().__init__(Scaled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            layer.mask = (x.detach() > 0).float()
        out = super().forward(x)
        for layer in self.layers:
            layer.mask = None
        return out


@pytest.mark.parametrize("kind", [SetsAScale, ClearsAMask])
def test_a_recompute_finds_the_attributes_that_the_model_had_set_for_its_forward(
    kind: Callable[[], Net],
) -> None:
    assert_as_plain(kind())


def test_a_recompute_finds_the_attributes_of_its_own_pass() -> None:
    model = Net(Scaled)
    plain = copy.deepcopy(model)

    def two_passes(model: Net) -> torch.Tensor:
        losses = []
        for scale in (0.5, 2.0):
            for layer in model.layers:
                layer.scale = scale
            losses.append(model(torch.full((2, WIDTH), 0.1)).pow(2).mean())
        return sum(losses)  # type: ignore[return-value]

    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        for _ in range(STEPS):
            two_passes(model).backward()
            two_passes(plain).backward()
    assert_same_gradients(model, plain)


class Stores(Net):
    """Stores the detached output of each block on it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            layer.feature = x.detach()
        return x


def test_large_detached_outputs_of_earlier_steps_are_not_held() -> None:
    model, x, held = Stores(), torch.ones(1 << 16, WIDTH), []
    earlier: list[weakref.ref[torch.Tensor]] = []
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        for _ in range(5):
            loss = model(x).pow(2).mean()
            held.append(sum(ref() is not None for ref in earlier))
            loss.backward()
            del loss
            earlier = [weakref.ref(layer.feature) for layer in model.layers]
    assert held[-2:] == [0, 0]


def test_outputs_that_the_model_stores_on_blocks_are_not_held_beyond_their_step() -> None:
    model = Net()
    stored: list[weakref.ref[torch.Tensor]] = []

    def store(layer: nn.Module, _: Any, out: torch.Tensor) -> None:
        layer.feature = out
        stored.append(weakref.ref(out))

    for layer in model.layers:
        layer.register_forward_hook(store)
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        for _ in range(5):
            loss = model(torch.ones(5, WIDTH)).pow(2).mean()
            held = [ref for ref in stored if ref() is not None]
            assert len(held) <= 3, "outputs of earlier steps are held"
            loss.backward()
            del loss
        for _ in range(4):  # without a backward
            model(torch.ones(5, WIDTH))
        assert sum(ref() is not None for ref in stored) <= 3


class Mapping(dict[str, int]):
    """A mapping of the user's own."""


class CountsIn(Block):
    """Counts its forwards in a value that it holds."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.state, tuple):
            self.state[0].add_(1)
        elif isinstance(self.state, dict):
            self.state["runs"] += 1
        else:
            self.state.runs += 1
        return super().forward(x)  # type: ignore[no-any-return]


class CountsAmongManyModules(CountsIn):
    def __init__(self) -> None:
        super().__init__(Collector())
        self.others = nn.ModuleList(nn.ReLU() for _ in range(250))


COUNTS: dict[str, tuple[Callable[[], CountsIn], Callable[[Any], float]]] = {
    "tuple": (lambda: CountsIn((torch.zeros(1),)), lambda state: float(state[0])),
    "subclass": (lambda: CountsIn(Mapping(runs=0)), lambda state: state["runs"]),
    "many modules": (CountsAmongManyModules, lambda state: state.runs),
}


@pytest.mark.parametrize("where", COUNTS)
def test_state_is_advanced_once_a_step_wherever_a_block_holds_it(where: str) -> None:
    make, count = COUNTS[where]
    model = Net(make)  # type: ignore[arg-type]
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        steps_of(model)
    assert [count(layer.state) for layer in model.layers] == [STEPS] * 3


class Drops(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        return nn.functional.dropout(y, 0.5)


def test_a_batched_backward_runs_through_recomputed_dropout() -> None:
    model, gradients = Net(Drops), []
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        for one in (model, plain, model, plain):
            torch.manual_seed(1)
            out, parameters = one(torch.ones(3, WIDTH)).mean(1), list(one.parameters())
            gradients.append(
                torch.autograd.grad(out, parameters, torch.eye(3), is_grads_batched=True)
            )
    for ours, theirs in zip(gradients[::2], gradients[1::2], strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_forward_mode_derivatives_are_not_planned() -> None:
    model, x = Net(), torch.randn(2, WIDTH)
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        steps_of(model)
        steps_of(plain)
        for one in (model, plain):
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(x, torch.ones_like(x))
                out, tangent = forward_ad.unpack_dual(one(dual))
            (out.pow(2).mean() + tangent.pow(2).mean()).backward()
    assert_same_gradients(model, plain)


def test_attentions_that_transformers_collects_are_those_of_plain_training() -> None:
    model, tokens = llama(3, attn_implementation="eager"), torch.randint(0, 50, (2, 6))
    plain = copy.deepcopy(model)
    asked = {"input_ids": tokens, "labels": tokens, "use_cache": False, "output_attentions": True}
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        for _ in range(STEPS):
            ours, expected = model(**asked), plain(**asked)
            assert len(ours.attentions) == len(expected.attentions) == 3
            (ours.loss + ours.attentions[1].pow(2).sum()).backward()
            (expected.loss + expected.attentions[1].pow(2).sum()).backward()
    assert_same_gradients(model, plain)


def test_a_cache_passed_as_an_argument_is_used() -> None:
    model, tokens = llama(2), torch.randint(0, 50, (2, 6))

    def tuned() -> tuple[torch.Tensor, torch.Tensor | None]:
        prefix = torch.linspace(-1, 1, 2 * 2 * 3 * 8).view(2, 2, 3, 8).requires_grad_()
        past = DynamicCache()
        for layer in range(2):
            past.update(prefix, prefix, layer)
        loss = model(input_ids=tokens, labels=tokens, past_key_values=past).loss
        loss.backward()
        return loss, prefix.grad

    expected, gradient = tuned()
    assert gradient is not None
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        for _ in range(2):
            loss, found = tuned()
            assert found is not None
            assert torch.equal(loss, expected)
            assert torch.equal(found, gradient)


def test_hooks_that_change_an_output_are_part_of_the_block() -> None:
    model = Net()
    for layer in model.layers:
        layer.first.register_forward_hook(lambda *call: 2 * call[-1])
    assert_as_plain(model)


def test_a_recompute_uses_the_swapped_parameters_of_its_forward() -> None:
    model = Net()
    scale = torch.tensor(0.5, requires_grad=True)

    def loss_of() -> torch.Tensor:
        fast = {name: scale * p for name, p in model.named_parameters()}
        loss: torch.Tensor = functional_call(model, fast, (torch.ones(2, WIDTH),)).pow(2).mean()
        return loss

    (expected,) = torch.autograd.grad(loss_of(), scale)
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        model(torch.ones(2, WIDTH)).sum().backward()
        (gradient,) = torch.autograd.grad(loss_of(), scale)
    assert torch.equal(gradient, expected)


def test_transforms_of_a_model_are_not_planned() -> None:
    model, x = Net(), torch.randn(3, 2, WIDTH)
    expected = vmap(model)(x)
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        assert torch.equal(vmap(model)(x), expected)
        assert torch.equal(torch.jit.trace(model, x[0])(x[0]), model(x[0]))


class DrawsFromPython(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * random.uniform(0.99, 1.01)  # type: ignore[no-any-return]


class DrawsFromNumpy(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * np.random.uniform(0.99, 1.01)  # type: ignore[no-any-return]


class SeedsNumpy(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        np.random.seed(3)
        return super().forward(x) * np.random.uniform(0.99, 1.01)  # type: ignore[no-any-return]


class DrawsOfItsOwn(Block):
    def __init__(self) -> None:
        super().__init__()
        self.dice = torch.Generator().manual_seed(0)

    def __deepcopy__(self, memo: Any) -> Block:
        twin = DrawsOfItsOwn()
        twin.load_state_dict(self.state_dict())
        return twin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        return y + 0.001 * torch.randn(y.shape, generator=self.dice)


class HasACodebook(Block):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.codes.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x * self.codes.detach().clone())  # type: ignore[no-any-return]


def seeded(model: nn.Module) -> tuple[list[float], float, float]:
    random.seed(0)
    np.random.seed(0)
    return steps_of(model), random.random(), np.random.uniform()


@pytest.mark.parametrize("collector", ["ride", "shuttle"])
@pytest.mark.parametrize("kind", [DrawsFromPython, DrawsFromNumpy, SeedsNumpy, DrawsOfItsOwn])
def test_a_recompute_draws_the_same_random_numbers(kind: type[nn.Module], collector: str) -> None:
    model = Net(kind)
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all", collector=collector):
        assert seeded(model) == seeded(plain)
    assert_same_gradients(model, plain)


class ChangesItsInput(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.relu_(x))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:block .* cannot be recomputed")
@pytest.mark.parametrize("kind", [Block, ChangesItsInput])
def test_the_extra_forward_of_the_shuttle_is_not_seen(kind: type[nn.Module]) -> None:
    features: list[torch.Tensor] = []

    def step(model: nn.Module) -> float:
        features.clear()
        out = model(torch.ones(5, WIDTH, requires_grad=True) * 2)
        (out.pow(2).mean() + torch.stack(features).sum()).backward()
        return float(out.sum()) + len(features)

    model = Net(kind)
    for layer in model.layers:
        for module in (layer, layer.first):
            module.register_forward_hook(lambda *all: features.append(all[-1].mean()))
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, "1GiB", collector="shuttle"):
        assert [step(model) for _ in range(STEPS)] == [step(plain) for _ in range(STEPS)]
    assert_same_gradients(model, plain)


class NormalizesItsWeight(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.first.weight.copy_(nn.functional.normalize(self.first.weight, dim=1))
        return super().forward(x)  # type: ignore[no-any-return]


class DecaysItsWeight(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first.weight.data.mul_(0.99)
        return super().forward(x)  # type: ignore[no-any-return]


class LimitsItsEmbeddings(Block):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH, max_norm=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.embedding.weight[0] + self.embedding(torch.arange(5)))  # type: ignore[no-any-return]


class HoldsWhatIsUndefined(Block):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.full((3,), torch.nan))


def test_parameters_without_a_number_count_as_unchanged() -> None:
    assert_as_plain(Net(HoldsWhatIsUndefined))


@pytest.mark.parametrize(
    "kind", [HasACodebook, NormalizesItsWeight, DecaysItsWeight, LimitsItsEmbeddings]
)
def test_a_block_that_cannot_run_twice_is_kept_and_its_first_run_counts(
    kind: type[nn.Module],
) -> None:
    model = Net(kind)
    plain = copy.deepcopy(model)
    with (
        mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"),
        pytest.warns(MimoseWarning, match="cannot be recomputed: it changes its parameter"),
    ):
        assert steps_of(model) == steps_of(plain)
    assert_same_gradients(model, plain)


class MovesALargeTensor(Block):
    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(1 << 19)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state += 1
        return super().forward(x) * self.state[0].clone()  # type: ignore[no-any-return]


def test_a_block_that_changes_a_tensor_too_large_to_be_copied_is_kept() -> None:
    with pytest.warns(MimoseWarning, match=r"it changes a tensor \[524288\] on its modules"):
        assert_as_plain(Net(MovesALargeTensor))


@dataclass
class Context:
    position: torch.Tensor


class TakesAContext(Block):
    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return super().forward(x * context.position)  # type: ignore[no-any-return]


class AdvancesItsContext(Net):
    def __init__(self) -> None:
        super().__init__(TakesAContext)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = Context(torch.ones(WIDTH))
        for layer in self.layers:
            x = layer(x, context)
            context.position += 1
        return x


def test_changing_a_tensor_in_a_dataclass_in_place_raises() -> None:
    model = AdvancesItsContext()
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        with pytest.warns(UserWarning, match="changes one of its arguments in place"):
            loss = model(torch.randn(2, WIDTH)).sum()
        with pytest.raises(RuntimeError, match=r"modified by an inplace"):  # in plain training too
            loss.backward()


class HoldsAScript(Block):
    def __init__(self) -> None:
        super().__init__()
        self.script = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.script(x))  # type: ignore[no-any-return]


def test_a_script_that_is_optimised_in_its_first_runs_is_kept() -> None:
    model = Net(HoldsAScript)
    with (
        mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"),
        pytest.warns(MimoseWarning, match="cannot be recomputed: it saved"),
    ):
        losses = steps_of(model)
    assert losses == steps_of(model)


def test_sparse_arguments_work() -> None:
    class Graph(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            adjacent = torch.eye(5).to_sparse()
            for layer in self.layers:
                x = layer(x, adjacent)
            return x

    class Convolution(Block):
        def forward(self, x: torch.Tensor, adjacent: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.sparse.mm(adjacent, x))  # type: ignore[no-any-return]

    assert_as_plain(Graph(Convolution))


class HoldsAGraph(Block):
    """A graph convolution with its sparse adjacency matrix."""

    def __init__(self, layout: torch.layout, *, trained: bool | None) -> None:
        super().__init__()
        dense = torch.eye(5)
        adjacent = dense.to_sparse() if layout is torch.sparse_coo else dense.to_sparse_csr()
        if trained is None:
            self.register_buffer("adjacent", adjacent)
        else:
            self.adjacent = nn.Parameter(adjacent, requires_grad=trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.sparse.mm(self.adjacent, x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("trained", [None, False])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_buffers_and_frozen_parameters_work(
    layout: torch.layout, trained: bool | None
) -> None:
    def net() -> nn.Module:  # copy.deepcopy cannot copy compressed tensors
        torch.manual_seed(0)
        return Net(lambda: HoldsAGraph(layout, trained=trained))  # type: ignore[arg-type, return-value]

    model, plain, x = net(), net(), torch.randn(5, WIDTH)
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all") as handle:
        for _ in range(STEPS):
            handle.retry(lambda: model(x).sum().backward())
            plain(x).sum().backward()
    assert_same_gradients(model, plain)
    assert torch.equal(model.layers[0].adjacent.to_dense(), torch.eye(5))
    mimose.checkpoint(model.layers[0], x.requires_grad_()).sum().backward()


def test_an_attribute_snapshot_does_not_hold_the_graph_of_an_older_loss() -> None:
    block = StoresALoss()
    look = FirstRunObserver(block)
    block(torch.randn(2, WIDTH))
    side_effects = look.side_effects()
    assert side_effects == SideEffects(((block, "loss"),))
    snapshot = AttributeSnapshot.before_forward(side_effects)
    loss, calls = block.loss, []
    snapshot.run(lambda: calls.append(block.loss))
    assert block.loss is loss
    assert calls[0].grad_fn is None
    assert torch.equal(calls[0], loss)
