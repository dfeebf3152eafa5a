"""Where and with what something was measured."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import Any

import torch

import mimose
from mimose.bench.extras import BenchError, need
from mimose.bench.source import source
from mimose.memory import allocator_backend, configure_for_process, current_settings, meter_for

_THAT_MATTER = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "LD_PRELOAD",
    "MIMOSE_DISABLE",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTHONMALLOC",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCHDYNAMO_DISABLE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
_ENVIRONMENT = {name: os.environ[name] for name in _THAT_MATTER if name in os.environ}
"""Variables that change times or memory, as they were set from outside."""


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
        configure_for_process()
    return name


def circumstances(
    device: str, *, allow_dirty: bool = False, scripts: Path | None = None
) -> dict[str, Any]:
    """What a result must be read with: code, versions, machine, environment, allocator, date.

    Raises a `BenchError` where the code that runs is not a commit's, unless dirty code is allowed.

    Args:
        device: where is measured, `cuda` or `cpu`.
        allow_dirty: accept code that differs from its commit, or whose commit is not known.
        scripts: a folder of scripts whose code has a part in the results, too.
    """
    code = source(allow_dirty=allow_dirty, scripts=scripts)
    meter = meter_for(torch.device(device))
    meter.close()
    cuda = device.startswith("cuda")
    return {
        "date": datetime.date.today().isoformat(),
        **code.to_plain(),
        "machine": torch.cuda.get_device_name(device) if cuda else _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": need("transformers").__version__,
        "mimose": mimose.__version__,
        "expandable_segments": not meter.fragments if cuda else None,
        "page_bytes": meter.page_bytes if cuda else None,
        "environment": _ENVIRONMENT,
        "allocator": allocator_settings() if cuda else None,
    }


def allocator_settings() -> dict[str, Any]:
    """The settings of CUDA's allocator that are in force now, by PyTorch's own account."""
    return {"backend": allocator_backend(), **current_settings()}


def _processor() -> str:
    return f"{platform.processor() or platform.machine()} ({torch.get_num_threads()} threads)"
