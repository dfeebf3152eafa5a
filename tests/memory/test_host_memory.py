"""The arena of host memory, the copies to it and back, its limit and the speed of the link."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chains import steady
from mimose.errors import ArgumentError
from mimose.memory import (
    CopyState,
    CopyTimes,
    HostArena,
    HostMemory,
    LinkSpeed,
    PinningError,
    host_arena,
    host_limit,
    meter_for,
)
from mimose.memory.host_limit import (
    automatic_limit,
    group_and_parents,
    parse_host_memory,
    physical_bytes,
)
from mimose.memory.host_segment import _WIPE_ON_FORK, HostSegment, ShortageError, _mapped

CPU = torch.device("cpu")


@steady
@given(data=st.data())
def test_ranges_never_overlap_and_return_to_the_arena(data: st.DataObject) -> None:
    arena = HostArena(1 << 20, CPU)
    held = []
    for size in data.draw(st.lists(st.integers(1, 40_000), max_size=40)):
        if held and data.draw(st.booleans()):
            held.pop(data.draw(st.integers(0, len(held) - 1)))
        got = arena.take(size)
        if got is not None:
            held.append(got)
        assert all(sum(piece.nbytes for piece in one.pieces) == one.nbytes for one in held)
        pieces = [(piece.address, piece.nbytes) for one in held for piece in one.pieces]
        spans = sorted((begin, begin + size) for begin, size in pieces)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert arena.held_bytes <= arena.limit_bytes
    held.clear()
    got = None
    assert arena.in_use_bytes == 0
    assert arena.take(arena.held_bytes or 1) is not None  # in one piece again


def test_an_arena_does_not_grow_beyond_its_limit() -> None:
    arena = HostArena(100_000, CPU)
    assert arena.take(200_000) is None
    first = arena.take(60_000)
    assert first is not None
    assert arena.take(60_000) is None
    assert not arena.reserve(100_001)
    assert arena.held_bytes <= 100_000


def test_reserved_bytes_can_be_taken_as_one_range() -> None:
    arena = HostArena(1 << 30, CPU)
    small = arena.take(1000)
    del small
    assert arena.reserve(50 << 20)
    assert arena.take(50 << 20) is not None
    arena.close()
    assert arena.held_bytes == 0


def wait_until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_an_arena_hands_out_ranges_while_it_grows_in_the_background() -> None:
    arena = HostArena(1 << 30, CPU)
    first = arena.take(1000)
    arena.prepare(700 << 20)
    assert arena.take(1000) is not None
    wait_until(lambda: arena.held_bytes >= 700 << 20)
    assert arena.held_bytes <= arena.limit_bytes
    assert arena.take(600 << 20) is not None
    assert first is not None


def test_reserve_waits_for_growth_in_the_background() -> None:
    arena = HostArena(1 << 30, CPU)
    arena.prepare(900 << 20)
    assert arena.reserve(1000 << 20)
    assert 1000 << 20 <= arena.held_bytes <= 1 << 30


def test_an_arena_that_is_closed_stops_growing() -> None:
    arena = HostArena(1 << 30, CPU)
    arena.prepare(900 << 20)
    arena.close()
    assert arena.held_bytes == 0
    assert not any(thread.name == "mimose-pinning" for thread in threading.enumerate())


def test_what_is_free_in_pieces_is_used_before_more_is_pinned() -> None:
    arena = HostArena(1 << 30, CPU)
    arena.prepare(300 << 20)
    while arena.held_bytes < 300 << 20:
        time.sleep(0.01)
    held = arena.held_bytes
    ranges = [arena.take(70 << 20) for _ in range(4)]  # no segment is so large
    assert all(ranges)
    assert arena.held_bytes == held


def test_an_error_in_the_background_is_raised_by_the_next_prepare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError("no pages")

    arena = HostArena(1 << 30, CPU)
    monkeypatch.setattr(mmap, "mmap", refuse)
    arena.prepare(100 << 20)

    def refused() -> bool:
        try:
            arena.prepare(100 << 20)
        except PinningError:
            return True
        return False

    wait_until(refused)
    assert arena.held_bytes == 0


def test_a_range_outlives_its_closed_arena() -> None:
    arena = HostArena(1 << 20, CPU)
    place = arena.take(4)
    assert place is not None
    arena.close()
    (piece,) = place.pieces
    piece.tensor.fill_(7)
    assert piece.tensor.tolist() == [7] * 4


def test_a_closed_arena_hands_out_nothing() -> None:
    arena = HostArena(1 << 20, CPU)
    arena.close()
    assert arena.take(4) is None
    assert not arena.reserve(4)
    assert arena.held_bytes == 0


def test_a_range_can_use_scattered_free_bytes() -> None:
    arena = HostArena(100 << 20, CPU)
    assert arena.reserve(70 << 20)  # in several pieces
    assert arena.reserve(100 << 20)
    thirds = [arena.take(33 << 20) for _ in range(3)]
    assert None not in thirds
    assert arena.take(2 << 20) is None
    thirds[1] = None
    assert arena.take(34 << 20) is not None


def test_a_storage_copied_to_a_scattered_range_comes_back() -> None:
    host = HostMemory(CPU, 10_240)
    places = [host.arena.take(1024) for _ in range(10)]
    del places[1::2]
    values = torch.arange(1200.0)  # 4,800 of the 5,120 bytes that are left, in five places
    copy = host.copy(values.untyped_storage())
    assert copy is not None
    copy.release()
    back = torch.empty(0).set_(copy.storage(), 0, (1200,), (1,))
    assert torch.equal(back, values)
    assert host.copy(torch.zeros(100).untyped_storage()) is None
    del copy
    assert host.arena.in_use_bytes == 5 * 1024


def test_the_garbage_collector_may_return_ranges_at_any_moment() -> None:
    """Also while the arena is handing others out."""

    def take_and_drop() -> None:
        arena = HostArena(1 << 20, CPU)
        held = []
        for k in range(2000):
            circle: list[object] = [arena.take(1000)]
            circle.append(circle)
            held.append(arena.take(600))
            if len(held) > 20:
                held.pop(k % 20)

    before = gc.get_threshold()
    gc.set_threshold(1)
    thread = threading.Thread(target=take_and_drop, daemon=True)
    thread.start()
    thread.join(20)
    gc.set_threshold(*before)
    assert not thread.is_alive()


def test_a_storage_leaves_the_device_and_comes_back() -> None:
    meter, host = meter_for(CPU), HostMemory(CPU, 1 << 20)
    values = torch.arange(1000.0)
    expected, in_use = values.clone(), meter.read().in_use
    copy = host.copy(values.untyped_storage())
    assert copy is not None
    assert copy.state is CopyState.LEAVING
    del values
    assert meter.read().in_use == in_use  # it may still be used
    copy.release()
    assert copy.state is CopyState.AWAY
    assert meter.read().in_use == in_use - 4000
    assert host.arena.in_use_bytes >= 4000
    copy.fetch()
    assert copy.state is CopyState.RETURNING
    back = torch.empty(0).set_(copy.storage(), 0, (1000,), (1,))
    assert copy.state is CopyState.BACK
    assert torch.equal(back, expected)
    assert host.moved_bytes == 4000
    del copy
    assert host.arena.in_use_bytes == 0
    meter.close()


def test_a_storage_that_is_still_on_the_device_is_not_copied_back() -> None:
    host, values = HostMemory(CPU, 1 << 20), torch.arange(10.0)
    copy = host.copy(values.untyped_storage())
    assert copy is not None
    assert copy.storage() is values.untyped_storage()
    copy.fetch()
    assert copy.state is CopyState.LEAVING


def test_a_full_arena_refuses_a_copy() -> None:
    host = HostMemory(CPU, 1000)
    assert host.copy(torch.zeros(1000).untyped_storage()) is None
    assert host.moved_bytes == 0


@pytest.mark.parametrize("value", ["lots", -1, "-1GiB", 1.5, True, "50%", None, ""])
def test_an_invalid_size_of_host_memory_is_refused(value: object) -> None:
    with pytest.raises(ArgumentError, match=r"host_memory=.*'16GiB'"):
        parse_host_memory(value)  # type: ignore[arg-type]


def test_more_host_memory_than_the_machine_has_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"more than the .*iB that this machine has"):
        parse_host_memory(physical_bytes() + 1)


def test_on_a_cpu_the_limit_is_zero_unless_requested() -> None:
    assert host_limit(None, CPU) == 0
    assert host_limit(0, CPU) == 0
    assert host_limit(1 << 20, CPU) == 1 << 20


def test_the_automatic_limit_leaves_three_quarters_and_is_shared_by_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = automatic_limit()
    assert 0 < alone <= physical_bytes() // 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert automatic_limit() == pytest.approx(alone / 4, rel=0.1)


@pytest.mark.parametrize(
    "cached",
    ["inactive_file 600\n", "inactive_file 5\nunevictable 0\ntotal_inactive_file 600\n"],
    ids=["version 2", "version 1"],
)
def test_files_that_the_system_caches_count_as_free_memory(cached: str, tmp_path: Path) -> None:
    group = tmp_path / "box"
    group.mkdir()
    for folder, limit in ((tmp_path, "max"), (group, "1000")):
        (folder / "most").write_text(limit)
        (folder / "used").write_text("900")
        (folder / "memory.stat").write_text(f"anon 300\n{cached}active_file 50\n")
    assert list(group_and_parents(tmp_path, "/box", "most", "used")) == [(1000, 300)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA would pin it")
def test_without_cuda_nothing_is_pinned() -> None:
    arena = HostArena(1 << 30, torch.device("cuda"))
    with pytest.raises(PinningError, match="memory cannot be pinned"):
        arena.reserve(1 << 20)
    assert arena.take(1 << 20) is None
    assert arena.held_bytes == 0


def test_more_than_the_free_memory_is_not_pinned() -> None:
    """The system would end the process, and not refuse."""
    with pytest.raises(PinningError, match=r"only .*iB of host memory are free"):
        HostSegment(1 << 50, torch.device("cuda"))
    arena = HostArena(1 << 60, torch.device("cuda"))
    assert not arena.reserve(1 << 50)
    assert arena.take(1 << 50) is None


def test_after_a_shortage_the_arena_asks_again_but_not_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena, asked = HostArena(1 << 30, CPU), list[int]()

    def short(nbytes: int, device: torch.device) -> NoReturn:
        asked.append(nbytes)
        raise ShortageError("only 1 MiB of host memory are free")

    def ask() -> None:
        arena.prepare(100 << 20)
        wait_until(lambda: arena._growth is None or not arena._growth.is_alive())

    with monkeypatch.context() as patch:
        patch.setattr(host_arena, "HostSegment", short)
        for _ in range(5):
            ask()
    assert len(asked) == 1
    arena._short_until = 0.0
    ask()
    assert arena.held_bytes >= 100 << 20


def test_reserve_makes_do_with_what_is_needed_if_there_is_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena, needed = HostArena(1 << 30, CPU), 16 << 20

    def scarce(nbytes: int, device: torch.device) -> HostSegment:
        if nbytes > needed:
            raise ShortageError("only 16 MiB of host memory are free")
        return HostSegment(nbytes, device)

    monkeypatch.setattr(host_arena, "HostSegment", scarce)
    assert arena.reserve(needed)
    assert arena.held_bytes == needed
    assert not arena.reserve(3 * needed)
    arena.close()


def test_an_arena_may_be_closed_by_the_thread_that_grows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The garbage collector runs in any thread, and may find a dead model there."""
    arena, made = HostArena(1 << 30, CPU), list[int]()

    def closing(nbytes: int, device: torch.device) -> HostSegment:
        arena.close()
        made.append(nbytes)
        return HostSegment(nbytes, device)

    monkeypatch.setattr(host_arena, "HostSegment", closing)
    arena.prepare(500 << 20)
    wait_until(lambda: bool(made))
    wait_until(lambda: not any(t.name == "mimose-pinning" for t in threading.enumerate()))
    assert len(made) == 1
    assert arena.held_bytes == arena.limit_bytes == 0


def is_mapped(address: int) -> bool:
    """Whether this process has memory there."""
    ranges = (
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def in_child(what: Callable[[], bool]) -> bool:
    """What a forked child says."""
    child = os.fork()
    if not child:
        os._exit(0 if what() else 1)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux wipes pages on a fork")
def test_a_child_process_gets_empty_pages_instead_of_pinned_ones() -> None:
    """If both processes had the same, the next write could go to a copy that the device does not
    know. They stay mapped: else the child would map other memory there, and unmap that later."""
    memory = _mapped(1 << 20, _WIPE_ON_FORK)
    memory.fill_(7)
    address = memory.data_ptr()
    assert in_child(lambda: is_mapped(address) and ctypes.string_at(address, 3) == bytes(3))
    assert ctypes.string_at(address, 3) == bytes([7] * 3)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_child_process_may_go_on_with_copies_on_a_cpu() -> None:
    host = HostMemory(CPU, 1 << 20)
    copied = host.copy(torch.arange(100.0).untyped_storage())
    assert copied is not None
    copied.release()

    def is_there() -> bool:
        return bool((torch.empty(0).set_(copied.storage(), 0, (100,), (1,)) == first).all())

    first = torch.arange(100.0)
    assert in_child(is_there)
    assert is_there()


def test_the_speed_of_the_link_follows_copies_that_differ_by_more_than_a_tenth() -> None:
    def copies(speed: float) -> list[tuple[int, float]]:
        return [(100 << 20, (100 << 20) / (speed * 1e9))] * 9

    link = LinkSpeed()
    assert not link.known
    assert link.learn(CopyTimes(copies(50), copies(40), 0.0))
    assert link.speeds == pytest.approx((50, 40))
    assert not link.learn(CopyTimes(copies(52), copies(41), 0.0))
    assert link.speeds == pytest.approx((50, 40))
    assert link.learn(CopyTimes(copies(25), [], 0.0))
    assert link.speeds == pytest.approx((25, 40))
    assert not link.learn(CopyTimes([(1000, 1.0)] * 20, [], 0.0))  # latency, not the link


def test_closing_host_memory_returns_everything() -> None:
    host = HostMemory(CPU, 1 << 20)
    kept = host.copy(torch.zeros(100).untyped_storage())
    host.close()
    assert host.arena.held_bytes == 0
    del kept
    gc.collect()
    assert host.arena.in_use_bytes == 0
