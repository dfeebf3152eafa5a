"""What the benchmark needs beyond the core, and what to type where it is missing."""

from __future__ import annotations

import importlib
from typing import Any

from mimose.api import pip_command


class BenchError(Exception):
    """Something that the person at the command line can put right; shown as one line."""


class MissingExtra(BenchError, SystemExit):
    """A package of an extra is not installed."""


def need(package: str, *, extra: str = "bench") -> Any:
    """The package, or one line that says how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise MissingExtra(
            f"the benchmark needs {name}, which is not installed: {pip_command(extra)}"
        ) from error
