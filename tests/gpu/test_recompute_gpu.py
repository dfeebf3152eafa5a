"""On a GPU, where the backward runs on another thread and has an RNG of its own, all holds too."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import mimose
import models
from compare import assert_same_buffers, assert_same_gradients, live_tensors, no_hooks
from mimose.interception.attachment import RECOMPUTE_EVERYTHING, Attachment, Director
from mimose.interception.blocks import find_blocks
from parts import AtRandom, Faulty, Layer, plain_call, train_model, without_cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

bf16 = functools.partial(torch.autocast, "cuda", dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def on_gpu(name: str) -> models.Case:
    if name == "lora":
        pytest.importorskip("peft")
    model, batch = models.ALL[name]()
    moved = {key: value.cuda() for key, value in batch.items()}
    return model.cuda(), without_cache(name, moved)


@pytest.mark.parametrize("director", [RECOMPUTE_EVERYTHING, AtRandom()], ids=["all", "some"])
@pytest.mark.parametrize("context", [nullcontext, bf16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", models.ALL)
def test_gradients_buffers_and_rng_are_those_of_the_plain_model(
    name: str, context: Callable[[], Any], director: Director
) -> None:
    model, batch = on_gpu(name)
    plain = copy.deepcopy(model)
    states = []
    for each in (plain, model):
        if each is model:
            Attachment(model, find_blocks(model), director)
        cpu = train_model(each, batch, context=context)
        states.append((cpu, torch.cuda.get_rng_state()))
    assert torch.equal(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])
    assert_same_gradients(model, plain)
    assert_same_buffers(model, plain)


@pytest.mark.parametrize("context", [nullcontext, bf16], ids=["fp32", "bf16"])
def test_checkpoint_of_a_function_is_exact(context: Callable[[], Any]) -> None:
    model, x = Layer().cuda(), torch.randn(2, 5, 16, device="cuda")
    plain = copy.deepcopy(model)
    states = []
    for module, call in ((plain, plain_call), (model, mimose.checkpoint)):
        torch.manual_seed(1)
        with context():
            loss = call(module, x).float().pow(2).sum()
        loss.backward()
        states.append(torch.cuda.get_rng_state())
    assert_same_gradients(model, plain)
    assert torch.equal(*states)


def attend(backend: SDPBackend) -> tuple[nn.Module, nn.Module]:
    """A layer trained under `backend`, checkpointed and plain, with the backward outside of it."""
    model = Layer(64).cuda().bfloat16()
    x = torch.randn(2, 4, 32, 64, device="cuda", dtype=torch.bfloat16)
    plain = copy.deepcopy(model)
    other = SDPBackend.MATH if backend != SDPBackend.MATH else SDPBackend.EFFICIENT_ATTENTION
    for module, call in ((plain, plain_call), (model, mimose.checkpoint)):
        torch.manual_seed(1)
        with sdpa_kernel(backend):
            loss = call(module, x).float().pow(2).sum()
        with sdpa_kernel(other):
            loss.backward()
    return model, plain


@pytest.mark.parametrize(
    "backend", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
)
def test_recompute_uses_the_attention_backend_of_its_forward(backend: SDPBackend) -> None:
    assert_same_gradients(*attend(backend))


def test_recompute_uses_the_cudnn_attention_of_its_forward() -> None:
    torch.use_deterministic_algorithms(False)  # or cuDNN refuses
    model, plain = attend(SDPBackend.CUDNN_ATTENTION)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 0.01 * theirs.grad.norm()


def step(model: nn.Sequential, x: torch.Tensor, phase: str) -> None:
    model[1].phase = phase
    model.zero_grad()
    with pytest.raises(ValueError, match="planned") if phase != "none" else nullcontext():
        model(x).sum().backward()
    model.zero_grad()


@pytest.mark.parametrize("raising", [False, True])
def test_a_thousand_steps_leave_memory_and_hooks_as_they_were(raising: bool) -> None:
    model, x = nn.Sequential(Faulty(), Faulty(), Faulty()).cuda(), torch.randn(3, 4, device="cuda")
    Attachment(model, find_blocks(model, blocks=["0", "1", "2"]), RECOMPUTE_EVERYTHING)
    faults = ("forward", "recompute", "backward")
    for phase in ("none", "none", *faults):
        step(model, x, phase)
    tensors, allocated = live_tensors(), torch.cuda.memory_allocated()
    turn = itertools.cycle(faults)
    for index in range(1000):
        step(model, x, next(turn) if raising and index % 3 == 2 else "none")
    assert live_tensors() <= tensors
    assert torch.cuda.memory_allocated() == allocated
    assert no_hooks()
