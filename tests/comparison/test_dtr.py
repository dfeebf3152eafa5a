"""The DTR simulator: by hand, by property, and on a recorded step."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mimose.comparison import (
    HEURISTICS,
    Action,
    Call,
    Constant,
    Event,
    Failure,
    Output,
    Release,
    Trace,
    record_trace,
    simulate,
)
from mimose.errors import ArgumentError
from models import Encoder

every_heuristic = pytest.mark.parametrize("name", HEURISTICS)


def call(nanoseconds: int, inputs: tuple[int, ...], tensor: int, size_bytes: int) -> Call:
    return Call(f"make {tensor}", nanoseconds, inputs, (Output(tensor, size_bytes),))


def first_evicted(events: tuple[Event, ...], budget_bytes: int, name: str) -> int:
    """The tensor that makes room first; evictions of released tensors do not count."""
    trace, seen = Trace(events), list[Action]()
    simulate(trace, budget_bytes, HEURISTICS[name], watch=seen.append)
    outputs = {
        (i, j): out.tensor for i, c in enumerate(trace.calls) for j, out in enumerate(c.outputs)
    }
    released = {event.tensor for event in events if isinstance(event, Release)}
    evicted = (outputs[place] for action in seen for place in action.evicted)
    return next(tensor for tensor in evicted if tensor not in released)


A, B, C, D, E = 1, 2, 3, 4, 5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h_LRU", A),  # made at 30, before B (70) and C (76)
        ("h_size", B),  # 4 bytes
        ("h_MSPS", C),  # 6/3, against 30/2 and 40/4
        ("h_DTR", C),  # 6/(3·24) = 0.083, against 30/(2·70) = 0.214 and 40/(4·30) = 0.333
        ("h_DTR^eq", C),
    ],
)
def test_each_heuristic_evicts_by_its_own_measure(name: str, expected: int) -> None:
    events = (
        Constant(0, 1),
        call(30, (0,), A, 2),
        call(40, (0,), B, 4),
        call(6, (0,), C, 3),
        call(24, (0,), D, 1),
        call(1, (D,), E, 1),  # now = 100; D is locked
    )
    assert first_evicted(events, 11, name) == expected


@pytest.mark.parametrize(("name", "expected"), [("h_MSPS", A), ("h_DTR", B), ("h_DTR^eq", B)])
def test_dtr_counts_evicted_children_and_msps_does_not(name: str, expected: int) -> None:
    events = (
        Constant(0, 1),
        call(10, (0,), A, 4),
        call(1000, (A,), C, 1),  # evicted by its release: A alone 10, with C 1010
        Release(C),
        call(20, (0,), B, 4),
        call(900, (0,), D, 1),
        call(1, (D,), E, 1),
    )
    assert first_evicted(events, 10, name) == expected


@pytest.mark.parametrize(("name", "expected"), [("h_MSPS", B), ("h_DTR", B), ("h_DTR^eq", B)])
def test_evicted_ancestors_count_with_the_storage(name: str, expected: int) -> None:
    events = (
        Constant(0, 1),
        call(1000, (0,), C, 1),
        call(10, (C,), A, 4),  # to recompute A is to recompute C: 1010
        Release(C),
        call(20, (0,), B, 4),
        call(900, (0,), D, 1),
        call(1, (D,), E, 1),
    )
    assert first_evicted(events, 10, name) == expected


@pytest.mark.parametrize(("name", "expected"), [("h_DTR", A), ("h_DTR^eq", B)])
def test_a_class_joins_what_is_no_ancestor_and_the_exact_neighbourhood_does_not(
    name: str, expected: int
) -> None:
    other_parent, child = 6, 7
    events = (
        Constant(0, 1),
        call(5000, (0,), other_parent, 1),
        call(10, (0,), A, 4),
        call(10, (A, other_parent), child, 1),
        Release(child),  # A: exact 10 + 10; in a class with the other parent 5020
        Release(other_parent),
        call(100, (0,), B, 4),
        call(900, (0,), D, 1),
        call(1, (D,), E, 1),
    )
    assert first_evicted(events, 10, name) == expected


def chain(length: int) -> Trace:
    """Forward and backward of a chain: every layer takes 1 ns, every tensor 1 byte."""
    events: list[Event] = [Constant(0, 1)]
    events += [call(1, (i,), i + 1, 1) for i in range(length)]
    gradient = length
    for i in reversed(range(length)):
        made = 2 * length - i
        events += [call(1, (gradient, i), made, 1), Release(gradient)]
        events += [Release(i)] if i else []
        gradient = made
    return Trace(tuple(events))


@every_heuristic
def test_a_chain_that_is_one_byte_short_recomputes_one_call(name: str) -> None:
    trace = chain(8)
    outcome = simulate(trace, trace.peak_bytes - 1, HEURISTICS[name])
    assert outcome.overhead == 17 / 16
    assert (outcome.evictions, outcome.recomputed_calls) == (1, 1)


@every_heuristic
def test_with_least_memory_a_chain_recomputes_everything_for_every_layer(name: str) -> None:
    outcome = simulate(chain(8), 4, HEURISTICS[name])
    assert outcome.recomputed_calls == 6 + 5 + 4 + 3 + 2 + 1
    assert simulate(chain(8), 3, HEURISTICS[name]).failure is Failure.out_of_memory


@every_heuristic
def test_more_memory_never_costs_more_on_a_chain(name: str) -> None:
    trace = chain(24)
    budgets = range(4, trace.peak_bytes + 1)
    overheads = [
        simulate(trace, budget, HEURISTICS[name], overhead_limit=100).overhead for budget in budgets
    ]
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[-1] == 1.0


def test_a_view_is_lost_with_its_storage_and_made_again() -> None:
    view, large = 2, 3
    trace = Trace(
        (
            Constant(0, 1),
            call(10, (0,), 1, 4),
            Call("view", 2, (1,), (Output(view, 0, alias_of=1),)),
            call(100, (0,), large, 4),
            Release(large),
            call(3, (view,), 4, 1),
            Release(1),
            Release(view),
        )
    )
    outcome = simulate(trace, 6)
    assert (outcome.recomputed_calls, outcome.nanoseconds) == (2, 10 + 2 + 100 + (10 + 2) + 3)


def test_a_repeated_call_makes_all_outputs_and_drops_the_copies() -> None:
    large = 9
    trace = Trace(
        (
            Constant(0, 1),
            Call("split", 10, (0,), (Output(1, 4), Output(2, 4))),
            call(1, (1,), 3, 1),
            Release(1),  # evicted at once
            call(5, (0,), 4, 0),
            call(1, (2,), 5, 0),  # 2 was used after 3
            call(1, (0,), large, 8),  # 14 bytes: evicts 3
            Release(large),
            call(1, (3,), 6, 1),  # repeats split beside 2: 5 + 8 bytes
            call(1, (0,), 7, 2),  # 11 + 2 bytes, now that the second copy of 2 is gone
        )
    )
    outcome = simulate(trace, 13, HEURISTICS["h_LRU"])
    assert (outcome.evictions, outcome.recomputed_calls, outcome.peak_bytes) == (1, 2, 13)


def test_a_chain_longer_than_pythons_stack_is_recomputed() -> None:
    length, large = 3000, 5000
    events: list[Event] = [Constant(0, 1)]
    for i in range(length):
        events += [call(1, (i,), i + 1, 1), *([Release(i)] if i else [])]
    events += [call(1, (0,), large, 3), Release(large), call(1, (length,), large + 1, 1)]
    outcome = simulate(Trace(tuple(events)), 4)
    assert (outcome.failure, outcome.recomputed_calls) == (None, length)


def test_constants_that_do_not_fit_are_a_failure_and_no_exception() -> None:
    outcome = simulate(chain(4), 0.5)
    assert (outcome.failure, outcome.peak_bytes) == (Failure.out_of_memory, 0)


def test_a_run_that_recomputes_too_much_is_given_up() -> None:
    assert simulate(chain(8), 4, overhead_limit=1.5).failure is Failure.thrashing
    assert simulate(chain(8), 4, overhead_limit=3.0).failure is None


@pytest.mark.parametrize("budget", [0, -1, math.nan])
def test_a_budget_that_is_no_budget_is_refused(budget: float) -> None:
    with pytest.raises(ArgumentError, match="must be positive"):
        simulate(chain(2), budget)


class Checker:
    """Follows the actions of a run on its own, and asserts that each of them is possible."""

    def __init__(self, trace: Trace, budget_bytes: float) -> None:
        self.calls, self.budget_bytes = trace.calls, budget_bytes
        self.in_use_bytes = self.peak_bytes = trace.constant_bytes
        self.nanoseconds = self.started = 0
        self.defined = {event.tensor for event in trace.events if isinstance(event, Constant)}
        self.storage_of = {tensor: tensor for tensor in self.defined}
        self.bytes_of: dict[int, int] = {}
        for output in (output for one in self.calls for output in one.outputs):
            alias = output.alias_of
            self.storage_of[output.tensor] = (
                output.tensor if alias is None else self.storage_of[alias]
            )
            self.bytes_of[output.tensor] = output.size_bytes

    def __call__(self, action: Action) -> None:
        if action.call is None:
            self._evict({self.calls[i].outputs[j].tensor for i, j in action.evicted})
        else:
            self._run(action.call)
        assert self.in_use_bytes >= 0

    def _run(self, index: int) -> None:
        assert index <= self.started  # the program's own calls come in their order
        self.started = max(self.started, index + 1)
        one = self.calls[index]
        assert self.defined >= set(one.inputs)
        self.nanoseconds += one.nanoseconds
        self.in_use_bytes += sum(output.size_bytes for output in one.outputs)
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
        assert self.in_use_bytes <= self.budget_bytes
        for output in one.outputs:
            if output.tensor in self.defined:
                self.in_use_bytes -= output.size_bytes
            self.defined.add(output.tensor)

    def _evict(self, tensors: set[int]) -> None:
        (storage,) = {self.storage_of[tensor] for tensor in tensors}
        assert storage in self.defined  # it was resident
        self.defined -= {one for one in self.defined if self.storage_of[one] == storage}
        self.in_use_bytes -= self.bytes_of[storage]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Steps with views, several outputs, changes in place and releases, in any order."""
    events: list[Event] = [Constant(0, draw(st.integers(0, 3))), Constant(1, 1)]
    live, tensors = [0, 1], 2
    for _ in range(draw(st.integers(1, 25))):
        inputs = tuple(draw(st.lists(st.sampled_from(live), min_size=1, max_size=3)))
        outputs = []
        for kind in draw(st.lists(st.sampled_from(["new", "view", "change"]), max_size=3)):
            size = 0 if kind == "view" else draw(st.integers(0, 5))
            alias_of = draw(st.sampled_from(inputs)) if kind == "view" else None
            replaces = draw(st.sampled_from(inputs)) if kind == "change" else None
            outputs.append(Output(tensors, size, alias_of, replaces))
            tensors += 1
        events.append(Call("call", draw(st.integers(0, 9)), inputs, tuple(outputs)))
        live += [output.tensor for output in outputs]
        for tensor in draw(st.lists(st.sampled_from(live), unique=True, max_size=3)):
            if tensor > 1:
                events.append(Release(tensor))
                live.remove(tensor)
    return Trace(tuple(events))


@every_heuristic
@settings(max_examples=25, deadline=None)
@given(trace=traces(), share=st.floats(0.2, 1.2))
def test_a_run_uses_only_what_is_resident_and_stays_in_its_budget(
    name: str, trace: Trace, share: float
) -> None:
    budget = trace.peak_bytes * share + 1
    checker = Checker(trace, budget)
    outcome = simulate(trace, budget, HEURISTICS[name], watch=checker)
    assert outcome.peak_bytes <= budget
    if outcome.failure is None:
        assert outcome.nanoseconds == checker.nanoseconds >= trace.nanoseconds
        assert outcome.peak_bytes == checker.peak_bytes
        assert checker.started == len(trace.calls)
        assert checker.defined >= set(trace.survivors)


@every_heuristic
@given(trace=traces())
@settings(max_examples=10, deadline=None)
def test_without_a_budget_nothing_is_recomputed_and_the_peak_is_that_of_the_trace(
    name: str, trace: Trace
) -> None:
    for budget in (math.inf, trace.peak_bytes or 1):
        outcome = simulate(trace, budget, HEURISTICS[name])
        assert (outcome.overhead, outcome.recomputed_calls, outcome.evictions) == (1.0, 0, 0)
        assert outcome.peak_bytes == trace.peak_bytes


@cache
def recorded_step() -> Trace:
    torch.manual_seed(0)
    model, tokens = Encoder(), torch.randint(0, 50, (4, 12))

    def step() -> None:
        model.zero_grad()
        model(tokens).sum().backward()

    return record_trace(step)


@every_heuristic
def test_a_recorded_step_runs_under_a_budget_and_ends_with_its_gradients(name: str) -> None:
    trace = recorded_step()
    assert simulate(trace, heuristic=HEURISTICS[name]).overhead == 1.0
    assert simulate(trace).peak_bytes == trace.peak_bytes
    budget = int(trace.constant_bytes + 0.9 * (trace.peak_bytes - trace.constant_bytes))
    checker = Checker(trace, budget)
    outcome = simulate(trace, budget, HEURISTICS[name], watch=checker)
    assert (outcome.failure, outcome.evictions > 0) == (None, True)
    assert outcome.overhead > 1.0
    assert checker.defined >= set(trace.survivors)
