"""On a GPU attaching sets the allocator up, detaching puts every key back, tensors stay usable."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mimose
import models
from mimose.errors import MimoseWarning
from mimose.memory.allocator import ALLOCATOR_SETTINGS, ALLOCATOR_VARIABLES, current_settings
from mimose.memory.reserve import FragmentReserve, PageReserve
from parts import Assembled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def keys() -> dict[str, Any]:
    """Every setting but the string that was last given."""
    settings = current_settings()
    settings.pop("PYTORCH_CUDA_ALLOC_CONF")
    return settings


def model_and_batch() -> tuple[torch.nn.Module, torch.Tensor]:
    model = models.Encoder(layers=4, width=64).cuda().train()
    return model, torch.randint(0, 50, (8, 64), device="cuda")


def train_on_varying_lengths(model: torch.nn.Module) -> None:
    for length in (64, 32, 48, 56, 40, 50, 60, 44):
        tokens = torch.randint(0, 50, (8, length), device="cuda")
        model(tokens).pow(2).mean().backward()
        model.zero_grad()


@pytest.fixture
def _cleared() -> Iterator[None]:
    yield
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False,large_segment_size_mb:20")


def test_attaching_sets_it_up_and_detaching_puts_every_key_back() -> None:
    model, tokens = model_and_batch()
    before, given = keys(), current_settings()["PYTORCH_CUDA_ALLOC_CONF"]
    assert not before["expandable_segments"], given
    plain = copy.deepcopy(model)
    torch.manual_seed(1)
    plain(tokens).pow(2).mean().backward()
    for _ in range(2):  # on, off, on and off again, with tensors alive throughout
        handle = Assembled(model, "4GiB")
        assert keys() == {**before, "expandable_segments": True}
        assert current_settings()["PYTORCH_CUDA_ALLOC_CONF"] == ALLOCATOR_SETTINGS
        model.zero_grad()
        torch.manual_seed(1)
        model(tokens).pow(2).mean().backward()
        assert isinstance(handle.setting.reserve, PageReserve)
        handle.detach()
        assert keys() == before
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad)


def test_a_model_that_comes_to_the_gpu_later_is_served_at_its_first_step() -> None:
    model = models.Encoder(layers=4, width=64).train()
    with mimose.auto_checkpoint(model, "4GiB"):
        assert not keys()["expandable_segments"]
        model.cuda()
        model(torch.randint(0, 50, (8, 64), device="cuda")).pow(2).mean().backward()
        assert keys()["expandable_segments"]
    assert not keys()["expandable_segments"]


def test_a_model_that_is_gone_gives_the_settings_back() -> None:
    model, _ = model_and_batch()
    handle = mimose.auto_checkpoint(model, "4GiB")
    assert keys()["expandable_segments"]
    del model
    gc.collect()
    assert not keys()["expandable_segments"]
    handle.detach()


def test_leave_leaves_it_alone_with_a_reserve_for_fragments() -> None:
    model, tokens = model_and_batch()
    with Assembled(model, "4GiB", allocator="leave") as handle:
        model(tokens).pow(2).mean().backward()
        assert not keys()["expandable_segments"]
        assert isinstance(handle.setting.reserve, FragmentReserve)


@pytest.mark.usefixtures("_cleared")
def test_settings_of_the_users_are_left_with_a_warning_when_planning_begins() -> None:
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:200")
    before = keys()
    model, _ = model_and_batch()
    with mimose.auto_checkpoint(model, "4GiB") as handle:
        with pytest.warns(MimoseWarning, match=r"max_split_size_mb:200' was set in this process"):
            train_on_varying_lengths(model)
        assert handle.stats().planned_steps
    assert keys() == before


def test_a_memory_pool_of_somebody_elses_is_left_in_peace() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        theirs = torch.ones(1 << 22, device="cuda")
    model, tokens = model_and_batch()
    with mimose.auto_checkpoint(model, "4GiB"):
        model(tokens).pow(2).mean().backward()
        assert not keys()["expandable_segments"]
    assert theirs.sum() == 1 << 22
    del theirs, pool
    torch.cuda.empty_cache()


PROGRAM = """
import torch, models, parts
model = models.Encoder(layers=4, width=64).cuda().train()
handle = parts.Assembled(model, "4GiB", enforce=True)
for step in range(16):
    tokens = torch.randint(0, 50, (8, 32 + 7 * step), device="cuda")
    model(tokens).pow(2).mean().backward()
    model.zero_grad()
print(type(handle.setting.reserve).__name__, handle.stats().planned_steps > 4)
handle.detach()
"""


def test_another_backend_trains_with_a_reserve_for_fragments() -> None:
    environment = {
        key: value for key, value in os.environ.items() if key not in ALLOCATOR_VARIABLES
    }
    environment["PYTORCH_ALLOC_CONF"] = "backend:cudaMallocAsync"
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["FragmentReserve", "True"], done.stderr
    assert "backend:cudaMallocAsync configures it" in done.stderr
