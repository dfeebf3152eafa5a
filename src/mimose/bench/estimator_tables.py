"""Tables of the comparison of estimators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mimose.bench.markdown import table
from mimose.bench.time_spent import mean

Rows = Mapping[str, Sequence[dict[str, Any]]]
"""By task: a row for each estimator and number of samples."""

_SHOWN = (10, 50)
_COLUMNS = {
    "training, ms": ("fit_ms", ".2f"),
    "prediction, ms": ("predict_ms", ".3f"),
    "mean error": ("mean_error", ".3%"),
    "worst error": ("worst_error", ".3%"),
    "sizes not predicted": ("not_predicted", ".0%"),
    "training of all layers, ms": ("layers_fit_ms", ".2f"),
    "prediction of all layers, ms": ("layers_predict_ms", ".3f"),
    "mean error of a layer": ("layers_mean_error", ".3%"),
    "worst error of a layer": ("layers_worst_error", ".3%"),
}


def estimators(found: Rows) -> str:
    """Every estimator with 10 and with 50 samples, or with as many as there are."""
    every = [row for rows in found.values() for row in rows]
    shown = {n: spec for n, spec in _COLUMNS.items() if any(spec[0] in row for row in every)}
    lines = []
    for task, rows in found.items():
        counts = {row["samples"] for row in rows}
        wanted = counts.intersection(_SHOWN) or {max(counts, default=0)}
        for row in rows:
            if row["samples"] in wanted:
                head = [task, row["estimator"], str(row["samples"])]
                lines.append([*head, *_cells(row, list(shown.values()))])
    return table(["task", "estimator", "samples", *shown], lines)


def _cells(row: dict[str, Any], columns: Sequence[tuple[str, str]]) -> list[str]:
    if "missing" in row:
        return [row["missing"], *["–"] * (len(columns) - 1)]
    return [format(row[name], style) if name in row else "–" for name, style in columns]


def by_samples(found: Rows) -> str:
    """How the error of the peak falls with the number of samples, averaged over the tasks."""
    rows = [row for rows in found.values() for row in rows]
    counts = sorted({row["samples"] for row in rows})
    lines = []
    for name in dict.fromkeys(row["estimator"] for row in rows):
        known = [row for row in rows if row["estimator"] == name and "mean_error" in row]
        means = [mean(r["mean_error"] for r in known if r["samples"] == n) for n in counts]
        lines.append([name, *("–" if m is None else f"{m:.3%}" for m in means)])
    return table(["estimator", *(f"{n} samples" for n in counts)], lines)
