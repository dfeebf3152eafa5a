"""Two hundred faults: training is that of a world without them."""

from __future__ import annotations

from harness import Trial

FAULTS = 200


def test_training_under_two_hundred_faults_is_plain_training() -> None:
    seed = faults = recoveries = 0
    while faults < FAULTS:
        outcome = Trial.of(seed).run()
        faults, recoveries = faults + outcome.faults, recoveries + outcome.recoveries
        seed += 1
    assert recoveries > FAULTS // 4
