"""`explain` and `stats` tell what is known, in values and in words."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch

import mimose
import models
from loops import adamw, bert, counted, labelled, task, texts, train
from mimose.costs.options import Option
from mimose.costs.pace import Pace
from mimose.integrations.metrics import IntervalMetrics
from mimose.reporting import Shortages, Stats
from mimose.training import StepRecord, Subscriber
from parts import Assembled, Observations


def test_explain_before_the_first_step_says_that_nothing_is_known() -> None:
    model, batch = models.Encoder(), texts([50])[0]
    with mimose.auto_checkpoint(model, "64MiB") as handle:
        explanation = handle.explain(**batch)
        text = str(explanation)
    assert explanation.plan is None
    assert explanation.predicted_peak_bytes is None
    assert explanation.budget_bytes == 64 << 20
    assert explanation.parameter_bytes == sum(p.nbytes for p in model.parameters())
    assert explanation.gradient_bytes == explanation.parameter_bytes
    assert "input 4×50" in text
    assert "budget 64.00 MiB" in text
    assert "not measured yet. The next batch of this size will be observed" in text


def test_explain_before_a_relative_budget_is_settled_says_what_it_can() -> None:
    model, batch = models.Encoder(), texts([50])[0]
    with mimose.auto_checkpoint(model, "50%") as handle:
        assert handle.explain(**batch).budget_bytes is None
        assert "50% of the device" in repr(handle)
        assert "not measured yet" in str(handle.explain(**batch))


def test_a_batch_that_was_not_unpacked_is_refused_with_the_way_to_write_it() -> None:
    model = models.Encoder()
    with mimose.auto_checkpoint(model, "64MiB") as handle:
        with pytest.raises(mimose.ArgumentError, match=r"input_ids.*write explain\(\*\*batch\)"):
            handle.explain(texts([50])[0])
        with pytest.raises(mimose.ArgumentError, match="missing a required argument: 'input_ids'"):
            handle.explain(tokens=torch.zeros(4, 50))


def test_a_model_that_takes_a_batch_as_one_argument_is_explained_by_it() -> None:
    class OfBatches(models.Encoder):
        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return super().forward(**batch)

    model, batch = OfBatches(), texts([50])[0]
    with mimose.auto_checkpoint(model, "64MiB") as handle:
        handle.explain(batch)
        for _ in range(3):
            model(batch).sum().backward()
        assert handle.explain(batch).plan is not None


def test_arguments_other_than_in_training_are_told() -> None:
    model = bert()
    with mimose.auto_checkpoint(model, "64MiB") as handle:
        train(model, labelled([50] * 3))
        told = str(handle.explain(**texts([50])[0]))
    assert (
        "training passed input_ids (2-d), labels (1-d) to the model, but explain() got input_ids"
        in told
    )
    assert "no prediction for this size" not in told


def test_explain_does_not_take_part_in_training() -> None:
    model, batches, budget = task("encoder")
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, budget) as handle:
        losses = train(model, batches[:15], after_step=lambda: str(handle.explain(**batches[20])))
        assert handle.stats().steps == 15
    assert losses == train(plain, batches[:15])


def test_explained_plan_is_the_one_that_the_batch_then_gets() -> None:
    model, batches, budget = task("encoder")
    upcoming = iter(batches[1:])
    explained: list[Any] = []
    checked = 0
    with mimose.auto_checkpoint(model, budget) as handle:

        def compare() -> None:
            nonlocal checked
            stats = handle.stats()
            if explained and explained[-1].plan and stats.planned_steps > checked:
                assert stats.last_plan is not None
                assert stats.last_real_peak_bytes is not None
                assert stats.last_plan.choices == explained[-1].plan.choices
                difference = explained[-1].predicted_peak_bytes - stats.last_real_peak_bytes
                assert abs(difference) < 0.02 * stats.last_real_peak_bytes
                checked += 1
            batch = next(upcoming, None)
            if batch is not None:
                explained.append(handle.explain(**batch))

        train(model, batches, after_step=compare)
    assert checked > 10


def test_explanation_names_floor_blocks_choices_and_peaks() -> None:
    model, batches, budget = task("encoder", share=0.3)
    longest = max(batches, key=lambda batch: batch["input_ids"].shape[1])
    with mimose.auto_checkpoint(model, budget) as handle:
        train(model, batches)
        explanation = handle.explain(**longest)
    assert explanation.plan is not None
    assert explanation.plan.fits
    assert 0 < explanation.plan.kept < 3
    assert explanation.base_bytes > explanation.parameter_bytes
    assert explanation.peak_recomputed_bytes is not None
    assert explanation.peak_kept_bytes is not None
    assert explanation.predicted_peak_bytes is not None
    assert explanation.peak_recomputed_bytes <= explanation.predicted_peak_bytes <= budget
    assert explanation.peak_kept_bytes > budget
    assert explanation.blocks == tuple(f"encoder.layers.{i}" for i in range(3))
    text = str(explanation)
    assert text.count("  recompute  encoder.layers.") == 1  # neighbours that are alike: one line
    assert text.count("  keep       encoder.layers.") == 1
    assert "(2 blocks, each)" in text
    assert "in use at the start" in text
    assert "; gradients 107 KiB" in text
    assert re.search(r"peak [\d.]+ \w+ with all blocks kept, ", text)
    assert ": fits" in text
    assert f"every block recomputed: about {explanation.largest_batch}" in text


COMFORTABLE = [90, 90, 20, 40, 60, 70, 30, 50, 80, 20, 90]
"""The longest first: every later size has a bound under which all can be kept."""


def test_under_a_comfortable_budget_every_size_is_told_as_it_is() -> None:
    model, batches = models.Encoder(), texts(COMFORTABLE)
    with mimose.auto_checkpoint(model, "6GiB") as handle, adamw(model) as optimizer:
        for batch in batches:
            models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        for batch in batches[2:]:
            told = handle.explain(**batch)
            assert told.at_most_as is None
            models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            stats = handle.stats()
            assert stats.last_real_peak_bytes == pytest.approx(told.peak_kept_bytes, rel=0.02)
        assert stats.observed_steps <= 6
        assert stats.runs_recomputed == 0


def test_a_size_that_only_a_larger_one_tells_of_is_said_to_be_bounded() -> None:
    model, (long, *_, short) = models.Encoder(), texts([90, 30])
    with mimose.auto_checkpoint(model, "6GiB") as handle:
        train(model, [long] * 3)
        told = handle.explain(**short)
    assert str(told.size) == "4×30"
    assert str(told.at_most_as) == "4×90"
    text = str(told)
    assert text.startswith("input 4×30")
    assert "upper bounds, from the costs measured at 4×90 (too few sizes" in text
    assert re.search(r"peak at most [\d.]+ \w+ with all blocks kept, ", text)
    assert "upper bounds, from the costs measured at 4×90 (too few sizes" in told._repr_html_()


def test_guess_under_which_a_larger_size_is_observed_is_told() -> None:
    class Records(Subscriber):
        def __init__(self) -> None:
            self.of: list[StepRecord] = []

        def step_over(self, record: StepRecord) -> None:
            self.of.append(record)

    model, _, budget = task("encoder", share=0.3)
    *_, short = texts([60])
    *_, long = texts([110])
    records = Records()
    with mimose.auto_checkpoint(model, budget) as handle:
        handle.subscribe(records)
        train(model, [short] * 3)
        told = handle.explain(**long)
        train(model, [long])
    assert told.plan is None
    assert told.guess is not None
    assert f"is observed, under the guess {told.guess}" in str(told)
    assert records.of[-1].observed
    assert str(records.of[-1].plan) == str(told.guess)


def test_a_peak_that_is_only_bounded_is_not_logged_as_predicted() -> None:
    model, (long, *_, short) = models.Encoder(), texts([90, 30])
    with Assembled(model, "6GiB") as handle:
        seen = Observations()
        handle.subscribe(seen)
        train(model, [long] * 4)
        assert "mimose/predicted_peak_gib" in IntervalMetrics().since_last(handle)  # type: ignore[arg-type]
        for observation in seen.whole * 12:  # often enough to do without more
            handle.scheduler.learn(observation)
        train(model, [short])
        assert handle.stats().planned_steps == 3
        assert handle.stats().last_predicted_peak_bytes is None
        assert "mimose/predicted_peak_gib" not in IntervalMetrics().since_last(handle)  # type: ignore[arg-type]


def test_largest_batch_fits_with_every_block_recomputed_and_twice_as_much_does_not() -> None:
    model, batches, budget = task("encoder")
    with mimose.auto_checkpoint(model, budget) as handle:
        train(model, batches)
        largest = handle.explain(**texts([100])[0]).largest_batch
    assert largest is not None
    peaks = []
    for batch in (largest, 2 * largest):
        with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
            train(model, texts([100], batch=batch))  # the first use of a block is rehearsed
            with counted() as counter:
                train(model, texts([100], batch=batch))
                peaks.append(counter.peak)
    assert peaks[0] <= budget < peaks[1]


class WideStart(models.Encoder):
    """An encoder that takes more memory before its first block than each block takes."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        wide = self.embedding(input_ids).repeat(1, 1, 16)
        hidden = torch.relu(wide).unflatten(-1, (16, -1)).mean(-2)
        return self.head(self.encoder(hidden).mean(1))


def test_largest_batch_counts_what_grows_before_the_first_block() -> None:
    model, budget = WideStart(), 16 << 20
    batches = texts([100], batch=2), texts([100], batch=3), texts([100], batch=4)
    with mimose.auto_checkpoint(model, budget) as handle:
        for batch in batches * 3:
            train(model, batch)
        largest = handle.explain(**batches[0][0]).largest_batch
    assert largest is not None
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        train(model, texts([100], batch=largest))
        with counted() as counter:
            train(model, texts([100], batch=largest))
            assert counter.peak <= budget


def test_stats_count_every_step_and_read_well() -> None:
    model, batches, budget = task("encoder")
    with mimose.auto_checkpoint(model, budget) as handle:
        train(model, batches)
        stats = handle.stats()
    assert stats.steps == len(batches) == stats.observed_steps + stats.planned_steps
    assert stats.runs_kept + stats.runs_recomputed == 3 * stats.planned_steps
    assert stats.cache_hits + stats.cache_misses >= stats.planned_steps
    assert stats.budget_bytes == budget
    assert stats.reserve_bytes is not None
    assert 0 < stats.reserve_bytes <= 0.03 * budget
    assert stats.prediction_error is not None
    assert 0 <= stats.prediction_error < 0.02
    assert 0 < stats.recompute_share < 0.5
    assert 0 < stats.planning_seconds < stats.seconds
    text = str(stats)
    planned = f"{stats.observed_steps} observed, {stats.planned_steps} planned"
    assert text.startswith(f"{len(batches)} steps: {planned}")
    for words in (
        "from the cache",
        "recomputed in planned steps",
        "peak",
        "budget",
        "reserve",
        "error",
    ):
        assert words in text


def test_a_pause_between_two_steps_does_not_count_as_theirs() -> None:
    pace = Pace()
    usual = sum(pace.seconds(0.1, 0.15) for _ in range(20))
    assert usual == pytest.approx(20 * 0.15)
    assert pace.seconds(0.1, 10.0) < 0.5
    assert pace.seconds(0.1, 0.15) == pytest.approx(0.15)


def test_a_step_that_waits_for_the_device_after_its_backward_counts_whole() -> None:
    pace = Pace()
    assert [pace.seconds(0.03, 0.1) for _ in range(3)] == pytest.approx([0.1] * 3)


def test_stats_of_a_handle_that_has_not_trained_are_empty() -> None:
    with mimose.auto_checkpoint(models.Encoder(), "64MiB") as handle:
        assert handle.stats().steps == 0
        assert str(handle.stats()).startswith("0 steps")


def test_in_a_notebook_everything_renders_as_html() -> None:
    model, batches, budget = task("encoder", share=0.3)
    longest = max(batches, key=lambda batch: batch["input_ids"].shape[1])
    with mimose.auto_checkpoint(model, budget) as handle:
        before = handle.explain(**longest)._repr_html_()
        train(model, batches)
        explanation = handle.explain(**longest)
        stats = handle.stats()
        whole = handle._repr_html_()
    assert "not measured yet" in before
    html = explanation._repr_html_()
    assert explanation.plan is not None
    assert html.count('title="recompute"') == explanation.plan.count(Option.RECOMPUTE)
    assert html.count('title="keep"') == explanation.plan.kept
    assert "encoder.layers.0" in html
    assert f"{stats.planned_steps} planned" in stats._repr_html_()
    assert "mimose on 3 blocks" in whole


def test_in_a_notebook_names_stay_text() -> None:
    model, batches, budget = task("encoder")
    with mimose.auto_checkpoint(model, budget) as handle:
        train(model, batches)
        explanation = handle.explain(**batches[0])
    evil = "<script>alert(1)</script>"
    html = dataclasses.replace(explanation, blocks=(evil,) * 3)._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


@pytest.mark.parametrize(
    ("recoveries", "words"), [(1, "ran out of memory once"), (3, "memory 3 times")]
)
def test_stats_tell_of_memory_that_ran_out(recoveries: int, words: str) -> None:
    assert words in str(Stats(steps=4, shortages=Shortages(recoveries=recoveries)))
    assert "ran out" not in str(Stats(steps=4))


def test_stats_tell_the_uncertainty_and_the_evictions() -> None:
    text = str(Stats(steps=1, reserve_bytes=1, uncertainty=0.01, shortages=Shortages(evictions=2)))
    assert "uncertainty 1.00%" in text
    assert "memory ran short: evicted the kept activations of 2 block runs" in text
    assert "evicted" not in str(Stats(steps=1))
    assert str(Stats()) == "0 steps: 0 observed, 0 planned"
    lost = Stats(steps=3, observed_steps=1, planned_steps=1)
    assert str(lost).startswith("3 steps: 1 observed, 1 planned, 1 not finished\n")


def test_an_observed_step_has_no_plan_in_the_statistics() -> None:
    model, batch = models.Encoder(), texts([50])
    with mimose.auto_checkpoint(model, "64MiB") as handle:
        train(model, batch * 3)
        before = handle.stats()
        assert before.last_plan is not None
        train(model, texts([90]))
        stats = handle.stats()
    assert stats.observed_steps == 3
    assert stats.last_plan is None
    assert stats.last_predicted_peak_bytes is None
    assert stats.last_real_peak_bytes not in (None, before.last_real_peak_bytes)


def test_what_does_not_fit_is_not_said_to_fit_still() -> None:
    model, batches = models.Encoder(), texts([90] * 4)
    with mimose.auto_checkpoint(model, "1MiB") as handle:
        with pytest.warns(mimose.MimoseWarning):
            train(model, batches)
        told = handle.explain(**batches[0])
    assert told.plan is not None
    assert not told.plan.fits
    assert ": DOES NOT FIT: raise the budget" in str(told)
    assert ": fits" not in str(told)


def test_a_detached_handle_explains_the_kind_of_step_that_the_last_one_was() -> None:
    model, batches, budget = task("encoder")
    with mimose.auto_checkpoint(model, budget) as handle, adamw(model) as optimizer:
        for batch in batches:
            models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        attached = handle.explain(**batches[0])
    detached = handle.explain(**batches[0])
    assert detached.at_most_as is None
    assert detached.peak_kept_bytes == pytest.approx(attached.peak_kept_bytes, rel=0.03)
