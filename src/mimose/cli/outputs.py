"""Where commands write: results to files or standard output, remarks to stderr."""

from __future__ import annotations

import sys
from pathlib import Path

from mimose.api import pip_command
from mimose.errors import ArgumentError


def write(text: str, target: Path) -> None:
    """Write to a file, or to standard output if `target` is "-"."""
    if str(target) == "-":
        print(text, end="")
        return
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(
            f"{target} cannot be written: {(error.strerror or str(error)).lower()}"
        ) from None
    print_status(f"wrote {target}")


def print_remark(file: Path, remark: str) -> None:
    """Print a remark about an input file, unless it is empty."""
    if remark:
        print_status(f"{file}: {remark}")


def print_status(line: str) -> None:
    """Print to stderr: standard output is for results."""
    print(line, file=sys.stderr)


def need_matplotlib(what: str = "pictures") -> None:
    """Raise unless matplotlib is there."""
    try:
        import matplotlib.backend_bases  # noqa: F401 (the module that pictures are drawn by)
    except ImportError:
        raise ArgumentError(
            f"{what} need matplotlib: {pip_command('bench', 'matplotlib')}"
        ) from None


def refuse_picture_name(picture: Path) -> None:
    """Raise unless matplotlib can draw to a file of this name."""
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if picture.suffix.lower().removeprefix(".") not in formats:
        known = ", .".join(sorted(formats))
        raise ArgumentError(f"{picture}: the file name of a picture must end in one of .{known}")
