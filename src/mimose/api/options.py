"""The options of `auto_checkpoint` that can be checked without a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mimose.costs import Option
from mimose.errors import ArgumentError
from mimose.memory import parse_host_memory, refuse_allocator_choice
from mimose.planning import Guarded, Planner, planner_named
from mimose.tensors import SizeFunction
from mimose.training import Collector, Options, Shuttle
from mimose.units import parse_budget

COLLECTORS: dict[str, type[Collector]] = {"ride": Collector, "shuttle": Shuttle}


def refuse_options(memory_budget: int | str, *, planner: str | Planner, **options: Any) -> None:
    """Raise for arguments that `auto_checkpoint` would refuse for any model."""
    for depends_on_model in ("blocks", "exclude", "record"):
        options.pop(depends_on_model, None)
    parse_budget(memory_budget)
    checked_options(**options)
    checked_planner(planner)


def checked_options(
    *,
    collector: str,
    enforce: bool,
    host_memory: int | str,
    choices: Iterable[str] | None,
    allocator: str,
    input_size: SizeFunction | None,
) -> Options:
    """These arguments of `auto_checkpoint` as the engine's options; raise if one is invalid."""
    if collector not in tuple(COLLECTORS):
        raise ArgumentError(f"collector= must be 'ride' or 'shuttle'; got {collector!r}")
    if not isinstance(enforce, bool):
        raise ArgumentError(f"enforce= must be True or False; got {enforce!r}")
    host_bytes = parse_host_memory(host_memory)
    options = checked_choices(choices)
    refuse_allocator_choice(allocator)
    if input_size is not None and not callable(input_size):
        raise ArgumentError(
            "input_size= must be a function of the forward's arguments, such as "
            f"lambda input_ids, **_: tuple(input_ids.shape); got {input_size!r}"
        )
    return Options(
        collector=COLLECTORS[collector],
        enforce=enforce,
        host_bytes=host_bytes,
        choices=options,
        allocator=allocator,
        input_size=input_size,
    )


def checked_choices(choices: Iterable[str] | None) -> frozenset[Option]:
    """The options with these names; all options if None."""
    if choices is None:
        return frozenset(Option)
    known = [option.value for option in Option]
    if not isinstance(choices, Iterable):
        raise ArgumentError(
            f"choices={choices!r} must be a collection of names such as ('keep', 'recompute'); "
            f"the names are {', '.join(known)}"
        )
    names = [choices] if isinstance(choices, str) else list(choices)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ArgumentError(
            f"choices= contains {', '.join(map(repr, unknown))}; the names are {', '.join(known)}"
        )
    needed = [option.value for option in (Option.KEEP, Option.RECOMPUTE)]
    if not set(needed) <= set(names):
        raise ArgumentError(
            f"choices={tuple(names)} must contain 'keep' and 'recompute', which steps without a "
            "prediction need; 'save_on_host' and 'recompute_from_host' may be left out. For one "
            "plan for all batches, see planner='keep_all' and planner='recompute_all'"
        )
    return frozenset(map(Option, names))


def checked_planner(planner: str | Planner) -> Planner:
    """The planner of this name; a planner object is wrapped so that its plans are checked."""
    chosen = planner_named(planner)
    return chosen if isinstance(planner, str) else Guarded(chosen)
