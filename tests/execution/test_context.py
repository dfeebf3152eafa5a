"""A recompute sees what its forward saw: RNG, autocast, attention backend, default device."""

from __future__ import annotations

import copy
import threading
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import mimose
from compare import assert_same_gradients
from parts import Call, Layer, bf16, plain_call


def test_rng_is_not_restored_with_preserve_rng_state_false() -> None:
    drawn = []

    def function(x: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(1).item())
        return x.sin().exp()

    def run(**options: Any) -> list[float]:
        drawn.clear()
        torch.manual_seed(1)
        mimose.checkpoint(function, torch.ones(3, requires_grad=True), **options).sum().backward()
        return [*drawn, torch.rand(1).item()]

    torch.manual_seed(1)
    first, second, third = (torch.rand(1).item() for _ in range(3))
    assert run() == [first, first, second]
    assert run(preserve_rng_state=False) == [first, second, third]


@pytest.mark.parametrize("backward_context", [nullcontext, bf16])
def test_recompute_runs_under_the_autocast_of_its_forward(backward_context: Call) -> None:
    model, x = Layer(), torch.randn(2, 5, 16)
    plain = copy.deepcopy(model)
    for module, call in ((plain, plain_call), (model, mimose.checkpoint)):
        torch.manual_seed(1)
        with bf16():
            loss = call(module, x).float().pow(2).sum()
        with backward_context():
            loss.backward()
            enabled = torch.is_autocast_enabled("cpu")
        assert enabled == (backward_context is bf16)
    assert_same_gradients(model, plain)


def test_recompute_of_a_full_precision_forward_ignores_autocast_around_the_backward() -> None:
    model, x = Layer(), torch.randn(2, 5, 16)
    plain = copy.deepcopy(model)
    for module, call in ((plain, plain_call), (model, mimose.checkpoint)):
        torch.manual_seed(1)
        loss = call(module, x).pow(2).sum()
        with bf16():
            loss.backward()
    assert_same_gradients(model, plain)


def test_recompute_under_autocast_does_not_warn() -> None:
    with bf16():
        out = mimose.checkpoint(Layer(), torch.randn(2, 5, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out.float().sum().backward()


def sdpa_flags() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_recompute_uses_the_attention_backend_of_its_forward(backend: SDPBackend) -> None:
    model, x = Layer(), torch.randn(2, 2, 5, 16)
    plain, flags = copy.deepcopy(model), sdpa_flags()
    other = {SDPBackend.MATH, SDPBackend.FLASH_ATTENTION} - {backend}
    for module, call in ((plain, plain_call), (model, mimose.checkpoint)):
        torch.manual_seed(1)
        with sdpa_kernel(backend):
            loss = call(module, x).pow(2).sum()
        with sdpa_kernel(list(other)):
            inside = sdpa_flags()
            loss.backward()
            assert sdpa_flags() == inside
    assert_same_gradients(model, plain)
    assert sdpa_flags() == flags


@pytest.mark.parametrize(("forward", "backward"), [("meta", "cpu"), ("cpu", "meta")])
def test_recompute_creates_tensors_on_the_default_device_of_its_forward(
    forward: str, backward: str
) -> None:
    x = torch.ones(3, device=forward, requires_grad=True)
    made = []

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.ones(3)
        made.append(y.device.type)
        return (x * y).sin()

    with torch.device(forward):
        out = mimose.checkpoint(function, x).sum()
    grad = torch.ones((), device=forward)
    with torch.device(backward):
        out.backward(grad)
        assert torch.empty(1).device.type == backward
    assert made == [forward, forward]
    assert torch.get_default_device() == torch.device("cpu")


def test_backward_on_another_thread_gives_the_same_gradients() -> None:
    model, x = Layer(), torch.randn(2, 5, 16)
    plain = copy.deepcopy(model)
    for module, call in ((plain, plain_call), (model, mimose.checkpoint)):
        torch.manual_seed(1)
        with bf16(), sdpa_kernel(SDPBackend.MATH):
            loss = call(module, x).float().pow(2).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert_same_gradients(model, plain)
