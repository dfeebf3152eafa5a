"""The examples for several processes run, by torchrun, in small form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent.parent / "examples"
_SECONDS = 120
"""After which a run counts as hung."""


@pytest.mark.parametrize("name", ["ddp.py", "fsdp2.py"])
def test_example_trains_on_two_ranks_and_plans(name: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(FOLDER.parent / "src"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    result = subprocess.run(
        [*command, str(FOLDER / name), "--steps=9"],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        env=environment,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for rank in (0, 1):
        lines = [line for line in result.stdout.splitlines() if f"rank {rank}, step" in line]
        assert len(lines) == 9
        assert "K" in lines[-1].split(", ")[-1], "the last plan keeps nothing"
