from __future__ import annotations

import pytest

from mimose.estimation.margin import Adaptation


def after(*shares: float) -> Adaptation:
    adaptation = Adaptation()
    for share in shares:
        adaptation.peaked(10_000, round(10_000 * (1 + share)))
    return adaptation


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
    adaptation = after(0.02)
    for _ in range(16):
        adaptation.peaked_unseen()
    assert adaptation.margin == 0


def test_what_is_usual_raises_no_doubt() -> None:
    assert not after(0.01, -0.02, 0.03).in_doubt
    assert after(0.04).in_doubt
    assert after(-0.04).in_doubt


def test_once_reassured_the_same_difference_is_usual() -> None:
    adaptation = after(-0.04)
    adaptation.reassured()
    assert not adaptation.in_doubt
    adaptation.peaked(10_000, 9_600)
    assert not adaptation.in_doubt
    adaptation.peaked(10_000, 9_300)
    assert adaptation.in_doubt


def test_running_out_of_memory_ends_the_trust_in_lower_peaks() -> None:
    adaptation = after(*[-0.02] * 20)
    adaptation.ran_out()
    assert adaptation.margin == 0
