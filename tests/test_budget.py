"""Budgets are read as people write them; what cannot be read is answered with what can."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chains import steady
from mimose.budget import GIB, Budget, Reserve, parse_budget, text_of
from mimose.errors import BudgetError

IN_BYTES = {
    "6GiB": 6 * 2**30,
    "512MiB": 2**29,
    "2048KiB": 2**21,
    "1TiB": 2**40,
    "6GB": 6 * 10**9,
    "512MB": 512 * 10**6,
    "2000KB": 2 * 10**6,
    "2TB": 2 * 10**12,
    "2000000B": 2 * 10**6,
    "1.5GiB": 3 * 2**29,
    ".5GiB": 2**29,
    " 6 GiB ": 6 * 2**30,
    "6gib": 6 * 2**30,
    "6gb": 6 * 10**9,
    6 * 2**30: 6 * 2**30,
    6e9: 6 * 10**9,
    2**20: 2**20,
}


@pytest.mark.parametrize("written", IN_BYTES)
def test_bytes_are_read(written: str | int | float) -> None:
    assert parse_budget(written) == Budget(total_bytes=IN_BYTES[written])


@pytest.mark.parametrize("kind", [np.int64, np.uint64, torch.tensor], ids=lambda k: k.__name__)
def test_whole_numbers_of_any_kind_are_bytes(kind: Any) -> None:
    budget = parse_budget(kind(3 << 30))
    assert budget == Budget(total_bytes=3 << 30)
    assert type(budget.total_bytes) is int


@pytest.mark.parametrize(
    ("written", "share"), [("80%", 0.8), ("100%", 1.0), ("12.5%", 0.125), (" 80 % ", 0.8)]
)
def test_share_of_the_device_is_read(written: str, share: float) -> None:
    assert parse_budget(written) == Budget(share=share)


@pytest.mark.parametrize("written", ["auto", "AUTO", " auto "])
def test_auto_is_read(written: str) -> None:
    assert parse_budget(written).is_auto


def test_only_auto_is_auto() -> None:
    assert not parse_budget("80%").is_auto
    assert not parse_budget("6GiB").is_auto


MEANT = [
    (0.8, '"80%"'),
    (0.85, '"85%"'),
    (1.0, '"100%"'),
    (7, '"7GiB"'),
    (7.0, '"7GiB"'),
    (7.5, '"7.5GiB"'),
    ("7", "7GiB"),
    ("7G", "7GiB"),
    ("7g", "7GiB"),
    ("512M", "512MiB"),
    ("2000K", "2000KiB"),
    ("2T", "2TiB"),
    ("7Gi", "7GiB"),
    ("7 gigs", "7GiB"),
    ("2000000000", '2000000000, without quotes, or "1.86 GiB"'),
    (2e9 + 0.5, '2000000000, without quotes, or "1.86 GiB"'),
    (np.int64(7), '"7GiB"'),
]


@pytest.mark.parametrize(("written", "meant"), MEANT, ids=repr)
def test_budget_without_a_unit_is_told_what_was_probably_meant(
    written: str | float, meant: str
) -> None:
    with pytest.raises(BudgetError) as error:
        parse_budget(written)
    assert f"memory_budget={written!r}" in str(error.value)
    assert f"did you mean {meant}?" in str(error.value)


@pytest.mark.parametrize(
    "written",
    ["abc", "", "GiB", "-6GiB", "6,5GiB", -1, 0, 0.0, True, False, None, [6], "0GiB", np.True_],
)
def test_budget_that_cannot_be_read_is_told_what_can(written: object) -> None:
    with pytest.raises(BudgetError) as error:
        parse_budget(written)  # type: ignore[arg-type]
    assert f"memory_budget={written!r}" in str(error.value)
    assert all(way in str(error.value) for way in ('"6GiB"', '"512MiB"', '"80%"', '"auto"'))


@pytest.mark.parametrize(
    "written",
    ["9" * 400 + "GiB", "9" * 305 + "TiB", 10**400, 1e300, 1 << 61],
    ids=lambda written: f"{type(written).__name__}{len(str(written))}",
)
def test_budget_beyond_all_devices_is_refused(written: str | float) -> None:
    with pytest.raises(BudgetError, match=r"more than any device has: write"):
        parse_budget(written)


@pytest.mark.parametrize("written", ["120%", "0%", "100.1%"])
def test_share_out_of_range_is_told_the_range(written: str) -> None:
    with pytest.raises(BudgetError, match=f"{re.escape(written)}.*between 0% and 100%"):
        parse_budget(written)


@pytest.mark.parametrize("written", ["1KiB", "0.5MiB", "1B"])
def test_budget_of_next_to_nothing_is_refused(written: str) -> None:
    with pytest.raises(BudgetError, match="under 1 MiB"):
        parse_budget(written)


@steady
@given(st.one_of(st.floats(1e-3, 1000), st.integers(1, 1000)))
def test_what_was_probably_meant_can_be_read(number: float) -> None:
    with pytest.raises(BudgetError) as error:
        parse_budget(number)
    meant = re.search(r'did you mean "(.*)"\?', str(error.value))
    assert meant is not None
    parse_budget(meant[1])


def test_budget_error_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        parse_budget("abc")


# In bytes


def in_bytes(budget: str, *, free: int = 0, own: int = 0) -> int:
    return parse_budget(budget).in_bytes(device_bytes=100 * GIB, free_bytes=free, own_bytes=own)


def test_bytes_stay_bytes_on_any_device() -> None:
    assert in_bytes("6GiB", free=GIB, own=GIB) == 6 * GIB


def test_share_is_of_the_whole_device() -> None:
    assert in_bytes("80%", free=GIB, own=GIB) == 80 * GIB


def test_auto_is_what_is_held_and_what_is_free_less_two_percent_of_the_device() -> None:
    assert in_bytes("auto", free=90 * GIB, own=10 * GIB) == 98 * GIB


def test_auto_leaves_other_processes_what_they_have() -> None:
    assert in_bytes("auto", free=50 * GIB, own=10 * GIB) == 58 * GIB


def test_auto_is_never_less_than_is_held_already() -> None:
    assert in_bytes("auto", free=GIB, own=10 * GIB) == 10 * GIB


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (2048, "2.00 KiB"),
        (1.5 * 2**20, "1.50 MiB"),
        (99.5 * 2**20, "99.50 MiB"),
        (512 * 2**20, "512 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (141 * GIB, "141 GiB"),
        (-3 * 2**29, "-1.50 GiB"),
    ],
)
def test_bytes_are_written_for_people(number: float, text: str) -> None:
    assert text_of(number) == text


# The reserve

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
def test_retries_and_observed_steps_make_the_reserve_grow_no_further(
    fragments: bool, most: int
) -> None:
    assert learn(reserve(fragments), retries=1000) == most
    observing = reserve(fragments)
    observing.learn_unusable(60_000)
    assert observing.bytes == most


def test_what_an_observed_step_could_not_use_is_reserved() -> None:
    observing = reserve(fragments=False)
    observing.learn_unusable(6_000)
    assert observing.bytes == 6_000
    observing.learn_unusable(1_000)
    assert observing.bytes == 6_000
