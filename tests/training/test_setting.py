"""What a device's readings teach, and what is done about memory that is cached."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from mimose.memory.clock import Clock
from mimose.memory.meters import CpuMeter, Meter, Reading, SharedPeaks
from mimose.memory.reserve import FragmentReserve, PageReserve, Reserve
from mimose.tensors.gradients import Gradients
from mimose.tensors.previous_outputs import PreviousOutputs
from mimose.training.allocator_history import AllocatorHistory
from mimose.training.collector import Collector
from mimose.training.setting import Setting, spare_bytes
from mimose.units import parse_budget

BUDGET = 100 << 20
MIB = 1 << 20


class CachingMeter(CpuMeter):
    """A meter whose allocator caches: counts how often it was told to give that back."""

    released = 0

    def release_cached(self) -> None:
        self.released += 1


@pytest.fixture
def setting() -> Iterator[Setting]:
    made = Setting(nn.Linear(4, 4), parse_budget(BUDGET), enforce=False)
    made.meter.close()
    made.meter = CachingMeter()
    made.history = AllocatorHistory(made.budget_bytes, made.meter, made.reserve, made.meter.read())
    yield made
    made.close()


def released(setting: Setting) -> int:
    assert isinstance(setting.meter, CachingMeter)
    return setting.meter.released


def reading(failures: int = 0, *, in_use: int = 10 * MIB, held: int = 10 * MIB) -> Reading:
    return Reading(in_use, in_use, held, held, 0, failures)


def test_memory_that_ran_out_within_a_rescued_step_is_seen_at_the_next(setting: Setting) -> None:
    before = setting.history.reserve.bytes
    setting.history.learn_reserve(reading(failures=1), 50 * MIB)
    assert setting.history.note_failures(reading(failures=1))
    assert setting.history.reserve.bytes > before
    assert not setting.history.note_failures(reading(failures=1))


def test_many_failures_in_one_step_count_as_one(setting: Setting) -> None:
    before = setting.history.reserve.bytes
    assert setting.history.note_failures(reading(failures=9))
    assert setting.history.reserve.bytes == before + BUDGET // 100


def experienced(*, losing: int) -> PageReserve:
    """A reserve that has looked at enough forwards."""
    reserve = PageReserve(BUDGET)
    for _ in range(8):
        reserve.learn_lost(losing)
    return reserve


def make_room(setting: Setting, predicted: int, cached: int) -> int:
    """How often cached memory is given back before such a step."""
    before = released(setting)
    setting.history.make_room(predicted, reading(in_use=40 * MIB, held=40 * MIB + cached))
    return released(setting) - before


def test_cached_memory_is_given_back_once_before_a_step_like_one_that_failed(
    setting: Setting,
) -> None:
    assert make_room(setting, 90 * MIB, 20 * MIB) == 0
    setting.history.failed(90 * MIB)
    assert make_room(setting, 80 * MIB, 20 * MIB) == 0  # smaller than what failed
    assert make_room(setting, 90 * MIB, 5 * MIB) == 0  # what is cached is not in the way
    assert make_room(setting, 90 * MIB, 20 * MIB) == 1
    assert make_room(setting, 90 * MIB, 20 * MIB) == 0
    setting.history.failed(90 * MIB)
    assert make_room(setting, 90 * MIB, 20 * MIB) == 1


def test_a_failure_is_forgotten_after_sixteen_steps(setting: Setting) -> None:
    setting.history.failed(90 * MIB)
    for _ in range(16):
        assert make_room(setting, 80 * MIB, 20 * MIB) == 0
    assert make_room(setting, 90 * MIB, 20 * MIB) == 0


def test_cached_memory_is_given_back_once_where_more_is_lost_than_is_reserved_for(
    setting: Setting,
) -> None:
    setting.history.reserve = experienced(losing=MIB // 2)
    near = setting.budget_bytes - setting.history.reserve.bytes
    for _ in range(32):
        setting.history.reserve.learn(peak_bytes=near, held_bytes=near, grew=False, retries=1)
    lost, counted = 2 * MIB, setting.history.meter
    setting.history.meter = Scripted(reading(), lost)
    setting.history.forward_over(near // 2)  # too far from the limit to measure
    setting.history.meter = counted
    assert make_room(setting, near, 20 * MIB) == 0
    setting.history.meter = Scripted(reading(), lost)
    setting.history.forward_over(near)
    setting.history.meter = counted
    assert make_room(setting, near // 2, 20 * MIB) == 0
    assert make_room(setting, near, 20 * MIB) == 1
    assert make_room(setting, near, 20 * MIB) == 0


@pytest.mark.parametrize("stale", [0, 1, 1000, 123_457, 3 * MIB + 1, 40 * MIB])
def test_stale_bytes_lie_in_a_narrow_bracket(setting: Setting, stale: int) -> None:
    least, most = setting.bracket(stale)
    assert least <= stale <= most
    assert most - least <= max(stale / 8, BUDGET >> 13)
    assert most - least <= BUDGET >> 8


class Scripted(Meter):
    """Says what it is told to."""

    def __init__(self, now: Reading, lost: int = 0) -> None:
        self.now, self._lost = now, lost
        self._peaks = SharedPeaks("scripted")

    def lost_bytes(self) -> int:
        return self._lost

    def _read(self) -> Reading:
        return self.now

    def _reset(self) -> None: ...

    def free_bytes(self) -> int:
        return 0

    def limit(self, number_of_bytes: int | None) -> None: ...


@pytest.mark.parametrize(
    ("held_after", "highest_before", "unusable"),
    [
        (120, 0, 40),  # the step has peaked at 80
        (120, 90, 30),  # what was loaded and cast before had its use for 90
        (120, 130, 0),
        (100, 0, 0),  # the allocator did not grow
    ],
)
def test_what_was_in_use_before_the_step_is_not_unusable(
    held_after: int, highest_before: int, unusable: int
) -> None:
    meter = Scripted(Reading(40, 40, 100, 100))
    collector = Collector(meter, Clock(torch.device("cpu")), Gradients([]), PreviousOutputs())
    meter.now = Reading(40, 80, held_after, held_after)
    collector.backward_over(retained=False)
    assert collector.readings.unusable_beyond(highest_before) == unusable


@pytest.mark.parametrize(("budget", "spare"), [(1 << 30, 16 * MIB), (500 << 30, 1 << 30)])
def test_a_hard_limit_leaves_room_for_what_the_allocator_runs_over_it(
    budget: int, spare: int
) -> None:
    meter = Scripted(reading())
    meter.overshoot_bytes = 16 * MIB
    assert spare_bytes(budget, meter) == spare


def shared(setting: Setting) -> None:
    """Give it a meter that others read as well, as a GPU's is."""
    setting.meter.close()
    setting.history.meter = Scripted(reading())


def test_memory_is_read_after_every_step_near_the_limit(setting: Setting) -> None:
    shared(setting)
    assert all(setting.history.reading_after(95 * MIB) is not None for _ in range(20))


def test_memory_is_read_after_every_eighth_step_far_from_it(setting: Setting) -> None:
    shared(setting)
    read = [setting.history.reading_after(10 * MIB) is not None for _ in range(16)]
    assert read == [False] * 7 + [True] + [False] * 7 + [True]


@pytest.mark.parametrize(
    ("reserve", "grown"),
    [(FragmentReserve(BUDGET), True), (experienced(losing=2 * MIB), False)],
)
def test_retries_in_a_step_far_from_the_limit_are_not_blamed_on_the_next(
    setting: Setting, reserve: Reserve, grown: bool
) -> None:
    shared(setting)
    setting.history.reserve = reserve
    before = setting.history.reserve.bytes
    assert setting.history.reading_after(50 * MIB) is None
    setting.history.step_begins(reading()._replace(retries=2))
    setting.history.learn_reserve(reading()._replace(retries=2), 96 * MIB)
    assert (setting.history.reserve.bytes > before) == grown
