"""Several passes before one backward: what is to come when the first begins."""

from __future__ import annotations

from mimose.costs import InputSize
from mimose.estimation.dimensions import Shape

_MOST_SIZES = 64


class MultiPass:
    """The sizes of steps that begin alike and have several passes (a contrastive loss, a GAN)."""

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
        """The size of a step whose first pass has this one.

        What was always the same stays so, what has followed from the first does so again; of the
        rest the largest that was seen is expected.
        """
        known = len(first.dims)
        dims = [*first.dims, *self._largest.dims[known:]]
        for leader, *others in self._shape.symbols:
            if leader.position >= known:
                continue
            for member in others:
                if member.position >= known:
                    at = first.dims[leader.position]
                    dims[member.position] = max(0, round(member.slope * at + member.offset))
        return InputSize(self.layout, tuple(dims))
