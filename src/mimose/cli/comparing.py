"""`mimose compare`: mimose's and published planners on one recording."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mimose.cli.terminal import add_columns, new_table, print_uncut
from mimose.comparison import (
    LEGEND,
    Comparison,
    SizeComparison,
    cells,
    columns,
    compare,
    draw,
    headline,
    markdown_of_comparison,
    page_of_comparison,
)
from mimose.errors import ArgumentError
from mimose.reporting import refuse_file


def run_comparison(
    file: Path,
    sizes: Sequence[str],
    budgets: Sequence[int],
    time_limit_seconds: float,
    output: Path | None,
    as_json: bool,
    trace: Path | None = None,
) -> list[Path]:
    """Compare, print, and write the page; the files that were written."""
    if not time_limit_seconds > 0:  # or NaN
        raise ArgumentError(f"--time-limit {time_limit_seconds:g}: give a positive number")
    if output is not None:
        _refuse_output(output, file)
    comparison = compare(file, sizes, budgets, time_limit_seconds, trace)
    if as_json:
        print(json.dumps(asdict(comparison)))
    else:
        _print(comparison)
    return [] if output is None else _write(comparison, output, f"mimose compare: {file.stem}")


def _refuse_output(output: Path, file: Path) -> None:
    if output.suffix not in (".html", ".md"):
        raise ArgumentError(f"--output {output}: the file name must end in .html or .md")
    refuse_file(output, "--output", like="compare.html")
    if output.exists() and file.exists() and output.samefile(file):
        raise ArgumentError(f"--output {output} is the input file: name another one")


def _print(comparison: Comparison) -> None:
    tables = [part for size in comparison.sizes for part in (Text(headline(size)), _table(size))]
    notes = map(Text, (LEGEND, *comparison.remarks))
    print_uncut(Group(*tables, *notes))


def _table(size: SizeComparison) -> Table:
    table = new_table()
    add_columns(table, [name.replace("_", "\n").replace("+", "\n+") for name in columns(size)])
    for line in cells(size):
        table.add_row(*line)
    return table


def _write(comparison: Comparison, output: Path, title: str) -> list[Path]:
    if output.suffix == ".html":
        output.write_text(page_of_comparison(comparison, title), encoding="utf-8")
        return [output]
    pictures = [output.with_name(f"{output.stem}-{k}.svg") for k in range(len(comparison.sizes))]
    for picture, size in zip(pictures, comparison.sizes, strict=True):
        picture.write_text(draw(size) + "\n", encoding="utf-8")
    names = [picture.name for picture in pictures]
    output.write_text(markdown_of_comparison(comparison, title, names), encoding="utf-8")
    return [output, *pictures]
