"""Terminal output with rich: tables that are never cut, and the live view of the demo."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import TracebackType

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mimose.cli.demo_training import DemoStep
from mimose.reporting import Forecast, HostRow, Row
from mimose.units import text_of

_BAR_WIDTH = 44
_UNLIMITED_WIDTH = 10_000


def forecast_table(forecast: Forecast) -> Group:
    """One row per budget, and remarks."""
    table = new_table()
    names = ["budget", "ms/step", "recompute\nms", "recomputed", "too\nlarge"]
    names += ["unknown"] if forecast.unknown_share else []
    names += ["largest\nn", "batch"] if forecast.dimension is not None else ["batch"]
    add_columns(table, names)
    for row in forecast.rows:
        table.add_row(*_cells(row, forecast))
    tables = [table, _host_table(forecast)] if forecast.host_rows else [table]
    return Group(*tables, *(Text(line) for line in _remarks(forecast)))


def print_uncut(parts: Group) -> None:
    """Print tables at their full width: no value is cut in a pipe or a narrow terminal."""
    console = Console()
    unlimited = console.options.update(max_width=_UNLIMITED_WIDTH)
    for part in parts.renderables:
        wide = isinstance(part, Table)
        width = Measurement.get(console, unlimited, part).maximum if wide else 0
        Console(width=max(console.width, width)).print(part, markup=False)


def new_table(title: str | None = None) -> Table:
    """An empty table, narrow enough for 80 columns."""
    return Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title=title,
        title_justify="left",
    )


def add_columns(table: Table, names: Sequence[str]) -> None:
    """Add columns of numbers; a line break in a name saves width."""
    for name in names:
        table.add_column(name, justify="right", vertical="bottom", no_wrap=True)


def _host_table(forecast: Forecast) -> Table:
    """What other host memory would buy."""
    budget = text_of(forecast.host_rows[0].row.budget_bytes)
    table = new_table(f"host memory, at the recorded budget of {budget}")
    names = ["host memory", "used", "ms/step", "recompute\nms", "waiting\nms", "too\nlarge"]
    add_columns(table, names)
    for host_row in forecast.host_rows:
        table.add_row(*_host_cells(host_row, forecast))
    return table


def _host_cells(host_row: HostRow, forecast: Forecast) -> list[str]:
    row = host_row.row
    step, recompute, _ = _times(row, forecast)
    return [
        "any" if host_row.limit_bytes is None else text_of(host_row.limit_bytes),
        text_of(row.host_bytes) if row.host_bytes else "–",
        step,
        recompute,
        "–" if _nothing_fits(row, forecast) else _milliseconds(row.stall_seconds),
        _range(row.too_large_range),
    ]


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f}"


def _cells(row: Row, forecast: Forecast) -> list[str]:
    cells = [
        text_of(row.budget_bytes),
        *_times(row, forecast),
        _range(row.too_large_range),
    ]
    if forecast.unknown_share:
        cells.append(f"{forecast.unknown_share:.0%}")
    if forecast.dimension is not None:
        reach = row.largest
        about = "≈ " if reach and reach.extrapolated else ""
        cells.append(f"{about}{reach.length}" if reach else "–")
    cells.append("–" if row.largest_batch is None else f"≈ {row.largest_batch}")
    return cells


def _times(row: Row, forecast: Forecast) -> list[str]:
    """The time of a step, its recomputes, and the share of runs; dashes if no step fits."""
    if _nothing_fits(row, forecast):
        return ["–"] * 3
    return [
        _milliseconds(row.step_seconds),
        _milliseconds(row.recompute_seconds),
        f"{row.recomputed_share:.0%}",
    ]


def _nothing_fits(row: Row, forecast: Forecast) -> bool:
    """Whether every step of known cost is certainly too large."""
    return math.isclose(row.too_large_range[0], 1 - forecast.unknown_share)


def _range(shares: tuple[float, float]) -> str:
    """The range of a share; a dash for zero."""
    low, high = (f"{share:.0%}" for share in shares)
    if low != high:
        return f"{low.removesuffix('%')}–{high}"
    return high if shares[1] else "–"


def _remarks(forecast: Forecast) -> list[str]:
    inputs = " and inputs on the host" if forecast.host_rows else ""
    lines = [
        _bounds(forecast, inputs),
        "recompute ms: part of the step time; recomputed: share of block runs; too large: share of "
        "steps that do not fit.",
        f"batch: approximate largest batch at {forecast.largest} with everything "
        f"recomputed{inputs}."
        + (f" largest n: the longest {forecast.dimension} that fits." * bool(forecast.dimension)),
    ]
    lines += [*_host_remarks(forecast), *_meanings(forecast)]
    if forecast.extrapolated_share:
        lines.append(
            f"{forecast.extrapolated_share:.1%} of the steps"
            f"{_count(forecast.extrapolated_share, forecast.steps)} are larger than any size that "
            "was measured: their costs are extrapolated."
        )
    if forecast.unknown_share:
        lines.append(
            f"unknown: {forecast.unknown_share:.1%} of the steps have sizes that cannot be "
            "predicted from the recording; times and shares of runs exclude them."
        )
    return lines


def _count(share: float, steps: float) -> str:
    """The number of steps behind a share, in brackets; empty for samples, which have none."""
    return f" ({share * steps:,.0f} of {steps:,.0f})" if steps > 1 else ""


def _bounds(forecast: Forecast, inputs: str) -> str:
    """The largest size, and the budgets between which it is planned for."""
    known = "known " if forecast.unknown_share else ""
    about, off = ("about ", f" (±{forecast.uncertainty:.0%})") if forecast.uncertainty else ("", "")
    which = f"largest of {forecast.sizes} {known}input sizes"
    return (
        f"The {which if forecast.sizes > 1 else 'only input size'} is {forecast.largest}. "
        f"Below {about}"
        f"{text_of(forecast.least_budget_bytes)}{off} it does not fit, even with everything "
        f"recomputed{inputs}; from {about}{text_of(forecast.easy_budget_bytes)}{off} on "
        f"{'every block of these sizes' if known else 'everything'} is kept."
    )


def _meanings(forecast: Forecast) -> Iterator[str]:
    """What dashes and ranges in this table mean, and what its planner misses."""
    rows = [*forecast.rows, *(host_row.row for host_row in forecast.host_rows)]
    if any(row.step_seconds is None for row in rows):
        yield "ms/step is –: the file has no times of whole steps."
    if any(_nothing_fits(row, forecast) for row in rows):
        yield "Times are – where no step fits."
    if forecast.dimension and any(row.largest is None for row in forecast.rows):
        yield "largest n is –: too few lengths were measured to tell."
    for row in rows:
        if "–" in (text := _range(row.too_large_range))[1:]:
            yield f"too large {text}: between these shares, since some costs are extrapolated."
            break
    if any(_planner_misses(row, forecast) for row in forecast.rows):
        yield (
            "At some budgets this planner's plans do not fit, although recomputing everything "
            "would."
        )


def _planner_misses(row: Row, forecast: Forecast) -> bool:
    """Whether a plan certainly exceeds a budget into which every step fits if recomputed."""
    fits = row.budget_bytes >= forecast.least_budget_bytes * (1 + forecast.uncertainty)
    return fits and row.too_large_range[0] > 0


def _host_remarks(forecast: Forecast) -> list[str]:
    """What the columns on host memory mean, and whether more host memory would help."""
    if not forecast.host_rows:
        return []
    meaning = (
        "used: the most host memory that a plan holds; waiting ms: time that the device waits for "
        "transfers, part of the step time."
    )
    if forecast.host_rows[-1].limit_bytes is None:
        return [meaning]
    return [meaning, "More host memory would change no plan at the recorded budget."]


class LiveDemo:
    """Live view of the demo: step, length, plan, and memory against the budget."""

    def __init__(self, console: Console) -> None:
        # Refresh only between steps, so that drawing is not timed.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveDemo:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def __call__(self, done: DemoStep) -> None:
        self._live.update(_progress(done), refresh=True)


def _progress(done: DemoStep) -> RenderableType:
    lines = Table.grid(padding=(0, 2))
    lines.add_row(
        Text(f"round {done.round} of {done.rounds}", style="dim"),
        Text(done.way, style="bold"),
    )
    lines.add_row("step", f"{done.step} of {done.steps}, {done.length} tokens")
    lines.add_row("blocks", _blocks(done.plan))
    lines.add_row("memory", _bar(done.peak_bytes, done.budget_bytes))
    return lines


def _blocks(plan: str) -> Text:
    bar = Text()
    styles = {"K": "blue", "H": "sky_blue1", "r": "dark_orange", "h": "light_salmon1"}
    for letter in plan:
        bar.append("██ ", style=styles.get(letter, "bright_black"))
    bar.append("kept ", style="blue")
    bar.append("recomputed", style="dark_orange")
    return bar


def _bar(peak: int, budget: int | None) -> Text:
    if budget is None:
        return Text(f"{text_of(peak)}, no budget yet", style="dim")
    filled = min(_BAR_WIDTH, round(_BAR_WIDTH * peak / budget))
    over = peak > budget
    bar = Text("█" * filled, style="red" if over else "cyan")
    bar.append("░" * (_BAR_WIDTH - filled), style="bright_black")
    bar.append(f" {text_of(peak)} of {text_of(budget)}" + (": over" if over else ""))
    return bar
