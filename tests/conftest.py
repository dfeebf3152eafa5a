"""What every test starts from and leaves behind: a seed, one thread, quiet libraries, no hooks."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch

import compare

torch.set_num_threads(1)
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two halves for two processes: on a CPU memory is counted by process, so order matters."""
    for item in items:
        half = "core" if item.path.parent == HERE else "folders"
        item.add_marker(pytest.mark.xdist_group(half))


@pytest.fixture(autouse=True)
def _same_start_and_clean_end() -> Iterator[None]:
    torch.manual_seed(0)
    random.seed(0)
    yield
    assert compare.no_hooks(), "a saved-tensor hook was left behind"
