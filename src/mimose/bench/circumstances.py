"""Where and with what something was measured."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from typing import Any

import torch

import mimose
from mimose.bench.extras import BenchError, need
from mimose.memory import meter_for, use_expandable_segments


def settle_device(asked: str | None) -> str:
    """The device to run on: the GPU if there is one, unless asked otherwise."""
    name = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in ("cuda", "cpu"):
        raise BenchError(f"--device {name}: the benchmark runs on cuda or cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise BenchError(
            f"--device {name} was asked for, but torch {torch.__version__} sees no CUDA device: "
            "leave it out, or say --device cpu for small models"
        )
    if name.startswith("cuda"):
        torch.set_float32_matmul_precision("high")  # TF32
        # Batches of varying size leave the memory in fragments otherwise, for every contestant.
        # What holds in the end is in the results file.
        use_expandable_segments()
    return name


def circumstances(device: str) -> dict[str, Any]:
    """What a result must be read with; runs that differ in any of it do not belong together."""
    meter = meter_for(torch.device(device))
    meter.close()
    cuda = device.startswith("cuda")
    return {
        "machine": torch.cuda.get_device_name(device) if cuda else _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": need("transformers").__version__,
        "mimose": mimose.__version__,
        "expandable_segments": not meter.fragments if cuda else None,
        "page_bytes": meter.page_bytes if cuda else None,
    }


def today() -> str:
    return datetime.date.today().isoformat()


def commit(given: str | None) -> str:
    """The commit that runs, as far as anybody can tell."""
    if given:
        return given
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=os.path.dirname(__file__),
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    return f"{platform.processor() or platform.machine()} ({torch.get_num_threads()} threads)"
