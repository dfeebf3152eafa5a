"""Tables and figures from results files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mimose.bench.records import read


def write_report(files: Sequence[Path], folder: Path) -> Path:
    """Write the report on these files into a folder; its page."""
    results = [read(path) for path in files]
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "README.md"
    page.write_text(f"{len(results)} files\n", encoding="utf-8")
    return page
