"""The allocator's settings: made for the first handle, put back by the last, the user's first."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import mimose
from mimose.errors import ArgumentError
from mimose.memory import allocator
from mimose.memory.allocator import (
    ALLOCATOR_SETTINGS,
    VARIABLES,
    AllocatorLease,
    ProcessAllocator,
    in_pool,
    page_bytes_in,
    set_up_for_good,
    settings_string,
    why_left_alone,
)

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
DEFAULTS = "expandable_segments:False,large_segment_size_mb:20"

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings") or torch.cuda.is_available(),
    reason="on a GPU tests/gpu tries it for real",
)


@pytest.fixture(autouse=True)
def _as_in_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(allocator, "PROCESS", ProcessAllocator())
    torch._C._accelerator_setAllocatorSettings("")
    yield
    torch._C._accelerator_setAllocatorSettings("")


def lease(choice: str = "auto", device: torch.device = CUDA) -> AllocatorLease:
    made = AllocatorLease(choice)
    made.take(device)
    return made


def test_a_handle_on_cuda_sets_it_up_and_puts_it_back(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mimose"):
        held = lease()
    assert settings_string() == ALLOCATOR_SETTINGS
    assert [r.message for r in caplog.records if ALLOCATOR_SETTINGS in r.message]
    held.give_back()
    held.give_back()
    assert settings_string() == DEFAULTS


def test_the_last_of_several_handles_puts_it_back(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mimose"):
        first, second = lease(), lease()
    assert len(caplog.records) == 1
    first.give_back()
    assert settings_string() == ALLOCATOR_SETTINGS
    second.give_back()
    assert settings_string() == DEFAULTS


def test_what_was_put_back_is_not_taken_for_the_users_choice() -> None:
    lease().give_back()
    again = lease()
    assert again.left_because is None
    assert settings_string() == ALLOCATOR_SETTINGS


@pytest.mark.parametrize("name", VARIABLES)
def test_an_environment_that_configures_it_is_respected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:256")
    held = lease()
    assert held.left_because == f"{name}=max_split_size_mb:256 configures it"
    assert settings_string() == ""
    held.give_back()
    assert settings_string() == ""


def test_settings_made_in_the_process_are_respected() -> None:
    torch._C._accelerator_setAllocatorSettings("garbage_collection_threshold:0.8")
    assert "garbage_collection_threshold:0.8" in (lease().left_because or "")
    assert settings_string() == "garbage_collection_threshold:0.8"


def test_settings_that_others_have_made_since_are_not_put_back() -> None:
    held = lease()
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:64")
    held.give_back()
    assert settings_string() == "max_split_size_mb:64"


def test_leaving_it_alone_is_a_choice_without_a_warning() -> None:
    held = lease("leave")
    assert settings_string() == ""
    assert held.left_because is None


def test_on_a_cpu_it_is_left_until_the_model_comes_to_a_gpu() -> None:
    held = lease(device=CPU)
    assert settings_string() == ""
    assert held.take(CUDA)
    assert settings_string() == ALLOCATOR_SETTINGS


def test_a_library_with_memory_pools_of_its_own_is_left_in_peace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm.device_allocator.cumem", allocator)
    assert "memory pools" in (why_left_alone() or "")


def test_segments_of_a_pool_are_known_by_its_id() -> None:
    assert not in_pool([{"segment_pool_id": (0, 0)}, {}])
    assert in_pool([{"segment_pool_id": (0, 0)}, {"segment_pool_id": (0, 3)}])


def test_without_a_gpu_programs_leave_it_alone() -> None:
    set_up_for_good()
    assert settings_string() == ""


@pytest.mark.parametrize("choice", ["yes", None, True])
def test_unknown_choices_are_refused_with_the_known_ones(choice: object) -> None:
    with pytest.raises(ArgumentError, match=r"neither 'auto'.*nor 'leave'"):
        mimose.auto_checkpoint(nn.Sequential(nn.Linear(2, 2)), "1GiB", allocator=choice)


def test_a_handle_on_the_cpu_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with mimose.auto_checkpoint(model, "1GiB", blocks=nn.Linear):
        model(torch.ones(1, 2)).sum().backward()
        assert settings_string() == ""


def test_torch_reads_the_settings_and_refuses_smaller_pages() -> None:
    torch._C._accelerator_setAllocatorSettings(ALLOCATOR_SETTINGS)
    with pytest.raises((RuntimeError, ValueError), match="must be > 10"):
        torch._C._accelerator_setAllocatorSettings(ALLOCATOR_SETTINGS.replace("mb:12", "mb:8"))


@pytest.mark.parametrize(
    ("settings", "mib"),
    [
        ("", 20),
        ("expandable_segments:True", 20),
        ("expandable_segments:True,large_segment_size_mb:12", 12),
        ("large_segment_size_mb : 32, expandable_segments:True", 32),
    ],
)
def test_pages_are_read_from_the_allocators_settings(settings: str, mib: int) -> None:
    assert page_bytes_in(settings) == mib << 20
