"""Blocks that are alike tell of each other while a step is observed: most of them are kept then."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import mimose
import models
from mimose.kin import Kin
from mimose.observations import StepObservation
from mimose.steps import ObservedStep
from training import Batch, labelled, peak_of_plain, texts, tight_budget, train

GROWING = (60, 80, 100, 120, 140)


class Looks:
    """How many runs of each observed step were kept."""

    def __init__(self, handle: mimose.Mimose) -> None:
        self._handle = handle
        self.kept: list[int] = []

    def __call__(self) -> None:
        step = self._handle._last_step
        if isinstance(step, ObservedStep):
            self.kept.append(step.ride.kept)


@pytest.fixture(autouse=True)
def _collects() -> Iterator[None]:
    yield
    gc.collect()


def observations(handle: mimose.Mimose, batches: list[Batch]) -> list[StepObservation]:
    """What is known after training on these, times aside."""
    seen = handle._scheduler.knowledge.seen_like(handle._size_of((), batches[0]))
    return [plain_times(one) for one in seen]


def plain_times(seen: StepObservation) -> StepObservation:
    plain = seen.to_plain()
    at = StepObservation.from_plain(plain).runs[0].__slots__.index("seconds")
    for run in plain["runs"]:
        run[at] = 0.0
    return StepObservation.from_plain(plain)


def trained(model: nn.Module, batches: list[Batch], budget: Any, *, sampling: bool) -> Any:
    handle = mimose.auto_checkpoint(model, budget)
    handle._scheduler._samples = sampling
    looks = Looks(handle)
    with handle:
        losses = train(model, batches, after_step=looks)
        return losses, looks.kept, observations(handle, batches), handle.stats()


def bert_of(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return models.bert(num_hidden_layers=layers)[0].train()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", ["bert", "encoder", "convolutions"])
def test_part_of_the_blocks_tells_all_that_all_would(name: str, set_to_none: bool) -> None:
    """Every byte of every observation is the same, whether the other blocks were kept or not."""
    made, batches = MAKERS[name]
    found = []
    for sampling in (True, False):
        torch.manual_seed(0)
        model, handed = made(), batches(GROWING)
        handle = mimose.auto_checkpoint(model, "1GiB")
        handle._scheduler._samples = sampling
        handle._planned = lambda *_: None  # observe every step
        looks = Looks(handle)
        with handle:
            losses = train(model, handed, after_step=looks, set_to_none=set_to_none)
            handle._read_observations()
            found.append((losses, looks.kept, observations(handle, handed)))
    (losses, kept, seen), (all_losses, none_kept, all_seen) = found
    assert losses == all_losses
    assert none_kept == [0] * len(GROWING)
    assert kept[0] == 0
    assert sum(k > 0 for k in kept) >= len(GROWING) - 2
    assert [one.to_plain() for one in seen] == [one.to_plain() for one in all_seen]


class Normed(nn.Module):
    """Ends in what its backward needs: its output is kept twice over."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(width, width, 3, padding=1), nn.BatchNorm1d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


class Chain(nn.Module):
    """An embedding, these blocks, a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(2))


MAKERS: dict[str, Any] = {
    "bert": (lambda: bert_of(6), labelled),
    "encoder": (lambda: models.Encoder(6), texts),
    "convolutions": (lambda: Chain(*(Normed() for _ in range(6))), texts),
}


def test_observed_steps_stay_within_a_tight_budget() -> None:
    """A size that is only guessed is observed under the budget, with what can be kept."""
    torch.manual_seed(0)
    model, batches = models.Encoder(8), texts([100, 110, 105, 120, 115, 130, 112, 140, 160, 125])
    budget = tight_budget(model, batches, share=0.6)
    _, kept, _, stats = trained(model, batches, budget, sampling=True)
    assert any(kept)
    assert stats.peak_bytes <= budget


def test_losses_are_those_of_plain_training() -> None:
    torch.manual_seed(0)
    model, batches = models.Encoder(6), texts([50, 70, 60, 90, 65, 120, 80, 75, 100, 85])
    plain = train(copy.deepcopy(model), batches)
    losses, kept, _, _ = trained(model, batches, "1GiB", sampling=True)
    assert any(kept)
    assert losses == plain


class Local(nn.Module):
    """Attention within a window: on short texts like any other, on long ones smaller."""

    def __init__(self, window: int | None, width: int = 16) -> None:
        super().__init__()
        self.window = window
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.transpose(1, 2)
        near = rows if self.window is None else rows[:, : self.window]
        weights = torch.softmax(near @ near.transpose(1, 2), -1)
        mixed = torch.sigmoid(self.out(weights @ near))
        if mixed.shape[1] < rows.shape[1]:
            mixed = torch.cat([mixed, rows[:, mixed.shape[1] :]], 1)
        return (rows + mixed).transpose(1, 2)


def test_blocks_that_are_alike_only_on_short_texts_are_found_out() -> None:
    windows = (None, 40, None, None, 40, 40, None, 40)
    batches = texts([36, 38, 60, 80, 100, 120, 90, 70, 110, 95])
    torch.manual_seed(0)
    model = Chain(*(Local(window) for window in windows))
    high = peak_of_plain(model, batches)
    handle = mimose.auto_checkpoint(model, 2 * high, blocks=list(model.blocks))
    looks = Looks(handle)
    with handle:
        train(model, batches, after_step=looks)
        handle._read_observations()
        seen = observations(handle, batches)
        longest = max(seen, key=lambda one: one.size.dims)
    assert looks.kept[1] > 0  # they looked alike
    saved = {run.saved_bytes for run in longest.runs[1:-1]}
    assert len(saved) == 2
    assert all(
        (run.saved_bytes == max(saved)) == (window is None)
        for run, window in zip(longest.runs[1:-1], windows[1:-1], strict=True)
    )


class Refuses(nn.Module):
    """Runs out of memory once, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Normed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self is ARMED[0]:
            ARMED[0] = None
            raise torch.OutOfMemoryError("no more")
        return y


ARMED: list[nn.Module | None] = [None]


def test_kept_block_that_runs_out_of_memory_while_observed_is_recomputed() -> None:
    torch.manual_seed(0)
    model, batches = Chain(*(Refuses() for _ in range(6))), texts([60, 70, 80, 90, 100])
    plain = train(copy.deepcopy(model), batches)
    handle = mimose.auto_checkpoint(model, "1GiB", blocks=list(model.blocks))
    handle._planned = lambda *_: None
    looks = Looks(handle)

    def after_step() -> None:
        looks()
        if len(looks.kept) == 2:
            ARMED[0] = model.blocks[1]

    with handle:
        losses = train(model, batches, after_step=after_step)
        assert handle.stats().recoveries == 1
    assert losses == plain
    assert looks.kept[1] > 1
    assert looks.kept[3] == 0  # what was known of kin does not count any more
    assert ARMED == [None]


def test_the_first_and_the_last_run_are_like_no_other() -> None:
    torch.manual_seed(0)
    model, batches = models.Encoder(5), texts([40, 50])
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all") as handle:
        handle._planned = lambda *_: None
        train(model, batches)
        handle._read_observations()
        (seen,) = observations(handle, batches)
    kin = Kin.among(seen)
    assert kin.kinds == (0, 1, 1, 1, 4)
    assert len(kin) == 3


@pytest.mark.parametrize("planner", ["recompute_all", "greedy", "static", "keep_all"])
def test_other_planners_observe_every_block(planner: Any) -> None:
    torch.manual_seed(0)
    model, batches = models.Encoder(6), texts(GROWING)
    handle = mimose.auto_checkpoint(model, "1GiB", planner=planner)
    looks = Looks(handle)
    with handle:
        train(model, batches, after_step=looks)
    assert not any(looks.kept)
