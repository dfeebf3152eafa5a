"""What real peaks teach: how far predictions are off, and when not to believe them any more."""

from __future__ import annotations

import math
from collections import deque

_WINDOW = 64
_QUANTILE = 0.98
_TO_SHIFT_DOWN = 16
"""Real peaks it takes to believe that predictions are too high."""
_MOST_DOWN = 0.03
"""By how much they are believed to be too high at most: other plans peak elsewhere, where they may
be exact, and then go over by so much."""
_STRANGE = 0.03
"""A difference, as a share of the predicted rise, that is a reason to observe again."""
_AGE = 16
"""Steps without a visible peak after which the oldest deviation is forgotten."""


class PredictionMargin:
    """Compares predicted with real peaks, step by step.

    Each difference is a share of the predicted rise. The margin that plans leave is the upper end
    of the recent ones, so a bias shifts predictions and noise widens the margin; it is negative
    where predictions have long been too high. A difference beyond what is usual is a doubt: the
    next step is observed again, and either the costs are learned anew or the difference is usual
    from then on.
    """

    def __init__(self) -> None:
        self.margin = 0.0
        self.in_doubt = False
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._usual = _STRANGE
        self._strange = False
        self._unseen = 0

    def peaked(self, predicted_rise: int, real_rise: int) -> None:
        """A step rose this far above its start."""
        if predicted_rise <= 0:
            return
        share = (real_rise - predicted_rise) / predicted_rise
        self._recent.append(share)
        self._settle()
        self.note_difference(share)

    def note_difference(self, share: float) -> None:
        """Somewhere in a step, memory in use was this far from what was predicted."""
        if abs(share) > self._usual:
            self.in_doubt = self._strange = True

    def failed(self) -> None:
        """Memory ran out in a step that was to fit: a doubt, whatever the differences were."""
        self.in_doubt = True

    def peaked_unseen(self) -> None:
        """A step's peak was hidden by an earlier one."""
        self._unseen += 1
        if self._unseen % _AGE == 0 and self._recent:
            self._recent.popleft()
            self._settle()

    def reassured(self) -> None:
        """Observed again, and nothing had changed: such differences are usual here."""
        self._usual *= 2 if self._strange else 1
        self.in_doubt = self._strange = False

    def ran_out(self) -> None:
        """Memory ran out: what made predictions lower than the estimator's is not to be trusted."""
        if self.margin < 0:
            self._recent = deque((max(0.0, share) for share in self._recent), maxlen=_WINDOW)
            self._settle()

    def _settle(self) -> None:
        if not self._recent:
            self.margin = 0.0
            return
        ordered = sorted(self._recent)
        upper = ordered[math.ceil(_QUANTILE * len(ordered)) - 1]
        self.margin = max(upper, -_MOST_DOWN if len(ordered) >= _TO_SHIFT_DOWN else 0.0)
