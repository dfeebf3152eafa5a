"""The CPU's meter counts the bytes of live storages, each once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    is_in_torch_dispatch_mode,
)
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode

from mimose.errors import ConflictError
from mimose.memory.meters import (
    CpuMeter,
    lost_in,
    meter_for,
)
from mimose.memory.storage_counter import StorageCounter
from parts import Assembled

KIB = 1 << 10


def take(kib: int) -> torch.Tensor:
    return torch.zeros(kib * KIB, dtype=torch.uint8)


@pytest.fixture
def meter() -> Iterator[CpuMeter]:
    meter = CpuMeter()
    yield meter
    meter.close()
    assert StorageCounter._shared is None


class Since:
    """Bytes allocated since this object was created."""

    def __init__(self, meter: CpuMeter) -> None:
        self._meter = meter
        meter.reset_peak()
        self._start = meter.read().in_use

    @property
    def in_use(self) -> int:
        return self._meter.read().in_use - self._start

    @property
    def peak(self) -> int:
        return self._meter.read().peak - self._start


def test_allocation_counts_until_it_is_freed(meter: CpuMeter) -> None:
    since = Since(meter)
    a, b = take(3), take(5)
    assert since.in_use == 8 * KIB
    del a
    assert since.in_use == 5 * KIB
    del b
    assert since.in_use == 0


def test_every_output_of_an_operator_counts(meter: CpuMeter) -> None:
    x = torch.rand(4, 8)
    since = Since(meter)
    values, indices = x.topk(2, dim=1)
    assert since.in_use == values.nbytes + indices.nbytes


def test_views_count_once(meter: CpuMeter) -> None:
    since = Since(meter)
    whole = take(4)
    parts = [whole[:10], whole.view(2, -1), whole.detach(), *whole.chunk(4)]
    assert since.in_use == 4 * KIB
    del whole
    assert since.in_use == 4 * KIB
    del parts
    assert since.in_use == 0


def test_in_place_operators_allocate_nothing(meter: CpuMeter) -> None:
    x = torch.rand(KIB)
    since = Since(meter)
    x.add_(1).mul_(2)
    assert since.in_use == since.peak == 0


def test_resizing_counts_the_new_size(meter: CpuMeter) -> None:
    since = Since(meter)
    x = take(2)
    x.resize_(6 * KIB)
    assert since.in_use == 6 * KIB
    del x
    assert since.in_use == 0


def test_peak_is_the_most_since_it_was_reset(meter: CpuMeter) -> None:
    since = Since(meter)
    x = take(9)
    del x
    assert (since.in_use, since.peak) == (0, 9 * KIB)
    meter.reset_peak()
    assert since.peak == 0
    take(2)
    assert since.peak == 2 * KIB


def test_tensors_older_than_the_meter_count_and_are_freed() -> None:
    model = torch.nn.Linear(64, 64)
    model(torch.ones(2, 64)).sum().backward()
    of_model = sum(2 * p.nbytes for p in model.parameters())
    meter = CpuMeter()
    before = meter.read().in_use
    assert before >= of_model
    model.zero_grad()
    assert before - meter.read().in_use == of_model // 2
    del model
    assert before - meter.read().in_use == of_model
    meter.close()


def test_backward_is_counted_too(meter: CpuMeter) -> None:
    model = torch.nn.Linear(64, 64)
    x = torch.ones(2, 64)
    loss = model(x).sum()
    since = Since(meter)
    loss.backward()
    assert since.in_use == sum(p.nbytes for p in model.parameters())


def test_meters_share_one_counter_until_the_last_is_closed() -> None:
    first, second = CpuMeter(), CpuMeter()
    x = take(7)
    assert first.read() == second.read()
    first.close()
    first.close()
    assert StorageCounter._shared is not None
    since = Since(second)
    y = take(1)
    assert since.in_use == KIB
    second.close()
    assert StorageCounter._shared is None
    del x, y


@pytest.mark.parametrize("reset", [CpuMeter.reset_peak, CpuMeter.read_and_reset])
def test_resetting_one_meters_peak_keeps_that_of_another(
    reset: Callable[[CpuMeter], object],
) -> None:
    first, second = CpuMeter(), CpuMeter()
    try:
        for meter in (first, second):
            reset(meter)
        start = first.read().in_use
        torch.empty(1 << 18)
        reset(second)
        torch.empty(1 << 10)

        assert first.read().peak == start + (4 << 18)
        assert second.read().peak == start + (4 << 10)
        reset(first)
        assert first.read().peak == start
        assert second.read().peak == start + (4 << 10)
    finally:
        first.close()
        second.close()


def test_closing_a_meter_keeps_the_limit_of_another() -> None:
    first, second = CpuMeter(), CpuMeter()
    second.limit(second.read().in_use + 4 * KIB)
    first.close()
    try:
        with pytest.raises(torch.OutOfMemoryError):
            take(8)
    finally:
        second.close()


# Together with the user's own dispatch modes


def modes() -> list[type]:
    return [type(mode) for mode in _get_current_dispatch_mode_stack()]


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(torch.nn.Linear(8, 8) for _ in range(3)))

    def step(self, flops: Any = None) -> int:
        """Run one step; return a lower bound of the bytes in use."""
        with flops or nullcontext():
            self(torch.ones(4, 8)).sum().backward()
        return sum(p.nbytes for p in self.parameters())


def attached(model: Net) -> Assembled:
    return Assembled(model, "1GiB", blocks=torch.nn.Linear)


@pytest.mark.parametrize("at", [0, 1, 4])
def test_users_dispatch_mode_around_one_step_sees_only_that_step(at: int) -> None:
    model, flops = Net(), FlopCounterMode(display=False)
    counts = []
    with attached(model) as handle:
        for step in range(6):
            least = model.step(flops if step == at else None)
            counts.append(flops.get_total_flops())
            assert modes() == [StorageCounter]
        assert handle.stats().peak_bytes >= least
        assert handle.stats().planned_steps > 0
        read = handle.setting.meter.read
        before = read().in_use
        ballast = take(4)
        assert read().in_use - before == ballast.nbytes
    assert modes() == []
    assert counts[:at] == [0] * at
    assert counts[at] > 0
    assert counts[at:] == [counts[at]] * (6 - at)


def test_users_dispatch_mode_around_everything_stays_active_after_detach() -> None:
    model, flops = Net(), FlopCounterMode(display=False)
    with flops:
        with attached(model) as handle:
            for _ in range(4):
                least = model.step()
            assert handle.stats().peak_bytes >= least
        assert modes() == [_FlopCounterMode]
        count = flops.get_total_flops()
        model.step()
        assert flops.get_total_flops() > count
    assert modes() == []
    assert StorageCounter._shared is None


def test_detaching_inside_a_users_dispatch_mode_leaves_that_mode_active() -> None:
    model, flops = Net(), FlopCounterMode(display=False)
    handle = attached(model)
    model.step()
    with flops:
        handle.detach()
        assert modes() == [_FlopCounterMode]
        model.step()
    assert flops.get_total_flops() > 0
    assert modes() == []


def test_torch_reports_correctly_whether_a_dispatch_mode_is_active() -> None:
    def known() -> bool:
        return bool(is_in_torch_dispatch_mode())

    with FlopCounterMode(display=False):
        meter = CpuMeter()
        assert known()
    assert known()
    with FlopCounterMode(display=False):
        meter.close()
        assert known()
    assert not known()


def test_meter_closed_in_a_backward_stops_counting_and_the_next_reuses_its_mode() -> None:
    meter = CpuMeter()
    x = torch.ones(4, requires_grad=True)
    x.register_hook(lambda _: meter.close())
    x.sum().backward()
    before, counter = meter.read().in_use, meter._counter
    ballast = take(4)
    assert meter.read().in_use == before
    following = CpuMeter()
    assert following._counter is counter
    assert following.read().in_use - before == ballast.nbytes + x.grad.nbytes
    following.close()
    assert modes() == []
    assert StorageCounter._shared is None


def test_limit_raises_out_of_memory_until_it_is_removed(meter: CpuMeter) -> None:
    meter.limit(meter.read().in_use + 4 * KIB)
    x = take(3)
    with pytest.raises(
        torch.OutOfMemoryError, match=r" out of memory\. .* exceeds the limit of .*iB by 2\.00 KiB"
    ):
        take(3)
    del x
    meter.limit(None)
    assert take(9).numel() == 9 * KIB


def test_allocation_over_the_limit_is_not_counted(meter: CpuMeter) -> None:
    since = Since(meter)
    meter.limit(meter.read().in_use + KIB)
    with pytest.raises(torch.OutOfMemoryError):
        take(8)
    assert since.in_use == 0


def test_closed_meter_limits_nothing() -> None:
    meter = CpuMeter()
    meter.limit(1)
    meter.close()
    assert take(1).numel() == KIB


class InWorker(Dataset[torch.Tensor]):
    """Items that a function makes in the worker of a DataLoader."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.make()


def made_in_a_fork(make: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    return list(DataLoader(InWorker(make), num_workers=1, multiprocessing_context="fork"))


def test_forked_worker_has_no_limit_and_the_parent_keeps_its_own(meter: CpuMeter) -> None:
    meter.limit(meter.read().in_use + 64 * KIB)
    assert [item.item() for item in made_in_a_fork(lambda: take(128).sum())] == [0, 0]
    with pytest.raises(torch.OutOfMemoryError):
        take(128)


def test_meter_made_in_a_forked_worker_counts_and_limits_there(meter: CpuMeter) -> None:
    meter.limit(meter.read().in_use + 64 * KIB)

    def counted() -> torch.Tensor:
        own = CpuMeter()
        since = Since(own)
        x = take(128)
        taken = since.in_use
        own.limit(own.read().in_use)
        with pytest.raises(torch.OutOfMemoryError):
            take(1)
        meter.close()  # as when the parent's model is dropped here
        with pytest.raises(torch.OutOfMemoryError):
            take(1)
        own.close()
        return torch.tensor(taken == x.nbytes)

    assert all(made_in_a_fork(counted))


def test_free_bytes_are_the_machines_memory_less_the_bytes_in_use(meter: CpuMeter) -> None:
    before = meter.free_bytes()
    x = take(16)
    assert before - meter.free_bytes() == x.nbytes
    assert meter.free_bytes() == meter.device_bytes - meter.read().in_use


def test_tensors_on_other_devices_do_not_count(meter: CpuMeter) -> None:
    since = Since(meter)
    elsewhere = torch.zeros(KIB, device="meta") + 1
    assert elsewhere.numel() == KIB
    assert since.in_use == 0


def test_unsupported_devices_are_refused_with_an_alternative() -> None:
    with pytest.raises(ConflictError, match=r"is on meta.*mimose\.checkpoint works on every"):
        meter_for(torch.device("meta"))


def test_a_compilers_fake_tensors_take_no_memory() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(1000)
    before = meter_for(torch.device("cpu"))
    try:
        counted = before.read().in_use
        del fake
        assert before.read().in_use == counted
    finally:
        before.close()


def segment(kind: str, *blocks: int) -> dict[str, Any]:
    """A run of pages, in MiB: what is negative is free."""
    states = [{"size": abs(b) << 20, "state": "inactive" if b < 0 else "active"} for b in blocks]
    return {"segment_type": kind, "blocks": states}


@pytest.mark.parametrize(
    ("blocks", "lost"),
    [
        ((24,), 0),
        ((-24,), 0),  # two whole pages
        ((5, -7), 7),  # none
        ((5, -19), 7),  # one, and the rest of another
        ((5, -26, 5), 14),  # one, between two parts
        ((5, -12, 7), 12),  # as large as a page, but it fills none
        ((5, -7, 12, -24, 3, -9), 16),
    ],
)
def test_free_bytes_outside_whole_pages_are_lost(blocks: tuple[int, ...], lost: int) -> None:
    assert lost_in([segment("large", *blocks)], 12 << 20) == lost << 20


def test_small_tensors_lie_in_small_pages() -> None:
    pages = [segment("small", 1, -3), segment("large", 12)]
    assert lost_in(pages, 12 << 20) == 1 << 20
