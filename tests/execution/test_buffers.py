"""Buffers are updated once a step, however `checkpoint` reaches their module."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import mimose
from compare import assert_same_buffers, assert_same_gradients
from parts import Call, assert_same_training, plain_call


def batch_norm_net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))


def test_batch_norm_is_updated_once_a_step() -> None:
    model = batch_norm_net()
    assert_same_training(model, torch.randn(2, 3, 8, 8), steps=3)
    assert model[1].num_batches_tracked == 3


GLOBAL_MODEL = batch_norm_net()


def as_bound_method(model: nn.Module) -> Call:
    return model.forward


def as_closure(model: nn.Module) -> Call:
    return lambda x: model(x)


def as_partial(model: nn.Module) -> Call:
    return functools.partial(model.__call__)


def as_global(model: nn.Module) -> Call:
    return lambda x: GLOBAL_MODEL(x)


def as_list_in_closure(model: nn.Module) -> Call:
    layers = list(model)
    return lambda x: functools.reduce(lambda out, layer: layer(out), layers, x)


def as_bound_argument(model: nn.Module) -> Call:
    return functools.partial(lambda module, x: module(x), model)


def as_default_argument(model: nn.Module) -> Call:
    return lambda x, module=model: module(x)


def as_function_in_closure(model: nn.Module) -> Call:
    inner = as_closure(model)
    return lambda x: inner(x)


@pytest.mark.parametrize(
    "behind",
    [
        as_bound_method,
        as_closure,
        as_partial,
        as_global,
        as_list_in_closure,
        as_bound_argument,
        as_default_argument,
        as_function_in_closure,
    ],
)
def test_batch_norm_is_found_inside_partials_methods_and_closures(
    behind: Callable[[nn.Module], Call],
) -> None:
    model = GLOBAL_MODEL
    model[1].reset_running_stats()
    mimose.checkpoint(behind(model), torch.randn(2, 3, 8, 8)).sum().backward()
    assert model[1].num_batches_tracked == 1


def test_batch_norm_of_a_module_that_is_an_argument_is_updated_once() -> None:
    model = batch_norm_net()
    x = torch.randn(2, 3, 8, 8)
    mimose.checkpoint(lambda module, x: module(x), model, x).sum().backward()
    assert model[1].num_batches_tracked == 1


def test_spectral_norm_is_exact_over_several_steps() -> None:
    model = nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Tanh(), spectral_norm(nn.Linear(8, 8)))
    plain, x = copy.deepcopy(model), torch.randn(3, 8)
    for module, call in ((plain, plain_call), (model, mimose.checkpoint)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            call(module, x).pow(2).sum().backward()
            optimizer.step()
    assert_same_gradients(model, plain)
    assert_same_buffers(model, plain)


def test_second_backward_recomputes_from_the_same_buffers() -> None:
    model = nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Tanh())
    x = torch.randn(3, 8, requires_grad=True)
    plain = copy.deepcopy(model)
    for module, call in ((plain, plain_call), (model, mimose.checkpoint)):
        loss = call(module, x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(model, plain)
    assert_same_buffers(model, plain)
