"""Activations in host memory on a real device: copies beside the computation change no bit."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mimose
from compare import assert_same_gradients
from mimose.costs import Option, Run, Transfer
from mimose.interception import Attachment, Directive, find_blocks
from mimose.memory import CopyState, HostArena, HostMemory, LinkSpeed, PinningError
from mimose.memory.host_segment import pin
from mimose.training.transfers import StepTransfers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH = 512
LONG = 50_000_000
"""Cycles of the device: some tens of milliseconds."""


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Mixture:
    """Each run under an option drawn at random, its transfers at moments drawn at random."""

    def __init__(self, seed: int, host: HostMemory) -> None:
        self._draw, self._host = random.Random(seed), host
        self._runs: list[Run] = [(k, 0) for k in range(6)]

    def step_begins(self) -> None:
        draw, last = self._draw, len(self._runs)
        self._options = {run: draw.choice(list(Option)) for run in self._runs}
        self._transfers = StepTransfers(
            [
                Transfer(k, 0, draw.randint(k + 1, last), draw.randint(k, last - 1))
                for k, option in enumerate(self._options.values())
                if option.moves
            ],
            self._runs,
            host=self._host,
        )

    def direct(self, block: int, args: Any, kwargs: Any) -> Directive:
        run = (block, 0)
        mover = self._transfers.before_forward(run, args, kwargs)
        after = self._transfers.watch(run)
        return Directive(self._options[run], block, after=after, mover=mover)

    def forward_ends(self) -> None:
        self._transfers.after_last_forward()

    def ran_out(self, block: int) -> None:
        raise AssertionError("no block is guarded here")


@pytest.fixture
def host() -> Any:
    memory = HostMemory(torch.device("cuda"), 1 << 30)
    yield memory
    memory.close()


def delay_copies(host: HostMemory) -> None:
    stream: Any = host.stream
    queue: Callable[..., Any] = stream._queue

    def late(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.stream(stream._stream):
            torch.cuda._sleep(LONG)
        return queue(*args, **kwargs)

    stream._queue = late


def delay_blocks(model: nn.Module) -> None:
    for block in model:
        block.register_forward_hook(lambda *_: torch.cuda._sleep(LONG))
        block.register_full_backward_hook(lambda *_: torch.cuda._sleep(LONG))


@pytest.mark.parametrize("late", ["nothing", "copies", "blocks"])
@pytest.mark.parametrize("seed", range(4))
def test_no_delay_on_either_stream_changes_a_gradient(
    seed: int, late: str, host: HostMemory
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Mlp() for _ in range(6))).cuda()
    model, director = copy.deepcopy(plain), Mixture(seed, host)
    Attachment(model, find_blocks(model, blocks=Mlp), director)
    if late == "copies":
        delay_copies(host)
    if late == "blocks":
        delay_blocks(model)
    for step in range(4):
        x = torch.randn(256 + 64 * step, WIDTH, device="cuda", requires_grad=True)
        for each in (plain, model):
            torch.manual_seed(step)
            director.step_begins()
            out = each(x)
            director.forward_ends()
            out.pow(2).mean().backward()
            # Memory that a copy still used would be overwritten here.
            torch.full((1 << 22,), float("nan"), device="cuda")
    assert host.moved_bytes > 0
    assert_same_gradients(model, plain)
    gc.collect()
    assert host.arena.in_use_bytes == 0


def test_pages_are_pinned_as_long_as_a_range_uses_them() -> None:
    """The system maps the same addresses again, and CUDA pins none of them twice."""
    for _ in range(3):
        arena = HostArena(1 << 30, torch.device("cuda"))
        place = arena.take(200 << 20)
        assert place is not None
        (piece,) = place.pieces
        assert piece.tensor.is_pinned()
        arena.close()
        assert piece.tensor.is_pinned()
        del place, piece


def test_if_cuda_refuses_to_pin_the_next_kernel_runs() -> None:
    device = torch.device("cuda")
    memory = HostArena(1 << 30, device).take(1 << 20)
    assert memory is not None
    with pytest.raises(PinningError, match="cudaHostRegister failed"):
        pin(memory.pieces[0].tensor, device)  # again
    assert torch.ones(3, device=device).sum().item() == 3


def test_the_link_is_measured_both_ways(host: HostMemory) -> None:
    speed = LinkSpeed()
    speed.probe(host)
    assert speed.known
    assert all(0.5 < one < 1000 for one in speed.speeds)
    assert host.moved_bytes == 0


def test_memory_on_the_device_is_free_once_it_is_released(host: HostMemory) -> None:
    values = torch.arange(1 << 20, device="cuda")
    expected, storage = values.clone(), values.untyped_storage()
    before = torch.cuda.memory_allocated()
    moved = host.copy(storage)
    assert moved is not None
    del values, storage
    assert torch.cuda.memory_allocated() == before
    moved.release()
    assert moved.state is CopyState.AWAY
    assert torch.cuda.memory_allocated() == before - (8 << 20)
    back = torch.empty(0, dtype=torch.int64, device="cuda").set_(moved.storage())
    assert torch.equal(back, expected)


def test_a_run_moves_activations_and_stays_within_its_budget() -> None:
    """A step at a budget that plain training would exceed, with losses as in plain training."""

    def losses(**options: Any) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Mlp() for _ in range(12))).cuda()
        handle = mimose.auto_checkpoint(model, **options) if options else None
        found = []
        for step in range(24):
            torch.manual_seed(step)
            x = torch.randn(16384, WIDTH, device="cuda", requires_grad=True)
            loss = model(x).pow(2).mean()
            loss.backward()
            found.append(loss.item())
            model.zero_grad()
            del x, loss
        stats = None if handle is None else handle.stats()
        if handle is not None:
            handle.detach()
        return found, stats

    expected, _ = losses()
    peak = torch.cuda.max_memory_allocated()
    gc.collect()
    torch.cuda.empty_cache()
    found, stats = losses(memory_budget=int(0.7 * peak), enforce=True, blocks=Mlp)
    assert found == expected
    assert stats.recoveries == 0
    assert stats.worst_shortfall <= 0.003
