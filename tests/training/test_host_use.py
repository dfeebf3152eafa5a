"""Host memory through a handle: what becomes of it in every kind of step, and at the end."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import mimose
import models
from compare import assert_same_gradients, live_tensors, no_hooks
from loops import (
    Batch,
    Predictions,
    lengths,
    peak_of_recomputing,
    task,
    tight_budget,
    train,
)
from mimose.bench.measuring import LatestStep
from mimose.costs import InputSize, Option, Profile, RunCost
from mimose.errors import MimoseWarning
from mimose.memory import Clock, CopyTimes, HostArena, HostMemory, LinkSpeed, PinningError
from mimose.planning import RecomputeAll
from mimose.training.device_pace import DevicePace
from mimose.training.host_use import HostUse
from parts import Faulty, bf16, without_cache

HOST = {"host_memory": "1GiB"}
CPU = torch.device("cpu")


def in_fp32(model: nn.Module, batch: Batch) -> torch.Tensor:
    return models.loss_of(model, batch)


def in_bf16(model: nn.Module, batch: Batch) -> torch.Tensor:
    with bf16():
        return models.loss_of(model, batch)


def mixed(name: str, count: int = 40) -> tuple[nn.Module, list[Batch]]:
    model = models.ALL[name]()[0]
    make: Any = models.ALL[name]
    return model, [without_cache(name, make(2, length)[1]) for length in lengths(count, 20, 120)]


@pytest.mark.parametrize(
    ("milliseconds", "share", "room", "serves"),
    [
        (10, 1.0, 2.0, True),
        (10, 0.2, 2.0, False),
        (10, None, 2.0, False),
        (1, 1.0, 2.0, False),
        (1, 1.0, 0.5, True),
        (10, None, 0.5, True),
    ],
    ids=[
        "long blocks",
        "blocks that are short while nothing is observed",
        "blocks of unknown pace",
        "short blocks",
        "short blocks, and nothing fits",
        "unknown pace, and nothing fits",
    ],
)
def test_blocks_on_a_gpu_that_hide_no_copies_move_only_if_nothing_else_fits(
    milliseconds: int, share: float | None, room: float, serves: bool
) -> None:
    run = RunCost(10, 50, 0, 100, 120, 5, 0, 0, nanoseconds=milliseconds * 1_000_000)
    profile = Profile(InputSize((("x", 1),), (8,)), (run,) * 4, 0, 0)
    needed = RecomputeAll().plan(profile, 0).peak_bytes
    on_gpu = HostUse(torch.device("cuda"), 0, frozenset(Option))
    on_gpu.pace = pace_of(profile, share)
    assert on_gpu.serves(profile, int(room * needed)) == serves
    assert HostUse(CPU, 0, frozenset(Option)).serves(profile, int(room * needed))


@pytest.mark.parametrize(("milliseconds", "timed"), [(1, False), (10, True)])
def test_forwards_of_blocks_that_are_too_short_to_hide_copies_are_not_timed(
    milliseconds: float, timed: bool
) -> None:
    profile = profile_of(8, milliseconds)
    on_gpu = HostUse(torch.device("cuda"), 0, frozenset(Option))
    assert not on_gpu.wants_time_of(profile.size, profile)  # no host memory is allowed
    on_gpu.limit_bytes = 1 << 30
    assert on_gpu.wants_time_of(profile.size, profile) == timed
    on_gpu.pace = pace_of(profile, 0.5)
    assert not on_gpu.wants_time_of(profile.size, profile)  # it is known


class Clockwork(Clock):
    """Tells the times that it is given."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, start: float, end: float) -> float:
        """By this clock, whatever times others measure (`--unsteady`)."""
        return end - start


def pace_of(profile: Profile, share: float | None) -> DevicePace:
    """The pace after a planned forward that took this share of what was observed."""
    clock = Clockwork()
    pace = DevicePace(clock)
    if share is not None:
        timer = pace.timer_for(profile.size, profile)
        clock.now += share * sum(run.nanoseconds for run in profile.runs) / 1e9
        timer.stop()
        assert pace.read()
    return pace


def profile_of(length: int, milliseconds: float) -> Profile:
    run = RunCost(10, 50, 0, 100, 120, 5, 0, 0, nanoseconds=int(milliseconds * 1e6))
    return Profile(InputSize((("x", 1),), (length,)), (run,) * 4, 0, 0)


def test_a_pace_holds_for_forwards_that_take_about_as_long() -> None:
    clock = Clockwork()
    pace = DevicePace(clock)
    for length in range(1, 9):
        profile = profile_of(length, 2.0**length)
        timer = pace.timer_for(profile.size, profile)
        clock.now += (0.5 if length <= 4 else 0.9) * 4 * 2.0**length / 1e3
        timer.stop()
        pace.read()
        assert not pace.is_new(profile.size)
    assert pace.of(profile_of(20, 2.5)) == pytest.approx(0.5)
    assert pace.of(profile_of(21, 200.0)) == pytest.approx(0.9)


def test_a_forward_that_was_given_up_does_not_stop_the_timing_of_others() -> None:
    pace, profile = pace_of(profile_of(1, 1.0), None), profile_of(2, 1.0)
    pace.timer_for(InputSize((("x", 1),), (1,)), profile)
    assert not pace.read()
    assert pace.is_new(profile.size)


def test_a_pause_of_the_host_does_not_make_blocks_seem_slow() -> None:
    profile = profile_of(3, 1.0)
    assert pace_of(profile, 7.0).of(profile) == 1.0


@pytest.mark.parametrize(
    ("name", "loss_of"),
    [
        ("bert", in_fp32),
        ("bert", in_bf16),
        ("llama", in_fp32),
        ("lora", in_fp32),
        ("t5", in_fp32),
        ("encoder", in_bf16),
    ],
)
def test_mixed_lengths_train_as_plain_within_the_budget(
    name: str, loss_of: Callable[[nn.Module, Batch], torch.Tensor]
) -> None:
    model, batches = mixed(name)
    budget = tight_budget(model, batches, 0.3, loss_of=loss_of)
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, budget, enforce=True, **HOST) as handle:
        predictions = Predictions(handle)
        losses = train(model, batches, loss_of=loss_of, after_step=predictions)
        stats = handle.stats()
    assert losses == train(plain, batches, loss_of=loss_of)
    assert stats.peak_bytes <= budget
    assert stats.moved_bytes > 0
    assert stats.recoveries == 0
    predictions.assert_exact(steps=15, plans=2)


def trained(handle: mimose.Mimose, model: nn.Module, batches: list[Batch]) -> None:
    """Until plans move something."""
    for batch in batches:
        models.loss_of(model, batch).backward()
        model.zero_grad()
    assert handle.stats().moved_bytes > 0


@pytest.mark.parametrize("moment", ["between steps", "before the backward", "in the backward"])
def test_detach_gives_host_memory_back_and_gradients_are_right(moment: str) -> None:
    model, batches, budget = task("bert", 0.1)
    longest = max(batches, key=lambda batch: batch["input_ids"].numel())
    plain = copy.deepcopy(model)
    handle = mimose.auto_checkpoint(model, budget, **HOST)
    trained(handle, model, batches)
    assert handle.stats().host_bytes_held > 0
    if moment == "between steps":
        handle.detach()
    for each in (model, plain):
        torch.manual_seed(1)
        loss = models.loss_of(each, longest)
        if each is model and moment == "before the backward":
            handle.detach()
        if each is model and moment == "in the backward":
            loss.grad_fn.register_prehook(lambda *_: handle.detach())
        loss.backward()
        del loss
    assert not handle.attached
    assert handle.stats().host_bytes_held == 0
    assert_same_gradients(model, plain)
    assert no_hooks()


def test_gradients_accumulate_as_in_plain() -> None:
    model, batches, budget = task("bert", 0.1)
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, budget, **HOST) as handle:
        losses = train(model, batches, micro_steps=3)
        assert handle.stats().moved_bytes > 0
    assert losses == train(plain, batches, micro_steps=3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_an_attached_model_is_plain(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, batches, budget = task("bert", 0.1)
    with mimose.auto_checkpoint(model, budget, **HOST) as handle:
        trained(handle, model, batches)
        twin, moved = copied(model), handle.stats().moved_bytes
        torch.manual_seed(1)
        models.loss_of(twin, batches[0]).backward()
        assert handle.stats().moved_bytes == moved
        torch.manual_seed(1)
        models.loss_of(model, batches[0]).backward()
    assert_same_gradients(model, twin)


def test_two_models_have_host_memory_of_their_own() -> None:
    model, batches, budget = task("bert", 0.1)
    other = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, budget, **HOST) as first:
        trained(first, model, batches)
        with mimose.auto_checkpoint(other, 2 * budget, **HOST) as second:
            train(other, batches)
        assert second.stats().host_bytes_held == 0
        assert first.stats().host_bytes_held > 0
        plain = copy.deepcopy(model)
        assert train(model, batches) == train(plain, batches)


def test_a_model_called_twice_before_its_backward_trains_as_plain() -> None:
    """Now and then, after steps of one call whose plans move something."""
    model, batches, budget = task("bert", 0.1)

    def run(model: nn.Module) -> list[float]:
        torch.manual_seed(1)
        losses = []
        for k, batch in enumerate(batches):
            loss = models.loss_of(model, batch)
            if k % 9 == 8:
                loss = loss + models.loss_of(model, batch)
            loss.backward()
            losses.append(loss.item())
        return losses

    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, budget, **HOST) as handle:
        losses = run(model)
        assert handle.stats().moved_bytes > 0
    assert losses == run(plain)
    assert_same_gradients(model, plain)


def test_a_step_that_is_retried_trains_as_plain() -> None:
    model, batches, budget = task("bert", 0.1)
    plain = copy.deepcopy(model)
    failing = {20, 21}

    def step(model: nn.Module, k: int, batch: Batch) -> float:
        loss = models.loss_of(model, batch)
        if k in failing:
            failing.discard(k)
            raise torch.OutOfMemoryError("CPU out of memory.")
        loss.backward()
        return loss.item()

    with mimose.auto_checkpoint(model, budget, **HOST) as handle:
        torch.manual_seed(1)
        losses = [handle.retry(step, model, k, batch) for k, batch in enumerate(batches)]
        assert handle.stats().moved_bytes > 0
        assert handle.stats().recoveries == 2
    torch.manual_seed(1)
    assert losses == [step(plain, k, batch) for k, batch in enumerate(batches)]
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
def test_steps_that_raise_leave_no_host_memory_in_use(phase: str) -> None:
    model = nn.Sequential(*(Faulty() for _ in range(5)))
    x = torch.randn(20_000, 4)
    with (
        warnings.catch_warnings(),
        mimose.auto_checkpoint(model, "2MiB", blocks=Faulty, **HOST) as handle,
    ):
        warnings.simplefilter("ignore", MimoseWarning)
        for k in range(24):
            model[2].phase = phase if k % 3 == 2 else "none"
            with suppress(ValueError):
                model(x).sum().backward()
            model.zero_grad()
            assert no_hooks()
        assert handle.stats().moved_bytes > 0
        gc.collect()
        assert handle._engine.setting.host.memory.arena.in_use_bytes == 0


def test_300_steps_hold_no_more_than_the_first_ones() -> None:
    model = nn.Sequential(*(Faulty() for _ in range(5)))
    batches = [{"input": torch.randn(25 * length, 4)} for length in lengths(25)]
    budget = tight_budget(model, batches, 0.1)
    with mimose.auto_checkpoint(model, budget, enforce=True, blocks=Faulty, **HOST) as handle:
        train(model, batches * 4)
        before = live_tensors(), handle.stats().host_bytes_held, len(gc.get_objects())
        train(model, batches * 8)
        after = live_tensors(), handle.stats().host_bytes_held, len(gc.get_objects())
        assert handle.stats().peak_bytes <= budget
    assert before[1] > 0
    assert after[:2] == before[:2]
    assert after[2] <= 1.02 * before[2]


class Refusing(HostArena):
    """Of a system that pins nothing more."""

    def reserve(self, nbytes: int) -> bool:
        raise PinningError("out of pages")


def test_if_pinning_fails_it_is_said_once_and_plans_do_without() -> None:
    model, batches, budget = task("bert", 0.1)
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, budget, enforce=True, **HOST) as handle:
        train(model, batches[:1])
        host = handle._engine.setting.host
        host.memory, host.speed = HostMemory(CPU, 1 << 30), LinkSpeed(10.0, 10.0)
        host.memory.arena = Refusing(1 << 30, CPU)
        with pytest.warns(MimoseWarning, match=r"out of pages.*host_memory=0") as said:
            losses = train(model, batches)
        stats = handle.stats()
    assert len(said) == 1
    assert stats.moved_bytes == 0
    assert stats.runs_recomputed > 0
    train(plain, batches[:1])
    assert losses == train(plain, batches)


class OfJaggedRows(nn.Module):
    """Its blocks save nested tensors, which cannot move."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.head = nn.Linear(8, 32), nn.Linear(32, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
            for _ in range(5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [row[: len(row) - i].detach() for i, row in enumerate(self.start(x))]
        x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.values())


def test_plans_do_without_an_option_whose_transfers_free_nothing() -> None:
    model, peaks = OfJaggedRows(), []
    latest, draw = LatestStep(), random.Random(3)
    with mimose.auto_checkpoint(model, 2100 << 10, **HOST) as handle:
        handle.subscribe(latest)
        for _ in range(24):
            model(torch.randn(8, draw.choice((20, 30, 40, 44, 47, 48)), 8)).pow(2).mean().backward()
            model.zero_grad()
            assert latest.record is not None
            peaks.append(latest.record.real_peak_bytes or 0)
        link = handle._engine.setting.host.known_link
    assert sum(peak > 2100 << 10 for peak in peaks) == 1  # the first one that counted on it
    assert link is not None
    assert Option.SAVE_ON_HOST not in link.options


def test_training_does_not_wait_for_host_memory_that_is_being_pinned() -> None:
    use = HostUse(CPU, 1 << 30, frozenset(Option), LinkSpeed(50.0, 50.0))
    link, version = use.link(trusted=True), use.version
    assert use.memory is not None
    use.memory.arena.slow = True
    assert not use.has(100 << 20)
    for _ in range(10_000):
        use.read_times()
        if use.version > version:
            break
        assert use.only_what_is_there(link) is None or use.held_bytes < 100 << 20
        time.sleep(0.001)
    assert use.version > version  # plans are made anew
    assert use.has(100 << 20)
    use.close()


def test_plans_are_made_anew_while_more_is_pinned() -> None:
    use = HostUse(CPU, 4 << 30, frozenset(Option), LinkSpeed(50.0, 50.0))
    use.link(trusted=True)
    assert use.memory is not None
    use.memory.arena.slow = True
    use.has(2 << 30)
    versions = {use.version}
    end = time.monotonic() + 20
    while use.held_bytes < 2 << 30:
        assert time.monotonic() < end
        use.read_times()
        versions.add(use.version)
    use.read_times()
    assert len(versions | {use.version}) <= 6  # not for every piece
    assert use.version > min(versions)
    use.close()
    assert use.held_bytes == 0


def test_a_step_that_fits_only_with_the_host_waits_for_it() -> None:
    model, batches, _ = task("bert", 0.1)
    needed = peak_of_recomputing(model, batches)
    with mimose.auto_checkpoint(model, int(0.95 * needed), **HOST) as handle:
        train(model, batches[:2])
        host = handle._engine.setting.host
        memory = host.begun()
        assert memory is not None
        memory.arena.slow = True
        train(model, batches)
        assert handle.stats().moved_bytes > 0


def test_plans_are_made_anew_when_the_speed_of_the_link_changes() -> None:
    use = HostUse(CPU, 1 << 30, frozenset(Option), LinkSpeed(50.0, 50.0))
    first = use.link(trusted=True)
    version = use.version
    assert first is not None
    copies = [(100 << 20, (100 << 20) / 25e9)] * 9
    use.memory.stream.times = lambda: CopyTimes(copies, copies, 0.5)
    use.read_times()
    second = use.link(trusted=True)
    assert second is not None
    assert (first.to_host, second.to_host) == (50.0, pytest.approx(25.0))
    assert use.version > version
    assert use.stalled_seconds == 0.5
