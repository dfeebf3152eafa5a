"""The paper's collector: each block's forward runs twice, once only to be measured."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from mimose.costs import Run
from mimose.execution import (
    ArgumentCopies,
    BufferSnapshot,
    ExecutionContext,
    ForwardEnd,
    buffers_in,
    copy_containers,
    run_without_side_effects,
)
from mimose.interception import BlockInterceptor
from mimose.tensors import argument_tensors, new_bytes
from mimose.training.boundary_tensors import bytes_of_storages
from mimose.training.collector import Collector


class Shuttle(Collector):
    """The paper's collector: each block's forward runs once more, only to be measured.

    The saved bytes, the spike and the time of a block come from this extra forward. It runs on
    copies of the arguments, without the block's own hooks, and restores RNG, buffers and
    attributes. The levels around the block still come from the recompute. So does everything if an
    extra forward might do harm: if the block was not tried yet, or if other ranks take part in it.
    """

    name = "shuttle"
    keeps = False

    def __init__(self, *args: Any, interceptors: Sequence[BlockInterceptor], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._interceptors = interceptors
        self._measured: dict[int, tuple[int, int, Any, Any]] = {}

    def run_begins(self, run: Run, args: Any, kwargs: Any, *, keep: bool) -> int:
        number = super().run_begins(run, args, kwargs, keep=False)
        interceptor, copies = self._interceptors[run[0]], ArgumentCopies.of(args, kwargs)
        copyable = copies is None or copies.problem is None
        if copyable and interceptor.trusted and interceptor.runs_alone:
            self._measure(number, interceptor, *_copied(args, kwargs, copies))
        return number

    def _measure(self, run: int, interceptor: BlockInterceptor, args: Any, kwargs: Any) -> None:
        execution_context = ExecutionContext(argument_tensors(args, kwargs), preserve_rng=True)
        buffers = BufferSnapshot(buffers_in(interceptor.module))
        before = self.readings.read().in_use
        begun = self._clock.mark()
        measured = functools.partial(
            run_without_side_effects,
            interceptor.module,
            interceptor.side_effects,
            execution_context.run,
        )
        try:
            out = buffers.run(measured, interceptor.forward, args, kwargs)
        except Exception:  # so will the forward itself, or else there is nothing to report
            self.readings.drop_peak()
            return
        ended = self._clock.mark()
        after = self.readings.read()
        kept = after.in_use - before - new_bytes(out, (args, kwargs))
        self._measured[run] = (kept, after.peak - before, begun, ended)
        del out
        self.readings.drop_peak()

    def forward_ends(self, run: int, end: ForwardEnd) -> None:
        super().forward_ends(run, end)
        if run in self._measured:
            saved, spike, begun, ended = self._measured[run]
            saved += bytes_of_storages(end.saved_outputs)
            self._measured[run] = (saved, spike, begun, ended)

    def after_recompute(self, run: int) -> None:
        super().after_recompute(run)
        if not self._over and run in self._measured:
            seen = self._runs[run]
            seen.saved, seen.spike, seen.begun, seen.ended = self._measured[run]


def _copied(args: Any, kwargs: Any, copies: ArgumentCopies | None) -> tuple[Any, Any]:
    return copy_containers(args, kwargs) if copies is None else (copies.args, copies.kwargs)
