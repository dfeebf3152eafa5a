"""The commands of `mimose` that need typer and rich: report, plan, demo."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import mimose
from mimose.api import pip_command
from mimose.cli.main import PURPOSE
from mimose.errors import ArgumentError, MimoseError
from mimose.reporting import Recording, is_recording, read_recording, refuse_file, refuse_folder
from mimose.units import typed_budget

app = typer.Typer(
    name="mimose",
    help=PURPOSE,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


INTERRUPTED = 130


class Format(str, Enum):
    """What a report can be."""

    html = "html"
    md = "md"
    png = "png"


def run(words: Sequence[str]) -> int:
    """Run a command; its exit status."""
    return guarded(app, words, "mimose")


def guarded(commands: typer.Typer, words: Sequence[str], program: str) -> int:
    """Run a command of these; what its caller can mend is answered in one line."""
    try:
        status = commands(args=list(words), prog_name=program, standalone_mode=False)
    except (MimoseError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        return _refused(program, _in_words(error))
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        if not hasattr(error, "format_message"):  # not one of click's
            raise
        if not error.format_message():  # no arguments at all: its message was the help
            return 0
        return _refused(program, f"{error.format_message()} Try: {program} --help")
    if status == INTERRUPTED:  # newer versions of click make an exit of it
        raise KeyboardInterrupt
    return status if isinstance(status, int) else 0


def _refused(program: str, message: str) -> int:
    print(f"{program}: {message}", file=sys.stderr)
    return 2


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {(error.strerror or 'cannot be used').lower()}"
    return str(error)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mimose {mimose.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


_JSON = typer.Option("--json", help="Print values for machines instead.")


@app.command(
    epilog="Examples: `mimose report run.jsonl` · `mimose report run.jsonl --format png -o run.png`"
    " · `mimose report run.jsonl --json | jq .peak_bytes`"
)
def report(
    file: Annotated[Path, typer.Argument(help="A recording, or results of mimose bench.")],
    format: Annotated[Format, typer.Option(help="A page, a text or a picture.")] = Format.html,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write it; - is the terminal.")
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Make a page of a recorded run, or of benchmark results: it sees which.

    The page is one file and needs no network. Of benchmark results, md and png give a folder.
    """
    first = _first_line(file)
    to_terminal = str(output) == "-"
    if output is not None and output.exists() and output.samefile(file):
        raise ArgumentError(f"--output {output} is the file to report on: name another one")
    if first.startswith('{"kind":'):
        if as_json or (to_terminal and format is not Format.html):
            raise ArgumentError(
                f"{file} is a benchmark's results, of which there is a page (html) or a folder "
                "(md, png); each line of the file itself is JSON"
            )
        _report_on_benchmark(file, format, output)
        return
    if to_terminal and format is Format.png and not as_json:
        raise ArgumentError("a picture cannot be written to the terminal: name a file")
    if not is_recording(first) and first:
        raise ArgumentError(
            f"{file} is neither a recording nor a benchmark's results: record a run with "
            'auto_checkpoint(..., record="run.jsonl"), or run mimose bench'
        )
    from mimose.reporting import contents_of

    target = output or file.with_suffix(f".{format.value}")
    if not (as_json or to_terminal):
        refuse_file(target, "--output", like=f"run.{format.value}")
        if format is Format.png:
            _need_matplotlib(target)
    recording = _with_steps(read_recording(file), file)
    _tell(file, recording.remark)
    contents = contents_of(recording)
    if as_json:
        print(json.dumps(asdict(contents)))
        return
    _write_report(contents, file, format, target)


def _write_report(contents: Any, file: Path, format: Format, target: Path) -> None:
    from mimose.reporting import markdown_of, page_of

    if format is Format.png:
        from mimose.reporting.page.picture import draw

        draw(contents, target)
        _say(f"written: {target}")
    else:
        make = page_of if format is Format.html else markdown_of
        _put(make(contents, f"mimose: {file.stem}"), target)


def _put(text: str, target: Path) -> None:
    """Write it there, and say so; - is the terminal."""
    if str(target) == "-":
        print(text, end="")
        return
    target.write_text(text, encoding="utf-8")
    _say(f"written: {target}")


def _report_on_benchmark(file: Path, format: Format, output: Path | None) -> None:
    from mimose.bench.extras import BenchError

    try:
        if format is Format.html:
            from mimose.bench.page import benchmark_page

            target = output or file.with_suffix(".html")
            if str(target) != "-":
                refuse_file(target, "--output", like="bench.html")
            _put(benchmark_page(file, f"mimose bench: {file.stem}"), target)
        else:
            from mimose.bench.report import write_report

            folder = output or file.with_suffix("")
            refuse_folder(folder, "--output")
            _say(f"written: {write_report([file], folder)}")
    except BenchError as error:
        raise ArgumentError(str(error)) from None


def _need_matplotlib(picture: Path) -> None:
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ArgumentError(
            f"this needs matplotlib: {pip_command('bench', 'matplotlib')}"
        ) from None
    formats = FigureCanvasBase.get_supported_filetypes()
    if picture.suffix.lower().removeprefix(".") not in formats:
        raise ArgumentError(f"{picture}: a picture ends in one of .{', .'.join(sorted(formats))}")


def _first_line(file: Path) -> str:
    with file.open(encoding="utf-8", errors="replace") as lines:
        return lines.readline(65536)


def _with_steps(recording: Recording, file: Path) -> Recording:
    if not recording.steps:
        raise ArgumentError(f"{file} has no finished step yet: train a little longer")
    return recording


@app.command(
    epilog="Examples: `mimose plan run.jsonl` · `mimose plan run.jsonl --budget 4GiB --budget 6GiB`"
    " · `mimose plan run.jsonl --lengths squad.csv --samples --plot plan.png`"
)
def plan(
    file: Annotated[Path, typer.Argument(help="A recording, or a saved handle.state_dict().")],
    budget: Annotated[
        list[str] | None,
        typer.Option("--budget", "-b", help='A budget to look at, like "6GiB"; may be repeated.'),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help='Lengths of batches: "64,128", "24-256", or a file (length[,count]).'),
    ] = None,
    samples: Annotated[
        bool,
        typer.Option("--samples", help="They are of single samples, padded to a batch's longest."),
    ] = False,
    planner: Annotated[str | None, typer.Option(help="Another planner, like greedy.")] = None,
    floor: Annotated[
        str | None, typer.Option(help="What is in use before a step; a recording tells it.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw it to this file (.png, .svg).")
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Ask what other budgets or lengths would cost, without training."""
    from mimose.reporting import Question

    if plot is not None:
        refuse_file(plot, "--plot", like="plan.png")
        _need_matplotlib(plot)
    question = Question.about(file, planner, _in_bytes(floor, "--floor") if floor else None)
    _tell(file, question.remark)
    weights = question.weights(lengths, samples=samples)
    forecast = question.forecast(weights, [_in_bytes(text) for text in budget or []])
    if plot is not None:
        from mimose.reporting.page.tradeoff import draw_tradeoff

        draw_tradeoff(question, weights, plot)
    if as_json:
        print(json.dumps(asdict(forecast)))
        return
    from mimose.cli.terminal import forecast_table

    Console().print(forecast_table(forecast))
    if plot is not None:
        _say(f"written: {plot}")


def _in_bytes(text: str, option: str = "--budget") -> int:
    total = typed_budget(text, option).total_bytes
    if total is None:
        raise ArgumentError(
            f"{option} {text!r} needs a device to be a share of: give bytes, like 6GiB"
        )
    return total


@app.command(epilog="Examples: `mimose demo` · `mimose demo --output /tmp/demo.html`")
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where its report goes.")] = Path(
        "mimose-demo.html"
    ),
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Train a small encoder four ways and compare: about a minute on a CPU."""
    from mimose.cli import demo as a_minute
    from mimose.cli.terminal import LiveDemo

    a_minute.refuse_page(output)
    console = Console(stderr=as_json)
    live = console.is_terminal and not as_json
    with LiveDemo(console) if live else a_minute.Quiet() as watcher:
        outcome = a_minute.compare(watcher, output.with_suffix(".jsonl"))
    if as_json:
        print(json.dumps(outcome.to_plain()))
    else:
        a_minute.tell(outcome)
    _say(f"\nIts report: {a_minute.write_page(output, outcome)}")


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def doctor(words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
    """Look at this machine, and at a model, and say what should be mended."""
    raise AssertionError("mimose.cli answers this itself, so that it works without extras")


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def bench(words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
    """Measure training under a budget, against peers, on this machine."""
    raise ArgumentError("the benchmark is not part of this installation: use a clone")


def _tell(file: Path, remark: str) -> None:
    if remark:
        _say(f"{file}: {remark}")


def _say(line: str) -> None:
    """For people; standard output is for what was asked for."""
    print(line, file=sys.stderr)
