"""What a block's backward needs waits in host memory: gradients are as if it had stayed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from compare import live_tensors, no_hooks
from mimose.execution.on_host import ArgumentsOfStep, run_saving_on_host
from mimose.execution.recompute import Frame
from mimose.memory import HostMemory
from parts import Layer

CPU = torch.device("cpu")


@pytest.fixture
def host() -> HostMemory:
    return HostMemory(CPU, 1 << 26)


def gradients_of(block: nn.Module, call: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, 5, 16, requires_grad=True)
    out = call(x.sin())
    out.pow(2).sum().backward()
    found = [x.grad, *(p.grad for p in block.parameters())]
    block.zero_grad()
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None]


@pytest.mark.parametrize("then", ["", "release", "release fetch"])
def test_saved_tensors_come_back_bit_for_bit(host: HostMemory, then: str) -> None:
    block = Layer()

    def call(x: torch.Tensor) -> torch.Tensor:
        out, moved = run_saving_on_host(block, (x,), {}, host)
        assert moved
        for one in moved if "release" in then else ():
            assert one.release() == one.nbytes
        for one in moved if "fetch" in then else ():
            one.fetch()
        return out

    expected = gradients_of(block, block)
    assert all(map(torch.equal, gradients_of(block, call), expected))
    gc.collect()
    assert host.arena.in_use_bytes == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_stay_on_the_device(host: HostMemory) -> None:
    block = nn.Sequential(nn.Linear(4, 8), nn.GELU())
    x = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)])
    out, moved = run_saving_on_host(block, (x,), {}, host)
    assert not moved
    out.to_padded_tensor(0.0).sum().backward()
    assert ArgumentsOfStep(host).movable((out,), {}) == []


@pytest.mark.parametrize("then", ["", "release", "release fetch"])
def test_arguments_of_a_recompute_come_back_bit_for_bit(host: HostMemory, then: str) -> None:
    block = Layer()

    def call(x: torch.Tensor) -> torch.Tensor:
        frame = Frame(block, (x,), {})
        out = frame.forward((x,), {})
        moved = frame.move_arguments(ArgumentsOfStep(host).movable((x,), {}), host)
        (only,) = moved
        del x
        if "release" in then:
            only.release()
        if "fetch" in then:
            only.fetch()
        return out

    expected = gradients_of(block, block)
    assert all(map(torch.equal, gradients_of(block, call), expected))
    gc.collect()
    assert host.arena.in_use_bytes == 0


def test_parameters_arguments_outputs_and_their_views_stay(host: HostMemory) -> None:
    linear = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True).sin()

    def block(x: torch.Tensor) -> torch.Tensor:
        return linear(x * x).t().exp()  # saves x, a product, the weight and its own output

    out, moved = run_saving_on_host(block, (x,), {}, host)
    assert [one.nbytes for one in moved] == [3 * 4 * 4]  # the product
    assert moved[0].release() == 3 * 4 * 4
    out.sum().backward()


def test_a_storage_with_several_views_moves_once(host: HostMemory) -> None:
    x = torch.randn(6, 4, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        first, second = (x + 1).chunk(2)
        return first.exp() * second * first

    expected = torch.autograd.grad(block(x).sum(), x)
    out, moved = run_saving_on_host(block, (x,), {}, host)
    sizes = sorted(one.nbytes for one in moved)
    assert sizes == [3 * 4 * 4, 3 * 4 * 4, 6 * 4 * 4]
    for one in moved:
        one.release()
    assert torch.equal(*torch.autograd.grad(out.sum(), x), *expected)


def test_small_tensors_stay() -> None:
    host = HostMemory(CPU, 1 << 20, smallest_bytes=1000)
    x = torch.randn(10, requires_grad=True)
    _, moved = run_saving_on_host(lambda x: x.exp().exp().exp(), (x,), {}, host)
    assert not moved


def test_without_room_on_the_host_tensors_stay_where_they_are() -> None:
    block = Layer()
    host = HostMemory(CPU, 1024)

    def call(x: torch.Tensor) -> torch.Tensor:
        out, moved = run_saving_on_host(block, (x,), {}, host)
        assert len(moved) < 3
        return out

    assert all(map(torch.equal, gradients_of(block, call), gradients_of(block, block)))


@pytest.mark.parametrize("released", [False, True])
def test_a_tensor_changed_in_place_raises_as_in_plain_autograd(
    host: HostMemory, released: bool
) -> None:
    seen: list[torch.Tensor] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.exp())
        return seen[-1].sin()

    x = torch.randn(4, requires_grad=True)
    out, moved = run_saving_on_host(block, (x,), {}, host)
    with torch.no_grad():
        seen[-1].add_(1)
    for one in moved if released else ():
        one.release()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_an_argument_changed_in_place_before_it_has_left_raises(host: HostMemory) -> None:
    x = torch.randn(4, requires_grad=True).sin()
    frame = Frame(torch.exp, (x,), {})
    out = frame.forward((x,), {}).sin()
    (moved,) = frame.move_arguments([x], host)
    with torch.no_grad():
        x.add_(1)
    moved.release()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_changes_after_it_has_left_does_not_reach_the_copy(host: HostMemory) -> None:
    x = torch.randn(4, requires_grad=True)
    kept = x.sin()
    out, moved = run_saving_on_host(lambda x: (x * 2).exp().sin(), (kept,), {}, host)
    expected = torch.autograd.grad((kept * 2).exp().sin().sum(), x, retain_graph=True)
    for one in moved:
        one.release()
    assert torch.equal(*torch.autograd.grad(out.sum(), x), *expected)


def test_a_retained_graph_can_be_walked_again(host: HostMemory) -> None:
    block = Layer().eval()
    x = torch.randn(2, 3, 16, requires_grad=True)
    expected = torch.autograd.grad(block(x).sum(), x)
    out, moved = run_saving_on_host(block, (x,), {}, host)
    for one in moved:
        one.release()
    for _ in range(2):
        assert torch.equal(*torch.autograd.grad(out.sum(), x, retain_graph=True), *expected)


def test_a_double_backward_is_that_of_plain(host: HostMemory) -> None:
    x = torch.randn(5, requires_grad=True)

    def twice(out: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return torch.autograd.grad(slope.pow(2).sum(), x)[0]

    out, moved = run_saving_on_host(lambda x: x.exp().sin() * x, (x,), {}, host)
    for one in moved:
        one.release()
    assert torch.equal(twice(out), twice(x.exp().sin() * x))


def test_a_graph_that_nobody_walks_leaves_nothing_behind(host: HostMemory) -> None:
    block, x = Layer(), torch.randn(2, 3, 16, requires_grad=True)
    host.arena.reserve(1 << 20)
    before = live_tensors()
    out, moved = run_saving_on_host(block, (x,), {}, host)
    for one in moved:
        one.release()
        one.fetch()
    del out, moved, one
    assert live_tensors() == before
    assert host.arena.in_use_bytes == 0
    assert no_hooks()


def test_a_forward_that_raises_leaves_nothing_behind(host: HostMemory) -> None:
    x = torch.randn(4, requires_grad=True)
    before = live_tensors()

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError(str(x.exp().exp().shape))

    with pytest.raises(ValueError):
        run_saving_on_host(fails, (x,), {}, host)
    assert live_tensors() == before
    assert host.arena.in_use_bytes == 0
    assert no_hooks()


def test_an_argument_that_many_calls_get_does_not_move(host: HostMemory) -> None:
    arguments = ArgumentsOfStep(host)
    shared = torch.randn(4, requires_grad=True).sin()
    own = [torch.randn(4, requires_grad=True).sin() for _ in range(3)]
    found = [arguments.movable((x,), {"shared": shared}) for x in own]
    assert [len(tensors) for tensors in found] == [2, 1, 1]
    assert [tensors[0] is x for tensors, x in zip(found, own, strict=True)] == [True] * 3


def test_an_argument_without_a_gradient_does_not_move(host: HostMemory) -> None:
    assert not ArgumentsOfStep(host).movable((torch.randn(4), 3), {"mask": torch.ones(4)})
