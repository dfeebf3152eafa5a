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


class Dice:
    """The random generators that torch's own do not cover: Python's, NumPy's, a module's."""

    __slots__ = ("_numpy", "_own", "_python")

    def __init__(self, generators: Iterable[Generator] = ()) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)
        self._own = [(generator, state_of(generator)) for generator in generators]

    def moved(self) -> bool:
        """Whether somebody has drawn from them since."""
        return (
            random.getstate() != self._python
            or not same_state(np.random.get_state(legacy=False), self._numpy)
            or any(not same_state(state_of(g), state) for g, state in self._own)
        )

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` with the same draws to come as then."""
        present = Dice(generator for generator, _ in self._own)
        self._set()
        try:
            return function(*args)
        finally:
            present._set()

    def _set(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for generator, state in self._own:
            _set_state(generator, state)


def state_of(generator: Generator) -> Any:
    """What the numbers to come depend on."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def same_state(a: Any, b: Any) -> bool:
    """Whether two states give the same numbers."""
    return pickle.dumps(a) == pickle.dumps(b)


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
