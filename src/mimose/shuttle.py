"""The paper's collector: each block's forward runs twice, once only to be looked at."""

from __future__ import annotations

from typing import Any

import torch

from mimose.ambient import Ambient
from mimose.attach import BlockSeat
from mimose.buffers import Snapshot, places_in
from mimose.collector import Ride
from mimose.held import own_containers
from mimose.trees import argument_tensors, storage_bytes


class Shuttle(Ride):
    """The paper's collector: each block's forward runs once more, only to be looked at.

    What a block saves, its spike and its time come from a forward of their own, with RNG and
    buffers as they were; the levels around it still come from the recompute.
    """

    samples = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._looked: dict[int, tuple[int, int, Any, Any]] = {}

    def run_begins(self, seat: BlockSeat, args: Any, kwargs: Any) -> bool:
        super().run_begins(seat, args, kwargs)
        ambient = Ambient(argument_tensors(args, kwargs), preserve_rng=True)
        buffers = Snapshot(places_in(seat.module))
        before = self._read().in_use
        begun = self._clock.mark()
        out = buffers.run(ambient.run, seat.plain, own_containers(args, kwargs), {})
        ended = self._clock.mark()
        after = self._read()
        kept = after.in_use - before - _fresh_output_bytes(out, (args, kwargs))
        self._looked[seat.run] = (kept, after.peak - before, begun, ended)
        del out
        self._meter.reset_peak()
        return True

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


def _fresh_output_bytes(out: Any, inputs: Any) -> int:
    known = storage_bytes(inputs)
    return sum(size for key, size in storage_bytes(out).items() if key not in known)
