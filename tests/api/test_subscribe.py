"""What a user's subscriber receives, and that its errors cost no step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mimose
import models
from compare import assert_same_gradients, no_hooks
from loops import places, texts
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


class CallsAt(Subscriber):
    """Calls a function at the first event of one kind."""

    def __init__(self, event: str, call: Callable[[], object]) -> None:
        self.called = False

        def at_event(*_: Any, **__: Any) -> None:
            if not self.called:
                self.called = True
                call()

        setattr(self, event, at_event)


@pytest.mark.parametrize("budget", ["1GiB", "1MiB"])
@pytest.mark.parametrize(
    "event",
    ["run_starts", "step_opens", "step_starts", "regime_entered", "learned", "step_over", "noted"],
)
@pytest.mark.filterwarnings("ignore::mimose.MimoseWarning")
def test_a_subscriber_may_detach_in_any_event_and_training_goes_on(event: str, budget: str) -> None:
    model = models.Encoder()
    plain, before = copy.deepcopy(model), places(model)
    lengths = [8, 9, 10, 11, 12, 13, 14, 15]
    torch.manual_seed(0)
    train(plain, lengths)
    handle = mimose.auto_checkpoint(model, budget)
    subscriber = CallsAt(event, handle.detach)
    handle.subscribe(subscriber)
    torch.manual_seed(0)
    train(model, lengths)
    assert subscriber.called
    assert not handle.attached
    assert places(model) == before
    assert no_hooks()
    assert_same_gradients(model, plain)
