"""The public functions: `auto_checkpoint` with its handle, and `checkpoint`.

Connects training and reporting.
"""

from mimose.api.checkpoint import checkpoint
from mimose.api.extras import EXTRAS, NEEDED, missing_from, pip_command, version_of
from mimose.api.handle import Mimose, auto_checkpoint
from mimose.api.options import refuse_options
from mimose.api.switch import switched_off

__all__ = [
    "EXTRAS",
    "NEEDED",
    "Mimose",
    "auto_checkpoint",
    "checkpoint",
    "missing_from",
    "pip_command",
    "refuse_options",
    "switched_off",
    "version_of",
]
