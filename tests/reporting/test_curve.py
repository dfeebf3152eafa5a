"""The curve of a step is the timeline, drawn out."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chains import chain, chains, chains_with_link, realistic_chains, run, steady
from mimose.costs.link import Link
from mimose.costs.options import Option
from mimose.costs.timeline import Profile, levels, peak
from mimose.planning import Plan
from mimose.reporting.page.curve import curve
from mimose.reporting.page.traffic import Copy, copies

any_chain = st.one_of(chains, realistic_chains(most_casts=150), chains_with_link())


def some_plan(data: Any, profile: Profile) -> list[Option]:
    return [data.draw(st.sampled_from(Option)) for _ in profile.runs]


@steady
@given(st.data())
def test_the_highest_moment_is_the_peak_of_the_timeline(data: Any) -> None:
    profile = data.draw(any_chain)
    plan = some_plan(data, profile)
    moments = curve(profile, plan)
    assert max(moment.bytes for moment in moments) == peak(profile, plan)


@steady
@given(st.data())
def test_forwards_start_where_the_timeline_says(data: Any) -> None:
    profile = data.draw(any_chain)
    plan = some_plan(data, profile)
    starts = [m.bytes for m in curve(profile, plan) if m.phase == "forward"][::2]
    assert starts == levels(profile, plan)[0]


@steady
@given(st.data())
def test_time_runs_forward_and_recomputing_takes_longer_than_keeping(data: Any) -> None:
    profile = data.draw(chains)
    kept = curve(profile, [Option.KEEP] * len(profile.runs))
    again = curve(profile, [Option.RECOMPUTE] * len(profile.runs))
    for moments in (kept, again):
        seconds = [moment.seconds for moment in moments]
        assert seconds == sorted(seconds)
    assert again[-1].seconds >= kept[-1].seconds


@steady
@given(st.data())
def test_the_link_makes_one_copy_at_a_time_there_and_back(data: Any) -> None:
    profile = data.draw(chains_with_link())
    plan = some_plan(data, profile)
    made = copies(profile, plan, curve(profile, plan))
    assert all(copy.begins <= copy.ends for copy in made)
    assert all(a.ends <= b.begins for a, b in pairwise(made))
    moved = {t.run: t.moved_bytes for t in Plan.of(profile, plan, 0).transfers}
    for to_host in (True, False):
        assert {c.run: c.bytes for c in made if c.to_host is to_host} == moved


def test_a_copy_begins_after_its_forward_and_comes_back_from_its_prefetch_on() -> None:
    layer = run(boundary=1, saved=1000, nanoseconds=1000, backward_nanoseconds=2000)
    profile = replace(chain(*[layer] * 6), link=Link(1.1, 1.1, 1 << 20))
    plan = [Option.SAVE_ON_HOST, *[Option.KEEP] * 5]
    (away, back), moments = copies(profile, plan, curve(profile, plan)), curve(profile, plan)
    assert away == Copy(0, True, pytest.approx(1e-6), pytest.approx(2e-6, rel=1e-3), 1000)
    (transfer,) = Plan.of(profile, plan, 0).transfers
    begun = [m.seconds for m in moments if (m.phase, m.run) == ("backward", transfer.prefetch_at)]
    needed = [m.seconds for m in moments if (m.phase, m.run) == ("backward", 1)]
    assert begun[0] - 2e-6 < back.begins < back.ends <= needed[-1] + 1e-12


def test_without_a_link_there_is_no_traffic() -> None:
    profile = chain(*[run(saved=10, nanoseconds=10)] * 3)
    plan = [Option.SAVE_ON_HOST] * 3
    assert copies(profile, plan, curve(profile, plan)) == []
