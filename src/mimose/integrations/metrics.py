"""The metrics of mimose that trainers log."""

from __future__ import annotations

from typing import final

from mimose.api import Mimose
from mimose.reporting import Stats
from mimose.units import GIB


@final
class IntervalMetrics:
    """Converts the running totals of a handle to metrics of each logging interval."""

    def __init__(self) -> None:
        self._before = Stats()

    def since_last(self, handle: Mimose) -> dict[str, float]:
        """The metrics since the last call. Unknown values are omitted, not logged as zero."""
        now, before = handle.stats(), self._before
        self._before = now
        row = {
            "mimose/peak_gib": now.peak_bytes / GIB,
            "mimose/observed_steps": float(now.observed_steps - before.observed_steps),
            "mimose/recoveries": float(now.recoveries),
        }
        row.update(_last_step(now))
        planned = now.planned_steps - before.planned_steps
        if planned > 0:
            recomputed = now.runs_recomputed - before.runs_recomputed
            row["mimose/blocks_recomputed"] = recomputed / planned
        seconds = now.planned_seconds - before.planned_seconds
        if planned > 0 and seconds > 0:
            recompute = now.recompute_seconds - before.recompute_seconds
            row["mimose/recompute_share"] = min(1.0, recompute / seconds)
        return row


def _last_step(stats: Stats) -> dict[str, float]:
    values = {
        "mimose/budget_gib": stats.budget_bytes,
        "mimose/predicted_peak_gib": stats.last_predicted_peak_bytes,
        "mimose/real_peak_gib": stats.last_real_peak_bytes,
    }
    return {name: value / GIB for name, value in values.items() if value is not None}
