"""Every term of the timeline, computed by hand on chains in which no other term counts."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, ge
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chains
from chains import chain, run, steady
from mimose.costs.options import Option
from mimose.costs.run_cost import RunCost
from mimose.costs.timeline import (
    Moments,
    Profile,
    StepConditions,
    costs_of,
    extra_nanoseconds,
    levels,
    peak,
    transfers_of,
)

KEEP, AGAIN = Option.KEEP, Option.RECOMPUTE
HOST = Option.SAVE_ON_HOST


def test_a_step_without_runs_peaks_in_its_head() -> None:
    assert peak(chain(head_forward=7, head_backward=5), ()) == 7
    assert peak(chain(head_forward=5, head_backward=7), ()) == 7


def test_a_step_that_needs_nothing_peaks_at_its_start() -> None:
    assert peak(chain(run(saved=10, backward_entry=-20, output_saved=10)), [KEEP]) == 0


def test_recomputed_run_peaks_in_its_forward() -> None:
    profile = chain(
        run(
            boundary=10,
            forward_peak=80,
            backward_entry=10,
            saved=30,
            recompute_peak=40,
            backward_peak=5,
        )
    )
    assert peak(profile, [AGAIN]) == 10 + 80


@pytest.mark.parametrize("choice", [KEEP, AGAIN])
def test_the_peak_may_lie_between_two_runs(choice: Option) -> None:
    profile = chain(run(saved=30), run(boundary=5, forward_peak=5, between_blocks_peak=75))
    assert peak(profile, [KEEP, choice]) == 30 + 5 + 75
    assert peak(profile, [AGAIN, choice]) == 5 + 75


def test_recomputed_run_peaks_in_its_recompute() -> None:
    profile = chain(
        run(
            boundary=10,
            forward_peak=40,
            backward_entry=10,
            saved=30,
            recompute_peak=70,
            backward_peak=5,
        )
    )
    assert peak(profile, [AGAIN]) == 20 + 70


def test_recomputed_run_peaks_in_its_backward() -> None:
    profile = chain(
        run(
            boundary=10,
            forward_peak=40,
            backward_entry=10,
            saved=30,
            recompute_peak=40,
            backward_peak=45,
        )
    )
    assert peak(profile, [AGAIN]) == 20 + 30 + 45


def test_kept_run_peaks_in_its_forward_from_its_own_start() -> None:
    profile = chain(
        run(
            boundary=10,
            forward_peak=490,
            backward_entry=10,
            saved=30,
            recompute_peak=70,
            backward_peak=5,
        )
    )
    assert peak(profile, [KEEP]) == 10 + 70


def test_kept_run_peaks_in_its_backward() -> None:
    profile = chain(
        run(boundary=10, backward_entry=10, saved=30, recompute_peak=40, backward_peak=45)
    )
    assert peak(profile, [KEEP]) == 20 + 30 + 45


def test_kept_run_frees_an_input_that_it_does_not_save() -> None:
    profile = chain(run(backward_entry=20, saved=30, backward_peak=45, droppable_input=8))
    assert peak(profile, [KEEP]) == 20 - 8 + 30 + 45
    assert peak(profile, [AGAIN]) == 20 + 30 + 45


def test_base_of_a_run_is_the_sum_of_all_boundaries_up_to_it() -> None:
    profile = chain(run(boundary=10), run(boundary=20), run(boundary=-5, forward_peak=50))
    assert peak(profile, [AGAIN] * 3) == 10 + 20 - 5 + 50


LATER = {
    "forward": run(forward_peak=50),
    "recompute": run(backward_entry=20, recompute_peak=30),
    "backward": run(backward_entry=20, saved=20, backward_peak=10),
}


@pytest.mark.parametrize("moment", LATER)
def test_kept_bytes_count_at_every_moment_of_a_later_run(moment: str) -> None:
    profile = chain(run(saved=100), LATER[moment])
    assert peak(profile, [KEEP, AGAIN]) == 100 + 50
    assert peak(profile, [AGAIN, AGAIN]) == 100


def test_kept_bytes_count_in_a_later_run_that_is_kept() -> None:
    in_forward = chain(run(saved=100), run(boundary=20, recompute_peak=30))
    in_backward = chain(run(saved=100), run(backward_entry=20, saved=20, backward_peak=10))
    assert peak(in_forward, [KEEP, KEEP]) == 100 + 50
    assert peak(in_backward, [KEEP, KEEP]) == 100 + 50


def test_bytes_kept_later_do_not_count_in_an_earlier_run() -> None:
    profile = chain(run(forward_peak=300), run(saved=100))
    assert peak(profile, [AGAIN, KEEP]) == 300


@pytest.mark.parametrize("head", ["head_forward", "head_backward"])
def test_kept_bytes_count_in_the_head(head: str) -> None:
    profile = chain(run(saved=100), run(saved=40), **{head: 500})
    assert peak(profile, [AGAIN, AGAIN]) == 500
    assert peak(profile, [AGAIN, KEEP]) == 540
    assert peak(profile, [KEEP, KEEP]) == 640


@pytest.mark.parametrize("choice", [KEEP, AGAIN])
def test_kept_bytes_do_not_count_in_the_tail(choice: Option) -> None:
    assert peak(chain(run(saved=100), head_forward=20, tail=300), [choice]) == 300


def test_output_that_a_run_saves_itself_is_not_counted_twice() -> None:
    profile = chain(run(saved=100, output_saved=30), head_forward=500)
    assert peak(profile, [KEEP]) == 500 + 100 - 30


def test_droppable_input_of_a_kept_run_is_not_held() -> None:
    profile = chain(run(saved=100, droppable_input=20), head_forward=500)
    assert peak(profile, [KEEP]) == 500 + 100 - 20


def test_held_bytes_are_never_negative() -> None:
    profile = chain(run(saved=10, output_saved=10, droppable_input=20), head_forward=500)
    assert peak(profile, [KEEP]) == 500


def test_casts_that_a_kept_run_shares_count_once_in_the_forwards() -> None:
    cast = run(saved=100, shared_casts=30)
    assert peak(chain(cast, head_forward=500), [KEEP]) == 500 + 100 - 30
    assert peak(chain(cast, run(forward_peak=500)), [KEEP, AGAIN]) == 500 + 100 - 30
    assert peak(chain(cast, cast, head_forward=500), [KEEP, KEEP]) == 500 + 2 * (100 - 30)


def test_casts_count_for_each_kept_run_in_the_backwards() -> None:
    cast = run(saved=100, shared_casts=30)
    assert peak(chain(cast, head_backward=500), [KEEP]) == 500 + 100
    assert peak(chain(cast, run(backward_entry=500)), [KEEP, AGAIN]) == 500 + 100


def test_a_run_that_saves_less_than_its_casts_holds_nothing_in_the_forwards() -> None:
    profile = chain(run(saved=20, shared_casts=30), head_forward=500)
    assert peak(profile, [KEEP]) == 500


@pytest.mark.parametrize("choice", [KEEP, AGAIN])
def test_fixed_run_costs_its_forward_alone_under_any_option(choice: Option) -> None:
    profile = chain(
        run(
            boundary=10,
            forward_peak=50,
            backward_entry=40,
            saved=400,
            recompute_peak=400,
            backward_peak=90,
            fixed=True,
        ),
        run(forward_peak=60),
        head_forward=65,
    )
    assert peak(profile, [choice, AGAIN]) == 10 + 60


# Step conditions


def given_conditions(profile: Profile, allocated: tuple[int, ...], **others: Any) -> Profile:
    """The profile under these conditions, without other gradients than those given."""
    by_end = others.pop("by_end", max(allocated, default=0))
    return profile.in_step(StepConditions(allocated, by_end, **others))


def test_allocated_gradients_count_in_the_backward_of_their_run_only() -> None:
    profile = chain(
        run(backward_entry=10, recompute_peak=20),
        run(backward_entry=10, recompute_peak=20, forward_peak=60),
        head_backward=50,
    )
    assert peak(given_conditions(profile, (7, 0)), [AGAIN, AGAIN]) == 60
    assert peak(given_conditions(profile, (70, 0)), [AGAIN, AGAIN]) == 10 + 70 + 20
    assert peak(given_conditions(profile, (0, 70)), [AGAIN, AGAIN]) == 10 + 70 + 20
    assert peak(given_conditions(profile, (70, 70)), [KEEP, KEEP]) == 10 + 70


def test_previous_outputs_do_not_count_in_the_backward() -> None:
    backward = chain(run(backward_entry=100, recompute_peak=20))
    head = chain(head_backward=100)
    assert peak(given_conditions(backward, (0,), previous_output_bytes=30), [AGAIN]) == 120 - 30
    assert peak(given_conditions(head, (), previous_output_bytes=30), ()) == 100 - 30


def test_previous_outputs_count_in_the_forward() -> None:
    profile = chain(run(boundary=50, forward_peak=50, recompute_peak=40), head_forward=80)
    profile = given_conditions(profile, (0,), previous_output_bytes=30)
    assert peak(profile, [AGAIN]) == 100
    assert peak(profile, [KEEP]) == 90


def test_allocated_gradients_but_not_previous_outputs_count_in_the_tail() -> None:
    profile = chain(run(), tail=100)
    assert peak(given_conditions(profile, (40,)), [AGAIN]) == 100 + 40
    assert peak(given_conditions(profile, (40,), previous_output_bytes=30), [AGAIN]) == 140 - 30


def test_gradients_of_embeddings_are_part_of_the_tail() -> None:
    profile = chain(run(), tail=100)
    assert peak(given_conditions(profile, (40,), by_end=70), [AGAIN]) == 100 + 40


def test_allocated_gradients_and_previous_outputs_count_together() -> None:
    profile = chain(run(backward_entry=100, saved=10, recompute_peak=20, backward_peak=30))
    profile = given_conditions(profile, (5,), previous_output_bytes=30)
    assert peak(profile, [AGAIN]) == 100 + 5 - 30 + 10 + 30


def test_kept_bytes_stay_if_the_graph_is_retained() -> None:
    profile = chain(
        run(backward_entry=10, saved=50, recompute_peak=60, backward_peak=5),
        run(saved=70),
        head_backward=20,
    )
    assert peak(profile, [AGAIN, KEEP]) == 70 + 20
    assert peak(given_conditions(profile, (0, 0), retained=True), [AGAIN, KEEP]) == 70 + 10 + 60
    more = given_conditions(profile, (30, 0), retained=True)
    assert peak(more, [AGAIN, KEEP]) == 70 + 10 + 60 + 30


def test_kept_bytes_count_in_the_tail_if_the_graph_is_retained() -> None:
    profile = chain(run(saved=50), head_backward=20, tail=90)
    assert peak(given_conditions(profile, (0,), retained=True), [KEEP]) == 50 + 90
    assert peak(given_conditions(profile, (0,), by_end=5, retained=True), [KEEP]) == 50 + 90 + 5


def test_a_second_backward_starts_with_all_gradients() -> None:
    profile = chain(run(saved=50), head_backward=100)
    retained = given_conditions(profile, (30,), by_end=40, retained=True)
    assert peak(retained, [KEEP]) == 50 + 100 + 40


def test_steps_of_other_handles_peak_while_all_kept_bytes_are_in_use() -> None:
    profile = chain(run(saved=50), head_forward=10)
    assert peak(given_conditions(profile, (0,), beside_bytes=300), [KEEP]) == 50 + 300
    assert peak(given_conditions(profile, (0,), beside_bytes=5), [KEEP]) == 50 + 10


def test_a_step_without_conditions_is_the_profile_itself() -> None:
    profile = chain(run(saved=50), head_forward=10)
    assert profile.in_step(StepConditions()) == profile
    assert profile.in_step(StepConditions((0,))) == profile


def test_gradients_are_needed_for_every_run() -> None:
    with pytest.raises(ValueError):
        given_conditions(chain(run(), run()), (1,))


def test_a_plan_is_needed_for_every_run() -> None:
    with pytest.raises(ValueError):
        peak(chain(run(), run()), [AGAIN])


def test_time_is_that_of_the_recomputed_runs() -> None:
    profile = chain(run(nanoseconds=3), run(nanoseconds=5), run(nanoseconds=9, fixed=True))
    assert extra_nanoseconds(profile, [AGAIN, KEEP, KEEP]) == 3
    assert extra_nanoseconds(profile, [AGAIN, AGAIN, AGAIN]) == 8


def test_three_runs_by_hand() -> None:
    profile = chain(
        run(forward_peak=30, backward_entry=10, saved=100, recompute_peak=120, backward_peak=20),
        run(
            boundary=10,
            forward_peak=30,
            backward_entry=10,
            saved=80,
            recompute_peak=90,
            backward_peak=25,
            output_saved=10,
        ),
        run(
            boundary=10,
            forward_peak=30,
            backward_entry=10,
            saved=60,
            recompute_peak=75,
            backward_peak=15,
            droppable_input=5,
        ),
        head_forward=35,
        head_backward=45,
    )
    # Kept: 0 + 120 forward, 10 + 100 + 20 backward; again at K = 100: 100 + 20 + 80 + 25;
    # kept at K = 100: 100 + 20 + 75, 100 + 30 − 5 + 60 + 15; head at K = 155: 155 + 45.
    assert peak(profile, [KEEP, AGAIN, KEEP]) == max(120, 130, 225, 195, 200, 200)


@steady
@given(chains.realistic_chains())
def test_more_memory_at_a_moment_never_lowers_the_peak(profile: Profile) -> None:
    raised = given_conditions(profile, (10,) * len(profile.runs))
    for choice in (KEEP, AGAIN):
        plan = [choice] * len(profile.runs)
        assert peak(profile, plan) <= peak(raised, plan) <= peak(profile, plan) + 10


# Any plan, simulated moment by moment


def simulated(profile: Profile, choices: Sequence[Option]) -> list[int]:
    """The bytes at every moment of a step, simulated by tracking the bytes that each run holds."""
    costs, runs = costs_of(profile, choices), profile.runs
    transfers = {transfer.run: transfer for transfer in transfers_of(profile, costs).transfers}
    inputs: dict[int, int] = {}
    activations: dict[int, int] = {}

    def saved(each: RunCost, casts: int = 0) -> int:
        """Bytes that a transfer frees; the droppable input of a kept run stays freed."""
        return max(0, each.saved - each.output_saved - casts)

    def release(now: int) -> None:
        for j, transfer in transfers.items():
            if transfer.release_before == now and choices[j] is HOST:
                activations[j] -= saved(runs[j], runs[j].shared_casts)
            elif transfer.release_before == now:
                inputs[j] = 0

    def in_use() -> int:
        return sum(inputs.values()) + sum(activations.values())

    moments = [0]
    for k, (each, cost) in enumerate(zip(runs, costs, strict=True)):
        inputs[k] = each.boundary
        release(k)
        moments.append(in_use() + cost.forward_peak)
        activations[k] = cost.forward_held
    release(len(runs))
    inputs_in_head = sum(each.boundary for each in runs)  # the head's peaks include them
    moments.append(in_use() - inputs_in_head + profile.head_forward)
    for k in activations:
        away = k in transfers and choices[k] is HOST
        activations[k] = costs[k].backward_held - (saved(runs[k]) if away else 0)
    moments.append(in_use() - inputs_in_head + profile.head_backward)
    for k in reversed(range(len(runs))):
        for j, transfer in transfers.items():
            if transfer.prefetch_at == k:
                activations[j], inputs[j] = costs[j].backward_held, runs[j].boundary
        del activations[k]  # from here on part of its own backward's peak
        moments.append(in_use() + costs[k].backward_peak)
        del inputs[k]
    return [*moments, profile.tail]


any_casts = st.one_of(chains.realistic_chains(9, most_casts=150), chains.odd_chains(8, 6))


@settings(steady, max_examples=250)
@given(any_casts, st.data())
def test_the_peak_is_the_highest_moment_of_the_step(profile: Profile, data: st.DataObject) -> None:
    choices = [data.draw(st.sampled_from([KEEP, AGAIN])) for _ in profile.runs]
    assert peak(profile, choices) == max(simulated(profile, choices))


def any_choices(data: st.DataObject, profile: Profile) -> list[Option]:
    return [data.draw(st.sampled_from(Option)) for _ in profile.runs]


@settings(steady, max_examples=400)
@given(chains.chains_with_link(most_casts=50), st.data())
def test_moved_bytes_count_until_their_release_and_from_their_prefetch(
    profile: Profile, data: st.DataObject
) -> None:
    choices = any_choices(data, profile)
    assert peak(profile, choices) == max(simulated(profile, choices))


@steady
@given(st.one_of(any_casts, chains.chains_with_link()), st.data())
def test_rises_are_the_peaks_between_consecutive_levels(
    profile: Profile, data: st.DataObject
) -> None:
    choices = any_choices(data, profile)
    count, (_, *moments) = len(profile.runs), simulated(profile, choices)
    at = Moments(profile, costs_of(profile, choices))
    starts, at_head, entries = at.levels()
    forward, head, backward = at.rises(at.levels())
    in_forward, in_backward = list(map(add, starts, forward)), list(map(add, entries, backward))
    heads, after = moments[count : count + 2], moments[count + 2 :]
    assert all(map(ge, in_forward, moments[:count]))
    assert at_head + head == max(heads)
    assert in_backward[:0:-1] == after[: count - 1]
    assert in_backward[:1] == [max(after[count - 1 :])][:count]
    # Between two forwards memory may be higher than in either, and never than the step's peak.
    assert max([0, *in_forward, at_head + head, *in_backward]) <= peak(profile, choices)


def test_levels_are_the_bytes_in_use_before_each_run() -> None:
    profile = chain(
        run(boundary=10, saved=100, backward_entry=3),
        run(boundary=20, saved=70, shared_casts=30, backward_entry=4),
        run(boundary=5, saved=50, backward_entry=6),
    )
    forward, head, backward = levels(profile, [KEEP, KEEP, AGAIN])
    assert forward == [10, 30 + 100, 35 + 100 + 40]
    assert head == 35 + 100 + 40
    assert backward == [10 + 100 + 3, 30 + 170 + 4, 35 + 170 + 6]
