from __future__ import annotations

import pytest

from mimose.estimation.margin import PredictionMargin


def after(*shares: float) -> PredictionMargin:
    prediction_margin = PredictionMargin()
    for share in shares:
        prediction_margin.peaked(10_000, round(10_000 * (1 + share)))
    return prediction_margin


def test_margin_is_the_largest_of_few_shortfalls() -> None:
    assert after(0.001, 0.02, 0.005).margin == pytest.approx(0.02)


def test_bias_downwards_is_believed_only_after_many_steps() -> None:
    assert after(*[-0.02] * 15).margin == 0
    assert after(*[-0.02] * 16).margin == pytest.approx(-0.02)


def test_predictions_that_are_far_too_high_are_believed_to_be_a_little_too_high() -> None:
    assert after(*[-0.5] * 16).margin == pytest.approx(-0.03)


def test_noise_widens_the_margin_to_its_upper_end() -> None:
    noise = [(i % 10 - 5) / 500 for i in range(64)]
    assert after(*noise).margin == pytest.approx(max(noise))


def test_a_single_outlier_in_many_steps_is_outgrown() -> None:
    assert after(0.025, *[0.0] * 63).margin == 0


def test_old_lessons_age_where_peaks_are_hidden() -> None:
    prediction_margin = after(0.02)
    for _ in range(16):
        prediction_margin.peaked_unseen()
    assert prediction_margin.margin == 0


def test_what_is_usual_raises_no_doubt() -> None:
    assert not after(0.01, -0.02, 0.03).in_doubt
    assert after(0.04).in_doubt
    assert after(-0.04).in_doubt


def test_once_reassured_the_same_difference_is_usual() -> None:
    prediction_margin = after(-0.04)
    prediction_margin.reassured()
    assert not prediction_margin.in_doubt
    prediction_margin.peaked(10_000, 9_600)
    assert not prediction_margin.in_doubt
    prediction_margin.peaked(10_000, 9_300)
    assert prediction_margin.in_doubt


def test_running_out_of_memory_ends_the_trust_in_lower_peaks() -> None:
    prediction_margin = after(*[-0.02] * 20)
    prediction_margin.ran_out()
    assert prediction_margin.margin == 0
