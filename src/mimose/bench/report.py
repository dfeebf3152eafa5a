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
        _fill(into, "\n\n".join([link, *short_page(sheets)]))
    return written


def terminal_tables(files: Sequence[Path]) -> str:
    """Time and memory of every contestant, for a terminal; a table for each file."""
    return "\n\n".join(summary.as_text(Sheet(read(path))) for path in files)


def _figures(drawn: Sequence[tuple[str, list[tuple[str, str]]]]) -> Iterator[str]:
    yield "## Figures"
    for stem, figures in drawn:
        for name, caption in figures:
            yield f"![{caption}]({stem}/{name})\n\n{stem}: {caption}."


def _marked(path: Path) -> str:
    """The text of a page that has a place for results."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise BenchError(f"--into {path} cannot be read: {error.strerror}") from None
    if BEGIN not in text or END not in text:
        raise BenchError(f"{path} has no lines {BEGIN} and {END} to write between")
    return text


def _fill(path: Path, text: str) -> None:
    before, _, rest = _marked(path).partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", "utf-8")
