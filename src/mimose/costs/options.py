"""How one call of a block can run."""

from __future__ import annotations

from enum import Enum


class Option(Enum):
    """What happens to a block's activations between its forward and its backward."""

    KEEP = "keep"
    """They stay on the device, as in plain training."""
    RECOMPUTE = "recompute"
    """They are dropped, and rebuilt by running the forward once more before the backward."""

    @property
    def letter(self) -> str:
        """The letter that stands for this option in a printed or recorded plan."""
        return _LETTERS[self]

    @classmethod
    def of(cls, choice: Option | bool | str) -> Option:
        """An option by itself, by its name, or by whether the block is recomputed.

        >>> Option.of(True), Option.of("keep")
        (<Option.RECOMPUTE: 'recompute'>, <Option.KEEP: 'keep'>)
        """
        if isinstance(choice, Option):
            return choice
        if isinstance(choice, str):
            return cls(choice)
        return cls.RECOMPUTE if choice else cls.KEEP


_LETTERS = {Option.KEEP: "K", Option.RECOMPUTE: "r"}
