"""The curve of a step is the timeline, drawn out."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chains import chains, realistic_chains, steady
from mimose.costs.timeline import levels, peak
from mimose.reporting.page.curve import curve


@steady
@given(st.data())
def test_the_highest_moment_is_the_peak_of_the_timeline(data: Any) -> None:
    profile = data.draw(realistic_chains())
    plan = [data.draw(st.booleans()) for _ in profile.runs]
    fixed_as_timeline = [again or run.fixed for run, again in zip(profile.runs, plan, strict=True)]
    moments = curve(profile, fixed_as_timeline)
    assert max(moment.bytes for moment in moments) == peak(profile, plan)


@steady
@given(st.data())
def test_forwards_start_where_the_timeline_says(data: Any) -> None:
    profile = data.draw(chains)
    plan = [data.draw(st.booleans()) for _ in profile.runs]
    starts = [m.bytes for m in curve(profile, plan) if m.phase == "forward"][::2]
    assert tuple(starts) == levels(profile, plan)


@steady
@given(st.data())
def test_time_runs_forward_and_recomputing_takes_longer_than_keeping(data: Any) -> None:
    profile = data.draw(chains)
    kept = curve(profile, [False] * len(profile.runs))
    again = curve(profile, [True] * len(profile.runs))
    for moments in (kept, again):
        seconds = [moment.seconds for moment in moments]
        assert seconds == sorted(seconds)
    assert again[-1].seconds >= kept[-1].seconds
