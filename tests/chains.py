"""Chains of runs: made by hand, or drawn at random for properties."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from mimose.costs.input_size import InputSize
from mimose.costs.timeline import Profile, RunCost

steady = settings(derandomize=True, deadline=None, max_examples=60)
"""The same examples every time."""

SIZE = InputSize((("0", 2),), (8, 128))


def run(**costs: Any) -> RunCost:
    """A run that costs nothing but this."""
    nothing = dict.fromkeys(RunCost._fields[:-1], 0)
    return RunCost(**{**nothing, **costs})


def chain(*runs: RunCost, head_forward: int = 0, head_backward: int = 0, tail: int = 0) -> Profile:
    return Profile(SIZE, runs, head_forward, head_backward, tail)


@st.composite
def realistic_chains(draw: st.DrawFn, longest: int = 9) -> Profile:
    """As a model makes them: levels rise by each output, and every run has costs of its own."""
    level, runs = draw(st.integers(0, 50)), []
    for _ in range(draw(st.integers(1, longest))):
        saved = draw(st.integers(0, 300))
        spike = saved + draw(st.integers(0, 100))
        runs.append(
            RunCost(
                start=level,
                forward=level + draw(st.integers(0, 100)),
                entry=level + draw(st.integers(0, 20)),
                saved=saved,
                spike=spike,
                back=draw(st.integers(0, 150)),
                out_saved=draw(st.integers(0, min(saved, 40))),
                in_idle=draw(st.integers(0, 10)),
                gap=level + draw(st.sampled_from([0, 0, 50, 400])),
                nanoseconds=draw(st.integers(0, 1000)),
                fixed=draw(st.integers(0, 5)) == 0,
            )
        )
        level += draw(st.integers(0, 40))
    head_forward, head_backward = (level + draw(st.integers(0, 200)) for _ in range(2))
    tail = draw(st.sampled_from([0, 100, 500]))
    return chain(*runs, head_forward=head_forward, head_backward=head_backward, tail=tail)


@st.composite
def odd_chains(draw: st.DrawFn, longest: int = 8) -> Profile:
    """As nothing makes them: small numbers without rhyme or reason, so that many are equal."""
    few = st.integers(0, 6)
    costs = st.tuples(few, few, few, few, few, few, few, few, few, few, st.booleans())
    runs = draw(st.lists(costs.map(lambda numbers: RunCost(*numbers)), max_size=longest))
    return chain(*runs, head_forward=draw(few), head_backward=draw(few), tail=draw(few))


@st.composite
def chains_of_kinds(draw: st.DrawFn, kinds: int, longest: int = 40) -> Profile:
    """Copies of a few blocks: those of a kind differ in the level that they start from alone."""
    width = draw(st.integers(0, 50))
    blocks = [draw(block_of(width)) for _ in range(kinds)]
    order = draw(st.lists(st.sampled_from(range(kinds)), min_size=1, max_size=longest))
    runs = [
        blocks[kind]._replace(
            start=k * width, forward=blocks[kind].forward + k * width, entry=(k + 1) * width
        )
        for k, kind in enumerate(order)
    ]
    return chain(*runs, head_forward=len(order) * width, head_backward=draw(st.integers(0, 3000)))


def block_of(width: int) -> st.SearchStrategy[RunCost]:
    return st.builds(
        run,
        forward=st.integers(width, width + 100),
        saved=st.integers(1, 300),
        spike=st.integers(300, 400),
        back=st.integers(0, 150),
        out_saved=st.sampled_from([0, width // 2]),
        in_idle=st.sampled_from([0, width // 4]),
        nanoseconds=st.integers(1, 1000),
    )


chains = st.one_of(realistic_chains(), odd_chains())
