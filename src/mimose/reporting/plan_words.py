"""Plans in words: what a run does, what moves, and behind what the copies are hidden."""

from __future__ import annotations

from collections.abc import Sequence

from mimose.costs import Option, Transfer
from mimose.planning import Plan
from mimose.units import text_of

OPTION_WORDS = {
    Option.KEEP: "keep",
    Option.SAVE_ON_HOST: "on the host",
    Option.RECOMPUTE: "recompute",
    Option.RECOMPUTE_FROM_HOST: "recompute",
}
"""What becomes of a run's activations. Where its input waits is said apart."""


def in_words(plan: Plan) -> str:
    """How much of a plan is kept, how much time it adds, and what it moves."""
    recompute = plan.extra_seconds - plan.stall_seconds
    parts = [f"{plan.kept} of {len(plan.choices)} kept", f"{recompute * 1e3:.1f} ms of recompute"]
    if plan.transfers:
        parts.append(f"{text_of(plan.moved_bytes)} to the host and back")
        parts.append(f"{plan.stall_seconds * 1e3:.1f} ms of waiting for it")
    return ", ".join(parts)


def way_in_words(transfers: Sequence[Transfer]) -> str:
    """How much each of these moves, all the same, and behind how many runs the copies are hidden.

    A copy to the host is hidden behind the forwards between its own run and its release.
    """
    behind = {transfer.release_before - transfer.run - 1 for transfer in transfers}
    least, most = min(behind), max(behind)
    blocks = f"{least}" if least == most else f"{least} to {most}"
    noun = "block" if most == 1 else "blocks"
    return f"{text_of(transfers[0].moved_bytes)}, hidden behind {blocks} {noun}"
