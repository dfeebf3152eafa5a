"""`mimose report`: a page from a recorded run or from benchmark results."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any

from mimose.cli.outputs import need_matplotlib, print_remark, print_status, write
from mimose.errors import ArgumentError
from mimose.reporting import Recording, is_recording, read_recording, refuse_file, refuse_folder


class Format(str, Enum):
    """File format of a report."""

    html = "html"
    md = "md"
    png = "png"


def write_report(file: Path, format: Format, output: Path | None, *, as_json: bool) -> None:
    """Write the report on this file, by default beside it."""
    if output is not None and output.exists() and output.samefile(file):
        raise ArgumentError(f"--output {output} is the input file: name another one")
    first = _first_line(file)
    if first.startswith('{"kind":'):
        _refuse_terminal(file, format, output, as_json=as_json)
        _report_on_benchmark(file, format, output)
    elif first and not is_recording(first):
        raise ArgumentError(
            f"{file} is neither a recording nor benchmark results: record a run with "
            'auto_checkpoint(..., record="run.jsonl"), or run mimose bench'
        )
    else:
        _report_on_run(file, format, output, as_json=as_json)


def _report_on_run(file: Path, format: Format, output: Path | None, *, as_json: bool) -> None:
    from mimose.reporting import contents_of

    target = output or file.with_suffix(f".{format.value}")
    if not as_json:
        _refuse_target(target, format)
    recording = _with_steps(read_recording(file), file)
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
            need_matplotlib(target)


def _with_steps(recording: Recording, file: Path) -> Recording:
    if not recording.steps:
        raise ArgumentError(f"{file} has no finished steps yet: train a little longer")
    return recording


def _write_contents(contents: Any, title: str, format: Format, target: Path) -> None:
    from mimose.reporting import markdown_of, page_of

    if format is Format.png:
        from mimose.reporting.page.picture import draw

        draw(contents, target)
        print_status(f"wrote {target}")
    else:
        make = page_of if format is Format.html else markdown_of
        write(make(contents, title), target)


def _refuse_terminal(file: Path, format: Format, output: Path | None, *, as_json: bool) -> None:
    if as_json or (str(output) == "-" and format is not Format.html):
        raise ArgumentError(
            f"{file} contains benchmark results, which can be written as a page (html) or a "
            "folder (md, png), but not to the terminal or as --json. The file itself is JSON, "
            "one object per line"
        )


def _report_on_benchmark(file: Path, format: Format, output: Path | None) -> None:
    from mimose.bench.extras import BenchError

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


def _first_line(file: Path) -> str:
    with file.open(encoding="utf-8", errors="replace") as lines:
        return lines.readline(65536)
