"""What a file that mimose wrote contains, to name the command that reads it."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from mimose.comparison import TRACE_FORMAT
from mimose.errors import ArgumentError
from mimose.reporting import is_recording

_HEAD_BYTES = 65536


class Kind(Enum):
    """Kinds of files, with their names and the commands that read them."""

    recording = "a recording", "mimose report, mimose plan or mimose compare"
    results = "benchmark results", "mimose report"
    trace = "an operator trace", "mimose trace"
    state = "a saved state", "mimose plan"


def kind_of(file: Path) -> Kind | None:
    """The kind of this file by its first line; None if it is of none of them."""
    with file.open("rb") as opened:
        head = opened.read(_HEAD_BYTES)
    first = head.decode(errors="replace").partition("\n")[0]
    if is_recording(first):
        return Kind.recording
    if first.startswith('{"kind":'):
        return Kind.results
    if first.startswith("{") and f'"{TRACE_FORMAT}"' in first:
        return Kind.trace
    return Kind.state if head.startswith(b"PK") or b'"chapters"' in head else None


def refuse_other_kinds(file: Path, *readable: Kind) -> None:
    """Raise if another command reads this file."""
    kind = kind_of(file)
    if kind is not None and kind not in readable:
        what, command = kind.value
        raise ArgumentError(f"{file} contains {what}: use {command}")
