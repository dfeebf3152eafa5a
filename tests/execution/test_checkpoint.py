"""`mimose.checkpoint` gives what the plain call gives, and leaves nothing behind."""

from __future__ import annotations

import copy
import functools
import gc
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointError,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import mimose
from compare import Storages, assert_same_gradients, live_tensors, no_hooks
from mimose.errors import MimoseError, RecomputeError
from parts import Call, Counted, Faulty, Layer, assert_same_training, bf16, plain_call


class Changing(nn.Module):
    """Runs `first` in the forward and `second` in the recompute."""

    def __init__(self, first: Call, second: Call) -> None:
        super().__init__()
        self.versions = [first, second]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.versions.pop(0)(x)


def test_gradients_and_rng_are_those_of_the_plain_call() -> None:
    assert_same_training(Layer(), torch.randn(2, 5, 16), steps=3)


def test_gradients_without_early_stop_are_those_of_the_plain_call() -> None:
    assert_same_training(Layer(), torch.randn(2, 5, 16), steps=3, early_stop=False)


def test_no_activation_lives_between_forward_and_backward() -> None:
    model, x = Layer(), torch.randn(2, 5, 16, requires_grad=True)
    with Storages(model, x) as storages:
        out = mimose.checkpoint(model, x)
        assert storages.live() == 1  # the output
        del out
        assert storages.live() == 0
        out = model(x)
        assert storages.live() > 8
    del out


def test_rebuilt_activations_are_freed_with_the_backward_even_if_the_graph_is_retained() -> None:
    model, x = Layer(), torch.randn(2, 5, 16, requires_grad=True)
    with Storages(model, x) as storages:
        out = mimose.checkpoint(model, x)
        out.sum().backward(retain_graph=True)
        model.zero_grad()
        x.grad = None
        assert storages.live() == 1  # the output


@dataclass
class Outputs:
    hidden: torch.Tensor
    rest: dict[str, Any]


def test_arguments_and_outputs_may_nest_in_any_way() -> None:
    weight = torch.randn(4, 4, requires_grad=True)

    def function(
        x: torch.Tensor, pair: tuple[torch.Tensor, list[torch.Tensor]], *, scale: dict[str, Any]
    ) -> tuple[Outputs, str]:
        hidden = (x @ weight + pair[0] * pair[1][0]).sin() * scale["by"]
        return Outputs(hidden, {"square": (hidden.pow(2), "text"), "none": None}), "tag"

    def loss(call: Call) -> torch.Tensor:
        leaves = [torch.full((3, 4), float(i + 1), requires_grad=True) for i in range(4)]
        pair = (leaves[1], [leaves[2]])
        outputs, tag = call(function, leaves[0], pair, scale={"by": leaves[3]})
        assert tag == "tag"
        assert isinstance(outputs, Outputs)
        total = outputs.hidden.sum() + outputs.rest["square"][0].sum()
        return torch.autograd.grad(total, [*leaves, weight])

    for ours, theirs in zip(loss(mimose.checkpoint), loss(plain_call), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("freeze_input", [True, False])
@pytest.mark.parametrize("frozen", ["none", "some", "all"])
def test_frozen_inputs_and_parameters_stay_without_gradient(
    freeze_input: bool, frozen: str
) -> None:
    model, x = Layer(), torch.randn(2, 5, 16, requires_grad=not freeze_input)
    model.requires_grad_(frozen != "all")
    model.qkv.requires_grad_(frozen == "none")
    plain, plain_x = copy.deepcopy(model), x.detach().clone().requires_grad_(not freeze_input)
    for module, call, start in ((plain, plain_call, plain_x), (model, mimose.checkpoint, x)):
        torch.manual_seed(1)
        out = call(module, start)
        assert out.requires_grad == (not freeze_input or frozen != "all")
        if out.requires_grad:
            out.pow(2).sum().backward()
    if frozen != "all":
        assert_same_gradients(model, plain)
    if not freeze_input:
        assert torch.equal(x.grad, plain_x.grad)


def test_without_gradients_the_call_is_plain() -> None:
    model = Counted()
    with torch.no_grad():
        out = mimose.checkpoint(model, torch.ones(2, 4))
    assert not out.requires_grad
    assert model.starts == model.ends == 1


@pytest.mark.parametrize("place", ["positional", "keyword", "tuple", "list in a dict"])
def test_argument_changed_in_place_raises(place: str) -> None:
    weight = torch.ones(3, requires_grad=True)
    x = torch.ones(3)

    def function(*args: Any, **kwargs: Any) -> torch.Tensor:
        return (weight * x).sin()

    args, kwargs = {
        "positional": ((x,), {}),
        "keyword": ((), {"x": x}),
        "tuple": (((x, 1),), {}),
        "list in a dict": ((), {"of": {"a": [x]}}),
    }[place]
    out = mimose.checkpoint(function, *args, **kwargs)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("nested", [False, True])
def test_saved_tensor_changed_in_place_inside_the_function_raises(nested: bool) -> None:
    weight = torch.ones(3, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        call = mimose.checkpoint if nested else plain_call
        out = call(lambda y: (weight * y).sin(), y)
        y.add_(1)  # autograd, had it saved y itself, would raise in the backward
        return out.sin()

    out = mimose.checkpoint(function, torch.ones(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_operators_in_place_inside_the_function_keep_gradients_exact() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Hardtanh())
    model[3].inplace = True
    assert_same_training(model, torch.randn(3, 4))


def test_checkpoints_nest_three_deep() -> None:
    model = nn.ModuleList([Layer() for _ in range(3)])
    plain, x = copy.deepcopy(model), torch.randn(2, 5, 16)

    def run(module: nn.ModuleList, call: Call, depth: int, x: torch.Tensor) -> torch.Tensor:
        x = module[depth](x)
        return call(run, module, call, depth + 1, x.sin()) * x if depth < 2 else x

    for module, call in ((plain, plain_call), (model, mimose.checkpoint)):
        torch.manual_seed(1)
        call(run, module, call, 0, x).pow(2).sum().backward()
    assert_same_gradients(model, plain)


def test_nested_checkpoint_does_not_pin_its_arguments() -> None:
    weight, pinned = torch.ones(3, requires_grad=True), []

    def outer(x: torch.Tensor) -> torch.Tensor:
        y = (x * weight).sin()
        pinned.append(StorageWeakRef(y.untyped_storage()))
        return mimose.checkpoint(lambda y: y.exp().exp(), y)

    out = mimose.checkpoint(outer, torch.ones(3))
    gc.collect()
    assert pinned[0].expired()
    out.sum().backward()
    assert weight.grad is not None


def test_backward_may_use_one_of_several_outputs() -> None:
    model = nn.Linear(4, 4)
    plain, x = copy.deepcopy(model), torch.randn(2, 4)
    for module, call in ((plain, plain_call), (model, mimose.checkpoint)):
        first, second, third = call(lambda x, m: (m(x).sin(), m(x).exp(), m(x).cos()), x, module)
        second.sum().backward()
        assert first.requires_grad
        assert third.requires_grad
    assert_same_gradients(model, plain)


def test_graph_may_be_retained_and_used_again() -> None:
    model, x = Layer(), torch.randn(2, 5, 16)
    plain = copy.deepcopy(model)
    for module, call in ((plain, plain_call), (model, mimose.checkpoint)):
        torch.manual_seed(1)
        loss = call(module, x).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(model, plain)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_of_gradients_are_those_of_the_plain_call() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Sigmoid())
    plain, x = copy.deepcopy(model), torch.randn(3, 4, requires_grad=True)
    for module, call in ((plain, plain_call), (model, mimose.checkpoint)):
        (grad,) = torch.autograd.grad(call(module, x).pow(2).sum(), x, create_graph=True)
        grad.pow(2).sum().backward(inputs=list(module.parameters()))
    assert_same_gradients(model, plain)


def test_function_may_run_a_backward_inside() -> None:
    model = nn.Linear(4, 4)
    plain, x = copy.deepcopy(model), torch.randn(3, 4)

    def penalty(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(module(x).sin().sum(), x, create_graph=True)
        return grad.pow(2).sum() + module(x).exp().sum()

    for module, call in ((plain, plain_call), (model, mimose.checkpoint)):
        call(penalty, module, x).backward()
    assert_same_gradients(model, plain)


def test_saved_tensors_can_be_read_outside_of_a_backward() -> None:
    x = torch.randn(3, requires_grad=True)
    out = mimose.checkpoint(lambda x: (2 * x).sin().exp(), x)
    with Storages(x, out) as storages:
        for _ in range(2):
            assert torch.equal(out.grad_fn._saved_result, out)
        assert storages.live() == 0  # what else was rebuilt is gone
    (expected,) = torch.autograd.grad((2 * x).sin().exp().sum(), x)
    out.sum().backward()
    assert torch.equal(x.grad, expected)


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,), _ = ctx.saved_tensors, ctx.saved_tensors
        return grad * x.exp()


def test_reading_saved_tensors_twice_in_one_backward_raises() -> None:
    out = mimose.checkpoint(ReadsTwice.apply, torch.ones(3, requires_grad=True))
    with pytest.raises(CheckpointError, match=r"apply: .*already unpacked once.*read it once"):
        out.sum().backward()


def backward_of(model: Counted, **options: Any) -> Counted:
    mimose.checkpoint(model, torch.ones(2, 4), **options).sum().backward()
    return model


def test_recompute_stops_at_the_last_saved_tensor() -> None:
    model = backward_of(Counted())
    assert (model.starts, model.ends) == (2, 1)


def test_without_early_stop_the_recompute_runs_to_its_end() -> None:
    model = backward_of(Counted(), early_stop=False)
    assert (model.starts, model.ends) == (2, 2)


def test_torch_setting_of_early_stop_is_honoured() -> None:
    with set_checkpoint_early_stop(False):
        model = backward_of(Counted())
    assert (model.starts, model.ends) == (2, 2)


def test_early_stop_passes_through_a_block_that_catches_exceptions() -> None:
    caught = []

    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            return x.sin().exp() + 1
        except Exception as error:
            caught.append(error)
            return x

    x = torch.randn(3, requires_grad=True)
    mimose.checkpoint(function, x).sum().backward()
    assert not caught
    assert torch.equal(x.grad, x.sin().exp() * x.cos())


DOUBLE_SAVED = (lambda x: x.sin(), lambda x: x.double().sin())


@pytest.mark.parametrize(
    ("versions", "options", "message"),
    [
        ((lambda x: x.sin().sin(), lambda x: x.sin()), {}, "different number.*2 and 1"),
        (
            (lambda x: x.sin(), lambda x: x.sin().sin()),
            {"early_stop": False},
            "more tensors.*\\(1\\)",
        ),
        ((lambda x: x.sin(), lambda x: x[:1].sin()), {}, r"\[3\] float32.*\[1\] float32"),
        (DOUBLE_SAVED, {}, r"\[3\] float32.*\[3\] float64"),
    ],
)
def test_recompute_that_differs_raises_an_error_with_the_name_of_the_function(
    versions: tuple[Call, Call], options: dict[str, Any], message: str
) -> None:
    out = mimose.checkpoint(Changing(*versions), torch.ones(3, requires_grad=True), **options)
    with pytest.raises(RecomputeError, match=f"Changing: .*{message}") as raised:
        out.sum().backward()
    assert isinstance(raised.value, CheckpointError)
    assert isinstance(raised.value, MimoseError)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_rebuilt_and_compared(layout: torch.layout) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def nested(*lengths: int) -> torch.Tensor:
        rows = [torch.ones(length, 4) * length for length in lengths]
        return torch.nested.nested_tensor(rows, layout=layout, requires_grad=True)

    def gradient(call: Call) -> torch.Tensor:
        x = nested(3, 5)
        call(model, x).to_padded_tensor(0.0).pow(2).sum().backward()
        assert x.grad is not None
        return x.grad.to_padded_tensor(0.0)

    assert torch.equal(gradient(mimose.checkpoint), gradient(plain_call))
    differs = Changing(model, lambda _: model(nested(3, 4)))
    out = mimose.checkpoint(differs, nested(3, 5)).to_padded_tensor(0.0)
    with pytest.raises(RecomputeError, match="different metadata"):
        out.sum().backward()


def test_metadata_is_not_compared_with_determinism_check_none() -> None:
    x = torch.ones(3, requires_grad=True)
    mimose.checkpoint(Changing(*DOUBLE_SAVED), x, determinism_check="none").sum().backward()
    assert torch.equal(x.grad, x.double().cos().float())


def test_unknown_determinism_check_and_reentrant_variant_are_refused() -> None:
    with pytest.raises(ValueError, match="determinism_check"):
        mimose.checkpoint(torch.sin, torch.ones(3), determinism_check="some")
    with pytest.raises(ValueError, match="use_reentrant=True"):
        mimose.checkpoint(torch.sin, torch.ones(3), use_reentrant=True)


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_is_handed_to_torch() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid())
    plain, x, saved = copy.deepcopy(model), torch.randn(2, 4), [torch.ops.aten.addmm.default]
    context_fn = functools.partial(create_selective_checkpoint_contexts, saved)
    with Operators() as selective:
        mimose.checkpoint(model, x, context_fn=context_fn).sum().backward()
    plain(x).sum().backward()
    assert_same_gradients(model, plain)
    assert selective.counts[torch.ops.aten.addmm.default] == 2
    assert selective.counts[torch.ops.aten.tanh.default] == 2  # its forward and its recompute


def test_debug_is_handed_to_torch() -> None:
    model = Changing(lambda x: x.sin().sin(), lambda x: x.sin())
    out = mimose.checkpoint(model, torch.ones(3, requires_grad=True), debug=True)
    with pytest.raises(CheckpointError, match="Operations executed during the original forward"):
        out.sum().backward()


def snapshot(model: nn.Module) -> dict[str, tuple[int, list[float]]]:
    return {name: (id(b), b.flatten().tolist()) for name, b in model.named_buffers()}


@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
@pytest.mark.parametrize("nested", [False, True])
def test_exception_leaves_no_hook_no_state_and_no_tensor_behind(phase: str, nested: bool) -> None:
    model, x = Faulty(), torch.randn(3, 4)
    function = (lambda x: mimose.checkpoint(model, x.sin()).cos()) if nested else model

    def step(phase: str) -> None:
        model.phase = phase
        model.zero_grad()
        planned = pytest.raises(ValueError, match="planned")
        rng = buffers = None
        with nullcontext() if phase == "none" else planned as raised:
            with bf16():
                out = mimose.checkpoint(function, x).float().sum()
            rng, buffers = torch.get_rng_state(), snapshot(model)
            out.backward()
        assert no_hooks()  # also while the traceback lives
        assert not torch.is_autocast_enabled("cpu")
        if rng is not None:
            assert torch.equal(torch.get_rng_state(), rng)
            assert snapshot(model) == buffers
        del raised

    step("none")
    model.zero_grad()
    before = live_tensors()
    with Storages(model, x) as storages:
        step(phase)
        model.zero_grad()
        assert storages.live() == 0
    del storages
    assert live_tensors() <= before
    model.phase = "none"
    assert_same_training(model, torch.randn(3, 4))


def test_a_failed_recompute_frees_its_tensors_while_the_graph_lives() -> None:
    model, x = Faulty(), torch.randn(3, 4)
    with Storages(model, x) as storages:
        out = mimose.checkpoint(model, x)
        before = storages.live()
        model.phase = "recompute"
        with pytest.raises(ValueError, match="planned"):
            out.sum().backward()
        assert storages.live() == before
        model.phase = "none"
        out.sum().backward()  # and the graph is still good
    assert model.head.weight.grad is not None
