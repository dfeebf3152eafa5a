"""A report as Markdown, for a pull request, a notebook or a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from mimose.reporting.page.contents import Contents, TimeFigures, counted
from mimose.reporting.page.size_figures import SizeFigures
from mimose.units import text_of

_MOST_ROWS = 16


def markdown_of(contents: Contents, title: str) -> str:
    """The report as text and tables."""
    parts = [f"# {_plain(title)}", _summary(contents)]
    if contents.sizes:
        parts += ["## Plans by input size", _sizes(contents)]
    if contents.time is not None:
        parts += ["## Time spent recomputing", _time(contents.time)]
    if contents.events:
        rows = ((e["step"], e["kind"], e["text"]) for e in contents.events)
        parts += ["## Events", _table(("step", "event", ""), rows)]
    return "\n\n".join(parts) + "\n"


def _summary(contents: Contents) -> str:
    header, run = contents.header, contents.summary
    lines = [
        f"{counted(len(contents.runs), 'block')} on {header['device_name']}, budget "
        f"{text_of(run.budget_bytes)}, planner {header['planner']}, "
        f"mimose {header['mimose_version']}, torch {header['torch_version']}",
        f"{counted(run.total_steps, 'step')} in {run.seconds:.1f} s, "
        f"of which {run.observed_steps} observed",
        f"highest peak {text_of(run.peak_bytes)}, "
        f"{run.peak_bytes / run.budget_bytes:.1%} of the budget",
    ]
    if run.total_steps > run.observed_steps:
        lines.append(
            f"recomputing took about {run.recompute_share:.1%} of the time of planned steps"
        )
    if run.steps_over:
        planned = run.total_steps - run.observed_steps
        lines.append(
            f"{run.steps_over} of {counted(planned, 'planned step')} went over the budget, "
            f"{'the highest of them ' if run.steps_over > 1 else ''}by "
            f"{text_of(run.planned_peak_bytes - run.budget_bytes)}, "
            f"to {text_of(run.planned_peak_bytes)}"
        )
    if run.peak_held_bytes > run.budget_bytes:
        lines.append(f"the allocator held {text_of(run.peak_held_bytes)}, over the budget")
    if run.evictions or run.recoveries:
        lines.append(
            f"memory ran short: kept block runs evicted: {run.evictions}, recomputed instead of "
            f"kept: {run.recoveries - run.retries}; steps retried: {run.retries}"
        )
    if run.worst_shortfall is not None and run.mean_excess is not None:
        lines.append(
            f"peaks underestimated by at most {run.worst_shortfall:.2%}, overestimated by "
            f"{run.mean_excess:.2%} on average"
        )
    return "\n".join(f"- {_plain(line)}" for line in lines)


def _sizes(contents: Contents) -> str:
    sizes, last = contents.sizes, len(contents.sizes) - 1
    if last >= _MOST_ROWS:
        sizes = tuple(sizes[round(i * last / (_MOST_ROWS - 1))] for i in range(_MOST_ROWS))
    moves = any(size.moved_bytes for size in sizes)
    rows = (
        (
            size.label,
            size.steps,
            f"`{size.plan}`",
            _peak(size, size.plan_peak_bytes),
            _peak(size, size.kept_peak_bytes),
            _peak(size, size.recomputed_peak_bytes),
            f"{size.plan_seconds * 1e3:.1f}",
            *((text_of(size.moved_bytes), f"{size.stall_seconds * 1e3:.1f}") if moves else ()),
        )
        for size in sizes
    )
    columns = ("input", "steps", "plan", "peak", "all kept", "all recomputed", "recompute, ms",
               *(("to the host", "waiting, ms") if moves else ()))  # fmt: skip
    legend = "K: kept, r: recomputed, f: cannot be recomputed."
    if moves:
        legend += " H: saved on the host, h: recomputed, with its input on the host."
    if any(size.at_most_as for size in sizes):
        legend += " ≤: upper bound from a larger size; too few sizes were observed to predict."
    return _table(columns, rows) + f"\n\n{legend}"


def _peak(size: SizeFigures, number_of_bytes: int) -> str:
    if size.at_most_as is None:
        return text_of(number_of_bytes)
    return f"≤ {text_of(number_of_bytes)} (measured at {size.at_most_as})"


def _time(time: TimeFigures) -> str:
    rows = (
        ("mimose", f"{time.chosen_seconds:.2f}"),
        ("static plan for the largest size", f"{time.static_seconds:.2f}"),
        ("everything", f"{time.everything_seconds:.2f}"),
    )
    steps = counted(time.steps, "planned step")
    total = f"Total of {steps}, which took {time.seconds:.2f} s without pauses."
    return _table(("recomputed", "seconds"), rows) + f"\n\n{total}"


def _table(columns: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "\n".join("| " + " | ".join(_plain(str(cell)) for cell in line) + " |" for line in lines)


def _plain(text: str) -> str:
    """Escape names from the model, so that they neither break a table nor become markup."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
