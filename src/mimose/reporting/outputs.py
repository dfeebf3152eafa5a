"""Check that output paths are writable before any work is done.

Missing parent folders are an error and are not created: they are usually typing errors.
"""

from __future__ import annotations

import os
from pathlib import Path

from mimose.errors import ArgumentError


def refuse_file(path: Path, option: str, *, like: str = "results.txt") -> None:
    """Raise unless a file can be written at `path`; `like` is an example of a file name."""
    if path.is_dir():
        raise ArgumentError(f"{option} {path} is a folder: name a file, such as {path / like}")
    _refuse_unwritable(path, option)


def refuse_folder(path: Path, option: str) -> None:
    """Raise unless `path` is a writable folder or can be created as one."""
    if path.exists() and not path.is_dir():
        raise ArgumentError(f"{option} {path} is a file: name a folder")
    _refuse_unwritable(path, option)


def _refuse_unwritable(path: Path, option: str) -> None:
    folder = path.parent
    if not folder.is_dir():
        raise ArgumentError(
            f"{option} {path}: there is no folder {folder}. Create it first: mkdir -p {folder}"
        )
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ArgumentError(f"{option} {path}: no permission to write. Give another path")
