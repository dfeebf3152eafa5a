"""Checkmate's mixed-integer linear programme for a chain of blocks.

Variables, for the phase of block j and blocks i ≤ j:

    input[j, i]         the input of i is held when the phase begins
    activations[j, i]   the activations of i are
    start[j, i]         the phase recomputes i … j
    save[j, i]          its recompute saves the activations of i, for a later phase (i < j)

`recomputed[j, i]` stands for the sum of start[j, 0 … i]. The programme minimises the time of all
recomputes. At each moment of a phase, blocks below the one that runs hold what the next phase
begins with, and blocks above it what this phase began with. That needs no product of variables.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mimose.api import pip_command
from mimose.comparison.phases import Phases
from mimose.comparison.stages import Chain
from mimose.errors import ArgumentError

_SCALE = 1000.0
"""What the available bytes and the time of one forward of all blocks are scaled to: the solver's
tolerances of 1e-6 are then a billionth of either."""

_TIMED_OUT = 1
"""scipy's status for a limit that was reached."""

Terms = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Solution:
    """What the solver found."""

    phases: Phases | None
    """None if it found no schedule."""
    bound_nanoseconds: float | None
    """No schedule of this form has less extra time; None if there is none."""
    timed_out: bool


class Programme:
    """The constraints for one chain and one number of bytes.

    `at_most_nanoseconds` is the time of a known schedule; slower ones are ruled out.
    """

    def __init__(
        self, chain: Chain, available_bytes: int, at_most_nanoseconds: int | None = None
    ) -> None:
        self._stages, self._count = chain.stages, len(chain.stages)
        self._possible = available_bytes > 0
        self._unit = _SCALE / max(1, available_bytes)
        times = np.cumsum([0, *(stage.nanoseconds for stage in chain.stages)])
        self._times, self._whole = times, max(1, int(times[-1]))
        self._columns: dict[tuple[str, int, int], int] = {}
        self._rows: list[tuple[Terms, float, float]] = []
        self._lower: dict[int, float] = {}
        self._upper: dict[int, float] = {}
        for j in range(self._count):
            self._add_phase(j)
        self._add_forwards(chain.head_bytes)
        self._fix()
        if at_most_nanoseconds is not None:
            self._at_most(self._cost(), at_most_nanoseconds / self._whole * _SCALE + 1e-6)

    def solve(self, time_limit_seconds: float, gap: float) -> Solution:
        """Run HiGHS."""
        if not self._count:
            return Solution(Phases((), (), ()), 0.0, timed_out=False)
        if not self._possible:
            return Solution(None, None, timed_out=False)
        result = self._run(self._integrality(), time_limit_seconds, gap)
        bound = result.mip_dual_bound
        if bound is None and result.status == _TIMED_OUT:
            # scipy tells no bound without a solution: that of the relaxation is the next best.
            bound = self._run([0] * len(self._columns), time_limit_seconds, gap).fun
        phases = None if result.x is None else self._phases(result.x)
        if bound is not None:
            bound = max(0.0, float(bound)) * self._whole / _SCALE
        return Solution(phases, bound, timed_out=result.status == _TIMED_OUT)

    def _run(self, integrality: list[int], time_limit_seconds: float, gap: float) -> Any:
        optimize, sparse = _scipy("optimize"), _scipy("sparse")
        matrix, low, high = self._matrix(sparse)
        cost = np.zeros(len(self._columns))
        for column, factor in self._cost():
            cost[column] = factor
        return optimize.milp(
            cost,
            constraints=optimize.LinearConstraint(matrix, low, high),
            bounds=optimize.Bounds(*self._bounds()),
            integrality=integrality,
            options={"time_limit": time_limit_seconds, "mip_rel_gap": gap},
        )

    # Columns

    def _column(self, kind: str, j: int, i: int) -> int:
        return self._columns.setdefault((kind, j, i), len(self._columns))

    def _recomputed(self, j: int, i: int, factor: float = 1.0) -> Terms:
        return [(self._column("start", j, c), factor) for c in range(i + 1)]

    def _held(self, j: int, blocks: Iterable[int]) -> Terms:
        """Bytes that these blocks hold when phase j begins."""
        terms: Terms = []
        for i in blocks:
            terms.append((self._column("input", j, i), self._stages[i].input_bytes * self._unit))
            bytes_ = self._stages[i].saved_bytes * self._unit
            terms.append((self._column("activations", j, i), bytes_))
        return terms

    def _cost(self) -> Terms:
        scale = _SCALE / self._whole
        return [
            (self._column("start", j, i), float(self._times[j + 1] - self._times[i]) * scale)
            for j in range(self._count)
            for i in range(j + 1)
        ]

    # Rows

    def _at_most(self, terms: Terms, limit: float) -> None:
        self._rows.append((terms, -np.inf, limit))

    def _not_above(self, smaller: Terms, larger: Terms) -> None:
        self._at_most([*smaller, *((column, -factor) for column, factor in larger)], 0.0)

    def _add_phase(self, j: int) -> None:
        own = [(self._column("activations", j, j), 1.0)]
        self._rows.append(([*own, *self._recomputed(j, j)], 1.0, 1.0))
        for i in range(j + 1):
            self._add_logic(j, i)
            self._add_recompute_peak(j, i)
        stage = self._stages[j]
        own_bytes = stage.gradient_bytes + stage.input_bytes + stage.saved_bytes
        peak = (own_bytes + stage.backward_peak_bytes) * self._unit
        self._at_most(self._held(j - 1, range(j)), _SCALE - peak)

    def _add_logic(self, j: int, i: int) -> None:
        """What is held comes from somewhere; a recompute starts from the nearest held input."""
        held = [(self._column("input", j, i), 1.0)]
        activations = [(self._column("activations", j, i), 1.0)]
        self._not_above(activations, held)
        self._not_above([(self._column("start", j, i), 1.0)], held)
        made = self._recomputed(j, i - 1)
        if i > 0:
            self._at_most([*held, *made], 1.0)
        if i == j:
            return
        save = [(self._column("save", j, i), 1.0)]
        self._not_above(save, self._recomputed(j, i))
        self._not_above([(self._column("activations", j - 1, i), 1.0)], [*activations, *save])
        if i > 0:
            self._not_above([(self._column("input", j - 1, i), 1.0)], [*held, *made])

    def _add_recompute_peak(self, j: int, i: int) -> None:
        stage, unit = self._stages[i], self._unit
        saving = (stage.saving_peak_bytes - stage.forward_peak_bytes) * unit
        terms = self._held(j - 1, range(i)) + self._held(j, range(i + 1, j + 1))
        terms.append((self._column("activations", j, i), stage.saved_bytes * unit))
        terms += self._recomputed(j, i, (stage.input_bytes + stage.forward_peak_bytes) * unit)
        if i < j:
            terms.append((self._column("save", j, i), saving))
        else:
            terms += self._recomputed(j, j, saving)
        self._at_most(terms, _SCALE - self._stages[j].gradient_bytes * unit)

    def _add_forwards(self, head_bytes: int) -> None:
        last = self._count - 1
        for k, stage in enumerate(self._stages):
            saving = (stage.saving_peak_bytes - stage.forward_peak_bytes) * self._unit
            terms = self._held(last, range(k))
            terms.append((self._column("activations", last, k), saving))
            peak = (stage.input_bytes + stage.forward_peak_bytes) * self._unit
            self._at_most(terms, _SCALE - peak)
        self._at_most(self._held(last, range(self._count)), _SCALE - head_bytes * self._unit)

    def _fix(self) -> None:
        """The first input always stays. Around a block that cannot be recomputed, all stays."""
        fixed = [stage.fixed for stage in self._stages]
        for (kind, j, i), column in self._columns.items():
            if kind == "start" and any(fixed[i : j + 1]):
                self._upper[column] = 0.0
            stays = fixed[i] or i == 0 or fixed[i - 1]
            if (kind == "input" and stays) or (kind == "activations" and fixed[i]):
                self._lower[column] = 1.0

    # For scipy

    def _matrix(self, sparse: Any) -> tuple[Any, list[float], list[float]]:
        entries = [
            (factor, row, column)
            for row, (terms, _, _) in enumerate(self._rows)
            for column, factor in terms
        ]
        factors, rows, columns = zip(*entries, strict=True)
        shape = len(self._rows), len(self._columns)
        matrix = sparse.coo_matrix((factors, (rows, columns)), shape=shape).tocsr()
        return matrix, [low for _, low, _ in self._rows], [high for _, _, high in self._rows]

    def _bounds(self) -> tuple[list[float], list[float]]:
        columns = range(len(self._columns))
        lower = [self._lower.get(column, 0.0) for column in columns]
        return lower, [self._upper.get(column, 1.0) for column in columns]

    def _integrality(self) -> list[int]:
        """All but `save`, which is the difference of two phases."""
        return [int(kind != "save") for kind, _, _ in self._columns]

    # Back

    def _phases(self, values: Any) -> Phases:
        on = {key for key, column in self._columns.items() if values[column] > 0.5}
        starts = tuple(
            next((i for i in range(j + 1) if ("start", j, i) in on), None)
            for j in range(self._count)
        )
        sources = tuple(self._source(on, k) if starts[k] is None else k for k in range(self._count))
        return Phases(starts, sources, tuple(stage.fixed for stage in self._stages))

    def _source(self, on: set[tuple[str, int, int]], k: int) -> int:
        """The phase before the first one that begins with the activations of block k."""
        absent: Iterator[int] = (
            j for j in range(k, self._count) if ("activations", j, k) not in on
        )
        return next(absent, self._count)


def how_to_install_scipy() -> str:
    """What to do where scipy is missing."""
    return f"Checkmate's solver is in scipy: {pip_command('bench', 'scikit-learn')} brings it"


def _scipy(part: str) -> Any:
    try:
        return importlib.import_module(f"scipy.{part}")
    except ImportError:
        raise ArgumentError(how_to_install_scipy()) from None
