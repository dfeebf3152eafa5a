"""Contestants train the same model on the same batches, each in its own way."""

from __future__ import annotations

import pytest
import torch
from bench_parts import STEPS, arena, half_tight, surveyed, trained

from mimose.bench.contestant import Match
from mimose.bench.contestants import (
    Plain,
    StaticForData,
    StaticForDrawn,
)
from mimose.bench.extras import BenchError
from mimose.bench.harness import run
from mimose.bench.lineup import CONTESTANTS, contestant_named

RUNNING = (
    "torch-all",
    "hf",
    "hf-every-n",
    "static",
    "static-drawn",
    "paper",
    "greedy+shuttle",
    "dtr",
    "mimose-two-options",
    "mimose",
    "oracle",
)
BLOCKS = 4


@pytest.mark.parametrize("name", [*RUNNING, "dtr-uncapped"])
def test_everybody_gets_the_losses_of_plain_training(name: str) -> None:
    outcome = trained(name)
    assert outcome.missing is None
    assert outcome.steps.loss == trained("plain").steps.loss
    assert None not in outcome.steps.loss


@pytest.mark.parametrize("name", RUNNING)
def test_nobody_but_plain_exceeds_the_budget(name: str) -> None:
    budget = half_tight("QA-Bert")
    assert max(trained(name).steps.held_bytes) <= budget
    assert sum(peak > budget for peak in trained("plain").steps.peak_bytes) >= STEPS // 3


def test_every_step_is_recorded_in_every_column() -> None:
    steps = trained("mimose").steps
    columns = {name: getattr(steps, name) for name in type(steps).__dataclass_fields__}
    assert {name: len(column) for name, column in columns.items()} == dict.fromkeys(columns, STEPS)
    assert steps.lengths == [shape.lengths for shape in arena("QA-Bert").shapes]
    assert all(ms > 0 for ms in steps.milliseconds)


def test_who_recomputes_how_much() -> None:
    recomputed = {name: trained(name).steps.recomputed for name in ("plain", *RUNNING)}
    assert recomputed["plain"] == [0] * STEPS
    assert recomputed["torch-all"] == recomputed["hf"] == [BLOCKS] * STEPS
    assert len(set(recomputed["static"])) == 1
    pairs = zip(recomputed["oracle"], recomputed["static"], strict=True)
    assert all(best <= fixed for best, fixed in pairs if best is not None and fixed is not None)
    assert set(recomputed["oracle"]) != set(recomputed["static"])


def test_a_plan_for_the_batches_drawn_recomputes_no_more_than_one_for_all_of_the_data() -> None:
    survey, budget = surveyed("TC-Bert"), half_tight("TC-Bert")
    drawn, longest = (kind.plan(survey, budget) for kind in (StaticForDrawn, StaticForData))
    assert drawn.fits
    assert drawn.recomputed < longest.recomputed


def test_dtr_tells_what_it_spent_on_deciding_and_on_recomputing() -> None:
    outcome = trained("dtr")
    recomputed = [n for n in outcome.steps.recomputed if n is not None]
    assert outcome.spent["evictions"] == sum(recomputed) > 0
    assert 0 < outcome.spent["recompute_seconds"] < outcome.seconds
    assert 0 < outcome.spent["deciding_seconds"] < outcome.seconds


def test_the_papers_system_tells_what_learning_and_planning_took() -> None:
    spent = trained("paper", steps=STEPS + 4).spent
    assert spent["observed_steps"] == 10
    assert spent["fits"] == 1
    assert spent["plans"] >= 1
    assert 0 < spent["plan_seconds"] <= spent["deciding_seconds"]
    assert spent["fit_seconds"] > 0


def test_mimose_observes_first_and_then_plans_as_the_oracle_does() -> None:
    mimose, oracle = trained("mimose"), trained("oracle")
    observed = mimose.steps.observed
    assert observed[0]
    assert not all(observed)
    assert mimose.spent["observed_steps"] == sum(observed)
    assert mimose.spent["plans"] >= 1
    assert not any(oracle.steps.observed)
    # The last batch is half full, which mimose has not seen before: it plans as if it were full.
    rows = zip(observed, mimose.steps.recomputed, oracle.steps.recomputed, strict=True)
    differences = [abs(ours - best) for seen, ours, best in list(rows)[:-1] if not seen]
    assert max(differences) <= 1


def test_predicted_peaks_are_recorded_beside_real_ones() -> None:
    steps = trained("mimose").steps
    known = [
        (predicted, real)
        for predicted, real, rows in zip(
            steps.predicted_bytes, steps.real_bytes, steps.rows, strict=True
        )
        if predicted is not None and rows == steps.rows[0]
    ]
    assert known
    assert all(predicted == pytest.approx(real, rel=0.1) for predicted, real in known)


def test_a_step_that_runs_out_of_memory_is_recorded_and_training_goes_on() -> None:
    class PlainUnderTheCap(Plain):
        capped = True

    match = Match(arena("QA-Bert"), surveyed("QA-Bert"), half_tight("QA-Bert"))
    outcome = run(PlainUnderTheCap, match)
    failed = outcome.steps.out_of_memory
    assert 0 < outcome.out_of_memory < STEPS
    assert [loss is None for loss in outcome.steps.loss] == failed
    assert [n is None for n in outcome.steps.recomputed] == failed
    first = failed.index(True)
    assert not all(failed[first:])


def test_training_goes_on_after_memory_ran_out_in_the_optimizers_first_step() -> None:
    here = arena("QA-Bert")
    with here.trainee() as trainee:
        trainee.forward(trainee.batch(min(here.shapes), 0)).backward()
        in_use = trainee.meter.read().in_use
        trainee.meter.limit(in_use + 10_000)
        with pytest.raises(torch.OutOfMemoryError):
            trainee.optimizer.step()
        trainee.meter.limit(None)
        trainee.recover()
        assert trainee.step(min(here.shapes), 1).isfinite()


def test_who_cannot_run_says_why() -> None:
    for name in ("compile-budget", "mimose-compiled"):
        assert "dispatch mode" in (trained(name).missing or "")
    xlnet = Match(arena("QA-XLNet"), surveyed("QA-Bert"), None)
    assert "no gradient checkpointing" in (run(contestant_named("hf"), xlnet).missing or "")


def test_every_n_layers_is_as_sparse_as_the_budget_allows() -> None:
    survey = surveyed("QA-Bert")
    match = Match(arena("QA-Bert"), survey, survey.kept_bytes(survey.longest))
    outcome = run(contestant_named("hf-every-n"), match)
    assert outcome.spent == {"every_n_layers": BLOCKS}
    assert set(outcome.steps.recomputed) == {1}


def test_an_unknown_contestant_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(BenchError, match="'nobody'; use one of plain, torch-all, hf"):
        contestant_named("nobody")
    assert len(CONTESTANTS) == 15
