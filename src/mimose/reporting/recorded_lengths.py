"""The lengths of recorded inputs: the dimension that varies besides the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from mimose.costs import InputSize
from mimose.errors import ArgumentError
from mimose.estimation import Shape


class RecordedLengths:
    """The lengths of recorded inputs, and the input size that belongs to any length."""

    def __init__(self, sizes: Sequence[InputSize]) -> None:
        layout = Counter(size.layout for size in sizes).most_common(1)[0][0]
        self._sizes = [size for size in sizes if size.layout == layout]
        self._shape = Shape.of(list(dict.fromkeys(self._sizes)))
        free = [i for i in range(len(self._shape.symbols)) if not self._is_batch(i)]
        self._free = free[0] if len(free) == 1 else None
        self._usual = Counter(self._sizes).most_common(1)[0][0]
        self.batch = self._usual.dims[0] if self._usual.dims else 1

    def _is_batch(self, symbol: int) -> bool:
        return len(self._shape.symbols) > 1 and self._shape.symbols[symbol][0].position == 0

    @property
    def one_dimension_varies(self) -> bool:
        """Whether only one dimension varies besides the batch."""
        return self._free is not None

    @property
    def pattern(self) -> str | None:
        """The most common size with n for the dimension that varies."""
        if self._free is None:
            return None
        varying = {member.position for member in self._shape.symbols[self._free]}
        return shape_in_n(self._usual, varying)

    def at(self, length: int) -> InputSize:
        """The most common size, with this length."""
        if self._free is None:
            raise ArgumentError(
                "the recorded inputs vary in several dimensions, so a length does not determine "
                "their size: omit the lengths to use the recorded sizes"
            )
        dims = list(self._usual.dims)
        for member in self._shape.symbols[self._free]:
            dims[member.position] = round(member.slope * length + member.offset)
        return InputSize(self._shape.layout, tuple(dims))

    def of(self, size: InputSize) -> int:
        """The length of this size."""
        assert self._free is not None
        return size.dims[self._shape.symbols[self._free][0].position]

    @property
    def longest(self) -> int:
        """The longest recorded length."""
        return max(map(self.of, self._sizes))


def shape_in_n(size: InputSize, varying: Collection[int]) -> str:
    """The shape of the first tensor in which dimensions vary, with n in their place."""
    dims = ["n" if i in varying else str(dim) for i, dim in enumerate(size.dims)]
    start = 0
    for _, rank in size.layout:
        shape = dims[start : start + rank]
        if "n" in shape:
            return "×".join(shape)
        start += rank
    return "n"
