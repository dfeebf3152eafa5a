"""Move bytes to the host and back, as the plan of a step says.

Transfers follow the order of the program, not the progress of the device, so that the peak of a
step is reproducible. Before the forward of a run, the storages that are due are released from the
device. When the backward reaches a run, the storages that are due are fetched. This module holds no
tensors: they are freed with the graph.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from mimose.costs import Option, Profile, Run, Transfer
from mimose.execution import ArgumentsOfStep, Frame, MovedStorage, nodes_of, run_saving_on_host
from mimose.memory import HostMemory
from mimose.planning import Plan
from mimose.tensors import tensors_in
from mimose.training.collector import Collector
from mimose.training.decision import Decision
from mimose.training.host_use import HostUse


class StepTransfers:
    """The transfers of one step."""

    def __init__(
        self,
        transfers: Iterable[Transfer],
        runs: Sequence[Run],
        collector: Collector | None = None,
        host: HostMemory | None = None,
        freed: FreedBytes | None = None,
    ) -> None:
        self.host = host
        self._collector = collector
        self._freed = freed
        """Compares what comes free with the plan; None without a plan."""
        self._positions = {run: k for k, run in enumerate(runs)}
        self._to_release = sorted(transfers, key=lambda transfer: -transfer.release_before)
        self._to_fetch: dict[int, list[int]] = {}
        for transfer in self._to_release:
            self._to_fetch.setdefault(transfer.prefetch_at, []).append(transfer.run)
        self._moved: dict[int, _Moved] = {}
        self._arguments: ArgumentsOfStep | None = None

    def before_forward(self, run: Run, args: Any, kwargs: Any) -> _CallMover | None:
        """Release what is due. Returns the mover for this call, if the run is in the plan."""
        assert self.host is not None
        if self._arguments is None:
            self._arguments = ArgumentsOfStep(self.host)
        movable = self._arguments.movable(args, kwargs)
        position = self._positions.get(run)
        if position is None:
            return None
        self._release(position)
        return _CallMover(self, self.host, position, run, movable)

    def after_last_forward(self) -> None:
        """All runs in the plan have returned."""
        self._release(len(self._positions))
        if self._freed is not None:
            self._freed.compare()

    def _release(self, position: int) -> None:
        while self._to_release and self._to_release[-1].release_before <= position:
            run = self._to_release.pop().run
            moved = self._moved.get(run)
            if moved is not None:
                moved.away_bytes = sum(one.release() for one in moved.alive())
                if self._freed is not None:
                    self._freed.note(run, moved.away_bytes)
                if self._collector is not None:
                    self._collector.input_left(moved.run, moved.away_bytes)

    def moves(self, position: int, run: Run, moved: Sequence[MovedStorage]) -> None:
        """These storages of a run are on their way to the host."""
        self._moved[position] = _Moved(run, moved)
        if self._collector is not None:
            self._collector.input_leaves(run)

    def watch(self, run: Run) -> Callable[[Any, Any], None] | None:
        """The callback that prepares fetches in the backward of this run; None if there are none.

        It must be called with the inputs and the output of the run.
        """
        position = self._positions.get(run)
        if position not in self._to_fetch:
            return None
        due = self._to_fetch[position]

        def fetch(*_: Any) -> None:
            for run in due:
                self._fetch(run)

        def watch(_: Any, out: Any) -> None:
            for node in nodes_of(tensors_in(out)):
                node.register_prehook(fetch)

        return watch

    def _fetch(self, position: int) -> None:
        moved = self._moved.pop(position, None)
        if moved is not None:
            assert self.host is not None
            with self.host.stream.together():
                for one in moved.alive():
                    one.fetch()
            if self._collector is not None:
                self._collector.input_is_back(moved.away_bytes)


class FreedBytes:
    """What transfers free on the device, for each option, compared with the plan.

    Nested tensors, for instance, do not move. Plans then must not count on it.
    """

    def __init__(self, plan: Plan, profile: Profile, use: HostUse) -> None:
        self._choices, self._use = plan.choices, use
        self._planned: Counter[Option] = Counter()
        self._freed: Counter[Option] = Counter()
        self._expected = {
            moved.run: moved.moved_bytes - profile.runs[moved.run].shared_casts
            for moved in plan.transfers
        }

    def note(self, run: int, freed_bytes: int) -> None:
        """The bytes of a run have left the device, which freed `freed_bytes`."""
        option = self._choices[run]
        self._planned[option] += self._expected.get(run, 0)
        self._freed[option] += freed_bytes

    def compare(self) -> None:
        """All bytes have left: exclude options that have freed far less than planned."""
        for option, planned_bytes in self._planned.items():
            if self._freed[option] < _LEAST_FREED * planned_bytes:
                self._use.exclude(option, planned_bytes, self._freed[option])


_LEAST_FREED = 0.5
"""The least share of the planned bytes that transfers must free."""


class UnplannedTransfers(StepTransfers):
    """The transfers of a step with unknown costs, in which every block is recomputed.

    If the inputs of all blocks together would take a large share of the available bytes, they wait
    on the host: each one leaves after the next block has run, and returns one block early.
    """

    def __init__(
        self, host: HostUse, blocks: int, available_bytes: int, collector: Collector
    ) -> None:
        self._use, self._blocks, self._available = host, blocks, available_bytes
        self._moving = False
        super().__init__((), (), collector)

    def before_forward(self, run: Run, args: Any, kwargs: Any) -> _CallMover | None:
        position = len(self._positions)
        self._positions[run] = position
        self._release(position)
        if not self._moving and self._is_tight(position):
            self.host = self._use.begun()
            self._moving = self.host is not None
        if not self._moving:
            return None
        self._to_release.insert(0, Transfer(position, 0, position + 2, position + 1))
        self._to_fetch[position] = [position, position - 1]
        return super().before_forward(run, args, kwargs)

    def _is_tight(self, position: int) -> bool:
        """Whether the inputs would take too much, if further ones are as large as those so far."""
        if position < _RUNS_BEFORE_ESTIMATE or not self._use.possible:
            return False
        assert self._collector is not None
        # `risen_bytes` was measured when the previous run began.
        bytes_per_input = self._collector.risen_bytes / (position - 1)
        inputs = bytes_per_input * max(position, self._blocks)
        return inputs > _MOST_FOR_INPUTS * self._available


def transfers_for(
    decision: Decision,
    host: HostUse,
    collector: Collector | None,
    available_bytes: int,
    blocks: int,
) -> StepTransfers | None:
    """The transfers of a step with this decision; None if nothing moves."""
    plan = decision.cached.plan
    if plan.transfers and host.memory is not None:
        runs, profile = list(decision.cached.choices), decision.cached.profile
        exact = profile is not None and decision.trusted and not decision.bounded
        freed = FreedBytes(plan, profile, host) if profile is not None and exact else None
        return StepTransfers(plan.transfers, runs, collector, host.memory, freed)
    if collector is not None and not plan.choices and host.possible:
        return UnplannedTransfers(host, blocks, available_bytes, collector)
    return None


_RUNS_BEFORE_ESTIMATE = 2
"""The number of inputs from which the size of further ones is estimated."""
_MOST_FOR_INPUTS = 0.25
"""The share of the available bytes that inputs may take on the device. A recompute needs several
times its block's input, and the head needs memory, too."""


class _Moved:
    """The storages that one run has moved."""

    __slots__ = ("_storages", "away_bytes", "run")

    def __init__(self, run: Run, storages: Sequence[MovedStorage]) -> None:
        self.run = run
        self._storages = [weakref.ref(storage) for storage in storages]
        self.away_bytes = 0
        """Bytes that were freed on the device until the storages are fetched."""

    def alive(self) -> list[MovedStorage]:
        return [storage for ref in self._storages if (storage := ref()) is not None]


class _CallMover:
    """Moves the tensors that one call of a block needs in its backward."""

    __slots__ = ("_host", "_movable", "_position", "_run", "_transfers")

    def __init__(
        self,
        transfers: StepTransfers,
        host: HostMemory,
        position: int,
        run: Run,
        movable: Sequence[torch.Tensor],
    ) -> None:
        self._transfers, self._host = transfers, host
        self._position, self._run, self._movable = position, run, movable

    def run_saving_on_host(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the function, and move what it saves for its backward."""
        out, moved = run_saving_on_host(function, args, kwargs, self._host)
        self._transfers.moves(self._position, self._run, moved)
        return out

    def move_arguments(self, frame: Frame) -> None:
        """Move the arguments that only this call holds, as it is over and will be recomputed."""
        moved = frame.move_arguments(self._movable, self._host)
        self._transfers.moves(self._position, self._run, moved)
