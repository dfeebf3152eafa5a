"""HTML of a handle, its statistics and its explanations, for notebooks.

The colours suit light and dark themes. All names are escaped, since they come from the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from mimose.costs import Profile
from mimose.planning import Plan
from mimose.reporting.plan_words import in_words, transfers_in_words
from mimose.units import text_of

if TYPE_CHECKING:
    from mimose.reporting.explanation import Explanation
    from mimose.reporting.stats import Stats

_KEEP, _RECOMPUTE, _FIXED, _PLAN, _OVER = "#3d7fc4", "#e07b29", "#8a919c", "#0b8a7d", "#c22f4a"
_ON_HOST, _FROM_HOST = "#9bbfe3", "#f2c9a1"
_FRAME = (
    "font-family:system-ui,sans-serif;font-size:13px;line-height:1.5;max-width:720px;"
    "border:1px solid rgba(128,128,128,.35);border-radius:8px;padding:10px 14px"
)


def handle_html(title: str, stats: Stats) -> str:
    """A handle with its statistics."""
    return _framed(f"<b>{escape(title)}</b>", *_stats_parts(stats))


def stats_html(stats: Stats) -> str:
    """The peak against the budget, then the other statistics."""
    return _framed(*_stats_parts(stats))


def _stats_parts(stats: Stats) -> Iterable[str]:
    if stats.budget_bytes:
        yield _bar(stats.peak_bytes, stats.budget_bytes, "peak")
    rows = [line.partition(": ") for line in str(stats).splitlines()]
    yield _table((name, value) if colon else ("", name) for name, colon, value in rows)


def explanation_html(explanation: Explanation) -> str:
    """Three peaks against the budget, then the plan and the cost of each block."""
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
        ("all recomputed", explanation.peak_recomputed_bytes, _RECOMPUTE),
    ):
        parts.append(_bar(peak or 0, budget, name, colour))
    choices = [
        "fixed" if run.fixed else option.value
        for run, option in zip(profile.runs, plan.choices, strict=True)
    ]
    parts.append(_strip(choices))
    verdict = "it may not fit" if explanation.at_most_as else "it does not fit"
    parts.append(f"{in_words(plan)}{'' if plan.fits else f'; <b>{verdict}</b>'}")
    table = _block_table(explanation.blocks, choices, profile, plan)
    return _framed(*parts, f"<details><summary>blocks</summary>{table}</details>")


def _block_table(
    blocks: Sequence[str], choices: Sequence[str], profile: Profile, plan: Plan
) -> str:
    """The choice and the costs of each block; what waits on the host, if anything does."""
    on_host = {transfer.run: transfers_in_words([transfer]) for transfer in plan.transfers}
    head = ("block", "plan", "memory if kept", "recompute time", *(["on the host"] * bool(on_host)))
    rows = (
        (name, choice.replace("_", " "), text_of(run.saved), f"{run.nanoseconds / 1e6:.2f} ms",
         *([on_host.get(k, "")] if on_host else []))
        for k, (name, choice, run) in enumerate(zip(blocks, choices, profile.runs, strict=False))
    )  # fmt: skip
    return _table(rows, head)


def _framed(*parts: str) -> str:
    return (
        f'<div class="mimose" style="{_FRAME}">'
        + "".join(f"<div>{p}</div>" for p in parts)
        + "</div>"
    )


def _bar(peak: int, budget: int, name: str, colour: str = _PLAN) -> str:
    """A bar whose full width is the budget; red if the peak exceeds it."""
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


def _strip(choices: Sequence[str]) -> str:
    """One coloured cell per block."""
    colours = {
        "keep": _KEEP,
        "save_on_host": _ON_HOST,
        "recompute": _RECOMPUTE,
        "recompute_from_host": _FROM_HOST,
        "fixed": _FIXED,
    }
    cells = "".join(
        f'<span title="{choice}" style="flex:1;height:14px;border-radius:2px;'
        f'background:{colours[choice]}"></span>'
        for choice in choices
    )
    return f'<div style="display:flex;gap:2px;margin:6px 0">{cells}</div>'


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    cell = 'style="text-align:left;padding:1px 12px 1px 0"'
    lines = ["".join(f"<th {cell}>{escape(name)}</th>" for name in head)] if head else []
    lines += ["".join(f"<td {cell}>{escape(value)}</td>" for value in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table style="border-collapse:collapse">{body}</table>'
