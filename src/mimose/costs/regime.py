"""The settings, besides the input size, that a block's costs depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Regime(NamedTuple):
    """Settings of a step. Costs that were learned in one regime do not hold in another."""

    autocast: str
    """The dtype of autocast; empty without autocast."""
    attention: str
    """The attention implementations that the model's configuration names; empty for none."""
    trained: tuple[bool, ...]
    """Whether each of a sample of parameters requires grad."""
    dtype: str = ""
    """The dtype of the first parameter."""

    def to_plain(self) -> dict[str, Any]:
        """Strings and lists, for JSON."""
        return {**self._asdict(), "trained": list(self.trained)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Regime:
        """The inverse of `to_plain`."""
        trained = tuple(map(bool, plain["trained"]))
        dtype = str(plain.get("dtype", ""))
        return cls(str(plain["autocast"]), str(plain["attention"]), trained, dtype)
