"""What a trainer logs of mimose: one row of numbers an interval."""

from __future__ import annotations

from typing import final

from mimose.api import Mimose
from mimose.reporting import Stats
from mimose.units import GIB


@final
class Interval:
    """Turns a handle's running totals into what has happened since the last row."""

    def __init__(self) -> None:
        self._before = Stats()

    def row(self, handle: Mimose) -> dict[str, float]:
        """The numbers to log now. What is not known yet is left out, rather than logged as zero."""
        now, before = handle.stats(), self._before
        self._before = now
        row = {
            "mimose/peak_gib": now.peak_bytes / GIB,
            "mimose/observed_steps": float(now.observed_steps - before.observed_steps),
            "mimose/recoveries": float(now.recoveries),
        }
        row.update(_of_last_plan(now))
        planned = now.planned_steps - before.planned_steps
        if planned > 0:
            recomputed = now.runs_recomputed - before.runs_recomputed
            row["mimose/blocks_recomputed"] = recomputed / planned
        seconds = now.planned_seconds - before.planned_seconds
        if planned > 0 and seconds > 0:
            spent = now.recompute_seconds - before.recompute_seconds
            row["mimose/recompute_share"] = min(1.0, spent / seconds)
        return row


def _of_last_plan(stats: Stats) -> dict[str, float]:
    known = {
        "mimose/budget_gib": stats.budget_bytes,
        "mimose/predicted_peak_gib": stats.last_predicted_peak_bytes,
        "mimose/real_peak_gib": stats.last_real_peak_bytes,
    }
    return {name: value / GIB for name, value in known.items() if value is not None}
