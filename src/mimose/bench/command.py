"""`mimose bench`: the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from mimose.bench import circumstances, presets
from mimose.bench.arena import PRECISIONS, Conditions
from mimose.bench.budgets import Asked
from mimose.bench.extras import BenchError, need
from mimose.bench.lineup import CONTESTANTS, contestant_named
from mimose.bench.progress import Deadline
from mimose.bench.records import Code, ResultsFile
from mimose.bench.report import terminal_tables, write_report
from mimose.bench.schedule import Program, Schedule
from mimose.bench.workloads import TASKS, task_named
from mimose.errors import ArgumentError
from mimose.reporting import refuse_file, refuse_folder

need("typer")
import typer  # noqa: E402 (after `need`, which says what to install)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_STOPPED = 130


@app.command()
def bench(
    tasks: Annotated[
        str | None, typer.Option(help=f"some of {', '.join(TASKS)}; by commas")
    ] = None,
    contestants: Annotated[
        str | None, typer.Option(help=f"some of {', '.join(CONTESTANTS)}; by commas")
    ] = None,
    tight: Annotated[
        str | None, typer.Option(help="budgets that plain exceeds on so many % of steps")
    ] = None,
    between: Annotated[
        str | None, typer.Option(help="budgets from 0 (all recomputed) to 1 (all kept)")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="budgets in bytes, 6GiB,8GiB")] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="steps a run")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="runs of each contestant")] = None,
    scale: Annotated[int, typer.Option(min=1, help="multiplies the batch")] = 1,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or amp")] = None,
    attention: Annotated[str | None, typer.Option(help="eager or sdpa")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu")] = None,
    small: Annotated[
        bool | None, typer.Option(help="small models and lengths; the default on a CPU")
    ] = None,
    seed: Annotated[int, typer.Option(help="of weights and lengths")] = 0,
    leg: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="steps after which the next contestant takes over, each in its own process; 0 for "
            "whole runs, one by one. 10 on a GPU, 0 on a CPU",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="two tasks, one budget")] = False,
    full: Annotated[bool, typer.Option("--full", help="everything, 300 steps a run")] = False,
    estimators: Annotated[bool, typer.Option(help="compare estimators, too")] = True,
    tables: Annotated[
        bool, typer.Option(help="write tables and figures in the end; --report does it later")
    ] = True,
    time_limit: Annotated[
        float | None, typer.Option(help="stop between runs after so many seconds")
    ] = None,
    allow_dirty: Annotated[
        bool,
        typer.Option(
            "--allow-dirty", help="measure code that is not a commit's; the results say so"
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="the results file; continued if it exists")] = Path(
        "bench.jsonl"
    ),
    report: Annotated[
        list[Path] | None, typer.Option(help="measure nothing: report on these files")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the folder for tables and figures")
    ] = None,
    into: Annotated[
        Path | None, typer.Option(help="with --report: a page to put the ratios and goals into")
    ] = None,
) -> None:
    """Measure training under a memory budget, against peers, on this machine.

    Results go to a file as they come; the same command continues what was interrupted, and tasks,
    budgets, contestants and rounds may be added to a file.
    """
    try:
        folder = output or (report[0] if report else out).with_suffix("")
        if report:
            refuse_folder(folder, "--output")
            _report(report, folder, into)
            return
        _refuse_places(out, folder)
        preset = presets.chosen(quick=quick, full=full)
        asked = Asked(
            total=tuple(_split(budget)),
            between=tuple(map(_number, _split(between))),
            tight=tuple(map(_number, _split(tight))),
        )
        if not (asked.total or asked.between or asked.tight):
            asked = Asked(tight=preset.tight)
        if precision not in (None, *PRECISIONS):
            raise BenchError(f"--precision {precision}: it is {', '.join(PRECISIONS)}")
        extras = {"matplotlib": tables, "sklearn": estimators}
        for package in ("transformers", *(name for name, wanted in extras.items() if wanted)):
            need(package)  # before anything is measured, not after
        chosen = tuple(map(task_named, _split(tasks) or preset.tasks))
        for package in {package for task in chosen for package in task.needs}:
            need(package, extra="vision")
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


def _refuse_places(out: Path, folder: Path) -> None:
    """Refuse, before anything is measured, what could not be written afterwards."""
    refuse_file(out, "--out", like="bench.jsonl")
    if folder == out:
        raise BenchError(f"--out {out}: the folder of tables gets this name; write {out}.jsonl")
    refuse_folder(folder, "--output")


def _measure(program: Program, header: dict[str, Any], out: Path, time_limit: float | None) -> None:
    """Measure all that the file does not hold yet; leaves the command if that is not all done."""
    file = ResultsFile.opened(out, header)
    try:
        complete = Schedule(program, file, Deadline(time_limit)).measure()
    except KeyboardInterrupt:
        _say(
            f"\ninterrupted: {len(file.results.records)} runs are kept in {out}. The same command "
            "continues from there"
        )
        raise typer.Exit(_STOPPED) from None
    if not complete:
        _say(
            f"stopped at the time limit: {len(file.results.records)} runs are in {out}. The same "
            "command continues from there"
        )
        raise typer.Exit(0)


def _report(files: list[Path], folder: Path | None, into: Path | None = None) -> None:
    """Write the pages, if there is a folder; end with the table that most people look for."""
    _say(f"written: {write_report(files, folder, into) if folder else files[0]}")
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
