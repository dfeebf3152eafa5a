"""The explanation of a plan, as a value. `explain.py` makes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from mimose.costs import InputSize, Option, Profile, RunCost, Transfer
from mimose.planning import Plan
from mimose.reporting.notebook import explanation_html
from mimose.reporting.plan_words import OPTION_WORDS, in_words, transfers_in_words
from mimose.units import text_of

_REMEDY = "raise the budget, use smaller batches, or choose smaller blocks with blocks="


@dataclass(frozen=True, slots=True)
class Explanation:
    """The plan for a batch of this size, and the costs that lead to it."""

    size: InputSize
    """The explained input size."""
    blocks: tuple[str, ...]
    """The names of the blocks."""
    budget_bytes: int | None = None
    """The budget; None for "auto" or a percentage until the first step."""
    reserve_bytes: int | None = None
    """The part of the budget that plans leave free; None before the first step."""
    base_bytes: int = 0
    """Memory in use when the first block starts: parameters, gradients, optimizer state, inputs."""
    parameter_bytes: int = 0
    """Size of the parameters."""
    gradient_bytes: int = 0
    """Size of all gradients."""
    profile: Profile | None = None
    """The cost of each run of a block at this size; None if this size cannot be predicted."""
    plan: Plan | None = None
    """What each run does with its activations; None if this size cannot be predicted."""
    peak_kept_bytes: int | None = None
    """The peak if all blocks were kept."""
    peak_recomputed_bytes: int | None = None
    """The peak if all blocks were recomputed."""
    at_most_as: InputSize | None = None
    """The size whose costs and peaks serve as upper bounds; None if they are predictions."""
    guess: Plan | None = None
    """The plan of the next step of this size, from costs guessed by another size; None if the size
    can be predicted, or if nothing is known."""
    note: str = ""
    """A remark to read first, for instance that mimose is not attached."""
    largest_batch: int | None = None
    """Approximate largest batch of this shape that fits, with every block recomputed."""

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The predicted peak under the plan."""
        return None if self.plan is None else self.base_bytes + self.plan.peak_bytes

    @property
    def bound_in_words(self) -> str:
        """Where the upper bounds come from; empty for predictions."""
        if self.at_most_as is None:
            return ""
        return (
            f"from the costs measured at {self.at_most_as} (too few sizes were observed to predict "
            "this one)"
        )

    def __str__(self) -> str:
        lines = [f"input {self.size}", *([self.note] if self.note else [])]
        if self.budget_bytes is not None:
            reserve = "a reserve, known from the first step on"
            if self.reserve_bytes is not None:
                reserve = f"a reserve of {text_of(self.reserve_bytes)}"
            lines.append(f"budget {text_of(self.budget_bytes)}, including {reserve}")
        lines.append(self._floor_line())
        if self.profile is not None and self.plan is not None:
            lines += self._plan_lines(self.profile, self.plan)
        elif not self.note:
            lines.append(self._unmeasured())
        return "\n".join(lines)

    def _unmeasured(self) -> str:
        if self.guess is None:
            return "not measured yet. The next batch of this size will be observed"
        under = f"under the guess {self.guess}"
        return f"not measured yet. The next step of this size is observed, {under}"

    def _floor_line(self) -> str:
        floor = f"parameters {text_of(self.parameter_bytes)}"
        if self.base_bytes:
            other = max(0, self.base_bytes - self.parameter_bytes)
            floor = (
                f"in use at the start: {text_of(self.base_bytes)} ({floor}, optimizer state and "
                f"other {text_of(other)})"
            )
        return f"{floor}; gradients {text_of(self.gradient_bytes)}"

    def _repr_html_(self) -> str:
        return explanation_html(self)

    def _plan_lines(self, profile: Profile, plan: Plan) -> list[str]:
        assert self.peak_kept_bytes is not None
        assert self.peak_recomputed_bytes is not None
        verdict = "fits" if plan.fits else f"DOES NOT FIT: {_REMEDY}"
        bound = self.at_most_as is not None
        if bound and not plan.fits:
            verdict = "may not fit"
        peak = "peak at most" if bound else "peak"
        lines = [
            *([f"upper bounds, {self.bound_in_words}:"] if bound else []),
            f"{peak} {text_of(self.peak_kept_bytes)} with all blocks kept, "
            f"{text_of(self.peak_recomputed_bytes)} with all recomputed, "
            f"{text_of(self.base_bytes + plan.peak_bytes)} under this plan: {verdict}",
            f"plan {plan}: {in_words(plan)}",
        ]
        lines += _block_lines(self.blocks, profile, plan)
        if self.largest_batch and not bound:
            lines.append(
                f"largest batch of this shape with every block recomputed: about "
                f"{self.largest_batch}"
            )
        return lines


def _block_lines(blocks: Sequence[str], profile: Profile, plan: Plan) -> Iterator[str]:
    """The choice and the cost of each block; equal neighbours share a line."""
    moved = {transfer.run: transfer for transfer in plan.transfers}
    rows = [
        _Row(name, _choice(run, option), _cost(run), option, moved.get(k))
        for k, (name, run, option) in enumerate(
            zip(blocks, profile.runs, plan.choices, strict=False)
        )
    ]
    width = max((len(row.choice) for row in rows), default=0)
    for _, group in groupby(rows, key=_Row.key):
        yield _block_line(list(group), width)


class _Row(NamedTuple):
    """One run of a block, in words."""

    name: str
    choice: str
    cost: str
    option: Option
    transfer: Transfer | None

    def key(self) -> tuple[str, str, Option, int]:
        """What neighbours on one line have in common: everything but when the bytes move."""
        moved_bytes = 0 if self.transfer is None else self.transfer.moved_bytes
        return self.choice, self.cost, self.option, moved_bytes


def _block_line(rows: Sequence[_Row], width: int) -> str:
    first, last = rows[0], rows[-1]
    names = f"{first.name} … {last.name} ({len(rows)} blocks, each)" if rows[1:] else first.name
    line = f"  {first.choice:{width}}  {names}: {first.cost}"
    transfers = [row.transfer for row in rows if row.transfer is not None]
    if not transfers:
        return line
    what = "input on the host" if first.option.recomputes else "on the host"
    return f"{line}; {what}: {transfers_in_words(transfers)}"


def _choice(run: RunCost, option: Option) -> str:
    return "fixed" if run.fixed else OPTION_WORDS[option]


def _cost(run: RunCost) -> str:
    return f"{text_of(run.saved)} if kept, {run.nanoseconds / 1e6:.2f} ms to recompute"
