"""`mimose bench`: the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from mimose.bench import circumstances, presets
from mimose.bench.arena import PRECISIONS, Conditions, attention_of
from mimose.bench.budgets import Asked
from mimose.bench.extras import BenchError, need
from mimose.bench.lineup import CONTESTANTS, contestant_named
from mimose.bench.progress import Deadline
from mimose.bench.records import Code, ResultsFile
from mimose.bench.report import terminal_tables, write_report
from mimose.bench.schedule import Program, Schedule
from mimose.bench.workloads import TASKS, Task, task_named
from mimose.errors import ArgumentError
from mimose.reporting import refuse_file, refuse_folder

need("typer")
import typer  # noqa: E402 (after `need`, which says what to install)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")

_STOPPED = 130


def _amounts(preset: presets.Preset) -> str:
    """How much a preset measures."""
    tasks, budgets = len(preset.tasks), len(preset.tight)
    return (
        f"{tasks} tasks, {budgets} budget{'s' * (budgets > 1)}, {len(preset.contestants)} "
        f"contestants, {preset.steps} steps, {preset.rounds} round{'s' * (preset.rounds > 1)}"
    )


@app.command()
def bench(
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"comma-separated, of {', '.join(TASKS)}; by default "
            f"{', '.join(presets.USUAL.tasks)}",
        ),
    ] = None,
    contestants: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"comma-separated, of {', '.join(CONTESTANTS)}; by default "
            f"{', '.join(presets.USUAL.contestants)}",
        ),
    ] = None,
    tight: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="budgets that plain training exceeds on these percentages of steps; by default "
            + ",".join(f"{percent:g}" for percent in presets.USUAL.tight),
        ),
    ] = None,
    between: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="budgets as shares, from 0 (all recomputed) to 1 (all kept)"
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="LIST", help="budgets, such as 6GiB,8GiB")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="N",
            help=f"steps per run, at least 2; {presets.USUAL.steps} by default",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help=f"runs of each contestant; {presets.USUAL.rounds} by default",
        ),
    ] = None,
    scale: Annotated[int, typer.Option(min=1, metavar="N", help="multiplies the batch")] = 1,
    precision: Annotated[str | None, typer.Option(metavar="NAME", help="fp32, bf16 or amp")] = None,
    attention: Annotated[str | None, typer.Option(metavar="NAME", help="eager or sdpa")] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="cuda or cpu; by default cuda if there is one"),
    ] = None,
    small: Annotated[
        bool | None, typer.Option(help="small models and lengths; the default on a CPU")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="random seed of weights and lengths")] = 0,
    leg: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="steps per turn of a contestant, each in its own process; 0 runs one contestant "
            "after the other. By default 10 on a GPU, 0 on a CPU",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help=_amounts(presets.QUICK))] = False,
    full: Annotated[bool, typer.Option("--full", help=_amounts(presets.FULL))] = False,
    estimators: Annotated[bool, typer.Option(help="also compare estimators")] = True,
    tables: Annotated[
        bool, typer.Option(help="write tables and figures at the end; --report can do it later")
    ] = True,
    time_limit: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="stop after this time, between two runs"),
    ] = None,
    allow_dirty: Annotated[
        bool,
        typer.Option("--allow-dirty", help="measure uncommitted code; the results record this"),
    ] = False,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="the results file; continued if it exists")
    ] = Path("bench.jsonl"),
    report: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="measure nothing: report on this file; may be repeated"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="for tables and figures; by default named like --out, or like the first --report",
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="with --report: a page to insert the ratios and goals into"
        ),
    ] = None,
) -> None:
    """Measure training under a memory budget, against peers, on this machine.

    Each result is written to a file at once. The same command continues an interrupted run, and
    can add tasks, budgets, contestants and rounds to a file.
    """
    try:
        folder = output or (report[0] if report else out).with_suffix("")
        if report:
            refuse_folder(folder, "--output")
            _report(report, folder, into)
            return
        _refuse_unwritable(out, folder)
        preset = presets.chosen(quick=quick, full=full)
        asked = _budgets(budget, between, tight) or Asked(tight=preset.tight)
        if precision not in (None, *PRECISIONS):
            raise BenchError(f"--precision {precision}: use one of {', '.join(PRECISIONS)}")
        chosen = tuple(map(task_named, _split(tasks) or preset.tasks))
        for task in chosen:
            attention_of(task, attention)
        _need_packages(chosen, tables=tables, estimators=estimators)
        where = circumstances.settle_device(device)
        around = circumstances.circumstances(where, allow_dirty=allow_dirty)
        program = Program(
            tasks=chosen,
            contestants=tuple(map(contestant_named, _split(contestants) or preset.contestants)),
            asked=asked,
            rounds=rounds or preset.rounds,
            conditions=Conditions(
                device=where,
                steps=steps or preset.steps,
                scale=scale,
                precision=precision,
                attention=attention,
                small=where == "cpu" if small is None else small,
                seed=seed,
                leg=(presets.LEG if where.startswith("cuda") else 0) if leg is None else leg,
            ),
            estimators=estimators,
            code=Code.of(around),
        )
        _measure(program, {**around, "conditions": program.conditions.to_plain()}, out, time_limit)
        _report([out], folder if tables else None)
    except (ArgumentError, BenchError) as error:
        _say(f"mimose bench: {error}")
        raise typer.Exit(2) from None


def _need_packages(tasks: Sequence[Task], *, tables: bool, estimators: bool) -> None:
    """Raise before measuring if a package is missing that is needed then or afterwards."""
    extras = {"matplotlib": tables, "sklearn": estimators}
    for package in ("transformers", *(name for name, wanted in extras.items() if wanted)):
        need(package)
    for package in {package for task in tasks for package in task.needs}:
        need(package, extra="vision")


def _budgets(budget: str | None, between: str | None, tight: str | None) -> Asked | None:
    """The budgets of these options; None if none is given."""
    if not (_split(budget) or _split(between) or _split(tight)):
        return None
    return Asked(
        total=tuple(_split(budget)),
        between=tuple(map(_number, _split(between))),
        tight=tuple(map(_number, _split(tight))),
    )


def _refuse_unwritable(out: Path, folder: Path) -> None:
    """Raise before measuring if the results could not be written."""
    refuse_file(out, "--out", like="bench.jsonl")
    if folder == out:
        raise BenchError(f"--out {out}: the folder for tables has the same name; use {out}.jsonl")
    refuse_folder(folder, "--output")


def _measure(program: Program, header: dict[str, Any], out: Path, time_limit: float | None) -> None:
    """Measure what the file does not contain yet; exit if that cannot be completed."""
    file = ResultsFile.opened(out, header)
    try:
        complete = Schedule(program, file, Deadline(time_limit)).measure()
    except KeyboardInterrupt:
        _say(f"\ninterrupted: {_progress(file, out)}")
        raise typer.Exit(_STOPPED) from None
    if not complete:
        _say(f"stopped at the time limit: {_progress(file, out)}")
        raise typer.Exit(0)


def _progress(file: ResultsFile, out: Path) -> str:
    runs = len(file.results.records)
    counted = "1 run" if runs == 1 else f"{runs} runs"
    return f"{out} contains {counted}. The same command continues from there"


def _report(files: list[Path], folder: Path | None, into: Path | None = None) -> None:
    """Write the pages, if there is a folder, and print the main table."""
    _say(f"wrote {write_report(files, folder, into) if folder else files[0]}")
    print(f"\n{terminal_tables(files)}", flush=True)


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _number(text: str) -> float:
    try:
        return float(text.rstrip("%"))
    except ValueError:
        raise BenchError(f"{text!r} is not a number") from None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
