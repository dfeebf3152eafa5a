"""Tables and figures from results files, as one page in a folder, and inside another page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from mimose.bench import summary
from mimose.bench.analysis import Sheet
from mimose.bench.extras import BenchError
from mimose.bench.figures import draw_all
from mimose.bench.records import read
from mimose.bench.sections import page, short_page

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def write_report(files: Sequence[Path], folder: Path, into: Path | None = None) -> Path:
    """Write the report on these files into a folder, and what it comes to into another page."""
    if into is not None:
        _marked(into)  # before anything is written
    sheets = [Sheet(read(path)) for path in files]
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [
        (path.stem, draw_all(sheet, folder / path.stem))
        for path, sheet in zip(files, sheets, strict=True)
    ]
    written = folder / "README.md"
    names = ", ".join(path.name for path in files)
    text = "\n\n".join(page(sheets, _figures(drawn)))
    written.write_text(f"# Results of `mimose bench`\n\nFrom {names}.\n\n{text}\n", "utf-8")
    if into is not None:
        link = f"All tables and figures: [{names}]({os.path.relpath(written, into.parent)})."
        fill(into, "\n\n".join([link, *short_page(sheets)]))
    return written


def terminal_tables(files: Sequence[Path]) -> str:
    """Time and memory of every contestant, for a terminal; a table for each file."""
    return "\n\n".join(summary.as_text(Sheet(read(path))) for path in files)


def _figures(drawn: Sequence[tuple[str, list[tuple[str, str]]]]) -> Iterator[str]:
    yield "## Figures"
    for stem, figures in drawn:
        for name, caption in figures:
            yield f"![{caption}]({stem}/{name})\n\n{stem}: {caption}."


def _marked(path: Path, begin: str = BEGIN, end: str = END) -> str:
    """The text of a page that has a place for results."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise BenchError(f"--into {path} cannot be read: {error.strerror}") from None
    if begin not in text or end not in text:
        raise BenchError(f"{path} has no lines {begin} and {end} to write between")
    return text


def fill(path: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Write a text between the marks of a page."""
    before, _, rest = _marked(path, begin, end).partition(begin)
    after = rest.partition(end)[2]
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", "utf-8")
