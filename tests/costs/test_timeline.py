"""The peak of a plan is arithmetic: every term by hand, in chains where nothing else counts."""

from __future__ import annotations

import pytest
from hypothesis import given

import chains
from chains import chain, run, steady
from mimose.costs.timeline import Profile, peak, recompute_nanoseconds

KEEP, AGAIN = False, True


def test_a_step_without_runs_peaks_in_its_head() -> None:
    assert peak(chain(head_forward=7, head_backward=5), ()) == 7
    assert peak(chain(head_forward=5, head_backward=7), ()) == 7


def test_a_step_that_needs_nothing_peaks_at_its_start() -> None:
    assert peak(chain(run(saved=10, entry=-20, out_saved=10)), [KEEP]) == 0


def test_recomputed_run_peaks_in_its_forward() -> None:
    profile = chain(run(start=10, forward=90, entry=20, saved=30, spike=40, back=5))
    assert peak(profile, [AGAIN]) == 90


@pytest.mark.parametrize("choice", [KEEP, AGAIN])
def test_the_peak_may_lie_between_two_runs(choice: bool) -> None:
    profile = chain(run(saved=30), run(start=5, forward=10, gap=80))
    assert peak(profile, [KEEP, choice]) == 30 + 80
    assert peak(profile, [AGAIN, choice]) == 80


def test_recomputed_run_peaks_in_its_recompute() -> None:
    profile = chain(run(start=10, forward=50, entry=20, saved=30, spike=70, back=5))
    assert peak(profile, [AGAIN]) == 20 + 70


def test_recomputed_run_peaks_in_its_backward() -> None:
    profile = chain(run(start=10, forward=50, entry=20, saved=30, spike=40, back=45))
    assert peak(profile, [AGAIN]) == 20 + 30 + 45


def test_kept_run_peaks_in_its_forward_from_its_own_start() -> None:
    profile = chain(run(start=10, forward=500, entry=20, saved=30, spike=70, back=5))
    assert peak(profile, [KEEP]) == 10 + 70


def test_kept_run_peaks_in_its_backward() -> None:
    profile = chain(run(start=10, entry=20, saved=30, spike=40, back=45))
    assert peak(profile, [KEEP]) == 20 + 30 + 45


def test_kept_run_lets_go_of_an_input_that_it_does_not_save() -> None:
    profile = chain(run(entry=20, saved=30, back=45, in_idle=8))
    assert peak(profile, [KEEP]) == 20 - 8 + 30 + 45
    assert peak(profile, [AGAIN]) == 20 + 30 + 45


LATER = {
    "forward": run(forward=50),
    "recompute": run(entry=20, spike=30),
    "backward": run(entry=20, saved=20, back=10),
}


@pytest.mark.parametrize("moment", LATER)
def test_what_is_kept_burdens_every_moment_of_a_later_run(moment: str) -> None:
    profile = chain(run(saved=100), LATER[moment])
    assert peak(profile, [KEEP, AGAIN]) == 100 + 50
    assert peak(profile, [AGAIN, AGAIN]) == 100


def test_what_is_kept_burdens_a_later_run_that_is_kept() -> None:
    in_forward = chain(run(saved=100), run(start=20, spike=30))
    in_backward = chain(run(saved=100), run(entry=20, saved=20, back=10))
    assert peak(in_forward, [KEEP, KEEP]) == 100 + 50
    assert peak(in_backward, [KEEP, KEEP]) == 100 + 50


def test_what_is_kept_later_does_not_burden_an_earlier_run() -> None:
    profile = chain(run(forward=300), run(saved=100))
    assert peak(profile, [AGAIN, KEEP]) == 300


@pytest.mark.parametrize("head", ["head_forward", "head_backward"])
def test_what_is_kept_burdens_the_head(head: str) -> None:
    profile = chain(run(saved=100), run(saved=40), **{head: 500})
    assert peak(profile, [AGAIN, AGAIN]) == 500
    assert peak(profile, [AGAIN, KEEP]) == 540
    assert peak(profile, [KEEP, KEEP]) == 640


@pytest.mark.parametrize("choice", [KEEP, AGAIN])
def test_nothing_that_is_kept_burdens_the_tail(choice: bool) -> None:
    assert peak(chain(run(saved=100), head_forward=20, tail=300), [choice]) == 300


def test_output_that_a_run_saves_itself_is_not_counted_twice() -> None:
    profile = chain(run(saved=100, out_saved=30), head_forward=500)
    assert peak(profile, [KEEP]) == 500 + 100 - 30


def test_input_that_a_kept_run_does_not_save_is_free_afterwards() -> None:
    profile = chain(run(saved=100, in_idle=20), head_forward=500)
    assert peak(profile, [KEEP]) == 500 + 100 - 20


def test_keeping_never_frees_more_than_it_holds() -> None:
    profile = chain(run(saved=10, out_saved=10, in_idle=20), head_forward=500)
    assert peak(profile, [KEEP]) == 500


@pytest.mark.parametrize("choice", [KEEP, AGAIN])
def test_fixed_run_costs_its_forward_and_no_more_whatever_the_plan_says(choice: bool) -> None:
    profile = chain(
        run(start=10, forward=60, entry=50, saved=400, spike=400, back=90, fixed=True),
        run(forward=70),
        head_forward=65,
    )
    assert peak(profile, [choice, AGAIN]) == 70


def test_born_gradients_burden_the_backward_of_their_run_alone() -> None:
    profile = chain(run(entry=10, spike=20), run(entry=10, spike=20, forward=60), head_backward=50)
    assert peak(profile.in_step((7, 0), 0), [AGAIN, AGAIN]) == 60
    assert peak(profile.in_step((70, 0), 0), [AGAIN, AGAIN]) == 10 + 70 + 20
    assert peak(profile.in_step((0, 70), 0), [AGAIN, AGAIN]) == 10 + 70 + 20
    assert peak(profile.in_step((70, 70), 0), [KEEP, KEEP]) == 10 + 70


def test_stale_outputs_are_gone_in_the_backward() -> None:
    backward = chain(run(entry=100, spike=20))
    head = chain(head_backward=100)
    assert peak(backward.in_step((0,), 30), [AGAIN]) == 100 + 20 - 30
    assert peak(head.in_step((), 30), ()) == 100 - 30


def test_stale_outputs_are_there_in_the_forward() -> None:
    profile = chain(run(start=50, forward=100, spike=40), head_forward=80)
    assert peak(profile.in_step((0,), 30), [AGAIN]) == 100
    assert peak(profile.in_step((0,), 30), [KEEP]) == 90


def test_missing_gradients_are_there_and_stale_outputs_gone_in_the_tail() -> None:
    profile = chain(run(), tail=100)
    assert peak(profile.in_step((0,), 0, 40), [AGAIN]) == 100 + 40
    assert peak(profile.in_step((0,), 30, 40), [AGAIN]) == 100 + 40 - 30


def test_born_and_stale_count_together() -> None:
    profile = chain(run(entry=100, saved=10, spike=20, back=30))
    assert peak(profile.in_step((5,), 30), [AGAIN]) == 100 + 5 - 30 + 10 + 30


def test_what_is_kept_stays_where_the_graph_outlives_its_backward() -> None:
    profile = chain(run(entry=10, saved=50, spike=60, back=5), run(saved=70), head_backward=20)
    assert peak(profile, [AGAIN, KEEP]) == 70 + 20
    assert peak(profile.in_step((0, 0), 0, 0, True), [AGAIN, KEEP]) == 70 + 10 + 60
    assert peak(profile.in_step((30, 0), 0, 30, True), [AGAIN, KEEP]) == 70 + 10 + 60 + 30


def test_what_is_kept_is_there_in_the_tail_where_the_graph_outlives_its_backward() -> None:
    profile = chain(run(saved=50), head_backward=20, tail=90)
    assert peak(profile.in_step((0,), 0, 0, True), [KEEP]) == 50 + 90
    assert peak(profile.in_step((0,), 0, 5, True), [KEEP]) == 50 + 90 + 5


def test_a_second_backward_finds_all_gradients() -> None:
    profile = chain(run(saved=50), head_backward=100)
    assert peak(profile.in_step((30,), 0, 40, True), [KEEP]) == 50 + 100 + 40


def test_gradients_are_needed_for_every_run() -> None:
    with pytest.raises(ValueError):
        chain(run(), run()).in_step((1,), 0)


def test_a_plan_is_needed_for_every_run() -> None:
    with pytest.raises(ValueError):
        peak(chain(run(), run()), [AGAIN])


def test_time_is_that_of_the_recomputed_runs() -> None:
    profile = chain(run(nanoseconds=3), run(nanoseconds=5), run(nanoseconds=9, fixed=True))
    assert recompute_nanoseconds(profile, [AGAIN, KEEP, KEEP]) == 3
    assert recompute_nanoseconds(profile, [AGAIN, AGAIN, AGAIN]) == 8


def test_three_runs_by_hand() -> None:
    profile = chain(
        run(start=0, forward=30, entry=10, saved=100, spike=120, back=20),
        run(start=10, forward=40, entry=20, saved=80, spike=90, back=25, out_saved=10),
        run(start=20, forward=50, entry=30, saved=60, spike=75, back=15, in_idle=5),
        head_forward=35,
        head_backward=45,
    )
    # Kept: 0 + 120 forward, 10 + 100 + 20 backward; again at K = 100: 100 + 20 + 80 + 25;
    # kept at K = 100: 100 + 20 + 75, 100 + 30 − 5 + 60 + 15; head at K = 155: 155 + 45.
    assert peak(profile, [KEEP, AGAIN, KEEP]) == max(120, 130, 225, 195, 200, 200)


@steady
@given(chains.realistic_chains())
def test_more_memory_at_a_moment_never_lowers_the_peak(profile: Profile) -> None:
    raised = profile.in_step([10] * len(profile.runs), 0)
    for choice in (KEEP, AGAIN):
        plan = [choice] * len(profile.runs)
        assert peak(profile, plan) <= peak(raised, plan) <= peak(profile, plan) + 10
