"""Train random models with faults, and hold the result to that of plain training.

What must be true whatever happens: losses, parameters, buffers and random numbers are, bit for bit,
those of plain training without faults; memory that was in use before a step is all that is in use
after it; a step that cannot be run raises an error that says why, and leaves everything as it was.
"""

from __future__ import annotations

import copy
import gc
import random
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from fuse import ERRORS, PHASES, Fuse
from subjects import MAKERS, Batch, batches, blocks_of
from torch import nn

import mimose
from compare import no_hooks, same
from loops import peak_of_plain, train
from mimose.costs import InputSize, RunCost, StepObservation
from mimose.errors import MimoseWarning, OutOfMemory
from mimose.memory.meters import CpuMeter
from mimose.reporting import RunningStats
from mimose.training import Collector
from parts import Assembled

STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One model, one budget, and what is done to them."""

    seed: int
    model: str
    layers: int
    share: float
    """Where the budget lies between what recomputing all and what keeping all needs."""
    enforce: bool
    retry: bool
    planner: str
    micro_steps: int
    set_to_none: bool
    lie: float
    """What observations are multiplied by."""
    foreign: bool
    """Whether knowledge of another model is loaded."""
    odd: bool
    """Whether somebody else takes memory between steps."""

    @classmethod
    def of(cls, seed: int) -> Trial:
        dice = random.Random(seed)
        return cls(
            seed=seed,
            model=dice.choice(list(MAKERS)),
            layers=dice.randint(2, 6),
            share=dice.choice([0.2, 0.4, 0.7, 1.2]),
            enforce=dice.random() < 0.6,
            retry=dice.random() < 0.8,
            planner=dice.choice(["optimal", "optimal", "greedy", "keep_all", "recompute_all"]),
            micro_steps=dice.choice([1, 1, 2, 3]),
            set_to_none=dice.random() < 0.7,
            lie=dice.choice([1.0, 1.0, 0.8, 1.2]),
            foreign=dice.random() < 0.2,
            odd=dice.random() < 0.3,
        )

    @property
    def honest(self) -> bool:
        """Whether memory is what it is said to be, and the planner minds it."""
        plans = self.planner != "keep_all" and self.model != "chosen"
        return plans and self.share >= 0.4 and self.lie == 1.0 and not self.odd

    def run(self) -> Outcome:
        """Train plainly, then under faults; an AssertionError tells the trial if they differ."""
        torch.manual_seed(self.seed)
        model = MAKERS[self.model](self.layers).train()
        todo = batches(random.Random(self.seed), STEPS)
        plain = copy.deepcopy(model)
        budget = self._budget(model, todo)
        expected = Loop(self, plain).train(todo)
        try:
            return Broken(self, model, budget).train_and_compare(todo, expected, plain)
        except Exception as error:
            raise AssertionError(f"{self} fails: {type(error).__name__}: {error}") from error

    def _budget(self, model: nn.Module, todo: list[Batch]) -> int:
        some = [todo[0]] * 3
        low, high = least_peak(model, some), peak_of_plain(model, some)
        return max(1 << 20, int(low + self.share * (high - low)))


@dataclass(slots=True)
class Outcome:
    """What has happened in a trial."""

    faults: int = 0
    lost: int = 0
    """Attempts that ended in an error and were run again by the loop itself."""
    recoveries: int = 0


class Loop:
    """A training loop as people write it."""

    def __init__(self, trial: Trial, model: nn.Module) -> None:
        self.trial = trial
        self.model = model
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)

    def train(self, todo: list[Batch]) -> list[float]:
        seed_all(self.trial.seed)
        losses = []
        for i, batch in enumerate(todo):
            losses.append(self.step(i, batch))
            if (i + 1) % self.trial.micro_steps == 0:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=self.trial.set_to_none)
            self.after_step(i)
        return [*losses, random.random(), float(np.random.rand()), torch.rand(()).item()]

    def step(self, i: int, batch: Batch) -> float:
        return self.forward_and_backward(batch)

    def forward_and_backward(self, batch: Batch) -> float:
        scale = 1 + random.random() + float(np.random.rand())
        loss = self.model(**batch).float().pow(2).mean() * scale
        self.between()
        loss.backward()
        return loss.item()

    def between(self) -> None:
        """After the forward, before the backward."""

    def after_step(self, i: int) -> None:
        """The step is done, its optimizer's, too."""


class Broken(Loop):
    """The same loop under mimose, with faults."""

    def __init__(self, trial: Trial, model: nn.Module, budget: int) -> None:
        super().__init__(trial, model)
        self.outcome = Outcome()
        self._dice = random.Random(trial.seed + 1)
        self._fuse = Fuse(blocks_of(model), model.head)  # type: ignore[arg-type]
        self._budget = budget
        self._odd: list[torch.Tensor] = []
        self._in_use: int | None = None
        self._later = RunningStats()
        """Of all steps but the first."""
        self.meter = CpuMeter()

    def train_and_compare(
        self, todo: list[Batch], expected: list[float], plain: nn.Module
    ) -> Outcome:
        blocks = blocks_of(self.model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", MimoseWarning)
            self.handle = Assembled(
                self.model,
                self._budget,
                blocks=blocks,
                planner=self.trial.planner,
                enforce=self.trial.enforce,
                collector=Collector if self.trial.lie == 1.0 else liar(self.trial.lie),
            )
            self._prepare()
            try:
                losses = self.train(todo)
                recoveries = self.handle.stats().recoveries
            finally:
                self.handle.detach()
                self._fuse.disarm()
                self.meter.close()
        assert losses == expected, "losses differ"
        for part in ("named_parameters", "named_buffers"):
            theirs = dict(getattr(plain, part)())
            for name, tensor in getattr(self.model, part)():
                same(tensor.detach(), theirs[name].detach(), name)
        if self.trial.honest and not said:
            assert self._later.so_far().peak_bytes <= self._budget, (
                "the budget is exceeded without a word"
            )
        self.outcome.recoveries = recoveries
        return self.outcome

    def _prepare(self) -> None:
        # Room for copies of buffers is taken once, and kept.
        self.handle.engine.rewind_point().settle()
        if self.trial.foreign:
            other = {**_STATE_OF_ANOTHER, "format": 1}
            self.handle.load_state_dict(other)

    def step(self, i: int, batch: Batch) -> float:
        if i >= 2 or self.trial.foreign:
            self._arm()
        self._take_odd_memory()
        for attempt in range(4):
            before = Remembered(self.model)
            if attempt == 2:  # the limit is too low for this batch, as an error has said
                self.handle.setting.meter.limit(None)
            try:
                loss = self._attempt(batch, retry=self.trial.retry or attempt > 0)
                self.outcome.faults += self._fuse.blown
                self._fuse.disarm()
                return loss
            except BaseException as error:
                self._judge(error, before)
                del error
            gc.collect()
            self._odd.clear()
            self._fuse.disarm()
        raise AssertionError("a step without faults or limit does not end")

    def _attempt(self, batch: Batch, *, retry: bool) -> float:
        if retry:
            return self.handle.retry(self.forward_and_backward, batch)
        return self.forward_and_backward(batch)

    def _judge(self, error: BaseException, before: Remembered) -> None:
        """An error has come through: was it right to, and is everything as it was?"""
        self.outcome.faults += max(1, self._fuse.blown)
        self.outcome.lost += 1
        expected = (torch.OutOfMemoryError, *(type(make()) for make in ERRORS.values()))
        if not isinstance(error, expected) or (self._fuse.blown == 0 and not self._may_fail()):
            raise error
        if isinstance(error, OutOfMemory):
            assert "does not fit with every block recomputed" in str(error), error
            before.assert_same(gradients="contain a part" not in str(error))
        before.restore()

    def _may_fail(self) -> bool:
        """Whether real memory may run out: only a hard limit does that."""
        return self.trial.enforce

    def between(self) -> None:
        self._fuse.between()

    def _arm(self) -> None:
        error = self._dice.choice(list(ERRORS))
        times = self._dice.choice([1, 1, 2, 3]) if "memory" in error else 1
        self._fuse.arm(self._dice, self._dice.choice(PHASES), error, times)

    def _take_odd_memory(self) -> None:
        self._odd.clear()
        if self.trial.odd and self._dice.random() < 0.5:
            self._odd.append(torch.zeros(self._dice.randrange(self._budget // 8)))

    def after_step(self, i: int) -> None:
        """Whatever went wrong, no more is in use than after a step in which nothing did."""
        self._odd.clear()
        if i == 0:  # in which each block is tried, and may take twice what it will
            self.handle.subscribe(self._later)
        assert no_hooks(), "a saved-tensor hook was left behind"
        if (i + 1) % self.trial.micro_steps:
            return
        in_use = self.meter.read().in_use
        if self._in_use is not None and in_use > self._in_use:
            gc.collect()
            in_use = self.meter.read().in_use
        if i >= 2 * self.trial.micro_steps:
            assert self._in_use is None or in_use <= self._in_use, (
                f"{in_use - self._in_use} bytes are left behind after step {i}"
            )
            self._in_use = in_use


class Remembered:
    """Copies of all that a step may change."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._buffers = [b.clone() for b in model.buffers()]
        self._gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    def assert_same(self, *, gradients: bool) -> None:
        same(torch.get_rng_state(), self._torch, "torch's random numbers")
        assert random.getstate() == self._python, "Python's random numbers"
        assert repr(np.random.get_state()) == repr(self._numpy), "numpy's random numbers"
        for buffer, value in zip(self._model.buffers(), self._buffers, strict=True):
            same(buffer, value, "a buffer")
        if gradients:
            for p, value in zip(self._model.parameters(), self._gradients, strict=True):
                same(p.grad, value, "a gradient")

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for buffer, value in zip(self._model.buffers(), self._buffers, strict=True):
            buffer.data.copy_(value)
        for p, value in zip(self._model.parameters(), self._gradients, strict=True):
            p.grad = value


def least_peak(model: nn.Module, todo: list[Batch]) -> int:
    """What training needs with everything recomputed, once each block has been tried."""
    model = copy.deepcopy(model)
    with mimose.auto_checkpoint(
        model, "1GiB", planner="recompute_all", blocks=blocks_of(model)
    ) as handle:
        train(model, todo[:1])
        later = RunningStats()
        handle.subscribe(later)
        train(model, todo[1:])
        return later.so_far().peak_bytes


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def liar(factor: float) -> type[Collector]:
    """A collector that sees everything larger, or smaller, than it is."""

    class Liar(Collector):
        def observation(self, size: InputSize) -> StepObservation | None:
            true = super().observation(size)
            if true is None:
                return None
            profile = replace(
                true.profile,
                runs=tuple(_scaled(run, factor) for run in true.runs),
                head_forward=int(true.profile.head_forward * factor),
                head_backward=int(true.profile.head_backward * factor),
                tail=int(true.profile.tail * factor),
            )
            gradients = tuple(int(number * factor) for number in true.gradients_allocated)
            return replace(true, profile=profile, gradients_allocated=gradients)

    return Liar


def _scaled(run: RunCost, factor: float) -> RunCost:
    names = RunCost._fields[: RunCost._fields.index("nanoseconds")]
    return run._replace(**{name: int(getattr(run, name) * factor) for name in names})


_STATE_OF_ANOTHER: dict[str, Any] = {
    "identity": {"blocks": 12, "precision": "torch.float32", "model": "0", "device": "cpu"},
    "chapters": [],
}
