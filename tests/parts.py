"""Small parts to recompute, how to train them, and mimose put together from its packages."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

import mimose
import models
from compare import assert_same_buffers, assert_same_gradients
from mimose.costs import Regime, StepObservation
from mimose.estimation import CostModel
from mimose.execution import Listener
from mimose.interception import KEEP, RECOMPUTE, Directive, Director, Selector, find_blocks
from mimose.planning import Guarded, Planner, planner_named
from mimose.reporting import HostStats, RunningStats, Stats
from mimose.training import Engine, Options, Scheduler, Setting, Subscriber, retry_step
from mimose.units import parse_budget

Call = Callable[..., Any]

DECODERS = ("gpt2", "llama", "lora", "t5")


def plain_call(function: Call, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def bf16() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


class Layer(nn.Module):
    """Attention and a feed-forward net with dropout: one of every kind of saved tensor."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.ff = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v)))
        return x + self.drop(self.ff(x))


WIDTH = 16
"""Of the blocks that follow."""


class Normed(nn.Module):
    """BatchNorm and dropout: buffers that change, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.norm(self.linear(x).flatten(0, 1)).view_as(x).tanh())


class InPlace(nn.Module):
    """Changes its own tensors in place, and saves its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).mul_(0.5).sigmoid_()


class Nested(nn.Module):
    """Checkpoints a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.3))
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + mimose.checkpoint(self.inner, self.outer(x).sin()).cos()


class StepDirector(Protocol):
    """A director that is told where steps begin and where their forwards end."""

    def step_begins(self) -> None: ...
    def forward_ends(self) -> None: ...


def train_under(
    model: nn.Module,
    director: StepDirector | None,
    *,
    steps: int = 3,
    backwards: int = 1,
    context: Callable[[], Any] = nullcontext,
) -> torch.Tensor:
    """Accumulate gradients over some steps from a fixed seed; the state of the RNG after them."""
    torch.manual_seed(1)
    for step in range(steps):
        x = torch.randn(2, 4 + step, WIDTH, requires_grad=True)
        if director is not None:
            director.step_begins()
        with context():
            out = model(x)
            if director is not None:
                director.forward_ends()
            loss = out.float().pow(2).mean()
        del out
        for left in reversed(range(backwards)):
            loss.backward(retain_graph=left > 0)
    return torch.get_rng_state()


@dataclass
class Tally:
    starts: int = 0
    ends: int = 0


TALLIES: WeakKeyDictionary[nn.Module, Tally] = WeakKeyDictionary()
"""Where no recompute finds them: what it leaves on modules, and on what these hold, is put back."""


class Counted(nn.Module):
    """Counts how often it runs, and how often to its end."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or nn.Linear(4, 4)

    @property
    def tally(self) -> Tally:
        return TALLIES.setdefault(self, Tally())

    @property
    def starts(self) -> int:
        return self.tally.starts

    @property
    def ends(self) -> int:
        return self.tally.ends

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tally.starts += 1
        x = self.inner(x).tanh() + 1
        self.tally.ends += 1
        return x


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("planned")


class Faulty(nn.Module):
    """A block with buffers and dropout that raises halfway, in the phase that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 4)
        self.phase = "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        in_backward = torch._C._current_graph_task_id() != -1
        x = self.body(x)
        if self.phase == ("recompute" if in_backward else "forward"):
            raise ValueError("planned")
        if self.phase == "backward":
            x = FailsInBackward.apply(x)
        return self.head(x).sin()


def train(model: nn.Module, call: Call, x: torch.Tensor, steps: int = 1) -> torch.Tensor:
    """Some steps from a fixed seed; the RNG's state after them."""
    torch.manual_seed(1)
    for _ in range(steps):
        call(model, x).float().pow(2).sum().backward()
    return torch.get_rng_state()


def assert_same_training(model: nn.Module, x: torch.Tensor, steps: int = 1, **options: Any) -> None:
    """Gradients, buffers and RNG are those of the plain model."""
    plain, plain_x, x = copy.deepcopy(model), x.clone(), x.clone()
    for tensor in (plain_x, x):
        tensor.requires_grad_()
    plain_rng = train(plain, plain_call, plain_x, steps)
    rng = train(model, functools.partial(mimose.checkpoint, **options), x, steps)
    assert_same_gradients(model, plain)
    assert_same_buffers(model, plain)
    assert torch.equal(x.grad, plain_x.grad)
    assert torch.equal(rng, plain_rng)


class AtRandom:
    """Recomputes each block or not, as the dice say."""

    def __init__(self) -> None:
        self.dice = random.Random(0)

    def direct(self, block: int, args: Any, kwargs: Any) -> Directive:
        return RECOMPUTE if self.dice.random() < 0.5 else KEEP

    def ran_out(self, block: int) -> None:
        raise AssertionError("nothing is guarded")


class Only:
    """Recomputes the blocks of these indices, which may change, and keeps the others."""

    def __init__(self, *blocks: int) -> None:
        self.blocks = blocks

    def direct(self, block: int, args: Any, kwargs: Any) -> Directive:
        return RECOMPUTE if block in self.blocks else KEEP

    def ran_out(self, block: int) -> None:
        raise AssertionError("nothing is guarded")


class Overheard:
    """Decides as another director does, and has a listener told of every call by block index."""

    def __init__(self, director: Director, listener: Listener) -> None:
        self._director = director
        self._listener = listener

    def direct(self, block: int, args: Any, kwargs: Any) -> Directive:
        directive = self._director.direct(block, args, kwargs)
        return replace(directive, run=block, listener=self._listener)

    def ran_out(self, block: int) -> None:
        self._director.ran_out(block)


class Assembled:
    """mimose attached to a model as a handle attaches it, with engine and scheduler in reach.

    For tests that change what a handle keeps to itself: the clock, the collector, the plan cache.
    """

    def __init__(
        self,
        model: nn.Module,
        budget: int | str,
        *,
        planner: str | Planner = "optimal",
        blocks: Selector | Sequence[Selector] | None = None,
        **options: Any,
    ) -> None:
        found = find_blocks(model, blocks=blocks)
        chosen = planner_named(planner)
        self.scheduler = Scheduler(chosen if isinstance(planner, str) else Guarded(chosen))
        self.engine = Engine(model, found, parse_budget(budget), self.scheduler, Options(**options))
        self._stats = RunningStats()
        self.subscribe(self._stats)
        self.engine.attach(found)

    @property
    def budget_bytes(self) -> int | None:
        return self.engine.budget_bytes

    @property
    def setting(self) -> Setting:
        """What the first training step has settled."""
        assert self.engine.setting is not None
        return self.engine.setting

    def subscribe(self, subscriber: Subscriber) -> None:
        self.engine.events.subscribe(subscriber)

    def stats(self) -> Stats:
        self.engine.read_observations()
        setting = self.engine.setting
        return self._stats.snapshot(
            cache=self.scheduler.cache,
            cost_model=self.scheduler.cost_model,
            budget_bytes=self.budget_bytes,
            reserve_bytes=None if setting is None else setting.reserve.bytes,
            host=HostStats(),
        )

    def retry(self, function: Call, *args: Any) -> Any:
        return retry_step(self.engine, function, args, {})

    def state_dict(self) -> dict[str, Any]:
        return self.engine.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.engine.load_state(state)

    def detach(self) -> None:
        self.engine.detach()

    def __enter__(self) -> Assembled:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


class Observations(Subscriber):
    """What training has learned, in order."""

    def __init__(self) -> None:
        self.all: list[StepObservation] = []

    def learned(self, observation: StepObservation, *, anew: bool, seconds: float) -> None:
        self.all.append(observation)

    @property
    def whole(self) -> list[StepObservation]:
        """Without those of steps in which blocks were tried."""
        return [seen for seen in self.all if not seen.provisional]


class Regimes(Subscriber):
    """The regimes that training has entered, in order, and what is known in each."""

    def __init__(self) -> None:
        self.entered: list[tuple[Regime, CostModel]] = []

    def regime_entered(self, regime: Any, cost_model: CostModel) -> None:
        self.entered.append((regime, cost_model))

    @property
    def cost_model(self) -> CostModel:
        """What is known in the present regime."""
        return self.entered[-1][1]


def train_model(
    model: nn.Module,
    batch: dict[str, Any],
    steps: int = 3,
    context: Callable[[], Any] = nullcontext,
) -> torch.Tensor:
    """Some steps from a fixed seed; the RNG's state after them."""
    torch.manual_seed(1)
    random.seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        with context():
            loss = models.loss_of(model, batch)
        loss.backward()
        optimizer.step()
    return torch.get_rng_state()


def without_cache(name: str, batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "use_cache": False} if name in DECODERS else batch
