"""Random generators besides torch's default ones: Python's, NumPy's, and a module's own."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_GLOBAL: tuple[Generator, ...] = (random._inst, np.random.mtrand._rand)
"""The generators behind `random.random()` and `np.random.rand()`."""


class OtherGenerators:
    """The states of generators that `ExecutionContext` does not capture, at one moment."""

    __slots__ = ("_states",)

    def __init__(self, generators: Iterable[Generator] = ()) -> None:
        self._states = [(g, _state_of(g)) for g in (*_GLOBAL, *generators)]

    def advanced(self) -> bool:
        """Whether any numbers were drawn since."""
        return any(state_bytes(g) != pickle.dumps(state) for g, state in self._states)

    def restore(self) -> None:
        """Set the generators to these states for good."""
        for generator, state in self._states:
            _set_state(generator, state)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` with these states, then restore the present ones."""
        present = [(generator, _state_of(generator)) for generator, _ in self._states]
        try:
            self.restore()
            return function(*args)
        finally:
            for generator, state in present:
                _set_state(generator, state)


def state_bytes(generator: Generator) -> bytes:
    """A generator's state, pickled so that it can be compared."""
    return pickle.dumps(_state_of(generator))


def _state_of(generator: Generator) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.get_state()


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
