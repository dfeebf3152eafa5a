"""What the evaluator says of a schedule is what a step that follows it takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mimose
import models
from loops import counted, texts, train
from mimose.comparison.evaluation import evaluate
from mimose.comparison.phases import Phases
from mimose.comparison.schedules import Schedule
from mimose.comparison.stages import Chain
from mimose.comparison.sublinear import Segments, schedule_of_segments
from mimose.costs.timeline import Profile
from mimose.reporting import Outlook, read_recording

LAYERS, BATCH, LENGTH = 6, 8, 120
CUTS: list[Segments] = [
    (range(6),),
    (range(2), range(2, 4), range(4, 6)),
    (range(3), range(3, 6)),
    (range(5), range(5, 6)),
    (range(1), range(1, 5), range(5, 6)),
]


@pytest.fixture
def encoder() -> models.Encoder:
    """One for each test: the counter must find its parameters, and what is older is frozen."""
    return models.Encoder(LAYERS, dropout=0.0)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """What mimose has observed of steps of this size."""
    path = tmp_path_factory.mktemp("executed") / "run.jsonl"
    model = models.Encoder(LAYERS, dropout=0.0)
    with mimose.auto_checkpoint(model, "1GiB", record=path):
        train(model, texts([LENGTH] * 6, BATCH))
    recording = read_recording(path)
    found = Outlook.of(recording).profile(recording.steps[-1].size)
    assert found is not None
    return found


def run_segments(layers: nn.ModuleList, segments: Segments, x: torch.Tensor) -> torch.Tensor:
    for segment in segments:
        part = nn.Sequential(*(layers[k] for k in segment))
        last = segment == segments[-1]
        x = part(x) if last else checkpoint(part, x, use_reentrant=False)
    return x


def run_nested(layers: nn.ModuleList, inner: range, x: torch.Tensor) -> torch.Tensor:
    """A checkpoint around the first layers, with another one inside for some of these."""
    before = nn.Sequential(*(layers[k] for k in range(inner.start)))
    within = nn.Sequential(*(layers[k] for k in inner))

    def both(x: torch.Tensor) -> torch.Tensor:
        return within(checkpoint(before, x, use_reentrant=False))

    x = checkpoint(both, x, use_reentrant=False)
    return nn.Sequential(*(layers[k] for k in range(inner.stop, LAYERS)))(x)


def measured(encoder: models.Encoder, body: Callable[..., torch.Tensor]) -> int:
    """The rise of the memory in use in one step."""
    ids = texts([LENGTH], BATCH)[0]["input_ids"]
    with counted() as counter:
        start = counter.in_use
        x = body(encoder.encoder.layers, encoder.embedding(ids))
        out = encoder.head(x.mean(1))
        del x
        out.float().pow(2).mean().backward()
        return counter.peak - start


def predicted(profile: Profile, schedule: Schedule) -> int:
    return (profile.prelude or 0) + evaluate(profile, schedule).peak_bytes


@pytest.mark.parametrize("segments", CUTS, ids=lambda cut: "-".join(str(len(s)) for s in cut))
def test_step_in_segments_takes_what_the_evaluator_says(
    encoder: models.Encoder, profile: Profile, segments: Segments
) -> None:
    def body(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return run_segments(layers, segments, x)

    schedule = schedule_of_segments(Chain.of(profile), segments)
    assert predicted(profile, schedule) == pytest.approx(measured(encoder, body), rel=0.02)


@pytest.mark.parametrize("inner", [range(1, 4), range(2, 4), range(3, 5)])
def test_step_with_nested_recomputes_takes_what_the_evaluator_says(
    encoder: models.Encoder, profile: Profile, inner: range
) -> None:
    def body(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return run_nested(layers, inner, x)

    # The phases of the last inner layer and of the last one before these start from the first.
    outer_phase, inner_phase = inner.stop - 1, inner.start - 1
    starts = tuple(0 if k in (outer_phase, inner_phase) else None for k in range(LAYERS))
    kept = [LAYERS] * (LAYERS - inner.stop)
    sources = (*[inner_phase] * inner.start, *[outer_phase] * len(inner), *kept)
    schedule = Phases(starts, sources, (False,) * LAYERS).schedule()
    assert predicted(profile, schedule) == pytest.approx(measured(encoder, body), rel=0.02)
