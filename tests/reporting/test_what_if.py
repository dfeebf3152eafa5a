"""What-if answers are those that training would give."""

from __future__ import annotations

import io
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import mimose
import models
from chains import chain, run
from loops import (
    adamw,
    between,
    counted,
    lengths,
    peak_of_plain,
    task,
    texts,
    train,
)
from mimose.cli.terminal import forecast_table
from mimose.costs.options import Option
from mimose.planning import planner_named
from mimose.reporting.lengths import padded, parse_lengths
from mimose.reporting.outlook import Outlook
from mimose.reporting.questions import Question
from mimose.reporting.reader import Recording, read_recording
from mimose.reporting.recorded_lengths import RecordedLengths
from mimose.reporting.what_if import Forecast, forecast


@pytest.fixture(scope="module")
def recording(recording_file: Path) -> Recording:
    return read_recording(recording_file)


@pytest.fixture(scope="module")
def question(recording_file: Path) -> Question:
    return Question.about(recording_file, None)


def test_a_budget_that_was_never_run_gets_the_plans_that_it_then_has(
    recording: Recording, question: Question
) -> None:
    model, batches, _ = task("encoder")
    other = between(recording.peak_bytes // 2, recording.peak_bytes, 0.5)
    plans: list[tuple[str, str]] = []
    with mimose.auto_checkpoint(model, other) as handle:

        def compare() -> None:
            stats = handle.stats()
            if stats.last_plan is None or stats.last_size is None or stats.planned_steps < 5:
                return
            profile = question.outlook.profile(stats.last_size)
            assert profile is not None
            plans.append((str(question.outlook.plan(profile, other)), str(stats.last_plan)))

        train(model, batches, after_step=compare)
    same = sum(asked == had for asked, had in plans)
    assert len(plans) > 10
    assert same >= 0.8 * len(plans)
    assert any("r" in had for _, had in plans)


def test_more_memory_never_costs_more_time(question: Question) -> None:
    rows = question.forecast(question.weights(None, samples=False)).rows
    again = [row.recompute_seconds for row in rows]
    assert again == sorted(again, reverse=True)
    assert again[0] > again[-1] == 0.0
    assert [row.recomputed_share for row in rows][-1] == 0.0
    assert all(row.step_seconds is not None and row.step_seconds > 0 for row in rows)


def test_below_the_least_budget_the_largest_input_does_not_fit(question: Question) -> None:
    weights = question.weights(None, samples=False)
    least = question.forecast(weights).least_budget_bytes
    enough, too_little = question.forecast(weights, [least, least - 200_000]).rows
    assert enough.too_large_share == 0.0
    assert too_little.too_large_share > 0.0


def test_the_budget_from_which_all_is_kept_is_what_plain_training_needs(
    question: Question,
) -> None:
    model, batches, _ = task("encoder")
    forecast_ = question.forecast(question.weights(None, samples=False))
    needed = forecast_.easy_budget_bytes * (1 - question.outlook.reserve_share)
    assert abs(needed - peak_of_plain(model, batches)) < 0.03 * needed


def test_the_largest_length_fits_and_a_longer_one_does_not(question: Question) -> None:
    model, _, _ = task("encoder")
    budget = 6 << 20
    (row,) = question.forecast(question.weights(None, samples=False), [budget]).rows
    assert row.largest is not None
    assert row.largest.extrapolated
    room = budget * (1 - question.outlook.reserve_share)
    peaks = []
    for length in (int(0.97 * row.largest.length), int(1.1 * row.largest.length)):
        with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
            train(model, texts([length]))
            with counted() as counter:
                train(model, texts([length]))
                peaks.append(counter.peak)
    assert peaks[0] <= room < peaks[1]


def test_lengths_are_read_as_people_write_them(tmp_path: Path) -> None:
    assert parse_lengths("64") == {64: 1.0}
    assert parse_lengths("64, 128,64") == {64: 2.0, 128: 1.0}
    assert parse_lengths("3-5") == {3: 1.0, 4: 1.0, 5: 1.0}
    file = tmp_path / "lengths.csv"
    file.write_text("length,count\n10,3\n20,1\n")
    assert parse_lengths(str(file)) == {10: 3.0, 20: 1.0}
    file.write_text("7\n7\n9\n")
    assert parse_lengths(str(file)) == {7: 2.0, 9: 1.0}
    for wrong in ("long", "5-3", "0", "-4", "1,,2"):
        with pytest.raises(mimose.ArgumentError, match='use "128"'):
            parse_lengths(wrong)
    file.write_text("length,count\n10,many\n")
    with pytest.raises(mimose.ArgumentError, match="line 2"):
        parse_lengths(str(file))
    file.write_text("-5\n7\n")
    with pytest.raises(mimose.ArgumentError, match="line 1: '-5' is not a positive length"):
        parse_lengths(str(file))
    file.write_text("64,1e308\n65,1e308\n")
    with pytest.raises(mimose.ArgumentError, match="counts add up to more"):
        parse_lengths(str(file))


@pytest.mark.parametrize("endless", ["1-100000000000", "7,99999999999999999999"])
def test_endless_lengths_are_refused_before_they_fill_the_memory(endless: str) -> None:
    with pytest.raises(mimose.ArgumentError, match="but at most 1,000,000 is supported"):
        parse_lengths(endless)


def test_samples_are_padded_to_the_longest_of_a_batch() -> None:
    assert padded({1: 1, 2: 1}, batch=1) == {1: 0.5, 2: 0.5}
    assert padded({1: 1, 2: 1}, batch=3) == {1: 0.125, 2: 0.875}


def test_lengths_beyond_those_seen_are_told_with_their_uncertainty(question: Question) -> None:
    model, _, _ = task("encoder")
    weights = question.weights("50,100,300,300", samples=False)
    asked = question.forecast(weights)
    assert asked.largest == "4×300"
    assert asked.extrapolated_share == pytest.approx(0.5)
    assert asked.unknown_share == 0.0
    assert 0 < asked.uncertainty < 0.2
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        train(model, texts([300]))
        with counted() as counter:
            train(model, texts([300] * 2))
    real = counter.peak, peak_of_plain(model, texts([300] * 2))
    for told, peak in zip((asked.least_budget_bytes, asked.easy_budget_bytes), real, strict=True):
        needed = told * (1 - question.outlook.reserve_share)
        assert abs(needed - peak) <= asked.uncertainty * needed


def test_where_it_depends_on_an_extrapolation_whether_a_size_fits_a_range_is_told(
    question: Question,
) -> None:
    weights = question.weights("50,320", samples=False)
    least = question.forecast(weights).least_budget_bytes
    near, far = question.forecast(weights, [least, 2 * least]).rows
    assert near.too_large_range == (0.0, 0.5)
    assert far.too_large_range == (0.0, 0.0)


def test_lengths_of_which_nothing_can_be_told_are_counted_in_the_table(question: Question) -> None:
    weights = question.weights("50,100,5000,9000", samples=False)
    asked = question.forecast(weights)
    assert asked.unknown_share == pytest.approx(0.5)
    assert asked.largest == "4×100"
    text = printed(asked)
    assert re.search(r"large +unknown", text)
    assert "on every block of these sizes is kept" in text


def test_plan_that_certainly_exceeds_the_budget_gives_one_share_and_not_a_range(
    recording_file: Path,
) -> None:
    question = Question.about(recording_file, "keep_all")
    weights = question.weights(None, samples=False)
    enough = question.forecast(weights).easy_budget_bytes
    asked = question.forecast(weights, [enough, int(0.9 * enough)])
    fits, exceeds = asked.rows
    assert fits.too_large_range == (0.0, 0.0)
    assert exceeds.too_large_range == (exceeds.too_large_share,) * 2
    assert 0 < exceeds.too_large_share < 1
    assert "this planner's plans do not fit, although recomputing" in printed(asked)


def test_budget_into_which_no_step_fits_has_no_times(question: Question) -> None:
    asked = question.forecast(question.weights("80", samples=False), [1 << 20])
    assert asked.rows[0].too_large_range == (1.0, 1.0)
    text = printed(asked)
    assert re.search(r"1\.00 MiB +– +– +– +100%", text)
    assert "Times are – where no step fits" in text


def test_steps_larger_than_any_measured_one_are_said_to_be_extrapolated(question: Question) -> None:
    text = printed(question.forecast(question.weights("50,300", samples=False)))
    assert "50.0% of the steps (1 of 2) are larger than any size that was measured" in text
    sampled = question.forecast(question.weights("50,300", samples=True))
    assert "of the steps are larger" in printed(sampled)


@pytest.mark.parametrize("lengths_", [None, "50,100,300,5000"])
def test_tables_of_forecasts_fit_into_80_columns(question: Question, lengths_: str | None) -> None:
    text = printed(question.forecast(question.weights(lengths_, samples=False)), columns=80)
    assert "…" not in text
    assert re.search(r"recomputed +large( +unknown)? +n +batch", text)
    assert max(map(len, text.splitlines())) <= 80


def test_a_length_becomes_a_size_of_the_recorded_shape(recording: Recording) -> None:
    lengths = RecordedLengths([step.size for step in recording.steps])
    assert lengths.one_dimension_varies
    assert lengths.pattern == "4×n"
    assert lengths.at(77).dims == (4, 77)


def test_saved_knowledge_answers_as_a_recording_does(
    recording: Recording, question: Question, recording_file: Path
) -> None:
    outlook = Outlook.of(recording)
    saved = recording_file.with_name("state.json")
    with pytest.raises(mimose.ArgumentError, match="add --floor"):
        Question.about(saved, None)
    asked = Question.about(saved, None, outlook.floor_bytes)
    weights = {size: float(n) for size, n in Counter(s.size for s in recording.steps).items()}
    one, other = (f.forecast(weights, [8 << 20]) for f in (question, asked))
    assert other.least_budget_bytes == pytest.approx(one.least_budget_bytes, rel=0.02)
    assert other.rows[0].recomputed_share == pytest.approx(one.rows[0].recomputed_share, abs=0.1)
    assert other.rows[0].step_seconds is None


def test_sizes_of_which_nothing_is_known_are_refused(recording: Recording) -> None:
    lengths = RecordedLengths([step.size for step in recording.steps])
    with pytest.raises(mimose.ArgumentError, match="record more steps"):
        forecast(Outlook.of(recording), {lengths.at(5000): 1.0})


def test_the_floor_is_known_though_gradients_are_accumulated_later_on(tmp_path: Path) -> None:
    model = models.Encoder()
    sizes = [*lengths(10, 30, 60), 90, *lengths(30, 30, 60), 90, *lengths(40, 30, 60, seed=1)]
    budget = int(0.75 * peak_of_plain(model, texts([90] * 3)))
    with mimose.auto_checkpoint(model, budget, record=tmp_path / "run.jsonl"), adamw(model) as o:
        for number, batch in enumerate(texts(sizes)):
            models.loss_of(model, batch).backward()
            if number % 2 or number < 24:
                o.step()
                o.zero_grad()
    recording = read_recording(tmp_path / "run.jsonl")
    bases = [step.base_bytes for step in recording.steps[40:]]
    assert 0.9 * min(bases) < Outlook.of(recording).floor_bytes < max(bases)


def test_host_memory_buys_time_at_the_recorded_budget(
    recorded_with_host: tuple[Path, mimose.Mimose],
) -> None:
    question = Question.about(recorded_with_host[0], None)
    weights = question.weights(None, samples=False)
    without, recorded = question.forecast(weights).host_rows
    assert (without.limit_bytes, recorded.limit_bytes) == (0, 1 << 30)
    assert without.row.host_bytes == 0 < recorded.row.host_bytes
    assert without.row.recompute_seconds > recorded.row.recompute_seconds
    assert without.row.budget_bytes == recorded.row.budget_bytes == question.outlook.budget_bytes
    alone = replace(question, outlook=replace(question.outlook, link=None))
    (two_options,) = alone.forecast(weights, [without.row.budget_bytes]).rows
    assert without.row == two_options


def test_where_host_memory_is_short_it_is_told_what_more_would_buy(
    recorded_with_host: tuple[Path, mimose.Mimose],
) -> None:
    question = Question.about(recorded_with_host[0], None)
    assert question.outlook.link is not None
    short = question.outlook.link._replace(host_bytes=1 << 20)
    question = replace(question, outlook=replace(question.outlook, link=short))
    forecast_ = question.forecast(question.weights(None, samples=False))
    rows = forecast_.host_rows
    assert [one.limit_bytes for one in rows] == [0, 1 << 20, 2 << 20, None]
    extra = [one.row.recompute_seconds + one.row.stall_seconds for one in rows]
    assert extra == sorted(extra, reverse=True)
    assert extra[0] > extra[-1]
    assert all(one.row.host_bytes <= (one.limit_bytes or 1 << 40) for one in rows[1:])
    told = printed(forecast_)
    assert "host memory, at the recorded budget of " in told
    assert re.search(r"^ +2.00 MiB ", told, re.MULTILINE)
    assert re.search(r"^ +any ", told, re.MULTILINE)
    assert "More host memory" not in told


def test_a_file_without_a_link_says_nothing_of_host_memory(question: Question) -> None:
    forecast_ = question.forecast(question.weights(None, samples=False))
    assert forecast_.host_rows == ()
    assert "host" not in printed(forecast_)


def test_the_least_budget_counts_inputs_on_the_host(
    recorded_with_host: tuple[Path, mimose.Mimose],
) -> None:
    outlook = Outlook.of(read_recording(recorded_with_host[0]))
    block = run(
        boundary=1 << 20, saved=3 << 20, recompute_peak=3 << 20, nanoseconds=1_000_000,
        backward_nanoseconds=2_000_000, input_movable=True,
    )  # fmt: skip
    without = chain(*[block] * 12)
    moved = replace(without, link=outlook.link)
    least = outlook.least_budget(moved)
    assert least < outlook.least_budget(without) - (5 << 20)
    plan = outlook.plan(moved, least)
    assert plan.fits
    assert plan.count(Option.RECOMPUTE_FROM_HOST) > 5
    assert not outlook.plan(moved, int(0.99 * least)).fits


def test_planners_that_never_use_the_host_are_asked_without_it(
    recorded_with_host: tuple[Path, mimose.Mimose],
) -> None:
    recording = read_recording(recorded_with_host[0])
    profile = Outlook.of(recording, planner_named("greedy")).profile(recording.steps[-1].size)
    assert profile is not None
    assert profile.link is None
    question = Question.about(recorded_with_host[0], "greedy")
    assert question.forecast(question.weights(None, samples=False)).host_rows == ()


def printed(forecast_: Forecast, columns: int = 200) -> str:
    out = io.StringIO()
    Console(file=out, width=columns).print(forecast_table(forecast_))
    return out.getvalue()
