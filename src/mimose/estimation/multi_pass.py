"""Predict the size of a step with several forward passes from the size of the first pass."""

from __future__ import annotations

from mimose.costs import InputSize
from mimose.estimation.dimensions import Shape

_MOST_SIZES = 64


class MultiPass:
    """Observed sizes of steps with several passes (a contrastive loss, a GAN) and one layout."""

    def __init__(self, size: InputSize) -> None:
        self.layout = size.layout
        self._seen: dict[InputSize, None] = {}
        self._largest = size
        self.note(size)

    def note(self, size: InputSize) -> None:
        """A step had this size."""
        self._seen.pop(size, None)
        self._seen[size] = None
        if len(self._seen) > _MOST_SIZES:
            del self._seen[next(iter(self._seen))]
        self._largest = self._largest.joined(size)
        self._shape = Shape.of(list(self._seen))

    def expected(self, first: InputSize) -> InputSize:
        """The expected size of a step with this first pass.

        Dimensions of later passes that have always followed from the first pass are computed from
        it. All others are expected to be as large as the largest observed one.
        """
        known = len(first.dims)
        dims = [*first.dims, *self._largest.dims[known:]]
        for symbol, *followers in self._shape.symbols:
            if symbol.position >= known:
                continue
            value = first.dims[symbol.position]
            for member in followers:
                if member.position >= known:
                    dims[member.position] = max(0, round(member.slope * value + member.offset))
        return InputSize(self.layout, tuple(dims))
