"""Key-value caches among a block's arguments: a recompute would write to them a second time."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

_CACHES = ("past_key_values", "layer_past")


def cache_positions(module: nn.Module) -> tuple[int, ...] | None:
    """Where the module's forward takes a cache, if its class brings its own checkpointing call.

    transformers' layers do: they drop what a recompute would write to a second time.
    """
    classes = type(module).__mro__
    if not any("gradient_checkpointing" in vars(c) and "__call__" in vars(c) for c in classes):
        return None
    names = list(inspect.signature(module.forward).parameters)
    return tuple(i for i, name in enumerate(names) if name in _CACHES)


def brings_a_past(positions: tuple[int, ...], args: Any, kwargs: Any) -> bool:
    """Whether a cache with something in it is given, a tuned prefix say: the block writes to it."""
    given = [args[i] for i in positions if i < len(args)]
    given += [kwargs[name] for name in _CACHES if name in kwargs]
    lengths = [getattr(cache, "get_seq_length", int) for cache in given if cache is not None]
    return any(length() > 0 for length in lengths)


def without_cache(
    module: nn.Module, positions: tuple[int, ...], args: Any, kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """The arguments, less a cache that a recompute would write to a second time."""
    for i in positions:
        if i < len(args) and args[i] is not None:
            args = (*args[:i], None, *args[i + 1 :])
    for name in ("use_cache", *_CACHES):
        if kwargs.get(name) not in (None, False):
            return _asked_of_seam(module, args, kwargs)
    return args, kwargs


def _asked_of_seam(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """The arguments as the module's own checkpointing would pass them on.

    It is told to checkpoint by a function that hands them back instead of running anything.
    """
    place = module.__dict__
    names = ("gradient_checkpointing", "_gradient_checkpointing_func")
    former = {name: place[name] for name in names if name in place}
    place.update(gradient_checkpointing=True, _gradient_checkpointing_func=_hand_back)
    try:
        handed: tuple[Any, dict[str, Any]] = type(module).__call__(module, *args, **kwargs)
        return handed
    finally:
        for name in names:
            place.pop(name, None)
        place.update(former)


def _hand_back(call: Any, *args: Any) -> tuple[Any, dict[str, Any]]:
    return args, call.keywords
