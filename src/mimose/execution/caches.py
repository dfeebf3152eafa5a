"""Key-value caches among a block's arguments, which blocks read and write.

A recompute must not write to a cache a second time, so it gets a copy from before its forward.

In training a cache is usually not read afterwards, but a filled one would hold the keys and values
of recomputed blocks until the outputs are freed. So each block gets its own copy, which is freed
after the block's run. All operators run as in plain training, and the cache stays empty. Caches
that are read are filled as in plain training.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from mimose.errors import warn
from mimose.tensors import tensors_in

_ARGUMENT_NAMES = frozenset(
    {"past_key_values", "past_key_value", "layer_past", "past", "cache", "cache_params"}
)
_LEAVES = frozenset({int, bool, float, str, type(None), torch.dtype, torch.device, torch.Tensor})
_NEVER_CACHES = _LEAVES | {tuple, list, dict}


def may_take_cache(module: nn.Module) -> bool:
    """Whether a cache may be among the arguments of the module's forward."""
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # no signature
        return True
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(name in _ARGUMENT_NAMES or p.kind in variadic for name, p in parameters.items())


def _has_cache_methods(kind: Any) -> bool:
    return all(callable(getattr(kind, name, None)) for name in ("get_seq_length", "update"))


def _has_layer_methods(kind: Any) -> bool:
    return _has_cache_methods(kind) or callable(getattr(kind, "reset", None))


is_cache: Callable[[Any], bool] = functools.lru_cache(maxsize=256)(_has_cache_methods)
"""Whether objects of this class are caches."""
_is_cache_or_layer: Callable[[Any], bool] = functools.lru_cache(maxsize=256)(_has_layer_methods)
"""Whether objects of this class are caches, or one layer's part of a cache."""


def copy_cache(cache: Any) -> Any:
    """A cache with the same tensors in containers of its own."""
    kind = type(cache)
    if kind is list or kind is tuple:
        return kind([copy_cache(item) for item in cache])
    if kind is dict:
        return {key: copy_cache(item) for key, item in cache.items()}
    if kind in _LEAVES or not _is_cache_or_layer(kind) or not hasattr(cache, "__dict__"):
        return cache
    made: Any = object.__new__(kind)
    held = made.__dict__ = dict(cache.__dict__)
    # This runs for every layer of the cache in every call of a block: make few calls.
    for name, value in held.items():
        if type(value) not in _LEAVES:
            held[name] = copy_cache(value)
    return made


def tensors_in_cache(cache: Any) -> Iterator[torch.Tensor]:
    """The tensors in a cache that have elements, depth first."""
    kind = type(cache)
    if isinstance(cache, torch.Tensor):
        if cache.numel():
            yield cache
    elif kind is list or kind is tuple:
        for item in cache:
            yield from tensors_in_cache(item)
    elif kind is dict:
        for item in cache.values():
            yield from tensors_in_cache(item)
    elif kind not in _LEAVES and _is_cache_or_layer(kind):
        for value in getattr(cache, "__dict__", {}).values():
            yield from tensors_in_cache(value)


def output_tensors(out: Any) -> Iterator[torch.Tensor]:
    """The tensors in a model's output, including those in caches."""
    yield from tensors_in(out)
    if isinstance(out, (dict, Mapping)):  # isinstance of Mapping alone is slow
        out = tuple(out.values())
    if isinstance(out, (tuple, list)):
        for value in out:
            if is_cache(type(value)):
                yield from tensors_in_cache(value)


class _SeenCache(NamedTuple):
    """A cache that was passed to blocks."""

    cache: weakref.ref[Any]
    stack: str
    """The name of the ModuleList whose block got it first."""
    blocks: set[int]
    """The blocks that got it so far."""
    filled: bool
    empty: bool
    """Whether it was empty when the first block got it."""


def holds_cache(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a cache is among a call's arguments. Runs in every call of a block."""
    for value in args:
        if (kind := type(value)) not in _NEVER_CACHES and is_cache(kind):
            return True
    for value in kwargs.values():
        if (kind := type(value)) not in _NEVER_CACHES and is_cache(kind):
            return True
    return False


class BlockArguments(NamedTuple):
    """The arguments that a block is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shares_cache: bool
    """Whether a cache of the model itself is among them: a second run would write to it again."""


class CacheUse:
    """Detects whether a model reads the caches that it passes to its blocks, and must fill them.

    They are filled in the first forward. A cache counts as read if it is passed to the blocks of a
    second ModuleList, or to one block twice. If none is, caches stay empty from then on.
    """

    def __init__(self) -> None:
        self._read = False
        self._in_first_forward = True
        self._requested = False
        self._first_block: int | None = None
        self._seen: dict[int, _SeenCache] = {}

    def start_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note whether a forward of the model is passed a cache, or `use_cache=True`."""
        self._requested = kwargs.get("use_cache") is True or holds_cache(args, kwargs)

    def arguments_for(
        self, block: int, stack: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BlockArguments:
        """Arguments that hold a cache, with copies in place of caches that need not be filled.

        `stack` is the name of the ModuleList that the block is in.
        """
        caches = [value for value in (*args, *kwargs.values()) if is_cache(type(value))]
        empty = [cache for cache in caches if self._see(cache, block, stack).empty]
        if self._must_fill:
            return BlockArguments(args, kwargs, shares_cache=True)
        copies = {id(cache): copy_cache(cache) for cache in empty}
        if copies:
            args = tuple([copies.get(id(value), value) for value in args])
            kwargs = {name: copies.get(id(value), value) for name, value in kwargs.items()}
        return BlockArguments(args, kwargs, shares_cache=len(copies) < len(caches))

    @property
    def in_use(self) -> bool:
        """Whether blocks were passed a cache."""
        return self._first_block is not None

    @property
    def _must_fill(self) -> bool:
        return self._read or self._in_first_forward or self._requested

    def _see(self, cache: Any, block: int, stack: str) -> _SeenCache:
        seen = self._seen.get(id(cache))
        if seen is None or seen.cache() is not cache:
            return self._see_first_time(cache, block, stack)
        if not self._read and (block in seen.blocks or stack != seen.stack):
            self._read = True
            if not seen.filled:
                warn(_NOT_FILLED)
        seen.blocks.add(block)
        return seen

    def _see_first_time(self, cache: Any, block: int, stack: str) -> _SeenCache:
        if self._first_block is None:
            self._first_block = block
        elif block == self._first_block:
            self._in_first_forward = False
        self._seen = {key: seen for key, seen in self._seen.items() if seen.cache() is not None}
        empty = next(tensors_in_cache(cache), None) is None
        seen = _SeenCache(weakref.ref(cache), stack, {block}, self._must_fill, empty)
        self._seen[id(cache)] = seen
        return seen


_NOT_FILLED = (
    "a key-value cache is read by a second block, which did not happen before. mimose had left it "
    "empty, so the result of this forward differs from plain training. From now on caches are "
    "filled; call the model with use_cache=True to have them filled from the start"
)
