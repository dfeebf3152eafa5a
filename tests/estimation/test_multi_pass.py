"""Several forward passes before one backward, each with its own size."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import nn

import mimose
from loops import once
from mimose.bench.measuring import LatestStep
from mimose.costs import InputSize
from mimose.estimation.multi_pass import MultiPass
from mimose.reporting import Stats
from mimose.training import StepRecord


def size(*dims: int) -> InputSize:
    return InputSize((("0", 2), ("mask", len(dims) - 2)), dims)


def pair(first: int, second: int) -> InputSize:
    return size(8, first, first).followed_by(size(8, second, second))


def test_a_size_of_several_passes_has_the_size_of_each_pass() -> None:
    whole = size(8, 3, 3).followed_by(size(4, 5, 6))
    assert whole.passes == (size(8, 3, 3), size(4, 5, 6))
    assert size(8, 3, 3).passes == (size(8, 3, 3),)
    assert str(whole) == "8×3, 4×5"


def test_a_pass_of_another_size_takes_the_place_of_one() -> None:
    whole = pair(3, 5).followed_by(size(8, 7, 7))
    assert whole.with_pass(1, size(8, 6, 6)) == pair(3, 6).followed_by(size(8, 7, 7))
    assert whole.with_pass(2, size(8, 6, 6)) == pair(3, 5).followed_by(size(8, 6, 6))
    assert whole.with_pass(3, size(8, 6, 6)) is None
    assert whole.with_pass(1, InputSize((("0", 2),), (8, 6))) is None


def test_sizes_of_other_numbers_of_passes_cannot_be_compared() -> None:
    assert not size(8, 3, 3) <= pair(3, 3)
    assert not pair(3, 3) <= size(8, 3, 3)
    assert pair(3, 3) <= pair(3, 4)


def test_passes_beyond_the_eighth_are_joined_with_it() -> None:
    whole = size(8, 1, 1)
    for length in (2, 3, 4, 5, 6, 7, 8, 11, 9):
        whole = whole.followed_by(size(8, length, length))
    assert [one.dims[1] for one in whole.passes] == [1, 2, 3, 4, 5, 6, 7, 11]
    assert whole.followed_by(InputSize((("0", 2),), (9, 9))) == whole


def expected(group: MultiPass, first: int) -> int:
    whole = group.expected(size(8, first, first))
    assert whole.passes[0] == size(8, first, first)
    return whole.passes[1].dims[1]


def test_a_second_pass_is_expected_to_be_as_large_as_it_was() -> None:
    assert expected(MultiPass(pair(3, 5)), 4) == 5


@pytest.mark.parametrize("of", [lambda n: n, lambda n: 4 * n + 2])
def test_a_second_pass_that_follows_from_the_first_is_expected_to(of: Callable[[int], int]) -> None:
    group = MultiPass(pair(3, of(3)))
    for first in (5, 9, 4):
        group.note(pair(first, of(first)))
    assert expected(group, 7) == of(7)
    assert expected(group, 20) == of(20)


def test_an_independent_second_pass_is_expected_to_be_the_largest_observed() -> None:
    group = MultiPass(pair(3, 5))
    for first, second in [(5, 9), (6, 4), (4, 8)]:
        group.note(pair(first, second))
    assert expected(group, 7) == 9


class Block(nn.Module):
    """Attention with dropout in as few operators as it takes: each of them is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = torch.bmm(torch.bmm(x, x.transpose(1, 2)).softmax(-1), self.norm(x))
        return x + self.drop(torch.tanh(self.linear(attended)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.mean(1)


Drawn = Callable[[random.Random], list[int]]
"""The lengths of one step's passes."""


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    stats: Stats | None
    steps: list[StepRecord]


@once
def trained(drawn: Drawn, budget: int | str | None) -> Trained:
    """Queries and documents through one encoder, with mimose if there is a budget."""
    torch.manual_seed(0)
    model, draw, losses, steps = Encoder().train(), random.Random(0), [], []
    handle, latest = mimose.auto_checkpoint(model, budget) if budget else None, LatestStep()
    if handle is not None:
        handle.subscribe(latest)
    for _ in range(40):
        outputs = [model(torch.randint(0, 50, (8, length))) for length in drawn(draw)]
        loss = torch.stack([(a - b).pow(2).mean() for a, b in pairwise(outputs)]).sum()
        loss.backward()
        model.zero_grad()
        losses.append(loss.item())
        if handle is not None:
            steps.append(latest.record)
    if handle is not None:
        handle.detach()
    return Trained(losses, handle.stats() if handle else None, steps)


def with_room(drawn: Drawn) -> Trained:
    return trained(drawn, "1GiB")


def plain(drawn: Drawn) -> Trained:
    return trained(drawn, None)


def query_and_document(draw: random.Random) -> list[int]:
    return [draw.randint(4, 12), draw.randint(30, 60)]


def document_and_query(draw: random.Random) -> list[int]:
    return query_and_document(draw)[::-1]


def triplet(draw: random.Random) -> list[int]:
    return [draw.randint(4, 12), draw.randint(20, 40), draw.randint(20, 40)]


def chunks(draw: random.Random) -> list[int]:
    return [draw.randint(10, 30)] * 10


def mixed(draw: random.Random) -> list[int]:
    return [draw.randint(10, 30) for _ in range(10)]


def test_many_passes_of_one_length_are_planned_together() -> None:
    run = with_room(chunks)
    assert run.losses == plain(chunks).losses
    assert run.stats.observed_steps <= 12
    planned = [step for step in run.steps[20:] if step.plan and not step.observed]
    assert len(planned) >= 18
    assert not any(bool(step.surprises) for step in planned)
    assert all(step.plan.kept == 40 for step in planned)


def test_many_passes_of_many_lengths_stay_within_the_budget() -> None:
    budget = int(0.5 * with_room(mixed).stats.peak_bytes)
    run = trained(mixed, budget)
    assert run.losses == plain(mixed).losses
    assert run.stats.peak_bytes <= budget


@pytest.mark.parametrize("drawn", [query_and_document, document_and_query, triplet])
def test_passes_of_independent_lengths_are_kept_where_there_is_room(drawn: Drawn) -> None:
    run = with_room(drawn)
    assert run.losses == plain(drawn).losses
    assert run.stats.observed_steps <= 20
    planned = [step for step in run.steps[20:] if step.plan and not step.observed]
    whole = [step for step in planned if step.plan.kept == len(step.plan.choices)]
    assert len(whole) >= 16
    assert sum(bool(step.surprises) for step in whole) <= 4


@pytest.mark.parametrize("drawn", [query_and_document, document_and_query, triplet])
def test_each_pass_is_planned_for_its_own_length(drawn: Drawn) -> None:
    budget = int(0.75 * with_room(drawn).stats.peak_bytes)
    run = trained(drawn, budget)
    assert run.losses == plain(drawn).losses
    assert run.stats.peak_bytes <= budget
    planned = [
        step for step in run.steps if step.plan and not step.observed and not bool(step.surprises)
    ]
    planned.sort(key=lambda step: sum(step.size.dims[1::2]))
    kept, half = [step.plan.kept for step in planned], len(planned) // 2
    # Of two single steps the longer one may keep more runs, if these take longer to recompute.
    assert sum(kept[:half]) / half > sum(kept[-half:]) / half
    assert len({step.plan.choices for step in planned}) > 2
