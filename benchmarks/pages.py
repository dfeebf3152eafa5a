"""Fill what README.md and BENCHMARKS.md take from the raw results.

    python benchmarks/pages.py

A block lies between two marks, and its text follows from the newest raw files; a test compares.
Only the blocks on ages also change as commits are added: they are as of when they were written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import measured
import notes
import notes_of_bench
from mimose.bench.report import fill
from raw_files import ROOT


class Block(NamedTuple):
    """Some lines of a page."""

    page: str
    name: str
    make: Callable[[], str]
    changes_with_commits: bool = False

    @property
    def marks(self) -> tuple[str, str]:
        return f"<!-- {self.name}: begin -->", f"<!-- {self.name}: end -->"

    def written(self) -> str:
        """What the page has now."""
        begin, end = self.marks
        text = (ROOT / self.page).read_text("utf-8")
        if begin not in text or end not in text:
            raise SystemExit(f"{self.page} has no lines {begin} and {end}")
        return text.partition(begin)[2].partition(end)[0].strip()

    def fill(self) -> None:
        fill(ROOT / self.page, self.make(), *self.marks)


BLOCKS = (
    Block("README.md", "measured", measured.measured),
    Block("README.md", "age", measured.ages, changes_with_commits=True),
    Block("BENCHMARKS.md", "measured", measured.measured),
    Block("BENCHMARKS.md", "age", measured.ages, changes_with_commits=True),
    Block("BENCHMARKS.md", "notes of bench", notes_of_bench.notes),
    Block("BENCHMARKS.md", "notes", notes.notes),
)


def main() -> None:
    for block in BLOCKS:
        block.fill()


if __name__ == "__main__":
    main()
