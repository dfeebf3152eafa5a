"""A block compiled with `block.compile()` stays compiled, and no decision compiles it again.

Decisions come from a director here, not from a session: on a CPU a session counts storages by a
dispatch mode, under which torch compiles nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

import mimose
import models
from compare import assert_same_gradients
from mimose.errors import ConflictError, MimoseWarning
from mimose.interception.attachment import Attachment
from mimose.interception.blocks import find_blocks
from parts import Only


class Backend:
    """Compiles by `aot_eager`; counts compilations and runs of what was compiled."""

    def __init__(self) -> None:
        self.compilations = self.runs = 0

    def __call__(self, graph: Any, examples: Any) -> Callable[..., Any]:
        self.compilations += 1
        compiled = aot_eager(graph, examples)

        def run(*args: Any) -> Any:
            self.runs += 1
            return compiled(*args)

        return run


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.linear(self.norm(x)).tanh())


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Sequential, **options: Any) -> Backend:
    backend = Backend()
    for part in model:
        part.compile(backend=backend, **options)
    return backend


def step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).pow(2).sum().backward()


PLANS = [(), (0, 1, 2), (0,), (1, 2), ()]


@pytest.mark.parametrize("compile_first", [True, False])
def test_compiled_block_runs_compiled_in_the_recompute_and_is_not_compiled_again(
    compile_first: bool,
) -> None:
    model, x = nn.Sequential(Part(), Part(), Part()), torch.randn(2, 8)
    plain, director = copy.deepcopy(model), Only()
    plain_backend = compiled(plain)
    torch.manual_seed(1)
    for _ in PLANS:
        step(plain, x)
    torch._dynamo.reset()

    if compile_first:
        backend = compiled(model)
        attachment = Attachment(model, find_blocks(model), director)
    else:
        attachment = Attachment(model, find_blocks(model), director)
        backend = compiled(model)
        attachment.intercept_again()
    for interceptor in attachment.interceptors:
        interceptor.trusted = True  # no rehearsal, so that every run of the blocks is a step's own
    torch.manual_seed(1)
    for director.blocks in PLANS:
        before = backend.runs
        step(model, x)
        assert backend.runs - before == 3 + len(director.blocks)
    assert backend.compilations == plain_backend.compilations
    assert_same_gradients(model, plain)


def test_trial_of_a_compiled_block_does_not_compile_it_again() -> None:
    model, x = nn.Sequential(Part(), Part(), Part()), torch.randn(2, 8)
    backend, director = compiled(model), Only()
    step(model, x)
    compilations = backend.compilations
    director.blocks = (0, 1, 2)
    Attachment(model, find_blocks(model), director)
    step(model, x)
    assert backend.compilations == compilations


def test_detaching_leaves_the_block_compiled() -> None:
    model, x = nn.Sequential(Part(), Part()), torch.randn(2, 8)
    backend = compiled(model)
    before = [part._compiled_call_impl for part in model]
    attachment = Attachment(model, find_blocks(model), Only())
    assert [part._compiled_call_impl for part in model] != before
    attachment.detach()
    assert [part._compiled_call_impl for part in model] == before
    step(model, x)
    assert backend.runs == 2


@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
def test_plans_that_change_with_the_shape_compile_no_more_than_the_shapes_alone(
    dynamic: bool | None,
) -> None:
    model, director = nn.Sequential(Part(), Part(), Part()), Only()
    plain = copy.deepcopy(model)
    batches = [torch.randn(2, length, 8) for length in (4, 7, 5, 9, 4, 12, 6)]
    plain_backend = compiled(plain, dynamic=dynamic)
    for i, x in enumerate(batches):
        torch.manual_seed(i)
        step(plain, x)
    expected = [p.grad for p in plain.parameters()]
    torch._dynamo.reset()

    backend = compiled(model, dynamic=dynamic)
    Attachment(model, find_blocks(model), director)
    counts = []
    for i, x in enumerate(batches):
        director.blocks = PLANS[i % len(PLANS)]
        torch.manual_seed(i)
        step(model, x)
        counts.append(backend.compilations)
    assert counts[-1] == plain_backend.compilations
    assert counts[2] == counts[-1], "compiled again after the shapes were known to vary"
    for ours, theirs in zip(model.parameters(), expected, strict=True):
        assert torch.equal(ours.grad, theirs)


not_before_2_13 = pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="the compiler looks past interceptors: a warning comes with the first gradient",
)


@not_before_2_13
@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
def test_a_model_compiled_as_a_whole_after_attaching_is_refused_with_the_advice(
    dynamic: bool | None,
) -> None:
    model, batch = models.encoder()
    advice = r"compiled as a whole.*block\.compile\(\)"
    with mimose.auto_checkpoint(model, "1GiB"), pytest.raises(ConflictError, match=advice):
        torch.compile(model, backend="eager", dynamic=dynamic)(**batch)


@not_before_2_13
def test_a_model_compiled_as_one_graph_fails_to_compile_with_the_advice() -> None:
    model, batch = models.encoder()
    advice = r"mimose cannot plan.*block\.compile\(\)"
    with mimose.auto_checkpoint(model, "1GiB"), pytest.raises(Exception, match=advice):
        torch.compile(model, backend="eager", fullgraph=True)(**batch)


def test_a_model_compiled_as_a_whole_before_attaching_is_refused_with_the_advice() -> None:
    model, _ = models.encoder()
    with pytest.raises(ConflictError, match=r"block\.compile\(\)"):
        mimose.auto_checkpoint(torch.compile(model, backend="eager"), "1GiB")
    model.compile(backend="eager")
    with pytest.raises(ConflictError, match=r"block\.compile\(\)"):
        mimose.auto_checkpoint(model, "1GiB")


@not_before_2_13
def test_layers_with_their_own_call_method_are_refused_in_a_compiled_model() -> None:
    model, batch = models.llama()
    with mimose.auto_checkpoint(model, "1GiB"):
        model.compile(backend="eager")
        with pytest.raises(ConflictError, match=r"block\.compile\(\)"):
            model(**batch)


def in_place(model: nn.Module) -> Any:
    model.compile(backend="eager")
    return model


def in_a_function(model: nn.Module) -> Any:
    return torch.compile(lambda input_ids: model(input_ids), backend="eager")


@pytest.mark.parametrize("compile_past_the_seat", [in_place, in_a_function])
def test_a_model_that_bypasses_its_interceptors_warns_once(
    compile_past_the_seat: Callable[[nn.Module], Any],
) -> None:
    model, batch = models.encoder()
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        trained = compile_past_the_seat(model)
        with pytest.warns(MimoseWarning, match=r"none of its blocks was called.*block\.compile"):
            trained(**batch).sum().backward()
        trained(**batch).sum().backward()
    assert handle.stats().steps == 0


def test_the_bypass_hook_is_removed_after_the_first_step() -> None:
    model, batch = models.encoder()
    with mimose.auto_checkpoint(model, "1GiB"):
        models.loss_of(model, batch).backward()
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_compiled_model_in_eval_mode_runs_although_mimose_is_attached() -> None:
    model, batch = models.encoder()
    with mimose.auto_checkpoint(model, "1GiB"):
        trained = torch.compile(model, backend="eager")
        with torch.no_grad():
            expected = model.eval()(**batch)
            assert torch.equal(trained(**batch), expected)


def test_a_model_in_training_mode_can_be_exported_while_attached() -> None:
    model, batch = models.Encoder(dropout=0.0), models.encoder()[1]
    with mimose.auto_checkpoint(model, "1GiB"):
        program = torch.export.export(model, (), batch)
    assert torch.allclose(program.module()(**batch), model(**batch))
