"""`explain` names what moves to the host, and why that costs little."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

import mimose
import models
from chains import SIZE, run
from loops import task, train
from mimose.costs.link import Link
from mimose.costs.options import Option
from mimose.costs.run_cost import RunCost
from mimose.costs.timeline import Profile
from mimose.planning import Plan
from mimose.reporting import Explanation

GIB = 1 << 30
LAYER = run(
    boundary=GIB // 8, saved=3 * GIB, recompute_peak=3 * GIB, nanoseconds=40_000_000,
    backward_nanoseconds=90_000_000, input_movable=True,
)  # fmt: skip


def explained(choices: str, runs: Sequence[RunCost] = (), speed: float = 50.0) -> Explanation:
    """A long model of equal layers under these choices; the link moves so many bytes a
    nanosecond."""
    layers = tuple(runs) or (LAYER,) * len(choices)
    profile = Profile(SIZE, layers, 0, 0, link=Link(speed, speed, 1 << 40))
    plan = Plan.of(profile, Option.of_letters(choices), 1 << 50)
    assert str(plan) == choices
    return Explanation(
        size=SIZE,
        blocks=tuple(f"layers.{k}" for k in range(len(choices))),
        profile=profile,
        plan=plan,
        peak_kept_bytes=0,
        peak_recomputed_bytes=0,
    )


def block_lines(explanation: Explanation) -> list[str]:
    return [line for line in str(explanation).splitlines() if line.startswith("  ")]


def test_a_block_on_the_host_says_how_much_moves_and_behind_what() -> None:
    first = block_lines(explained("HKKKKKKK"))[0]
    assert first == (
        "  on the host  layers.0: 3.00 GiB if kept, 40.00 ms to recompute; "
        "on the host: 3.00 GiB, copied while the next 2 blocks run"
    )


def test_an_input_on_the_host_is_told_from_activations_there() -> None:
    line = block_lines(explained("hKKKKKKK"))[0]
    assert line.startswith("  recompute  layers.0: 3.00 GiB if kept, 40.00 ms to recompute; ")
    assert line.endswith("; input on the host: 128 MiB, copied while the next block runs")


def test_the_plan_line_tells_what_moves_and_how_long_the_device_waits() -> None:
    hidden = str(explained("HKKHKKKKKK"))
    assert (
        "plan HKKHKKKKKK: 8 of 10 kept, 0.0 ms of recomputing, 6.00 GiB moved to the host" in hidden
    )
    assert ", 0.0 ms of waiting for transfers" in hidden
    stalled = explained("HHHrKKKK", speed=5.0)
    assert stalled.plan is not None
    waited = f"{stalled.plan.stall_seconds * 1e3:.1f} ms of waiting for transfers"
    assert stalled.plan.stall_seconds > 0.5
    assert f", 40.0 ms of recomputing, 9.00 GiB moved to the host and back, {waited}" in str(
        stalled
    )


def test_a_plan_that_moves_nothing_does_not_speak_of_the_host() -> None:
    text = str(explained("rrKKKKKK"))
    assert "host" not in text
    assert "plan rrKKKKKK: 6 of 8 kept, 80.0 ms of recomputing\n" in text


def test_neighbours_whose_transfers_differ_only_in_time_share_a_line() -> None:
    explanation = explained("h" * 24 + "K" * 8, speed=2.0)
    assert explanation.plan is not None
    assert len({t.release_before - t.run for t in explanation.plan.transfers}) > 1
    lines = block_lines(explanation)
    assert len(lines) == 2
    assert "layers.0 … layers.23 (24 blocks, each): 3.00 GiB if kept" in lines[0]
    assert re.search(
        r"input on the host: 128 MiB, copied while the next \d+ to \d+ blocks run$", lines[0]
    )


def test_neighbours_that_move_different_amounts_have_lines_of_their_own() -> None:
    small = LAYER._replace(boundary=GIB // 16)
    lines = block_lines(explained("hhhK", [LAYER, LAYER, small, LAYER]))
    assert len(lines) == 3
    assert lines[1].endswith("input on the host: 64.00 MiB, copied while the next block runs")


def test_a_notebook_shows_what_moves() -> None:
    html = explained("HKhKKKKK")._repr_html_()
    assert "3.12 GiB moved to the host and back" in html
    assert "3.00 GiB, copied while the next 2 blocks run" in html
    assert "128 MiB, copied while the next" in html
    assert html.count('title="save_on_host"') == html.count('title="recompute_from_host"') == 1
    assert "host" not in explained("rrKKKKKK")._repr_html_()


class WithHost:
    """Gives every block but the last this option."""

    def __init__(self, option: Option) -> None:
        self._option = option

    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        choices = [*[self._option] * (len(profile.runs) - 1), Option.KEEP]
        return Plan.of(profile, choices, available_bytes)


@pytest.mark.filterwarnings("ignore:.*raise memory_budget")
def test_what_explain_says_moves_is_what_then_moves() -> None:
    model, batches, budget = task("encoder")
    longest = max(batches, key=lambda batch: batch["input_ids"].shape[1])
    planner = WithHost(Option.SAVE_ON_HOST)
    with mimose.auto_checkpoint(model, budget, host_memory="1GiB", planner=planner) as handle:
        train(model, batches)
        explanation, before = handle.explain(**longest), handle.stats()
        train(model, [longest])
        stats = handle.stats()
    assert explanation.plan is not None
    assert stats.last_plan is not None
    assert stats.last_plan.choices == explanation.plan.choices
    assert str(explanation.plan).startswith("H")
    moved = stats.moved_bytes - before.moved_bytes
    assert moved == pytest.approx(explanation.plan.moved_bytes, rel=0.01)
    assert "moved to the host: " in str(stats)


@pytest.mark.filterwarnings("ignore:.*raise memory_budget")
def test_where_graphs_are_retained_explain_does_not_plan_with_the_host() -> None:
    model, batches, budget = task("encoder")
    longest = max(batches, key=lambda batch: batch["input_ids"].shape[1])
    planner = WithHost(Option.RECOMPUTE_FROM_HOST)
    with mimose.auto_checkpoint(model, budget, host_memory="1GiB", planner=planner) as handle:
        train(model, batches)
        usual = handle.explain(**longest)
        models.loss_of(model, longest).backward(retain_graph=True)
        retained = handle.explain(**longest)
    assert usual.plan is not None
    assert usual.plan.transfers
    assert retained.plan is not None
    assert not retained.plan.transfers
