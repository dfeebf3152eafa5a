"""The switch for everything: MIMOSE_DISABLE in the environment."""

from __future__ import annotations

import os


def switched_off() -> bool:
    """Whether models are to be left as they are."""
    return os.environ.get("MIMOSE_DISABLE", "") not in ("", "0")
