"""The axis of input sizes in a report's charts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mimose.costs import InputSize
from mimose.estimation import Shape
from mimose.reporting.recorded_lengths import shape_in_n


@dataclass(frozen=True, slots=True)
class SizeAxis:
    """Maps input sizes to one number: the product of the dimensions that vary."""

    shape: Shape | None
    label: str

    @classmethod
    def of(cls, sizes: Sequence[InputSize]) -> SizeAxis:
        if not sizes:
            return cls(None, "input size")
        usual = Counter(size.layout for size in sizes).most_common(1)[0][0]
        shown = list(dict.fromkeys(size for size in sizes if size.layout == usual))
        shape = Shape.of(shown)
        if len(shape.symbols) == 1:
            return cls(shape, f"n, of inputs {shape_in_n(shown[0], shape.varying)}")
        if shape.symbols:
            return cls(shape, "product of the dimensions that vary")
        return cls(shape, "input size (the same in all steps)")

    @property
    def one_way(self) -> bool:
        return self.shape is not None and len(self.shape.symbols) <= 1

    def shows(self, size: InputSize) -> bool:
        """Whether this size can be placed on the axis."""
        return self.shape is not None and size.layout == self.shape.layout

    def x(self, size: InputSize) -> int:
        assert self.shape is not None
        return math.prod(self.shape.point(size))
