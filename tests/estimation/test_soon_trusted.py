"""Real models on batches of mixed sizes: after few observed steps, the others are trusted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mimose
import models
from loops import Batch, tight_budget, train
from mimose.training import StepRecord, Subscriber

CHUNK = 48


class WithLossInChunks(nn.Module):
    """A model whose memory is largely logits, computed one chunk at a time."""

    def __init__(self, *, trained_head: bool) -> None:
        super().__init__()
        self.encoder = models.Encoder(layers=4, dropout=0.0).encoder
        self.embedding = nn.Embedding(400, 32)
        self.head = nn.Linear(32, 400, bias=False).requires_grad_(trained_head)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        (hidden,) = self.encoder(self.embedding(input_ids))
        parts = zip(hidden.split(CHUNK), input_ids[0].split(CHUNK), strict=True)
        losses = [checkpoint(self._loss, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).mean()

    def _loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(hidden), targets, reduction="sum")


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    output = model(**batch)
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss


class Records(Subscriber):
    """The outcomes of the steps of a run."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def step_over(self, record: StepRecord) -> None:
        self.steps.append(record)

    @property
    def errors(self) -> list[float]:
        """By how much the peaks of trusted steps were predicted too high, as a fraction."""
        trusted = (r for r in self.steps if not r.observed and r.predicted_peak_bytes is not None)
        known = [(r.predicted_peak_bytes, r.real_peak_bytes) for r in trusted if not r.is_bound]
        return [thought / real - 1 for thought, real in known if thought and real]


def trained(model: nn.Module, batches: Sequence[Batch]) -> Records:
    """The outcomes of steps under a budget that is too small for plain training."""
    records, budget = Records(), tight_budget(model, batches, loss_of=loss_of)
    with mimose.auto_checkpoint(model, budget) as handle:
        handle.subscribe(records)
        train(model, batches, loss_of=loss_of)
    assert len(records.steps) == len(batches)
    return records


def assert_soon_trusted(records: Records, untrusted: int) -> None:
    assert len(records.errors) >= len(records.steps) - untrusted
    assert min(records.errors) >= -0.003
    assert sum(max(0.0, error) for error in records.errors) / len(records.errors) <= 0.02


@pytest.mark.parametrize(
    ("trained_head", "untrusted"), [(False, 14), (True, 20)], ids=["a bend", "a bend and a jump"]
)
def test_mixed_lengths_are_soon_trusted_under_a_loss_in_chunks(
    trained_head: bool, untrusted: int
) -> None:
    """From the second chunk on, there are two gradients of a trained head at a time."""
    dice = random.Random(0)
    drawn = [round(dice.lognormvariate(4.0, 0.4)) for _ in range(50)]
    assert sum(length > CHUNK for length in drawn) > 30
    batches = [{"input_ids": torch.randint(0, 400, (1, length))} for length in drawn]
    model = WithLossInChunks(trained_head=trained_head)
    records = trained(model, batches)
    assert_soon_trusted(records, untrusted)


class Strided(nn.Module):
    """Convolutions with strides: 2 in the stem, then 4 and 8."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        widths = [16, 32, 32, 32, 32, 32, 64, 64, 64, 64]
        self.blocks = nn.ModuleList(map(self._block, widths, widths[1:]))

    @staticmethod
    def _block(before: int, after: int) -> nn.Sequential:
        stride = after // before
        return nn.Sequential(
            nn.Conv2d(before, after, 3, stride=stride, padding=1),
            nn.GroupNorm(2, after),
            nn.GELU(),
            nn.Conv2d(after, after, 3, padding=1),
            nn.GELU(),
        )

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(pixel_values)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(hidden.mean((2, 3)), labels)


def images(count: int, low: int, high: int) -> list[Batch]:
    """Landscape and portrait images; all images of a batch have one size."""
    dice, batches = random.Random(1), []
    for _ in range(count):
        sides = [dice.randint(low, high), dice.randint(low, high)]
        labels = torch.randint(0, 2, (2,))
        batches.append({"pixel_values": torch.randn(2, 3, *sides), "labels": labels})
    return batches


@pytest.mark.parametrize(
    ("make", "untrusted"),
    [(Strided, 14), (lambda: models.swin()[0], 16)],
    ids=["strides", "windows"],
)
def test_images_of_any_size_are_soon_trusted(make: Callable[[], nn.Module], untrusted: int) -> None:
    records = trained(make(), images(45, 40, 80))
    assert_soon_trusted(records, untrusted)
