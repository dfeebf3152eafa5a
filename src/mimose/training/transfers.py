"""Carry out what a step's plan moves to the host: when it leaves the device, when it comes back.

The moments follow the order of the program, not the progress of the device, so the peak of a step
is the same each time. Before the forward of a run begins, whatever is due by then is released; when
the backward comes to a run, whatever is due by then is fetched. Nothing here holds tensors: with
the graph they are gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from mimose.costs import Run, Transfer
from mimose.execution import ArgumentsOfStep, Frame, MovedStorage, nodes_of, run_saving_on_host
from mimose.memory import HostMemory
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
    ) -> None:
        self.host = host
        self._collector = collector
        self._positions = {run: k for k, run in enumerate(runs)}
        self._to_release = sorted(transfers, key=lambda transfer: -transfer.release_before)
        self._to_fetch: dict[int, list[int]] = {}
        for transfer in self._to_release:
            self._to_fetch.setdefault(transfer.prefetch_at, []).append(transfer.run)
        self._moved: dict[int, _Moved] = {}
        self._arguments: ArgumentsOfStep | None = None

    def before_forward(self, run: Run, args: Any, kwargs: Any) -> _CallMover | None:
        """A block is about to run: release what is due. What moves for this call, if the plan knows
        it."""
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
        """Every run that the plan knows has returned."""
        self._release(len(self._positions))

    def _release(self, position: int) -> None:
        while self._to_release and self._to_release[-1].release_before <= position:
            moved = self._moved.get(self._to_release.pop().run)
            if moved is not None:
                moved.away_bytes = sum(one.release() for one in moved.alive())
                if self._collector is not None:
                    self._collector.input_left(moved.run, moved.away_bytes)

    def moves(self, position: int, run: Run, moved: Sequence[MovedStorage]) -> None:
        """These storages of a run are on their way to the host."""
        self._moved[position] = _Moved(run, moved)
        if self._collector is not None:
            self._collector.input_leaves(run)

    def watch(self, run: Run) -> Callable[[Any, Any], None] | None:
        """What must be called with the inputs and the output of this run, so that transfers are
        fetched when the backward comes to it; None if none are."""
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


class UnplannedTransfers(StepTransfers):
    """The transfers of a step of which nothing is known, in which every block is recomputed.

    If the inputs of all blocks together would take a large share of what the step may rise by, they
    wait on the host: each leaves when the next block has run, and comes back one block ahead.
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
        """Whether the inputs would take too much, if those to come are like those so far."""
        if position < _FEW_RUNS or not self._use.possible:
            return False
        assert self._collector is not None
        of_one = self._collector.risen_bytes / (position - 1)  # when the run before began
        inputs = of_one * max(position, self._blocks)
        return inputs > _TIGHT * self._available


def transfers_for(
    decision: Decision,
    host: HostUse,
    collector: Collector | None,
    available_bytes: int,
    blocks: int,
) -> StepTransfers | None:
    """The transfers of a step that runs as decided; None if nothing moves in it."""
    plan = decision.cached.plan
    if plan.transfers and host.memory is not None:
        return StepTransfers(plan.transfers, list(decision.cached.choices), collector, host.memory)
    if collector is not None and not plan.choices and host.possible:
        return UnplannedTransfers(host, blocks, available_bytes, collector)
    return None


_FEW_RUNS = 2
"""So many inputs tell how large those to come will be."""
_TIGHT = 0.25
"""The share of what a step may rise by that inputs may take on the device. A recompute needs some
times its block's input, and the head its own part."""


class _Moved:
    """What one run has moved."""

    __slots__ = ("_storages", "away_bytes", "run")

    def __init__(self, run: Run, storages: Sequence[MovedStorage]) -> None:
        self.run = run
        self._storages = [weakref.ref(storage) for storage in storages]
        self.away_bytes = 0
        """What came free on the device, until it is fetched."""

    def alive(self) -> list[MovedStorage]:
        return [storage for ref in self._storages if (storage := ref()) is not None]


class _CallMover:
    """Moves what one call of a block needs in its backward."""

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
        """Call the function; what it saves for its backward moves."""
        out, moved = run_saving_on_host(function, args, kwargs, self._host)
        self._transfers.moves(self._position, self._run, moved)
        return out

    def move_arguments(self, frame: Frame) -> None:
        """The call is over, and will be recomputed: arguments that only it holds move."""
        moved = frame.move_arguments(self._movable, self._host)
        self._transfers.moves(self._position, self._run, moved)
