"""How one call of a block can run."""

from __future__ import annotations

from enum import Enum


class Option(Enum):
    """What happens to a block's activations between its forward and its backward.

    Sorted by the memory that the device holds meanwhile, the most first.
    """

    KEEP = "keep"
    """They stay on the device, as in plain training."""
    SAVE_ON_HOST = "save_on_host"
    """They are copied to host memory after the forward, and back before the backward."""
    RECOMPUTE = "recompute"
    """They are dropped, and computed again by a second forward just before the backward."""
    RECOMPUTE_FROM_HOST = "recompute_from_host"
    """They are recomputed, and the block's input is in host memory until then."""

    @property
    def letter(self) -> str:
        """The letter that stands for this option in a printed or recorded plan."""
        return _LETTERS[self]

    @classmethod
    def of_letters(cls, plan: str) -> tuple[Option, ...]:
        """The options of a printed or recorded plan.

        >>> Option.of_letters("Kr")
        (<Option.KEEP: 'keep'>, <Option.RECOMPUTE: 'recompute'>)
        """
        return tuple([_OPTIONS[letter] for letter in plan])

    @property
    def recomputes(self) -> bool:
        """Whether the forward runs a second time before the backward."""
        return self is Option.RECOMPUTE or self is Option.RECOMPUTE_FROM_HOST

    @property
    def moves(self) -> bool:
        """Whether bytes are moved to host memory."""
        return self is Option.SAVE_ON_HOST or self is Option.RECOMPUTE_FROM_HOST

    @classmethod
    def of(cls, choice: Option | bool | str) -> Option:
        """The option for an option, for its name, or for whether the block is recomputed.

        >>> Option.of(True), Option.of("keep")
        (<Option.RECOMPUTE: 'recompute'>, <Option.KEEP: 'keep'>)
        """
        if isinstance(choice, Option):
            return choice
        if isinstance(choice, str):
            return cls(choice)
        return cls.RECOMPUTE if choice else cls.KEEP


_LETTERS = {
    Option.KEEP: "K",
    Option.SAVE_ON_HOST: "H",
    Option.RECOMPUTE: "r",
    Option.RECOMPUTE_FROM_HOST: "h",
}
_OPTIONS = {letter: option for option, letter in _LETTERS.items()}
