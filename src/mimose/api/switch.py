"""The environment variable MIMOSE_DISABLE."""

from __future__ import annotations

import os


def switched_off() -> bool:
    """Whether MIMOSE_DISABLE is set: `auto_checkpoint` then does not touch the model."""
    return os.environ.get("MIMOSE_DISABLE", "") not in ("", "0")
