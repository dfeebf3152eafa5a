"""One cost model for each regime.

Unfreezing a layer, another attention implementation or switching on autocast starts a new cost
model. Going back to an earlier regime needs no new observations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mimose.costs import Regime
from mimose.estimation.cost_model import CostModel

_MOST = 8
"""Cost models to keep; the one used the longest ago is dropped first."""


class CostModels:
    """The cost model of each regime that steps have run in."""

    def __init__(self) -> None:
        self._known: dict[Regime, CostModel] = {}
        self.present: Regime | None = None

    def enter(self, regime: Regime) -> tuple[CostModel, str | None]:
        """The cost model of this regime; if new, also its difference from the last, in words."""
        former, self.present = self.present, regime
        known = self._known.pop(regime, None)
        cost_model = self._known[regime] = known or CostModel()
        while len(self._known) > _MOST:
            del self._known[next(iter(self._known))]
        change = None if known or former is None else _difference(former, regime)
        return cost_model, change

    def to_plain(self) -> list[dict[str, Any]]:
        """Numbers, strings, lists and dicts, for JSON."""
        return [
            {"regime": regime.to_plain(), "knowledge": cost_model.to_plain()}
            for regime, cost_model in self._known.items()
            if cost_model.observed
        ]

    def load_plain(self, plain: list[Mapping[str, Any]], blocks: int) -> None:
        """Load the result of `to_plain` for a model with this number of blocks.

        If any part is invalid, nothing is loaded.
        """
        cost_models = {
            Regime.from_plain(chapter["regime"]): CostModel.from_plain(chapter["knowledge"], blocks)
            for chapter in plain
        }
        self._known.update(cost_models)

    def difference_from_others(self) -> str | None:
        """How the present regime differs from the last other regime with observations."""
        others = [r for r, known in self._known.items() if known.observed and r != self.present]
        if self.present is None or not others:
            return None
        return _difference(others[-1], self.present)


def _difference(former: Regime, regime: Regime) -> str | None:
    """The changes from one regime to another, in words; None without any."""
    changes = [
        f"{name} was {before or 'off'}, now is {after or 'off'}"
        for name, before, after in (
            ("autocast", former.autocast, regime.autocast),
            ("the attention implementation", former.attention, regime.attention),
            ("the type of parameters", former.dtype, regime.dtype),
        )
        if before != after
    ]
    if former.trained != regime.trained:
        changes.append("other parameters are trained")
    return "; ".join(changes) or None
