"""The commands that need typer and rich: report, plan, compare, trace, demo."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import mimose
from mimose.cli.file_kinds import Kind, refuse_other_kinds
from mimose.cli.main import PURPOSE
from mimose.cli.outputs import (
    need_matplotlib,
    print_remark,
    print_status,
    refuse_picture_name,
)
from mimose.cli.report import Format, write_report
from mimose.cli.user_errors import guarded
from mimose.errors import ArgumentError
from mimose.reporting import refuse_file
from mimose.units import typed_bytes

app = typer.Typer(
    name="mimose",
    help=PURPOSE,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def run(words: Sequence[str]) -> int:
    """Run a command and return its exit status."""
    return guarded(app, words, "mimose")


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


_JSON = typer.Option("--json", help="Print JSON instead.")


@app.command(
    epilog="Examples: `mimose report run.jsonl` · `mimose report run.jsonl --format png -o run.png`"
    " · `mimose report run.jsonl --json | jq .peak_bytes`"
)
def report(
    file: Annotated[Path, typer.Argument(help="A recording, or results of mimose bench.")],
    format: Annotated[
        Format | None,
        typer.Option(
            help="HTML page, Markdown or picture; by default what --output is named like, or html."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Output file; - for standard output.")
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Make a page from a recorded run or from benchmark results.

    The page is one file and needs no network. For benchmark results, md and png write a folder.
    """
    if as_json and output is not None:
        raise ArgumentError("--json prints to standard output: leave out --output, or use > FILE")
    write_report(file, format, output, as_json=as_json)


@app.command(
    epilog="Examples: `mimose plan run.jsonl` · `mimose plan run.jsonl --budget 4GiB --budget 6GiB`"
    " · `mimose plan run.jsonl --lengths squad.csv --samples --plot plan.png`"
)
def plan(
    file: Annotated[Path, typer.Argument(help="A recording, or a saved handle.state_dict().")],
    budget: Annotated[
        list[str] | None,
        typer.Option("--budget", "-b", help='A budget such as "6GiB"; may be repeated.'),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help='Lengths of batches: "64,128", "24-256", or a file (length[,count]).'),
    ] = None,
    samples: Annotated[
        bool,
        typer.Option(
            "--samples",
            help="The lengths are of samples; a batch is padded to its longest.",
        ),
    ] = False,
    planner: Annotated[
        str | None, typer.Option(help="Plan with another planner, such as greedy.")
    ] = None,
    floor: Annotated[
        str | None,
        typer.Option(
            help='Memory in use before a step, which explain calls "in use at the start"; needed '
            "for a state_dict."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw a chart to this file (.png, .svg).")
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Predict the cost of other budgets, host memory or lengths, without training."""
    from mimose.reporting import Question

    if samples and lengths is None:
        raise ArgumentError(
            "--samples needs --lengths, the lengths of samples: --lengths data.csv --samples"
        )
    if plot is not None:
        refuse_file(plot, "--plot", like="plan.png")
        need_matplotlib()
        refuse_picture_name(plot)
    refuse_other_kinds(file, Kind.recording, Kind.state)
    question = Question.about(file, planner, typed_bytes(floor, "--floor") if floor else None)
    print_remark(file, question.remark)
    if question.from_state and lengths is None:
        print_remark(file, question.remark_on_frequencies)
    weights = question.weights(lengths, samples=samples)
    forecast = question.forecast(weights, [typed_bytes(text) for text in budget or []])
    if plot is not None:
        from mimose.reporting.page.tradeoff import draw_tradeoff

        draw_tradeoff(question, weights, plot)
    if as_json:
        print(json.dumps(asdict(forecast)))
        return
    from mimose.cli.terminal import forecast_table, print_uncut

    print_uncut(forecast_table(forecast))
    if plot is not None:
        print_status(f"wrote {plot}")


@app.command(
    epilog="Examples: `mimose compare run.jsonl` · `mimose compare run.jsonl --size 8x120 "
    "--time-limit 60 -o compare.html`"
)
def compare(
    file: Annotated[Path, typer.Argument(help="A recording.")],
    size: Annotated[
        list[str] | None,
        typer.Option("--size", "-s", help='A recorded size, "8x120" or "120"; may be repeated.'),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option("--budget", "-b", help='A budget such as "6GiB"; may be repeated.'),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="An operator trace of the same step, to simulate DTR (mimose trace)."),
    ] = None,
    time_limit: Annotated[
        float, typer.Option(help="Time limit in seconds of Checkmate's solver, for each budget.")
    ] = 10.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write a page (.html, .md).")
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Compare published planners on the costs of a recorded run, without training."""
    from mimose.cli.comparing import run_comparison

    refuse_other_kinds(file, Kind.recording)
    budgets = [typed_bytes(text) for text in budget or []]
    files = run_comparison(file, size or [], budgets, time_limit, output, as_json, trace)
    for written in files:
        print_status(f"wrote {written}")


@app.command(
    epilog="Examples: `mimose trace my_project.train:make_step` · "
    "`mimose trace trace.jsonl --heuristic h_DTR^eq` · `mimose trace trace.jsonl --json`"
)
def trace(
    source: Annotated[
        str,
        typer.Argument(
            help="module:function that returns a function of one step, or a recorded trace."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File for the recorded trace.")
    ] = Path("trace.jsonl"),
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; cuda by default if available.")
    ] = None,
    heuristic: Annotated[
        list[str] | None,
        typer.Option(help="A heuristic such as h_DTR^eq; may be repeated. All by default."),
    ] = None,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Record the operators of a training step, and simulate DTR on them."""
    from mimose.cli import trace as tracing
    from mimose.comparison import write_trace

    heuristics = tracing.known_heuristics(heuristic or [])
    records = not tracing.is_trace_file(source)
    if records:
        refuse_file(output, "--output", like="trace.jsonl")
    recorded = tracing.load_or_record(source, device)
    if records:
        write_trace(recorded, output)
        print_status(f"wrote {output}")
    comparison = tracing.compare(recorded, heuristics)
    if as_json:
        print(json.dumps(comparison.to_plain()))
    else:
        from mimose.cli.terminal import print_uncut

        print_uncut(tracing.trace_table(comparison))


@app.command(epilog="Examples: `mimose demo` · `mimose demo --output /tmp/demo.html`")
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the report.")] = Path(
        "mimose-demo.html"
    ),
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Train a small encoder four ways and compare them (about a minute on a CPU)."""
    from mimose.cli import demo as demonstration
    from mimose.cli import demo_training
    from mimose.cli.terminal import LiveDemo

    demonstration.refuse_page(output)
    console = Console(stderr=as_json)
    live = console.is_terminal and not as_json
    with LiveDemo(console) if live else demo_training.QuietProgress() as progress:
        outcome = demo_training.compare(progress, output.with_suffix(".jsonl"))
    if as_json:
        print(json.dumps(outcome.to_plain()))
    else:
        demonstration.print_outcome(outcome)
    print_status(f"\nReport on the mimose run: {demonstration.write_page(output, outcome)}")


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def doctor(words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
    """Check this machine, and optionally a model, for problems."""
    raise AssertionError("mimose.cli.main runs doctor itself, so that it works without extras")


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def bench(words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
    """Benchmark training under a memory budget on this machine."""
    raise ArgumentError("the benchmark is not part of this installation: run it from a clone")
