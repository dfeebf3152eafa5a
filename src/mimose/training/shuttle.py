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
    run_restoring_attributes,
)
from mimose.interception import BlockInterceptor
from mimose.tensors import argument_tensors, new_bytes
from mimose.training.boundary_tensors import bytes_of_storages
from mimose.training.collector import Collector


class Shuttle(Collector):
    """The paper's collector: each block's forward runs once more, only to be measured.

    The saved bytes, the spike and the time of a block come from this extra forward. It runs on
    copies of the arguments, and restores RNG, buffers and attributes. The levels around the block
    still come from the recompute. A block whose arguments cannot be copied is kept, not measured.
    """

    name = "shuttle"
    keeps = False

    def __init__(self, *args: Any, interceptors: Sequence[BlockInterceptor], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._interceptors = interceptors
        self._measured: dict[int, tuple[int, int, Any, Any]] = {}

    def run_begins(self, run: Run, args: Any, kwargs: Any, *, keep: bool) -> int:
        number = super().run_begins(run, args, kwargs, keep=False)
        copies = ArgumentCopies.of(args, kwargs)
        if copies is None or copies.problem is None:
            self._measure(number, self._interceptors[run[0]], *_copied(args, kwargs, copies))
        return number

    def _measure(self, run: int, interceptor: BlockInterceptor, args: Any, kwargs: Any) -> None:
        execution_context = ExecutionContext(argument_tensors(args, kwargs), preserve_rng=True)
        buffers = BufferSnapshot(buffers_in(interceptor.module))
        before = self.readings.read().in_use
        begun = self._clock.mark()
        measured = functools.partial(
            run_restoring_attributes, interceptor.module, execution_context.run
        )
        out = buffers.run(measured, interceptor.plain, (args, kwargs), {})
        ended = self._clock.mark()
        after = self.readings.read()
        kept = after.in_use - before - new_bytes(out, (args, kwargs))
        self._measured[run] = (kept, after.peak - before, begun, ended)
        del out
        self.readings.drop_peak()

    def forward_ends(self, run: int, end: ForwardEnd) -> None:
        super().forward_ends(run, end)
        saved, spike, begun, ended = self._measured[run]
        saved += bytes_of_storages(end.saved_outputs)
        self._measured[run] = (saved, spike, begun, ended)

    def after_recompute(self, run: int) -> None:
        super().after_recompute(run)
        if not self._over:
            seen = self._runs[run]
            seen.saved, seen.spike, seen.begun, seen.ended = self._measured[run]


def _copied(args: Any, kwargs: Any, copies: ArgumentCopies | None) -> tuple[Any, Any]:
    return copy_containers(args, kwargs) if copies is None else (copies.args, copies.kwargs)
