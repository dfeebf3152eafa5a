"""What decides a block's costs besides the size of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Regime(NamedTuple):
    """The circumstances of a step; what was learned in one regime does not hold in another."""

    autocast: str
    """The type that operators are cast to; empty if they are not."""
    attention: str
    """The attention implementation, where the model's configuration names one; or several."""
    trained: tuple[bool, ...]
    """Whether parameters are trained, by a sample."""
    dtype: str = ""
    """The type of the first parameter."""

    def to_plain(self) -> dict[str, Any]:
        """Strings, a list and a dict alone, for files."""
        return {**self._asdict(), "trained": list(self.trained)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Regime:
        """What `to_plain` gave."""
        trained = tuple(map(bool, plain["trained"]))
        dtype = str(plain.get("dtype", ""))
        return cls(str(plain["autocast"]), str(plain["attention"]), trained, dtype)
