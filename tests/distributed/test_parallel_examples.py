"""The examples for several processes run, by torchrun, in small form."""

from __future__ import annotations

import os
import re
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
        [*command, str(FOLDER / name), "--steps=8"],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        env=environment,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for rank in (0, 1):  # their lines may run into each other
        plans = re.findall(rf"rank {rank}, step \d+: \d+, (observed|[Kr]+)", result.stdout)
        assert len(plans) == 8
        planned = [plan for plan in plans if plan != "observed"]
        assert planned, "every step was observed"
        assert "K" in planned[-1], "the last plan keeps nothing"
