"""Plans in words: what each run does, what moves, and which runs its copies overlap."""

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
"""What happens to a run's activations. Whether its input is on the host is stated separately."""


def in_words(plan: Plan) -> str:
    """How many runs a plan keeps, how much time it adds, and what it moves."""
    recompute_seconds = plan.extra_seconds - plan.stall_seconds
    parts = [
        f"{plan.kept} of {len(plan.choices)} kept",
        f"{recompute_seconds * 1e3:.1f} ms of recomputing",
    ]
    if plan.transfers:
        parts.append(f"{text_of(plan.moved_bytes)} moved to the host and back")
        parts.append(f"{plan.stall_seconds * 1e3:.1f} ms of waiting for transfers")
    return ", ".join(parts)


def transfers_in_words(transfers: Sequence[Transfer]) -> str:
    """How much each of these transfers moves (all the same), and how many runs its copy overlaps.

    A copy to the host overlaps the forwards between its own run and its release.
    """
    overlapped = {transfer.release_before - transfer.run - 1 for transfer in transfers}
    least, most = min(overlapped), max(overlapped)
    if most == 0:
        when = "before the next block runs"
    elif least == most == 1:
        when = "while the next block runs"
    else:
        when = f"while the next {most if least == most else f'{least} to {most}'} blocks run"
    return f"{text_of(transfers[0].moved_bytes)}, copied {when}"
