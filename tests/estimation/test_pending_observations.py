"""A device reports times late: they are used when they arrive, without waiting for them."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

import torch

import models
from loops import Batch, texts, train
from mimose.costs import StepObservation
from mimose.estimation import CostModel
from mimose.memory import Clock
from mimose.reporting import Recorder, read_recording
from mimose.training import Subscriber
from parts import Assembled, Observations


class LateClock(Clock):
    """Measures each run's time as the number of its step.

    Returns None while it is `late`, and for steps from `late_from` on.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.late, self.step, self.marks = True, 0, 0
        self.late_from = 1 << 30

    def mark(self) -> tuple[int, int]:
        self.marks += 1
        return self.step, self.marks

    def seconds(self, start: tuple[int, int], end: tuple[int, int]) -> float | None:
        return None if self.late or start[0] >= self.late_from else float(start[0])


def seconds_of(*observations: StepObservation) -> set[float]:
    """The times of all runs of these observations."""
    return {run.nanoseconds / 1e9 for seen in observations for run in seen.runs}


class Observing:
    """A handle that only observes, under a late clock from the second step on."""

    def __init__(self, record: Path | None = None) -> None:
        self.model = models.Encoder()
        self.handle = Assembled(self.model, "1GiB", observe_only=True)
        if record is not None:
            self.handle.subscribe(Recorder(record))
        train(self.model, texts([30]))
        self.clock = self.handle.setting.clock = LateClock()

    def train(self, *batches: Batch) -> None:
        for batch in batches:
            self.clock.step += 1
            train(self.model, [batch])
        self.handle.stats()

    def times_come(self) -> None:
        self.clock.late = False
        self.handle.stats()

    @property
    def cost_model(self) -> CostModel:
        """The cost model of the present regime."""
        return self.handle.scheduler.cost_model

    @property
    def observations(self) -> list[StepObservation]:
        return list(self.cost_model.observations)

    @property
    def seconds(self) -> list[set[float]]:
        """The times of the runs of each observation, the oldest observation first."""
        return [seconds_of(seen) for seen in self.observations]


def test_late_times_are_used_and_are_not_another_observation() -> None:
    run = Observing()
    cost_model = run.cost_model
    run.train(*texts([40, 50, 60]))
    observed, version = cost_model.observed, cost_model.version
    assert all(max(seconds) < 1e-3 for seconds in run.seconds)  # assumed times, from the bytes
    run.times_come()
    assert run.seconds == [{1.0}, {2.0}, {3.0}]
    assert cost_model.observed == observed
    assert cost_model.version > version  # so new plans are made
    run.handle.detach()


def test_late_times_count_in_predictions_of_sizes_never_seen() -> None:
    run = Observing()
    cost_model = run.cost_model
    sizes = texts([40, 60, 80, 100, 70])
    run.train(*sizes[:4])
    run.times_come()
    prediction = cost_model.predict(run.handle.engine.size_of((), sizes[4]))
    assert prediction is not None
    assert all(1e9 <= cost.nanoseconds <= 4e9 for cost in prediction.profile.runs)
    run.handle.detach()


def test_until_times_come_those_that_are_predicted_count() -> None:
    run = Observing()
    run.train(*texts([40, 60, 80, 100]))
    run.times_come()
    run.clock.late = True
    run.train(*texts([70]))
    assert all(1.0 <= seconds <= 4.0 for seconds in run.seconds[-1])
    run.times_come()
    assert run.seconds[-1] == {5.0}
    run.handle.detach()


def test_predicted_times_follow_from_those_that_come_at_the_same_moment() -> None:
    """As they do while the host is a step ahead of the device."""
    run = Observing()
    run.train(*texts([40, 60, 80, 100]))
    run.clock.late_from = run.clock.step = 5
    train(run.model, texts([70]))
    run.times_come()
    assert run.seconds[:-1] == [{1.0}, {2.0}, {3.0}, {4.0}]
    assert all(1.0 <= seconds <= 4.0 for seconds in run.seconds[-1])
    run.handle.detach()


def test_late_times_do_not_clear_a_later_surprise() -> None:
    run = Observing()
    run.train(*texts([40, 50]))
    reliability = run.cost_model.reliability
    reliability.surprised()
    run.times_come()
    assert reliability.suspects(run.observations[0].size)
    run.handle.detach()


def test_late_times_of_an_older_observation_are_not_those_of_a_newer_one() -> None:
    run = Observing()
    run.train(*texts([40, 50, 40]))
    run.times_come()
    assert run.seconds == [{2.0}, {3.0}]
    run.handle.detach()


def test_late_times_go_to_the_regime_that_they_were_seen_in() -> None:
    run = Observing()
    regimes = []
    for trained, batch in zip((True, False, True, False), texts([40, 50, 60, 70]), strict=True):
        run.model.encoder.layers[2].requires_grad_(trained)
        run.train(batch)
        regimes.append(run.cost_model)
    assert regimes[0] is regimes[2] is not regimes[1]
    run.times_come()
    for cost_model, times in zip(regimes[:2], ({1.0, 3.0}, {2.0, 4.0}), strict=True):
        assert seconds_of(*cost_model.observations) == times
    run.handle.detach()


def test_a_recording_has_late_times_and_no_additional_observations(
    tmp_path: Path,
) -> None:
    run = Observing(tmp_path / "run.jsonl")
    run.train(*texts([40, 50]))
    run.model.encoder.layers[2].requires_grad_(False)
    run.train(*texts([60]))
    run.times_come()
    run.model.encoder.layers[2].requires_grad_(True)
    run.train(*texts([70]))
    run.handle.detach()
    recording = read_recording(tmp_path / "run.jsonl")
    whole = [seen for seen in recording.observations if not seen.provisional]
    assert [seconds_of(seen) for seen in whole] == [{1.0}, {2.0}, {4.0}]
    assert len(list(recording.cost_model().observations)) == 3


class ReadsAll(Subscriber):
    """Reads the statistics at every event of an observation, which reads all pending ones."""

    def __init__(self, handle: Assembled) -> None:
        self.handle = handle
        self.timings = 0

    def timed(self, observation: StepObservation, regime: Hashable) -> None:
        self.timings += 1
        self.handle.stats()


def test_a_subscriber_that_is_told_of_times_may_read_the_statistics() -> None:
    run = Observing()
    subscriber = ReadsAll(run.handle)
    run.handle.subscribe(subscriber)
    run.train(*texts([40, 50, 60]))
    run.times_come()
    assert subscriber.timings == 3
    assert run.seconds == [{1.0}, {2.0}, {3.0}]
    run.handle.detach()


class TellsSome(LateClock):
    """A clock of a device that has only finished the first run's recompute."""

    def seconds(self, start: tuple[int, int], end: tuple[int, int]) -> float | None:
        return 1.0 if end[1] == 2 else None


def test_measured_and_assumed_times_are_not_mixed() -> None:
    run, seen = Observing(), Observations()
    run.handle.setting.clock = TellsSome()
    run.handle.subscribe(seen)
    train(run.model, texts([40]))
    run.handle.stats()
    observation = seen.whole[-1]
    assert str(observation.size) == "4×40"
    stand_ins = [round(r.saved * 1e-12 * 1e9) for r in observation.runs]
    assert [r.nanoseconds for r in observation.runs] == stand_ins
    run.handle.detach()
