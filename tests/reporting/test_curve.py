"""The curve of a step is the timeline, drawn out."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chains import chains, chains_with_link, realistic_chains, steady
from mimose.costs.options import Option
from mimose.costs.timeline import Profile, levels, peak
from mimose.reporting.page.curve import curve

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
