"""What a user's subscriber receives, and that its errors cost no step."""

from __future__ import annotations

from typing import Any

import pytest

import mimose
import models
from loops import texts
from mimose.training import StepRecord, Subscriber


class Counts(Subscriber):
    def __init__(self) -> None:
        self.steps = 0

    def step_over(self, record: StepRecord) -> None:
        self.steps += 1


class Fails(Counts):
    def step_over(self, record: StepRecord) -> None:
        super().step_over(record)
        raise KeyError("loss")


def train(model: Any, lengths: list[int]) -> None:
    for batch in texts(lengths):
        models.loss_of(model, batch).backward()


def test_a_subscriber_that_raises_gets_no_more_events_and_training_goes_on() -> None:
    model, counts, fails = models.Encoder(), Counts(), Fails()
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        handle.subscribe(fails)
        handle.subscribe(counts)
        with pytest.warns(mimose.MimoseWarning, match=r"Fails\.step_over\(\) raised KeyError"):
            train(model, [8])
        train(model, [9, 10])
    assert fails.steps == 1
    assert counts.steps == 3


@pytest.mark.parametrize("subscriber", [3, None, Counts, print])
def test_what_is_no_subscriber_is_refused(subscriber: Any) -> None:
    refused = pytest.raises(mimose.ArgumentError, match=r"subclass of mimose\.training\.Subscriber")
    with mimose.auto_checkpoint(models.Encoder(), "1GiB") as handle, refused:
        handle.subscribe(subscriber)
