"""Chains for planners of the field, and the least time over every schedule there is."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from hypothesis import strategies as st

from chains import chain
from mimose.comparison.stages import Chain, Stage
from mimose.costs.run_cost import RunCost
from mimose.costs.timeline import Profile


@st.composite
def field_chains(draw: st.DrawFn, longest: int = 4, one_gradient: bool = False) -> Profile:
    """Chains that the papers' models see as they are: blocks share nothing.

    With `one_gradient` all gradients are equal, and every block can be recomputed.
    """
    gradients = st.just(draw(st.integers(0, 25))) if one_gradient else st.integers(0, 25)
    runs = []
    for _ in range(draw(st.integers(1, longest))):
        saved, forward = draw(st.integers(1, 60)), draw(st.integers(25, 60))
        runs.append(
            RunCost(
                boundary=draw(st.integers(1, 25)),
                forward_peak=forward,
                backward_entry=draw(gradients),
                saved=saved,
                recompute_peak=max(forward, saved + draw(st.integers(25, 40))),
                backward_peak=draw(st.integers(0, 30)),
                output_saved=0,
                droppable_input=0,
                nanoseconds=draw(st.integers(1, 20)),
                fixed=not one_gradient and draw(st.integers(0, 7)) == 0,
            )
        )
    level = sum(run.boundary for run in runs)
    head = level + draw(st.integers(0, 60))
    return chain(*runs, head_forward=head, head_backward=head)


class State(NamedTuple):
    """What is there at some moment of a step."""

    forwards: int
    backward: bool
    pending: int
    inputs: frozenset[int]
    saved: frozenset[int]


class Search:
    """The least extra time of any schedule of the papers' model, by trying everything.

    Written apart from the library's evaluator: bytes are added up anew for each state.
    """

    def __init__(self, model: Chain, available: int) -> None:
        self.stages, self.head = model.stages, model.head_bytes
        self.count, self.available = len(model.stages), available

    def least(self) -> int | None:
        begin = State(0, False, self.count - 1, frozenset([0]), frozenset())
        queue, known = [(0, 0, begin)], {begin: 0}
        number = 0
        while queue:
            time, _, state = heapq.heappop(queue)
            if state.pending < 0:
                return time
            if time > known[state]:
                continue
            for extra, after in self.moves(state):
                if time + extra < known.get(after, 1 << 60):
                    known[after] = time + extra
                    number += 1
                    heapq.heappush(queue, (time + extra, number, after))
        return None

    def level(self, state: State) -> int:
        inputs = sum(self.stages[k].input_bytes for k in state.inputs | state.saved)
        saved = sum(self.stages[k].saved_bytes for k in state.saved)
        return inputs + saved + state.backward * self.stages[state.pending].gradient_bytes

    def moves(self, state: State) -> Iterator[tuple[int, State]]:
        room = self.available - self.level(state)
        if state.forwards < self.count and state.forwards in state.inputs:
            for keep in (True, False):
                yield from self.run(state, state.forwards, keep, room, first=True)
        if state.forwards == self.count and not state.backward and self.head <= room:
            yield 0, state._replace(backward=True)
        in_head = state.forwards == self.count and not state.backward  # nothing else runs then
        for k in () if in_head else state.inputs:
            if k < state.forwards and not self.stages[k].fixed:
                for keep in {k not in state.saved, False}:
                    yield from self.run(state, k, keep, room, first=False)
        pending = self.stages[state.pending]
        if state.backward and state.pending in state.saved and pending.backward_peak_bytes <= room:
            gone = frozenset([state.pending])
            yield (
                0,
                State(self.count, True, state.pending - 1, state.inputs - gone, state.saved - gone),
            )
        yield from self.drops(state)

    def run(
        self, state: State, k: int, keep: bool, room: int, first: bool
    ) -> Iterator[tuple[int, State]]:
        stage: Stage = self.stages[k]
        peak = stage.saving_peak_bytes if keep else stage.forward_peak_bytes
        if peak > room or (stage.fixed and not keep):
            return
        after = state._replace(forwards=state.forwards + first)
        last = state.pending if after.forwards == self.count else after.forwards
        inputs = state.inputs | {k + 1} if k + 1 <= last else state.inputs
        saved = state.saved | {k} if keep else state.saved
        yield 0 if first else stage.nanoseconds, after._replace(inputs=inputs, saved=saved)

    def drops(self, state: State) -> Iterator[tuple[int, State]]:
        for k in state.inputs:
            if k in state.saved or not (k and self.stages[k - 1].fixed):
                yield 0, state._replace(inputs=state.inputs - {k})
        for k in state.saved:
            if not self.stages[k].fixed:
                yield 0, state._replace(saved=state.saved - {k})
