"""The reserve: what makes it grow, and how far."""

from __future__ import annotations

import pytest

from mimose.reserve import Reserve

BUDGET = 100_000


def reserve(fragments: bool = True) -> Reserve:
    return Reserve(BUDGET, fragments=fragments)


def learn(
    reserve: Reserve, *, peak: int = 97_000, over: int = 0, grew: bool = False, retries: int = 0
) -> int:
    reserve.learn(peak_bytes=peak, held_bytes=peak + over, grew=grew, retries=retries)
    return reserve.bytes


@pytest.mark.parametrize("fragments", [True, False])
def test_reserve_starts_at_three_percent(fragments: bool) -> None:
    assert reserve(fragments).bytes == 3_000


@pytest.mark.parametrize(("fragments", "once", "four_times"), [(True, 3_500, 5_000),
                                                              (False, 3_250, 4_000)])  # fmt: skip
def test_reserve_grows_with_every_retry(fragments: bool, once: int, four_times: int) -> None:
    assert learn(reserve(fragments), retries=1) == once
    assert learn(reserve(fragments), retries=4) == four_times


def test_retries_far_from_the_limit_warn_of_fragments_alone() -> None:
    assert learn(reserve(fragments=True), peak=10, retries=1) > 3_000
    assert learn(reserve(fragments=False), peak=10, retries=1) == 3_000


def test_reserve_grows_to_what_the_allocator_held_beyond_what_was_in_use() -> None:
    assert learn(reserve(), over=5_000, grew=True) == 5_000


def test_reserve_ignores_what_was_held_before() -> None:
    assert learn(reserve(), over=5_000, grew=False) == 3_000


def test_reserve_ignores_steps_far_from_the_limit() -> None:
    far = reserve()
    for _ in range(500):
        assert learn(far, peak=95_000, over=4_900, grew=True) == 3_000


def test_a_step_is_near_the_limit_within_two_percent_of_what_plans_may_use() -> None:
    assert reserve().near_limit(round(0.98 * 97_000))
    assert not reserve().near_limit(round(0.98 * 97_000) - 1)


def test_reserve_shrinks_by_a_tenth_when_fifty_steps_near_the_limit_were_quiet() -> None:
    quiet = reserve(fragments=True)
    grown = learn(quiet, retries=2)
    assert grown == 4_000
    assert [learn(quiet) for _ in range(49)] == [grown] * 49
    assert learn(quiet) == 3_600


def test_reserve_waits_anew_after_a_sign() -> None:
    near = reserve()
    for _ in range(49):
        learn(near)
    grown = learn(near, retries=1)
    assert [learn(near) for _ in range(49)] == [grown] * 49


def test_reserve_shrinks_to_where_it_started_and_no_further() -> None:
    quiet = reserve(fragments=True)
    learn(quiet, retries=20)
    for _ in range(3000):
        learn(quiet, peak=99_000)
    assert quiet.bytes == 3_000


def test_reserve_starts_at_the_holes_of_the_allocators_pages_but_not_over_five_percent() -> None:
    assert Reserve(100_000, hole_bytes=4_000).bytes == 4_000
    assert Reserve(100_000, hole_bytes=40_000).bytes == 5_000


def test_reserve_grows_past_its_cap_when_memory_ran_out() -> None:
    tight = reserve(fragments=False)
    for _ in range(2):
        tight.ran_out()
    assert tight.bytes == 5_000
    for _ in range(100):
        tight.ran_out()
    assert tight.bytes == 25_000


@pytest.mark.parametrize(("fragments", "most"), [(True, 25_000), (False, 3_000)])
def test_reserve_never_outgrows_its_cap(fragments: bool, most: int) -> None:
    assert learn(reserve(fragments), over=60_000, grew=True) == most


@pytest.mark.parametrize(("fragments", "most"), [(True, 25_000), (False, 8_000)])
def test_retries_make_the_reserve_grow_no_further(fragments: bool, most: int) -> None:
    assert learn(reserve(fragments), retries=1000) == most


@pytest.mark.parametrize(("fragments", "most"), [(True, 25_000), (False, 8_000)])
def test_what_an_observed_step_could_not_use_is_reserved(fragments: bool, most: int) -> None:
    observing = reserve(fragments)
    observing.learn_unusable(6_000)
    assert observing.bytes == 6_000
    observing.learn_unusable(1_000)
    assert observing.bytes == 6_000
    observing.learn_unusable(60_000)
    assert observing.bytes == most


def test_what_an_observed_step_could_not_use_says_nothing_once_somebody_has_looked() -> None:
    looked = reserve(fragments=False)
    looked.learn_lost_early(700)
    looked.learn_unusable(6_000)
    assert looked.bytes == 3_000


def lose(reserve: Reserve, *lost: int) -> int:
    """So much was lost after forwards, also once cached memory had been given back."""
    for number in lost:
        if reserve.learn_lost(number):
            assert not reserve.learn_lost(number)
    return reserve.bytes


def test_two_and_a_half_times_what_forwards_lose_is_reserved() -> None:
    assert lose(reserve(fragments=False), 2_000) == 5_000
    assert lose(reserve(fragments=False), 1_000) == 3_000


def test_cached_memory_is_given_back_before_more_is_reserved() -> None:
    untidy = reserve(fragments=False)
    assert untidy.learn_lost(2_000)
    assert untidy.wants_look(97_000)  # in the next step
    assert untidy.bytes == 3_000
    assert not untidy.learn_lost(1_000)  # that was the reason
    assert untidy.bytes == 3_000


def test_one_forward_that_loses_much_is_no_rule() -> None:
    assert lose(reserve(fragments=False), 1_000, 1_000, 6_000) == 3_000


def test_what_is_lost_makes_the_reserve_grow_to_eight_percent() -> None:
    assert lose(reserve(fragments=False), 50_000) == 8_000


def test_what_observed_steps_lose_counts_until_planned_ones_have_been_seen() -> None:
    young = reserve(fragments=False)
    young.learn_lost_early(2_000)
    assert young.bytes == 5_000
    assert lose(young, 500) == 3_000
    young.learn_lost_early(2_000)
    assert young.bytes == 3_000


def test_what_observed_steps_lose_is_forgotten_whatever_happens_in_between() -> None:
    young = reserve(fragments=False)
    young.learn_lost_early(2_500)
    learn(young, over=6_000, grew=True)
    for _ in range(60):
        learn(young)
    assert young.bytes == 6_250
    assert lose(young, 500) == 3_000


def test_retries_count_as_far_as_what_is_lost_can_be_the_reason() -> None:
    little, much, nobody_knows = (reserve(fragments=False) for _ in range(3))
    lose(little, 700)
    lose(much, 1_600)
    for one in (little, much, nobody_knows):
        for _ in range(12):
            learn(one, retries=1)
    assert (little.bytes, much.bytes, nobody_knows.bytes) == (3_000, 5_000, 6_000)


def test_reserve_shrinks_no_further_than_what_is_lost_needs() -> None:
    quiet = reserve(fragments=False)
    lose(quiet, 2_000)
    learn(quiet, retries=4)
    for _ in range(3000):
        learn(quiet, peak=99_000)
    assert quiet.bytes == 5_000


def test_four_observed_steps_and_five_near_the_limit_are_looked_at() -> None:
    curious = reserve(fragments=False)
    looked = []
    for peak in [None] * 6 + [50_000] * 3 + [97_000] * 10:
        looked.append(curious.wants_look(peak))
        if looked[-1] and peak is None:
            curious.learn_lost_early(100)
        elif looked[-1]:
            curious.learn_lost(100)
    assert looked == [True] * 4 + [False] * 5 + [True] * 5 + [False] * 5


def test_a_retry_makes_it_look_again_but_not_in_every_step() -> None:
    curious = reserve(fragments=False)
    lose(curious, *[100] * 5)
    looked = []
    for _ in range(96):
        looked.append(curious.wants_look(97_000))
        if looked[-1]:
            curious.learn_lost(100)
        learn(curious, retries=1)
    assert [number for number, look in enumerate(looked) if look] == [32, 64]
