"""Terminal output with rich: the table of a forecast, and the live view of the demo."""

from __future__ import annotations

from types import TracebackType

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mimose.cli.demo_training import DemoStep
from mimose.reporting import Forecast, HostRow, Row
from mimose.units import text_of

_BAR_WIDTH = 44


def forecast_table(forecast: Forecast) -> RenderableType:
    """One row per budget, and remarks."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = ["budget", "ms/step", "recompute ms", "recomputed", "too large"]
    names += ["unknown"] if forecast.unknown_share else []
    names += ["largest n", "batch"] if forecast.dimension is not None else ["batch"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in forecast.rows:
        table.add_row(*_cells(row, forecast))
    tables = [table, _host_table(forecast)] if forecast.host_rows else [table]
    return Group(*tables, *(Text(line) for line in _remarks(forecast)))


def _host_table(forecast: Forecast) -> Table:
    """What other host memory would buy."""
    budget = text_of(forecast.host_rows[0].row.budget_bytes)
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"host memory, at the recorded budget of {budget}",
        title_justify="left",
    )
    for name in ("host memory", "used", "ms/step", "recompute ms", "waiting ms", "too large"):
        table.add_column(name, justify="right", no_wrap=True)
    for host_row in forecast.host_rows:
        table.add_row(*_host_cells(host_row))
    return table


def _host_cells(host_row: HostRow) -> list[str]:
    row = host_row.row
    return [
        "any" if host_row.limit_bytes is None else text_of(host_row.limit_bytes),
        text_of(row.host_bytes) if row.host_bytes else "–",
        _milliseconds(row.step_seconds),
        _milliseconds(row.recompute_seconds),
        _milliseconds(row.stall_seconds),
        _range(row.too_large_range),
    ]


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f}"


def _cells(row: Row, forecast: Forecast) -> list[str]:
    cells = [
        text_of(row.budget_bytes),
        _milliseconds(row.step_seconds),
        _milliseconds(row.recompute_seconds),
        f"{row.recomputed_share:.0%}",
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


def _range(shares: tuple[float, float]) -> str:
    """The range of a share; a dash for zero."""
    low, high = (f"{share:.0%}" for share in shares)
    if low != high:
        return f"{low.removesuffix('%')}–{high}"
    return high if shares[1] else "–"


def _remarks(forecast: Forecast) -> list[str]:
    known = "known " if forecast.unknown_share else ""
    about, off = ("about ", f" (±{forecast.uncertainty:.0%})") if forecast.uncertainty else ("", "")
    inputs = " and inputs on the host" if forecast.host_rows else ""
    which = f"largest of {forecast.sizes} {known}input sizes"
    lines = [
        f"The {which if forecast.sizes > 1 else 'only input size'} is {forecast.largest}. "
        f"Below {about}"
        f"{text_of(forecast.least_budget_bytes)}{off} it does not fit, even with everything "
        f"recomputed{inputs}; from {about}{text_of(forecast.easy_budget_bytes)}{off} on "
        f"{'every block of these sizes' if known else 'everything'} is kept.",
        "recompute ms: part of the step time; recomputed: share of block runs; too large: share of "
        "steps that do not fit.",
        f"batch: approximate largest batch at {forecast.largest} with everything "
        f"recomputed{inputs}."
        + (f" largest n: the longest {forecast.dimension} that fits." * bool(forecast.dimension)),
    ]
    lines += _host_remarks(forecast)
    if forecast.extrapolated_share:
        lines.append(
            f"{forecast.extrapolated_share:.1%} of the steps are larger than any recorded one: "
            "their costs are extrapolated."
        )
    if forecast.unknown_share:
        lines.append(
            f"unknown: {forecast.unknown_share:.1%} of the steps have sizes that cannot be "
            "predicted from the recording; times and shares of runs exclude them."
        )
    return lines


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
