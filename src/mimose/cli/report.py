"""`mimose report`: a page from a recorded run or from benchmark results."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any

from mimose.cli.file_kinds import Kind, kind_of, refuse_other_kinds
from mimose.cli.outputs import (
    need_matplotlib,
    print_remark,
    print_status,
    refuse_picture_name,
    write,
)
from mimose.errors import ArgumentError
from mimose.reporting import read_recording, refuse_file, refuse_folder, refuse_without_steps


class Format(str, Enum):
    """File format of a report."""

    html = "html"
    md = "md"
    png = "png"

    @property
    def words(self) -> str:
        """What a file of this format is."""
        return {"html": "an HTML page", "md": "a Markdown page", "png": "a picture"}[self.value]


_BY_SUFFIX = {
    **dict.fromkeys((".html", ".htm"), Format.html),
    **dict.fromkeys((".md", ".markdown"), Format.md),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".svg", ".pdf", ".webp"), Format.png),
}


def write_report(file: Path, format: Format | None, output: Path | None, *, as_json: bool) -> None:
    """Write the report on this file, by default beside it."""
    if output is not None and output.exists() and output.samefile(file):
        raise ArgumentError(f"--output {output} is the input file: name another one")
    kind = kind_of(file)
    if kind is Kind.results:
        _refuse_terminal(file, format, output, as_json=as_json)
        _report_on_benchmark(file, format or Format.html, output)
        return
    refuse_other_kinds(file, Kind.recording)
    if kind is None and file.stat().st_size:
        raise ArgumentError(
            f"{file} is neither a recording nor benchmark results: record a run with "
            'auto_checkpoint(..., record="run.jsonl"), or run mimose bench'
        )
    _report_on_run(file, _format_for(format, output), output, as_json=as_json)


def _format_for(format: Format | None, output: Path | None) -> Format:
    """The format that was asked for, or that the name of the output has."""
    named = None if output is None else _BY_SUFFIX.get(output.suffix.lower())
    if format is not None and named not in (None, format):
        raise ArgumentError(
            f"--output {output} is {named.words}, but --format is {format.value}: give "
            f"--format {named.value}, or another name"
        )
    return format or named or Format.html


def _report_on_run(file: Path, format: Format, output: Path | None, *, as_json: bool) -> None:
    from mimose.reporting import contents_of

    target = output or file.with_suffix(f".{format.value}")
    if not as_json:
        _refuse_target(target, format)
    recording = read_recording(file)
    refuse_without_steps(recording, file)
    print_remark(file, recording.remark)
    contents = contents_of(recording)
    if as_json:
        print(json.dumps(contents.to_plain()))
    else:
        _write_contents(contents, f"mimose: {file.stem}", format, target)


def _refuse_target(target: Path, format: Format) -> None:
    to_terminal, picture = str(target) == "-", format is Format.png
    if to_terminal and picture:
        raise ArgumentError("a picture cannot be written to the terminal: name a file with -o")
    if not to_terminal:
        refuse_file(target, "--output", like=f"run.{format.value}")
        if picture:
            need_matplotlib()
            refuse_picture_name(target)


def _write_contents(contents: Any, title: str, format: Format, target: Path) -> None:
    from mimose.reporting import markdown_of, page_of

    if format is Format.png:
        from mimose.reporting.page.picture import draw

        draw(contents, target)
        print_status(f"wrote {target}")
    else:
        make = page_of if format is Format.html else markdown_of
        write(make(contents, title), target)


def _refuse_terminal(
    file: Path, format: Format | None, output: Path | None, *, as_json: bool
) -> None:
    if as_json or (str(output) == "-" and format not in (None, Format.html)):
        raise ArgumentError(
            f"{file} contains benchmark results, which can be written as a page (html) or a "
            "folder (md, png), but not to the terminal or as --json. The file itself is JSON, "
            "one object per line"
        )


def _report_on_benchmark(file: Path, format: Format, output: Path | None) -> None:
    from mimose.bench.extras import BenchError

    _refuse_name_for_benchmark(format, output)
    need_matplotlib("figures of benchmark results")
    try:
        if format is Format.html:
            from mimose.bench.page import benchmark_page

            target = output or file.with_suffix(".html")
            if str(target) != "-":
                refuse_file(target, "--output", like="bench.html")
            write(benchmark_page(file, f"mimose bench: {file.stem}"), target)
        else:
            from mimose.bench.report import write_report as write_folder

            folder = output or file.with_suffix("")
            refuse_folder(folder, "--output")
            print_status(f"wrote {write_folder([file], folder)}")
    except BenchError as error:
        raise ArgumentError(str(error)) from None


def _refuse_name_for_benchmark(format: Format, output: Path | None) -> None:
    """Raise if the output's name is that of another format, or of a file where a folder is due."""
    named = None if output is None else _BY_SUFFIX.get(output.suffix.lower())
    if named is not None and (named, format) != (Format.html, Format.html):
        raise ArgumentError(
            f"--output {output} is the name of {named.words}, but benchmark results are written as "
            "an HTML page, or with --format md or png as a folder: name one of these"
        )
