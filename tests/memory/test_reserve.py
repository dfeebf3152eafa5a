"""The reserve: what makes it grow, and how far."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mimose.memory.meters import CpuMeter
from mimose.memory.reserve import FragmentReserve, PageReserve, Reserve, reserve_for

BUDGET = 100_000
KINDS = [Reserve, FragmentReserve, PageReserve]
FIRST = list(zip(KINDS, [3_000, 20_000, 8_000], strict=True))
LEAST = list(zip(KINDS, [3_000, 20_000, 3_000], strict=True))


def learn(
    reserve: Reserve, *, peak: int = 97_000, over: int = 0, grew: bool = False, retries: int = 0
) -> int:
    reserve.learn(peak_bytes=peak, held_bytes=peak + over, grew=grew, retries=retries)
    return reserve.bytes


def lose(reserve: PageReserve, *lost: int) -> int:
    """Report these losses after forwards."""
    for number in lost:
        if reserve.learn_lost(number):
            assert not reserve.learn_lost(number)
    return reserve.bytes


def experienced(*, losing: int = 100) -> PageReserve:
    """A reserve with enough measurements."""
    reserve = PageReserve(BUDGET)
    lose(reserve, *[losing] * 8)
    return reserve


class Scripted(CpuMeter):
    """A meter of another allocator."""

    def __init__(self, *, fragments: bool, hole_bytes: int) -> None:
        super().__init__()
        self.fragments, self.hole_bytes = fragments, hole_bytes


@pytest.mark.parametrize(
    ("fragments", "hole_bytes", "kind"),
    [(True, 500, FragmentReserve), (False, 500, PageReserve), (False, 0, Reserve)],
)
def test_each_kind_of_allocator_gets_its_kind_of_reserve(
    fragments: bool, hole_bytes: int, kind: type[Reserve]
) -> None:
    meter = Scripted(fragments=fragments, hole_bytes=hole_bytes)
    try:
        assert type(reserve_for(BUDGET, meter)) is kind
    finally:
        meter.close()


@pytest.mark.parametrize(("kind", "first"), FIRST)
def test_reserve_starts_at_three_percent_or_higher_where_it_depends_on_the_model(
    kind: type[Reserve], first: int
) -> None:
    assert kind(BUDGET).bytes == first


@pytest.mark.parametrize(("kind", "least"), LEAST)
def test_minimum_is_three_percent_or_twenty_where_memory_fragments(
    kind: type[Reserve], least: int
) -> None:
    assert kind(BUDGET).minimum_bytes == least


@pytest.mark.parametrize("kind", [Reserve, PageReserve])
def test_minimum_covers_the_holes_in_pages_but_is_at_most_five_percent(
    kind: type[Reserve],
) -> None:
    assert kind(BUDGET, 4_000).minimum_bytes == 4_000
    assert kind(BUDGET, 40_000).minimum_bytes == 5_000


@pytest.mark.parametrize(
    ("kind", "then", "at_last"),
    [(Reserve, 4_000, 25_000), (PageReserve, 9_000, 25_000), (FragmentReserve, 23_000, 45_000)],
)
def test_reserve_grows_when_memory_ran_out_up_to_a_limit(
    kind: type[Reserve], then: int, at_last: int
) -> None:
    tight = kind(BUDGET)
    tight.ran_out()
    assert tight.bytes == then
    for _ in range(100):
        tight.ran_out()
    assert tight.bytes == at_last


def test_running_out_of_memory_counts_for_an_experienced_reserve_too() -> None:
    tight = experienced()
    tight.ran_out()
    assert tight.bytes == 4_000


@pytest.mark.parametrize("kind", KINDS)
def test_reserve_ignores_steps_far_from_the_limit(kind: type[Reserve]) -> None:
    far = kind(BUDGET)
    first = far.bytes
    for _ in range(500):
        assert learn(far, peak=90_000, over=9_900, grew=True) == first


def test_a_step_is_near_the_limit_within_two_percent_of_what_plans_may_use() -> None:
    assert Reserve(BUDGET).near_limit(round(0.98 * 97_000))
    assert not Reserve(BUDGET).near_limit(round(0.98 * 97_000) - 1)


@pytest.mark.parametrize(
    ("kind", "before", "after"), [(Reserve, 4_000, 3_600), (FragmentReserve, 23_000, 20_700)]
)
def test_reserve_shrinks_by_a_tenth_when_fifty_steps_near_the_limit_were_quiet(
    kind: type[Reserve], before: int, after: int
) -> None:
    quiet = kind(BUDGET)
    quiet.ran_out()
    assert [learn(quiet) for _ in range(49)] == [before] * 49
    assert learn(quiet) == after


def test_growing_restarts_the_count_of_quiet_steps() -> None:
    near = FragmentReserve(BUDGET)
    for _ in range(49):
        learn(near)
    grown = learn(near, retries=1)
    assert [learn(near) for _ in range(49)] == [grown] * 49


@pytest.mark.parametrize(("kind", "first"), FIRST[:2])
def test_reserve_shrinks_to_where_it_started_and_no_further(
    kind: type[Reserve], first: int
) -> None:
    quiet = kind(BUDGET)
    for _ in range(20):
        quiet.ran_out()
    for _ in range(3000):
        learn(quiet, peak=99_000)
    assert quiet.bytes == first


def test_fragments_grow_the_reserve_with_every_retry_up_to_a_limit() -> None:
    assert learn(FragmentReserve(BUDGET), retries=1) == 20_500
    assert learn(FragmentReserve(BUDGET), retries=4) == 22_000
    assert learn(FragmentReserve(BUDGET), peak=10, retries=1) == 20_500
    assert learn(FragmentReserve(BUDGET), retries=1000) == 45_000


def test_fragment_reserve_covers_newly_held_memory_beyond_the_bytes_in_use() -> None:
    assert learn(FragmentReserve(BUDGET), over=22_000, grew=True) == 22_000
    assert learn(FragmentReserve(BUDGET), over=60_000, grew=True) == 45_000
    assert learn(FragmentReserve(BUDGET), over=22_000, grew=False) == 20_000


def test_fragment_reserve_covers_what_an_observed_step_could_not_use() -> None:
    observing = FragmentReserve(BUDGET)
    observing.learn_unusable(21_000)
    assert observing.bytes == 21_000
    observing.learn_unusable(1_000)
    assert observing.bytes == 21_000
    observing.learn_unusable(60_000)
    assert observing.bytes == 45_000
    assert lose(experienced(), 100) == 3_000


def test_eight_percent_is_reserved_until_eight_forwards_were_measured() -> None:
    young = PageReserve(BUDGET)
    assert [lose(young, 500) for _ in range(9)] == [8_000] * 7 + [3_000] * 2


def test_one_forward_that_loses_little_does_not_shrink_the_reserve() -> None:
    young = PageReserve(BUDGET)
    lose(young, 100)
    assert young.bytes == 8_000


@pytest.mark.parametrize(
    ("lost", "bytes_"),
    [
        ([2_000] * 8, 5_000),  # two and a half times the median
        ([1_000] * 8, 3_000),
        ([1_000] * 7 + [4_000], 5_600),  # 1.4 times the most
        ([50_000] * 8, 8_000),
    ],
)
def test_reserve_follows_the_median_and_the_largest_loss(lost: list[int], bytes_: int) -> None:
    assert lose(PageReserve(BUDGET), *lost) == bytes_


def test_the_cache_is_emptied_before_the_reserve_grows() -> None:
    untidy = experienced()
    assert untidy.learn_lost(2_000)
    assert untidy.should_measure_lost(97_000)  # already in the next step
    assert untidy.bytes == 3_000
    assert not untidy.learn_lost(1_000)  # emptying helped
    assert untidy.bytes == 3_000


def test_the_cache_is_emptied_at_most_every_512_steps() -> None:
    untidy = experienced(losing=2_000)
    given_back = []
    for number in range(1200):
        if untidy.should_measure_lost(99_000) and untidy.learn_lost(3_500):
            given_back.append(number)
        learn(untidy, peak=99_000)
    assert len(given_back) == 3
    assert all(later - one >= 512 for one, later in pairwise(given_back))


def test_the_cache_is_not_emptied_before_eight_measurements() -> None:
    assert not PageReserve(BUDGET).learn_lost(6_000)


@pytest.mark.parametrize(
    ("over", "retries", "bytes_"),
    [
        (2_000, 1, 3_000),  # less than is reserved
        (3_000, 1, 3_900),  # three tenths more than was lost at the peak
        (3_000, 0, 3_000),  # no retry, so cached memory is not lost
        (20_000, 1, 8_000),
    ],
)
def test_after_a_retry_memory_held_beyond_the_peak_counts_as_lost(
    over: int, retries: int, bytes_: int
) -> None:
    assert learn(experienced(), over=over, retries=retries) == bytes_


def test_reserve_does_not_shrink_below_the_measured_loss() -> None:
    quiet = experienced(losing=2_000)
    assert learn(quiet, over=4_615, retries=1) == 5_999
    for _ in range(3000):
        learn(quiet, peak=99_000)
    assert quiet.bytes == 5_000


def measured_steps(
    reserve: PageReserve, peaks: list[int], *, losing: int, retries: int
) -> list[int]:
    """The steps in which the loss was measured."""
    looked = []
    for number, peak in enumerate(peaks):
        if reserve.should_measure_lost(peak):
            looked.append(number)
            reserve.learn_lost(losing)
        learn(reserve, peak=peak, retries=retries)
    return looked


def test_the_first_eight_steps_near_the_limit_are_measured() -> None:
    peaks = [50_000] * 3 + [97_000] * 60
    assert measured_steps(PageReserve(BUDGET), peaks, losing=100, retries=0) == list(range(3, 11))


def test_a_retry_leads_to_a_new_measurement_but_not_in_every_step() -> None:
    assert measured_steps(experienced(), [97_000] * 96, losing=100, retries=1) == [32, 64]


def test_measuring_goes_on_while_the_reserve_is_above_its_minimum() -> None:
    high = experienced(losing=2_000)
    looks = measured_steps(high, [99_000] * 400, losing=500, retries=0)
    assert looks == [32, 64, 96, 128, 160]
    assert high.bytes == 3_000
