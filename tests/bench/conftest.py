"""The benchmark freezes and unfreezes what lives by itself: nothing may be frozen before."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_frozen() -> None:
    gc.unfreeze()  # before the fixtures of a module measure anything
    gc.collect()


@pytest.fixture(autouse=True)
def _no_rubbish() -> None:
    gc.collect()
