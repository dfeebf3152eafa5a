"""The benchmark freezes and unfreezes what lives by itself: nothing may be frozen before."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def _no_rubbish() -> None:
    gc.unfreeze()
    gc.collect()
