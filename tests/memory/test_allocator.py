"""The first handle configures the allocator, the last restores it; the user's settings win."""

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
    ALLOCATOR_VARIABLES,
    AllocatorLease,
    ProcessAllocator,
    configure_for_process,
    in_pool,
    page_bytes_in,
    reason_not_to_configure,
    settings_string,
)

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
DEFAULTS = "expandable_segments:False,large_segment_size_mb:20"

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings") or torch.cuda.is_available(),
    reason="on a GPU tests/gpu tries it for real",
)


@pytest.fixture(autouse=True)
def _as_in_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(allocator, "PROCESS", ProcessAllocator())
    torch._C._accelerator_setAllocatorSettings("")
    yield
    torch._C._accelerator_setAllocatorSettings("")


def lease(choice: str = "auto", device: torch.device = CUDA) -> AllocatorLease:
    made = AllocatorLease(choice)
    made.take(device)
    return made


def test_a_handle_on_cuda_configures_the_allocator_and_restores_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "mimose"):
        held = lease()
    assert settings_string() == ALLOCATOR_SETTINGS
    assert [r.message for r in caplog.records if ALLOCATOR_SETTINGS in r.message]
    held.give_back()
    held.give_back()
    assert settings_string() == DEFAULTS


def test_the_last_of_several_handles_restores_the_allocator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "mimose"):
        first, second = lease(), lease()
    assert len(caplog.records) == 1
    first.give_back()
    assert settings_string() == ALLOCATOR_SETTINGS
    second.give_back()
    assert settings_string() == DEFAULTS


def test_restored_settings_do_not_count_as_the_users_choice() -> None:
    lease().give_back()
    again = lease()
    assert again.reason_not_configured is None
    assert settings_string() == ALLOCATOR_SETTINGS


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_settings_in_the_environment_are_respected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:256")
    held = lease()
    assert held.reason_not_configured == f"{name}=max_split_size_mb:256 configures it"
    assert settings_string() == ""
    held.give_back()
    assert settings_string() == ""


def test_settings_made_in_the_process_are_respected() -> None:
    torch._C._accelerator_setAllocatorSettings("garbage_collection_threshold:0.8")
    assert "garbage_collection_threshold:0.8" in (lease().reason_not_configured or "")
    assert settings_string() == "garbage_collection_threshold:0.8"


def test_settings_changed_by_other_code_are_not_restored() -> None:
    held = lease()
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:64")
    held.give_back()
    assert settings_string() == "max_split_size_mb:64"


def test_allocator_leave_changes_nothing_and_gives_no_reason() -> None:
    held = lease("leave")
    assert settings_string() == ""
    assert held.reason_not_configured is None


def test_the_allocator_is_configured_once_the_model_is_on_a_gpu() -> None:
    held = lease(device=CPU)
    assert settings_string() == ""
    assert held.take(CUDA)
    assert settings_string() == ALLOCATOR_SETTINGS


def test_a_library_with_memory_pools_of_its_own_prevents_configuring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm.device_allocator.cumem", allocator)
    assert "memory pools" in (reason_not_to_configure() or "")


def test_segments_of_a_pool_are_recognized_by_their_pool_id() -> None:
    assert not in_pool([{"segment_pool_id": (0, 0)}, {}])
    assert in_pool([{"segment_pool_id": (0, 0)}, {"segment_pool_id": (0, 3)}])


def test_programs_without_a_gpu_do_not_configure_the_allocator() -> None:
    configure_for_process()
    assert settings_string() == ""


@pytest.mark.parametrize("choice", ["yes", None, True])
def test_unknown_choices_are_refused_with_the_valid_ones(choice: object) -> None:
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
