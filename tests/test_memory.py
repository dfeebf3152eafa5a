"""The CPU's meter counts what is alive, each byte once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mimose.errors import ConflictError
from mimose.memory import CpuMeter, _StorageCounter, meter_for

KIB = 1 << 10


def take(kib: int) -> torch.Tensor:
    return torch.zeros(kib * KIB, dtype=torch.uint8)


@pytest.fixture
def meter() -> Iterator[CpuMeter]:
    meter = CpuMeter()
    yield meter
    meter.close()
    assert _StorageCounter._shared is None


class Since:
    """Bytes that came since it was made."""

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


def test_in_place_operators_take_nothing(meter: CpuMeter) -> None:
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


def test_what_lived_before_counts_and_is_freed() -> None:
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


def test_meters_share_one_count_until_the_last_is_closed() -> None:
    first, second = CpuMeter(), CpuMeter()
    x = take(7)
    assert first.read() == second.read()
    first.close()
    first.close()
    assert _StorageCounter._shared is not None
    since = Since(second)
    y = take(1)
    assert since.in_use == KIB
    second.close()
    assert _StorageCounter._shared is None
    del x, y


def test_meter_that_is_closed_does_not_lift_the_limit_of_another() -> None:
    first, second = CpuMeter(), CpuMeter()
    second.limit(second.read().in_use + 4 * KIB)
    first.close()
    try:
        with pytest.raises(torch.OutOfMemoryError):
            take(8)
    finally:
        second.close()


def test_limit_raises_out_of_memory_until_it_is_lifted(meter: CpuMeter) -> None:
    meter.limit(meter.read().in_use + 4 * KIB)
    x = take(3)
    with pytest.raises(torch.OutOfMemoryError, match=r"bytes in use, the limit is \d+"):
        take(3)
    del x
    meter.limit(None)
    assert take(9).numel() == 9 * KIB


def test_what_did_not_fit_is_not_held(meter: CpuMeter) -> None:
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


def test_free_is_what_the_machine_has_less_what_is_in_use(meter: CpuMeter) -> None:
    before = meter.free_bytes()
    x = take(16)
    assert before - meter.free_bytes() == x.nbytes
    assert meter.free_bytes() == meter.device_bytes - meter.read().in_use


def test_tensors_of_other_devices_do_not_count(meter: CpuMeter) -> None:
    since = Since(meter)
    elsewhere = torch.zeros(KIB, device="meta") + 1
    assert elsewhere.numel() == KIB
    assert since.in_use == 0


def test_other_devices_are_refused_with_a_way_out() -> None:
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
