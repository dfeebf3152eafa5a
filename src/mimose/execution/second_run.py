"""The arguments with which a forward that broke off can run again.

A recompute gets containers of its own. A second run gets those that its caller holds, and the first
one may have changed them: appended to a list, filled a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import is_dataclass
from typing import Any

from mimose.execution.caches import is_cache, tensors_in_cache
from mimose.execution.object_contents import same_content

Arguments = tuple[Any, Any]
"""The positional ones, and those by name."""
StandsFor = Callable[[Any, Any], bool]
"""Whether the second value stands for the first one among the former arguments."""


def nothing_stands_for(value: Any, before: Any) -> bool:
    """There are no copies but those of containers."""
    return False


def arguments_again(
    now: Arguments,
    former: Arguments,
    stands_for: StandsFor = nothing_stands_for,
    *,
    own_caches: bool,
) -> Arguments | None:
    """The arguments of a second run; None if the first one has changed a container among them.

    `former` are the same arguments in containers that were copied before the first run. Caches
    that are this call's own are replaced by their copies.
    """
    if now[0] is former[0] and now[1] is former[1]:  # there are no containers
        return now

    def again(value: Any, before: Any) -> Any:
        if own_caches and is_cache(type(value)):
            return before
        if not _unchanged(value, before, stands_for):
            raise _Changed
        return value

    try:
        args = tuple(map(again, now[0], former[0]))
        return args, {name: again(value, former[1][name]) for name, value in now[1].items()}
    except _Changed:
        return None


class _Changed(Exception):
    """A container does not hold what it held before."""


def _unchanged(value: Any, before: Any, stands_for: StandsFor) -> bool:
    def all_unchanged(values: Iterable[Any], formers: Iterable[Any]) -> bool:
        pairs = zip(values, formers, strict=True)
        return all(_unchanged(one, other, stands_for) for one, other in pairs)

    if is_cache(type(value)):
        tensors, formers = list(tensors_in_cache(value)), list(tensors_in_cache(before))
        copied = value is not before
        return copied and len(tensors) == len(formers) and all_unchanged(tensors, formers)
    if same_content(value, before) or stands_for(value, before):
        return True
    if isinstance(value, (list, tuple)):
        return len(value) == len(before) and all_unchanged(value, before)
    if isinstance(value, MutableMapping):
        return [*value] == [*before] and all_unchanged(value.values(), before.values())
    if not is_dataclass(value) or not hasattr(value, "__dict__"):
        return False
    held, formerly = vars(value), vars(before)
    return [*held] == [*formerly] and all_unchanged(held.values(), formerly.values())
