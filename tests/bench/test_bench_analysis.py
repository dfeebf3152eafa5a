"""Ratios, overhead and goals: arithmetic on records."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_parts import surveyed

from loops import once
from mimose.bench.analysis import Sheet, Spread, time_ratio
from mimose.bench.estimator_tables import by_samples, estimators
from mimose.bench.estimators import compare
from mimose.bench.goals import fullest, goals, left_out_of_static
from mimose.bench.harness import Run, Steps
from mimose.bench.paper_tables import (
    deciding,
    eviction,
    left_unused,
    loosest,
    plans_made,
    predictions,
    stars,
)
from mimose.bench.records import Record, Results
from mimose.bench.tables import ratios
from mimose.bench.waste import parts, shortest_quarter, waste

BUDGET = 10**9
SPENT: dict[str, Any] = {
    "observed_steps": 1,
    "fits": 1,
    "plans": 1,
    "fit_seconds": 0.1,
    "predict_seconds": 0.1,
    "plan_seconds": 0.1,
    "deciding_seconds": 0.3,
}


def made(
    milliseconds: list[float],
    failed: tuple[int, ...] = (),
    recomputed: tuple[int | None, ...] = (),
    **more: Any,
) -> Run:
    count = len(milliseconds)
    steps = Steps(
        rows=[4] * count,
        lengths=[(8,)] * count,
        milliseconds=milliseconds,
        recomputed=list(recomputed) or [None] * count,
        observed=[i == 0 for i in range(count)],
        out_of_memory=[i in failed for i in range(count)],
    )
    return Run(seconds=sum(milliseconds) / 1e3, steps=steps, **more)


def sheet_of(runs: dict[tuple[str, int], Run]) -> Sheet:
    conditions = {"scale": 1, "steps": 2, "small": True, "seed": 0}
    results = Results(Path("x"), {"conditions": conditions})
    results.surveys["QA-Bert"] = surveyed("QA-Bert")
    results.limits["QA-Bert"] = [{"label": "b", "total_bytes": BUDGET, "at_floor": False}]
    for (contestant, number), run in runs.items():
        record = Record(
            task="QA-Bert", budget_bytes=BUDGET, contestant=contestant, round=number, run=run
        )
        results.records[record.key] = record
    return Sheet(results)


def test_whole_runs_are_compared_where_nobody_ran_out_of_memory() -> None:
    assert time_ratio(made([10, 30]), made([10, 10])) == 2.0


def test_only_steps_that_both_finished_are_compared_otherwise() -> None:
    assert time_ratio(made([10, 1], failed=(1,)), made([5, 100])) == 2.0
    assert time_ratio(made([1], failed=(0,)), made([1])) is None


def test_ratios_are_formed_within_a_round() -> None:
    sheet = sheet_of(
        {
            ("mimose", 0): made([10, 10]),
            ("mimose", 1): made([100, 100]),
            ("static", 0): made([20, 20]),
            ("static", 1): made([160, 240]),
            ("static", 2): made([1, 1]),
        }
    )
    assert sheet.ratio("QA-Bert", BUDGET, "mimose", "static") == Spread(0.5, 0.5, 0.5, 2)
    assert sheet.ratio("QA-Bert", BUDGET, "mimose", "oracle") is None


def test_overhead_is_counted_in_iterations_of_the_oracle() -> None:
    ours, oracle = made([3000, 1000], spent=SPENT), made([1000, 1000])
    (found,) = sheet_of({("mimose", 0): ours, ("oracle", 0): oracle}).overhead(
        "QA-Bert", BUDGET, "mimose"
    )
    assert found.collector == pytest.approx(2.0)
    assert found.estimator == pytest.approx(0.2)
    assert found.planner == pytest.approx(0.2)
    assert found.whole == pytest.approx(2.0)
    assert found.plan_milliseconds == pytest.approx(200.0)


def test_steps_under_the_oracles_plan_tell_what_a_planned_step_costs_besides() -> None:
    ours = made([90, 12, 40, 14, 1], recomputed=(4, 3, 5, 0, None), spent=SPENT)
    oracle = made([10, 10, 10, 10, 10], recomputed=(4, 3, 3, 0, None))
    (found,) = sheet_of({("mimose", 0): ours, ("oracle", 0): oracle}).overhead(
        "QA-Bert", BUDGET, "mimose"
    )
    assert found.same_plan_milliseconds == pytest.approx(3.0)  # the first step is observed


def test_goals_say_what_is_reached_what_is_missed_and_what_was_not_measured() -> None:
    sheet = sheet_of({("mimose", 0): made([10.0]), ("torch-all", 0): made([20.0])})
    verdicts = {row[0].split(": ")[1]: row[-1] for row in goals([sheet])}
    assert verdicts["mean time / torch-all's"] == "reached"
    assert verdicts["mean time / static's"] == "not measured"
    slower = sheet_of({("mimose", 0): made([19.0]), ("torch-all", 0): made([20.0])})
    assert goals([slower])[0][1:] == ["at most 0.6", "0.950", "missed"]


def test_without_tasks_whose_longest_batch_was_not_drawn_static_is_judged_again() -> None:
    sheet = sheet_of({("mimose", 0): made([16.0]), ("static", 0): made([20.0])})
    known = sheet.results.surveys["QA-Bert"]
    shorter = min((o.size for o in known.full_batches), key=lambda size: size.dims)
    sheet.results.surveys["QA-Bert"] = replace(known, longest=known.largest)
    sheet.results.surveys["TC-Bert"] = replace(
        known, task="TC-Bert", largest=shorter, longest=known.largest
    )
    sheet.results.limits["TC-Bert"] = sheet.results.limits["QA-Bert"]
    for contestant, seconds in (("mimose", 10.0), ("static", 20.0)):
        record = Record(
            task="TC-Bert", budget_bytes=BUDGET, contestant=contestant, round=0, run=made([seconds])
        )
        sheet.results.records[record.key] = record
    assert left_out_of_static(sheet) == ["TC-Bert"]
    rows = {row[0].split(": ")[1]: row[1:] for row in goals([sheet])}
    assert rows["mean time / static's"] == ["at most 0.83", "0.650", "reached"]
    assert rows["the same without TC-Bert"] == ["at most 0.83", "0.800", "reached"]
    assert "| **without TC-Bert, mean** |  | **0.800** |" in ratios(sheet)


def test_plans_are_compared_in_steps_that_both_had_planned() -> None:
    ours = made([9, 9, 9, 9], recomputed=(4, 3, 2, None))
    theirs = made([9, 9, 9, 9], recomputed=(0, 1, 2, 3))
    sheet = sheet_of({("mimose", 0): ours, ("paper", 0): theirs})
    # The first step is observed, the last one ran out of memory.
    assert sheet.recomputed_by_both("QA-Bert", BUDGET, "mimose", "paper") == (2.5, 1.5)
    assert sheet.recomputed_by_both("QA-Bert", BUDGET, "mimose", "oracle") is None


def test_goals_are_judged_where_most_of_the_papers_cells_were_run() -> None:
    few = sheet_of({("mimose", 0): made([19.0]), ("torch-all", 0): made([20.0])})
    more = sheet_of({("mimose", 0): made([10.0]), ("torch-all", 0): made([20.0])})
    other = {"label": "c", "total_bytes": 2 * BUDGET, "at_floor": False}
    more.results.limits["QA-Bert"].append(other)
    record = Record(
        task="QA-Bert", budget_bytes=2 * BUDGET, contestant="mimose", round=0, run=made([10.0])
    )
    more.results.records[record.key] = record
    assert fullest([few, more]) == fullest([more, few]) == [more]
    assert goals([few, more]) == goals([more])


def test_a_contestant_that_no_budget_changes_counts_for_every_budget() -> None:
    sheet = sheet_of({("torch-all", 0): made([10.0]), ("mimose", 0): made([5.0])})
    assert set(sheet.runs("QA-Bert", 1234, "torch-all")) == {0}
    assert not sheet.runs("QA-Bert", 1234, "mimose")


def test_a_spread_shows_its_rounds() -> None:
    assert Spread.of([]) is None
    one, three = Spread.of([1.0]), Spread.of([1.0, 3.0, 2.0])
    assert one is not None
    assert three is not None
    assert (one.text(), three.text()) == ("1.00", "2.00 (1.00–3.00)")


def test_a_cell_in_which_static_cannot_fit_is_marked_and_not_averaged_in() -> None:
    runs = {("mimose", 0): made([10.0]), ("static", 0): made([20.0])}
    sheet = sheet_of(runs)
    survey, tight = sheet.results.surveys["QA-Bert"], 2**20
    assert sheet.fits("QA-Bert", BUDGET, "static")
    assert not sheet.fits("QA-Bert", tight, "static")
    assert sheet.fits("QA-Bert", tight, "mimose")
    sheet.results.surveys["QA-Bert"] = replace(survey, longest=survey.largest)
    sheet.results.limits["QA-Bert"].append({"label": "t", "total_bytes": tight, "at_floor": False})
    for contestant, seconds in (("mimose", 10.0), ("static", 100.0)):
        record = Record(
            task="QA-Bert", budget_bytes=tight, contestant=contestant, round=0, run=made([seconds])
        )
        sheet.results.records[record.key] = record
    text = ratios(sheet)
    assert "| 0.10 † |" in text
    assert "| **paper's tasks, mean** |  | **0.500** |" in text
    (mean_time,) = (row for row in goals([sheet]) if row[0].endswith("mean time / static's"))
    assert mean_time[2] == "0.500"


def with_memory(run: Run, peaks: list[int], lengths: list[int], held: list[int]) -> Run:
    steps = replace(
        run.steps, peak_bytes=peaks, held_bytes=held, lengths=[(length,) for length in lengths]
    )
    return replace(run, steps=steps)


def test_the_shortest_quarter_is_of_the_smallest_batches() -> None:
    steps = with_memory(made([1.0] * 8), [0] * 8, [9, 2, 8, 3, 7, 6, 5, 4], [0] * 8).steps
    assert shortest_quarter("QA-Bert", steps, range(8)) == [1, 3]
    assert shortest_quarter("QA-Bert", steps, [0, 2, 4]) == [4]


def test_unused_memory_and_lost_time_are_those_of_steps_that_were_finished() -> None:
    lengths = [10, 20, 30, 40, 5]
    static = with_memory(
        made([30, 30, 40, 40, 1], failed=(4,)), [BUDGET // 2, *[BUDGET] * 4], lengths, [0] * 5
    )
    plain = with_memory(made([20, 25, 30, 35, 2]), [0] * 5, lengths, [0] * 5)
    sheet = sheet_of({("static", 0): static, ("plain", 0): plain})
    (found,) = waste(sheet, "QA-Bert", BUDGET, "static")
    assert found.unused_bytes == pytest.approx(BUDGET / 8)
    assert found.unused_bytes_of_short == pytest.approx(BUDGET / 2)
    assert found.short_over_plain == pytest.approx(1.5)
    assert "| static | 0.12 | 0.47 | 1.50 |" in (left_unused(sheet) or "")
    assert "| 1.273 |" in (loosest(sheet) or "")  # of the four steps that both finished


def test_shares_of_deciding_and_recomputing_are_of_the_whole_run() -> None:
    spent = {"deciding_seconds": 0.1, "recompute_seconds": 0.4, "evictions": 3}
    run = with_memory(made([1000, 1000], spent=spent), [5, 7], [8, 8], [6, 12])
    sheet = sheet_of({("dtr", 0): run})
    (found,) = parts(sheet, "QA-Bert", BUDGET, "dtr")
    assert (found.deciding, found.recomputing) == (pytest.approx(0.05), pytest.approx(0.2))
    assert (found.most_held_bytes, found.most_beyond_use_bytes) == (12, 5)
    assert "| dtr | 5.00 | 20.00 |" in (eviction(sheet) or "")
    assert eviction(sheet_of({("mimose", 0): made([10.0])})) is None


def test_overhead_is_told_in_milliseconds_too() -> None:
    ours, oracle = made([3000, 1000], spent=SPENT), made([1000, 1000])
    text = deciding(sheet_of({("mimose", 0): ours, ("oracle", 0): oracle})) or ""
    # Two seconds for the observed step, 200 ms for the fit and for the plan, both with predicting.
    assert "| 2000.00 × 1 | 200.00 × 1 | 200.00 × 1 | 1000.0 | 2400 | 2.40 |" in text


def test_new_plans_stand_beside_the_sizes_of_the_run() -> None:
    sheet = sheet_of({("mimose", 0): made([10.0, 10.0], spent=SPENT)})
    assert "| mimose | 1 | 2 | – |" in (plans_made(sheet) or "")


def test_predictions_are_judged_by_how_much_they_are_too_low_and_too_high() -> None:
    run = made([10.0] * 4)
    steps = replace(
        run.steps,
        rows=[4, 4, 4, 2],  # the last batch is not full
        predicted_bytes=[None, 990, 1040, 5000],
        real_bytes=[None, 1000, 1000, 1000],
    )
    sheet = sheet_of({("mimose", 0): replace(run, steps=steps)})
    assert "| mimose | 2 | 1.000% | 2.000% | 4.000% |" in (predictions(sheet) or "")


def test_steps_whose_prediction_is_not_trusted_stand_beside_the_others() -> None:
    run = made([10.0] * 3)
    steps = replace(
        run.steps,
        rows=[4, 4, 4],
        predicted_bytes=[None, None, 1010],
        untrusted_bytes=[1100, 1300, None],
        real_bytes=[1000, 1000, 1000],
    )
    text = predictions(sheet_of({("mimose", 0): replace(run, steps=steps)})) or ""
    assert "| mimose | 1 | 0.000% | 1.000% | 1.000% | 2 | 0.000% | 20.000% | 30.000% |" in text
    assert "not trusted" in text
    without = replace(steps, untrusted_bytes=[])  # an older file
    text = predictions(sheet_of({("mimose", 0): replace(run, steps=without)})) or ""
    assert "not trusted" not in text


def test_the_stars_are_the_least_and_the_most_of_the_largest_batch() -> None:
    sheet = sheet_of({("torch-all", 0): made([30.0]), ("plain", 0): made([20.0])})
    survey = surveyed("QA-Bert")
    peaks = (survey.needed_bytes, survey.kept_bytes(survey.largest))
    least, most = (f"{peak / 2**30:.2f}" for peak in peaks)
    assert f"| QA-Bert | {least} | {most} | 1.50 |" in stars(sheet)


@once
def compared() -> list[dict[str, Any]]:
    return compare(surveyed("QA-Bert").full_batches)


def test_a_quadratic_beats_a_line_and_ours_is_no_worse_than_a_tree() -> None:
    rows = compared()
    for error in ("mean_error", "layers_mean_error"):
        of = {row["estimator"]: row.get(error) for row in rows if row["samples"] == 8}
        assert of["polynomial, degree 2"] < of["polynomial, degree 1"]
        assert of["mimose"] < 0.01 < of["decision tree"]
    assert {row["samples"] for row in rows} == {4, 6, 8, 10}


def test_sizes_that_nothing_is_known_of_yet_are_counted_not_guessed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "xgboost", None)  # which takes longer than all others
    rows = compare(surveyed("ViT").full_batches)
    ours = [row for row in rows if row["estimator"] == "mimose"]
    assert {4, 6} <= {row["samples"] for row in ours}
    assert all("missing" in row or 0 <= row["not_predicted"] < 1 for row in ours)
    others = (row for row in rows if row["estimator"] == "decision tree")
    assert all(row["not_predicted"] == 0 for row in others)


def test_the_row_of_xgboost_says_when_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgboost", None)
    rows = compare(surveyed("QA-Bert").full_batches)
    (row,) = (r for r in rows if r["estimator"] == "XGBoost" and r["samples"] == 10)
    assert row == {"estimator": "XGBoost", "samples": 10, "missing": "xgboost is not installed"}
    assert "| XGBoost | 10 | xgboost is not installed | – |" in estimators({"QA-Bert": rows})
    assert "| XGBoost | – | – | – | – |" in by_samples({"QA-Bert": rows})


def test_xgboost_needs_more_samples_than_a_quadratic() -> None:
    pytest.importorskip("xgboost")
    rows = compared()
    error = {row["estimator"]: row["mean_error"] for row in rows if row["samples"] == 10}
    assert error["polynomial, degree 2"] < error["XGBoost"] < 1.0
