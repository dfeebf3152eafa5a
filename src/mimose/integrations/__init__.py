"""One line in the trainer that people already use.

The core imports nothing from here, and nothing here is imported before somebody asks for it:

    from mimose.integrations.huggingface import enable, MimoseCallback
    from mimose.integrations.lightning import MimoseCallback

Accelerate, Fabric and plain loops need no integration: `mimose.auto_checkpoint(model, …)`, before
or after `prepare` or `setup`.
"""

from __future__ import annotations

from mimose.api import pip_command


def missing(package: str, extra: str) -> ImportError:
    """What to raise where an optional package is not installed."""
    return ImportError(
        f"{package} is not installed, and this part of mimose works with it: {pip_command(extra)}",
        name=package,
    )
