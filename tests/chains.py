"""Profiles of chains of runs: written by hand, or drawn at random for property tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from mimose.costs.input_size import InputSize
from mimose.costs.link import Link
from mimose.costs.options import Option
from mimose.costs.run_cost import OptionCost, RunCost
from mimose.costs.timeline import Profile

steady = settings(derandomize=True, deadline=None, max_examples=60)
"""Settings for property tests with the same examples every time."""

SIZE = InputSize((("0", 2),), (8, 128))


def run(**costs: Any) -> RunCost:
    """A run with these costs; all others are 0."""
    nothing = dict.fromkeys(RunCost._fields[: RunCost._fields.index("fixed")], 0)
    return RunCost(**{**nothing, **costs})


def chain(*runs: Any, head_forward: int = 0, head_backward: int = 0, tail: int = 0) -> Profile:
    return Profile(SIZE, runs, head_forward, head_backward, tail)


@st.composite
def realistic_chains(draw: st.DrawFn, longest: int = 9, most_casts: int = 0) -> Profile:
    """Realistic profiles: each output raises the level, and all runs have different costs.

    All runs share equally many bytes of casts, up to `most_casts`.
    """
    boundary, level, runs = draw(st.integers(0, 50)), 0, []
    casts = draw(st.integers(0, most_casts))
    for _ in range(draw(st.integers(1, longest))):
        saved = draw(st.integers(0, 300))
        level += boundary
        runs.append(
            RunCost(
                boundary=boundary,
                forward_peak=draw(st.integers(0, 100)),
                backward_entry=draw(st.integers(0, 20)),
                saved=saved,
                recompute_peak=saved + draw(st.integers(0, 100)),
                backward_peak=draw(st.integers(0, 150)),
                output_saved=draw(st.integers(0, min(saved, 40))),
                droppable_input=draw(st.integers(0, 10)),
                between_blocks_peak=draw(st.sampled_from([0, 0, 50, 400])),
                shared_casts=casts,
                nanoseconds=draw(st.integers(0, 1000)),
                fixed=draw(st.integers(0, 5)) == 0,
            )
        )
        boundary = draw(st.integers(0, 40))
    head_forward, head_backward = (level + draw(st.integers(0, 200)) for _ in range(2))
    tail = draw(st.sampled_from([0, 100, 500]))
    return chain(*runs, head_forward=head_forward, head_backward=head_backward, tail=tail)


@st.composite
def odd_chains(draw: st.DrawFn, longest: int = 8, most_casts: int = 0) -> Profile:
    """Unrealistic profiles of small arbitrary numbers, so that many are equal."""
    few = st.integers(0, 6)
    casts = draw(st.integers(0, most_casts))
    costs = st.tuples(*[few] * 9, st.just(casts), few, st.booleans())
    runs = draw(st.lists(costs.map(lambda numbers: RunCost(*numbers)), max_size=longest))
    return chain(*runs, head_forward=draw(few), head_backward=draw(few), tail=draw(few))


@st.composite
def chains_of_kinds(draw: st.DrawFn, kinds: int, longest: int = 40) -> Profile:
    """Copies of a few blocks. Copies of the same block differ only in their boundaries."""
    width = draw(st.integers(0, 50))
    blocks = [draw(block_of(width)) for _ in range(kinds)]
    order = draw(st.lists(st.sampled_from(range(kinds)), min_size=1, max_size=longest))
    runs = [blocks[kind]._replace(boundary=width if k else 0) for k, kind in enumerate(order)]
    return chain(*runs, head_forward=len(order) * width, head_backward=draw(st.integers(0, 3000)))


def block_of(width: int) -> st.SearchStrategy[RunCost]:
    return st.builds(
        run,
        forward_peak=st.integers(width, width + 100),
        backward_entry=st.just(width),
        saved=st.integers(1, 300),
        recompute_peak=st.integers(300, 400),
        backward_peak=st.integers(0, 150),
        output_saved=st.sampled_from([0, width // 2]),
        droppable_input=st.sampled_from([0, width // 4]),
        nanoseconds=st.integers(1, 1000),
    )


chains = st.one_of(realistic_chains(), odd_chains())


# Runs with an option that no block has


@dataclass(frozen=True)
class FreeRun:
    """A run whose options are given, rather than derived from measurements."""

    boundary: int
    menu: tuple[OptionCost, ...]

    def under(self, option: Option) -> OptionCost:
        return next(cost for cost in self.menu if cost.option is option)


def _another_option(name: str) -> Option:
    """An option that the library does not have: planners must not depend on which options exist."""
    option = object.__new__(Option)
    option._name_, option._value_ = name, name.lower()
    return option


COMPRESS = _another_option("COMPRESS")
"""An option that takes some time and holds some bytes."""


@st.composite
def chains_of_three_options(draw: st.DrawFn, longest: int = 6, largest: int = 200) -> Profile:
    """Runs that can be kept, compressed or recomputed."""
    few = st.integers(0, largest)
    runs = []
    for _ in range(draw(st.integers(1, longest))):
        held = sorted((draw(few), draw(few)), reverse=True)
        times = sorted((draw(few), draw(few)))
        costs = [(Option.KEEP, held[0], 0), (COMPRESS, held[1], times[0])]
        costs += [(Option.RECOMPUTE, 0, times[1])]
        menu = [OptionCost(o, draw(few), draw(few), held, held, time) for o, held, time in costs]
        runs.append(FreeRun(draw(st.integers(0, 40)), tuple(menu)))
    return chain(*runs, head_forward=draw(few), head_backward=draw(few), tail=draw(few))


@st.composite
def chains_with_link(draw: st.DrawFn, longest: int = 7, most_casts: int = 0) -> Profile:
    """Runs whose bytes may move to host memory, and a link of any speed."""
    profile = draw(realistic_chains(longest, most_casts))
    runs = [
        run._replace(
            input_movable=draw(st.booleans()), backward_nanoseconds=draw(st.integers(0, 2000))
        )
        for run in profile.runs
    ]
    to_host, from_host = (draw(st.sampled_from([0.01, 0.1, 0.3, 1.0, 10.0])) for _ in range(2))
    return replace(profile, runs=tuple(runs), link=Link(to_host, from_host, 1 << 40))
