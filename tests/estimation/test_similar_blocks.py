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
from loops import (
    Batch,
    adamw,
    labelled,
    peak_of_plain,
    peak_of_recomputing,
    texts,
    tight_budget,
    train,
)
from mimose.costs.observations import StepObservation
from mimose.estimation.similar_blocks import SimilarBlocks
from mimose.training.steps import ObservedStep

GROWING = (60, 80, 100, 120, 140, 160)


class Looks:
    """How many runs of each observed step were kept."""

    def __init__(self, handle: mimose.Mimose) -> None:
        self._handle = handle
        self.kept: list[int] = []

    def __call__(self) -> None:
        step = self._handle._engine._last_step
        if isinstance(step, ObservedStep):
            self.kept.append(step.collector.kept)


@pytest.fixture(autouse=True)
def _collects() -> Iterator[None]:
    yield
    gc.collect()


def observations(handle: mimose.Mimose, batches: list[Batch]) -> list[StepObservation]:
    """What is known after training on these, times aside."""
    seen = handle._engine.scheduler.cost_model.seen_like(handle._engine.size_of((), batches[0]))
    return [plain_times(one) for one in seen]


def plain_times(seen: StepObservation) -> StepObservation:
    plain = seen.to_plain()
    at = StepObservation.from_plain(plain).runs[0].__slots__.index("seconds")
    for run in plain["runs"]:
        run[at] = 0.0
    return StepObservation.from_plain(plain)


def trained(model: nn.Module, batches: list[Batch], budget: Any, *, sampling: bool) -> Any:
    handle = mimose.auto_checkpoint(model, budget)
    handle._engine.scheduler._samples = sampling
    looks = Looks(handle)
    with handle:
        losses = train(model, batches, after_step=looks)
        return losses, looks.kept, observations(handle, batches), handle.stats()


def bert_of(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return models.bert(num_hidden_layers=layers)[0].train()


WAYS: dict[str, dict[str, Any]] = {
    "cleared": {},
    "zeroed": {"set_to_none": False},
    "accumulated": {"micro_steps": 2},
}


def watched(name: str, way: str, *, sampling: bool) -> tuple[list[float], list[int], list[Any]]:
    """Losses, how many runs were kept, and what was seen, if every step is observed."""
    gc.collect()  # on a CPU memory is counted by process: nothing of another run may die in this
    torch.manual_seed(0)
    made, batches = MAKERS[name]
    model, handed = made(), batches(GROWING)
    handle = mimose.auto_checkpoint(model, "1GiB")
    handle._engine.scheduler._samples = sampling
    handle._engine._planned = lambda *_: None
    looks = Looks(handle)
    with handle:
        losses = train(model, handed, after_step=looks, **WAYS[way])
        handle._engine.read_observations()
        return losses, looks.kept, [one.to_plain() for one in observations(handle, handed)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["bert", "frozen", "encoder", "convolutions"])
def test_part_of_the_blocks_tells_all_that_all_would(name: str, way: str) -> None:
    """Every byte of every observation is the same, whether the other blocks were kept or not."""
    losses, kept, seen = watched(name, way, sampling=True)
    all_losses, none_kept, all_seen = watched(name, way, sampling=False)
    assert losses == all_losses
    assert none_kept == [0] * len(GROWING)
    assert kept[0] == 0
    assert sum(k > 0 for k in kept) >= len(GROWING) - 2
    assert seen == all_seen


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


def half_frozen() -> nn.Module:
    model = bert_of(8)
    for name, parameter in model.named_parameters():
        lower = any(f"layer.{i}." in name for i in range(3))
        parameter.requires_grad = "embeddings" not in name and not lower
    return model


MAKERS: dict[str, Any] = {
    "bert": (lambda: bert_of(6), labelled),
    "frozen": (half_frozen, labelled),
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


class Over(nn.Module):
    """Attention over all places of an image."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(torch.softmax(q @ k.transpose(1, 2), -1) @ v)


class Vision(nn.Module):
    """An image in patches: memory grows with the fourth power of its side."""

    def __init__(self, layers: int = 8, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.ModuleList(Over(width) for _ in range(layers))
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def test_images_that_grow_in_both_directions_stay_within_a_tight_budget() -> None:
    torch.manual_seed(0)
    model = Vision()
    images = [{"x": torch.randn(2, 3, side, side)} for side in (48, 64, 72, 80, 88, 100, 112)]
    budget = tight_budget(model, images, share=0.15)
    _, kept, _, stats = trained(model, images, budget, sampling=True)
    assert any(kept)
    assert stats.peak_bytes <= budget


def test_second_pass_that_is_larger_than_the_first_stays_within_the_budget() -> None:
    def both(model: nn.Module, batch: Batch) -> torch.Tensor:
        first = models.loss_of(model, {"input_ids": batch["a"]})
        return first + models.loss_of(model, {"input_ids": batch["b"]})

    torch.manual_seed(0)
    model = Chain(*(Local(None) for _ in range(8)))
    lengths = [(300, 300), (300, 300), (150, 420), (152, 430), (154, 440)]
    pairs = [{"a": texts([a])[0]["input_ids"], "b": texts([b])[0]["input_ids"]} for a, b in lengths]
    low, high = (
        peak_of_recomputing(model, pairs, loss_of=both),
        peak_of_plain(model, pairs, loss_of=both),
    )
    budget = int(low + 0.2 * (high - low))
    handle = mimose.auto_checkpoint(model, budget, blocks=list(model.blocks))
    looks = Looks(handle)
    with handle:
        train(model, pairs, loss_of=both, after_step=looks)
        assert handle.stats().peak_bytes <= budget
    assert any(looks.kept)


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
        handle._engine.read_observations()
        seen = observations(handle, batches)
        longest = max(seen, key=lambda one: one.size.dims)
    assert looks.kept[1] > 0  # they looked alike
    saved = {run.saved_bytes for run in longest.runs[1:-1]}
    assert len(saved) == 2
    assert all(
        (run.saved_bytes == max(saved)) == (window is None)
        for run, window in zip(longest.runs[1:-1], windows[1:-1], strict=True)
    )


class SavesLittle(torch.autograd.Function):
    """Mixes rows, so many at a time, and saves its input alone, as flash kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        parts = [torch.softmax(part @ x.transpose(1, 2), -1) @ x for part in x.split(rows, 1)]
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * 1.0, None


class Hungry(nn.Module):
    """Saves the same whatever `rows` is, and needs more and more memory while it runs."""

    def __init__(self, rows: int, width: int = 16) -> None:
        super().__init__()
        self.rows = rows
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2)
        x = x + SavesLittle.apply(x, self.rows)
        return (x + self.down(torch.nn.functional.gelu(self.up(x)))).transpose(1, 2)


def test_blocks_that_differ_only_in_what_they_need_while_they_run_are_found_out() -> None:
    rows = (64, 1000, 1000, 1000, 1000, 64, 64, 64, 64)
    lengths, spikes = [60, 64, 120, 240, 400, 500], []
    for sampling in (True, False):
        gc.collect()
        torch.manual_seed(0)
        model, batches = Chain(*map(Hungry, rows)), texts(lengths)
        handle = mimose.auto_checkpoint(model, "1GiB", blocks=list(model.blocks))
        handle._engine.scheduler._samples = sampling
        handle._engine._planned = lambda *_: None
        with handle:
            train(model, batches)
            handle._engine.read_observations()
            longest = max(observations(handle, batches), key=lambda one: one.size.dims)
        spikes.append([run.spike_bytes for run in longest.runs])
    assert spikes[0] == spikes[1]


def test_steps_that_break_off_say_nothing_of_kin() -> None:
    torch.manual_seed(0)
    model = models.Encoder(8)
    handle = mimose.auto_checkpoint(model, "1GiB")
    handle._engine._planned = lambda *_: None
    looks = Looks(handle)
    weight = model.encoder.layers[3].linear1.weight

    def breaks(_: torch.Tensor) -> None:
        raise RuntimeError("broken off")

    with handle, adamw(model) as optimizer:
        for i, batch in enumerate(texts(range(60, 160, 10))):
            if i in (2, 5):
                hook = weight.register_hook(breaks)
                with pytest.raises(RuntimeError, match="broken off"):
                    models.loss_of(model, batch).backward()
                hook.remove()
                optimizer.zero_grad()
            models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            looks()
    assert all(looks.kept[1:])


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
    handle._engine._planned = lambda *_: None
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
        handle._engine._planned = lambda *_: None
        train(model, batches)
        handle._engine.read_observations()
        (seen,) = observations(handle, batches)
    similar = SimilarBlocks.among(seen)
    assert similar.kinds == (0, 1, 1, 1, 4)
    assert len(similar) == 3


@pytest.mark.parametrize("planner", ["recompute_all", "greedy", "static", "keep_all"])
def test_other_planners_observe_every_block(planner: Any) -> None:
    torch.manual_seed(0)
    model, batches = models.Encoder(6), texts(GROWING)
    handle = mimose.auto_checkpoint(model, "1GiB", planner=planner)
    looks = Looks(handle)
    with handle:
        train(model, batches, after_step=looks)
    assert not any(looks.kept)
