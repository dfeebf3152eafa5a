"""Integrations with trainers. Import the one that you need:

    from mimose.integrations.huggingface import enable, MimoseCallback
    from mimose.integrations.lightning import MimoseCallback

Accelerate, Fabric and plain loops need none: call `mimose.auto_checkpoint(model, …)` before or
after `prepare` or `setup`.
"""

from __future__ import annotations

from mimose.api import pip_command


def missing(package: str, extra: str) -> ImportError:
    """The error to raise if an optional package is not installed."""
    return ImportError(
        f"this integration needs {package}, which is not installed: {pip_command(extra)}",
        name=package,
    )
