"""One pair of processes for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pair import Pair


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    processes = Pair()
    yield processes
    processes.close()
