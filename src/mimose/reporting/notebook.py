"""How a handle, its statistics and its explanations look in a notebook: small pieces of HTML.

Colours go with light and dark notebooks alike. Every name is escaped: names come from a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from mimose.units import text_of

if TYPE_CHECKING:
    from mimose.reporting.report import Explanation, Stats

_KEEP, _AGAIN, _FIXED, _PLAN, _OVER = "#3d7fc4", "#e07b29", "#8a919c", "#0b8a7d", "#c22f4a"
_FRAME = (
    "font-family:system-ui,sans-serif;font-size:13px;line-height:1.5;max-width:720px;"
    "border:1px solid rgba(128,128,128,.35);border-radius:8px;padding:10px 14px"
)


def handle_html(title: str, stats: Stats) -> str:
    """A handle: what it is, and how the run goes."""
    return _framed(f"<b>{escape(title)}</b>", *_stats_parts(stats))


def stats_html(stats: Stats) -> str:
    """Statistics: the peak against the budget, then the numbers."""
    return _framed(*_stats_parts(stats))


def _stats_parts(stats: Stats) -> Iterable[str]:
    if stats.budget_bytes:
        yield _bar(stats.peak_bytes, stats.budget_bytes, "peak")
    rows = [line.partition(": ") for line in str(stats).splitlines()]
    yield _table((first, rest) if mark else ("", first) for first, mark, rest in rows)


def explanation_html(explanation: Explanation) -> str:
    """An explanation: three peaks against the budget, then what each block does."""
    parts = [f"<b>input {escape(str(explanation.size))}</b>"]
    plan, profile = explanation.plan, explanation.profile
    if plan is None or profile is None:
        return _framed(*parts, f"<pre>{escape(str(explanation))}</pre>")
    budget = explanation.budget_bytes or explanation.peak_kept_bytes or 1
    if explanation.at_most_as is not None:
        parts.append(f"upper bounds, {escape(explanation.bound_in_words)}:")
    for name, peak, colour in (
        ("all kept", explanation.peak_kept_bytes, _KEEP),
        ("this plan", explanation.predicted_peak_bytes, _PLAN),
        ("all recomputed", explanation.peak_recomputed_bytes, _AGAIN),
    ):
        parts.append(_bar(peak or 0, budget, name, colour))
    does = [
        "fixed" if run.fixed else "recompute" if again else "keep"
        for run, again in zip(profile.runs, plan.recompute, strict=True)
    ]
    parts.append(_strip(does))
    short = "it may not fit" if explanation.at_most_as else "it does not fit"
    parts.append(
        f"{plan.kept} of {len(does)} blocks kept, {plan.recompute_seconds * 1e3:.1f} ms of "
        f"recomputing{'' if plan.fits else f'; <b>{short}</b>'}"
    )
    rows = (
        (name, word, text_of(run.saved), f"{run.nanoseconds / 1e6:.2f} ms")
        for name, word, run in zip(explanation.blocks, does, profile.runs, strict=False)
    )
    table = _table(rows, ("block", "", "keeping costs", "recompute takes"))
    return _framed(*parts, f"<details><summary>blocks</summary>{table}</details>")


def _framed(*parts: str) -> str:
    return (
        f'<div class="mimose" style="{_FRAME}">'
        + "".join(f"<div>{p}</div>" for p in parts)
        + "</div>"
    )


def _bar(peak: int, budget: int, name: str, colour: str = _PLAN) -> str:
    """A bar whose track is the budget; red where it is longer than that."""
    share = min(1.0, peak / budget)
    fill = _OVER if peak > budget else colour
    return (
        '<div style="display:flex;align-items:center;gap:8px">'
        f'<span style="width:100px">{escape(name)}</span>'
        '<span style="flex:1;height:8px;border-radius:4px;background:rgba(128,128,128,.2)">'
        f'<span style="display:block;height:8px;border-radius:4px;background:{fill};'
        f'width:{share:.1%}"></span></span>'
        f'<span style="width:170px">{text_of(peak)} of {text_of(budget)}</span></div>'
    )


def _strip(does: Sequence[str]) -> str:
    """A cell a block."""
    colours = {"keep": _KEEP, "recompute": _AGAIN, "fixed": _FIXED}
    cells = "".join(
        f'<span title="{word}" style="flex:1;height:14px;border-radius:2px;'
        f'background:{colours[word]}"></span>'
        for word in does
    )
    return f'<div style="display:flex;gap:2px;margin:6px 0">{cells}</div>'


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    cell = 'style="text-align:left;padding:1px 12px 1px 0"'
    lines = ["".join(f"<th {cell}>{escape(name)}</th>" for name in head)] if head else []
    lines += ["".join(f"<td {cell}>{escape(value)}</td>" for value in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table style="border-collapse:collapse">{body}</table>'
