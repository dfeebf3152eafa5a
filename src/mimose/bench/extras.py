"""What the benchmark needs beyond the core, and what to type where it is missing."""

from __future__ import annotations

import importlib
from typing import Any

from mimose.api import pip_command


class BenchError(Exception):
    """Something that the person at the command line can put right; shown as one line."""


class MissingExtra(BenchError, SystemExit):
    """A package of an extra is not installed. A script that does not catch this prints it and exits
    with status 1."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message  # `BenchError.__init__` does not pass it on to `SystemExit`


def need(package: str, *, extra: str = "bench") -> Any:
    """The package, or one line that says how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise MissingExtra(
            f"the benchmark needs {name}, which is not installed: {pip_command(extra)}"
        ) from error
