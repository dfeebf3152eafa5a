"""Refuse a place that nothing can be written to, before any work is done.

No folder above it is made: a path that leads nowhere is a typing error more often than a wish.
"""

from __future__ import annotations

import os
from pathlib import Path

from mimose.errors import ArgumentError


def refuse_file(path: Path, option: str, *, like: str = "results.txt") -> None:
    """Refuse what cannot be written as a file, such as a folder; `like` is a name that could."""
    if path.is_dir():
        raise ArgumentError(f"{option} {path} is a folder: name a file, like {path / like}")
    _refuse_unwritable(path, option)


def refuse_folder(path: Path, option: str) -> None:
    """Refuse what is no folder and cannot be made one."""
    if path.exists() and not path.is_dir():
        raise ArgumentError(f"{option} {path} is a file: name a folder")
    _refuse_unwritable(path, option)


def _refuse_unwritable(path: Path, option: str) -> None:
    folder = path.parent
    if not folder.is_dir():
        raise ArgumentError(
            f"{option} {path}: there is no folder {folder}. Make it first: mkdir -p {folder}"
        )
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ArgumentError(f"{option} {path}: you may not write there. Name another place")
