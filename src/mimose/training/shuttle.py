"""The paper's collector: each block's forward runs twice, once only to be looked at."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mimose.execution import (
    ExecutionContext,
    Given,
    Snapshot,
    own_containers,
    places_in,
    without_a_trace,
)
from mimose.interception import BlockInterceptor
from mimose.tensors import argument_tensors, storage_bytes
from mimose.training.collector import RecomputeCollector


class Shuttle(RecomputeCollector):
    """The paper's collector: each block's forward runs once more, only to be looked at.

    What a block saves, its spike and its time come from a forward of their own, with RNG, buffers
    and attributes as they were, on copies of what the block is given; the levels around it still
    come from the recompute. A block whose arguments cannot be copied is not looked at: it is kept.
    """

    name = "shuttle"

    samples = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._looked: dict[int, tuple[int, int, Any, Any]] = {}

    def run_begins(self, interceptor: BlockInterceptor, args: Any, kwargs: Any) -> bool:
        super().run_begins(interceptor, args, kwargs)
        given = Given.of(args, kwargs)
        if given is None or given.problem is None:
            self._look(interceptor, *_own(args, kwargs, given))
        return True

    def _look(self, interceptor: BlockInterceptor, args: Any, kwargs: Any) -> None:
        execution_context = ExecutionContext(argument_tensors(args, kwargs), preserve_rng=True)
        buffers = Snapshot(places_in(interceptor.module))
        before = self._read().in_use
        begun = self._clock.mark()
        looked = functools.partial(without_a_trace, interceptor.module, execution_context.run)
        out = buffers.run(looked, interceptor.plain, (args, kwargs), {})
        ended = self._clock.mark()
        after = self._read()
        kept = after.in_use - before - _fresh_output_bytes(out, (args, kwargs))
        self._looked[interceptor.run] = (kept, after.peak - before, begun, ended)
        del out
        self._meter.reset_peak()

    def forward_ends(
        self, block: int, own_outputs: list[torch.UntypedStorage], idle_inputs: list[torch.Tensor]
    ) -> None:
        super().forward_ends(block, own_outputs, idle_inputs)
        saved, spike, begun, ended = self._looked[block]
        saved += sum(storage.nbytes() for storage in own_outputs)
        self._looked[block] = (saved, spike, begun, ended)

    def after_recompute(self, block: int) -> None:
        super().after_recompute(block)
        if self._over:
            return
        run = self._runs[block]
        run.saved, run.spike, run.begun, run.ended = self._looked[block]


def _own(args: Any, kwargs: Any, given: Given | None) -> tuple[Any, Any]:
    return own_containers(args, kwargs) if given is None else (given.args, given.kwargs)


def _fresh_output_bytes(out: Any, inputs: Any) -> int:
    known = storage_bytes(inputs)
    return sum(size for key, size in storage_bytes(out).items() if key not in known)
