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
from mimose.errors import BudgetError
from mimose.units import GIB, Budget, parse_budget, text_of, typed_budget

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
    assert parse_budget(written) == Budget()


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
    (964_914, '"1.00 MiB"'),
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
    with pytest.raises(BudgetError, match=r"more than any device has; use"):
        parse_budget(written)


@pytest.mark.parametrize("written", ["120%", "0%", "100.1%"])
def test_share_out_of_range_is_told_the_range(written: str) -> None:
    with pytest.raises(BudgetError, match=f"{re.escape(written)}.*between 0% and 100%"):
        parse_budget(written)


@pytest.mark.parametrize("written", ["1KiB", "0.5MiB", "1B"])
def test_budget_of_next_to_nothing_is_refused(written: str) -> None:
    with pytest.raises(BudgetError, match="below the minimum of 1 MiB"):
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
        (2**20 - 1, "1.00 MiB"),
        (1023 * 2**10, "1023 KiB"),
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


def test_a_petabyte_is_a_unit_and_no_unit_is_guessed_that_nobody_meant() -> None:
    assert parse_budget("1PiB").total_bytes == 1 << 50
    with pytest.raises(BudgetError, match="'6XB' has the unknown unit 'XB'; use") as refused:
        parse_budget("6XB")
    assert "did you mean" not in str(refused.value)
    with pytest.raises(BudgetError, match="did you mean 6GiB"):
        parse_budget("6Gi")


def test_an_amount_that_is_typed_is_refused_under_its_options_name() -> None:
    with pytest.raises(BudgetError, match=r"^--floor '2XB' has the unknown unit 'XB'"):
        typed_budget("2XB", "--floor")
    with pytest.raises(BudgetError, match=r"^--budget 7 means 7 bytes, below the minimum"):
        typed_budget("7")
