"""Activations on the host as trainers do it: every tensor that a block saves, in every step.

As in TRL and torchtune: saved-tensor hooks copy to pinned memory on a side stream while the device
goes on computing; a few tensors wait on the device until their copies are done; in the backward
each comes back when it is asked for. Parameters and small tensors stay. Two things are better here
than there: the pinned memory is taken before training starts and serves tensors of any size, and
what is saved twice in a row is copied once.

With reentrant checkpointing inside the hooks, all that is saved is each block's input.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from mimose.tensors import version_of

SLAB_BYTES = 1 << 30
SMALL_BYTES = 64 << 10
STASH = 5
"""Tensors that wait on the device until their copies are done."""


class HostTooSmall(RuntimeError):
    """The host has no room for what a step saves."""


class Slabs:
    """Pinned host memory in large pieces, of which tensors take slices until the step is over."""

    def __init__(self, limit_bytes: int, *, pinned: bool) -> None:
        self._limit, self._pinned = limit_bytes, pinned
        self._slab_bytes = SLAB_BYTES if pinned else SLAB_BYTES >> 8
        # On a CPU, to try things out, the meter must not count the host's memory as the device's.
        self.uncounted = contextlib.nullcontext if pinned else _disable_current_modes
        self._slabs: list[torch.Tensor] = []
        self._slab = self._used = 0

    def grow_to(self, number_of_bytes: int) -> None:
        """Take so much now, or all that there may be: pinning takes time."""
        while self.taken_bytes < min(number_of_bytes, self._limit - self._slab_bytes):
            self._add(self._slab_bytes)

    @property
    def taken_bytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def reset(self) -> None:
        """The step is over."""
        self._slab = self._used = 0

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the host with this one's shape and strides."""
        storage = torch.empty_like(tensor, device="meta")  # dense, in the same order
        needed = -(-tensor.nbytes // 64) * 64
        while self._slab < len(self._slabs) and not self._fits(needed):
            self._slab, self._used = self._slab + 1, 0
        if self._slab == len(self._slabs):
            self._add(max(self._slab_bytes, needed))
        begin, self._used = self._used, self._used + needed
        with self.uncounted():
            flat = self._slabs[self._slab][begin : begin + tensor.nbytes].view(tensor.dtype)
            return flat.as_strided(storage.size(), storage.stride())

    def _fits(self, needed: int) -> bool:
        return self._used + needed <= self._slabs[self._slab].nbytes

    def _add(self, number_of_bytes: int) -> None:
        if self.taken_bytes + number_of_bytes > self._limit:
            raise HostTooSmall(f"the host has no more than {self._limit / 2**30:.0f} GiB to give")
        with self.uncounted():
            slab = torch.empty(number_of_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        self._slabs.append(slab)


@dataclass(eq=False)
class _Saved:
    """A tensor on its way to the host, there, or on its way back."""

    host: torch.Tensor
    device: torch.device
    still_here: torch.Tensor | None
    copied: Any = None


class HostHooks:
    """Pack and unpack for `saved_tensors_hooks`."""

    def __init__(self, slabs: Slabs, model: nn.Module, device: torch.device) -> None:
        self._slabs = slabs
        self._own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._stash: deque[_Saved] = deque()

    def pack(self, tensor: torch.Tensor) -> Any:
        own = tensor.untyped_storage().data_ptr() in self._own
        if own or tensor.nbytes < SMALL_BYTES or not _is_dense(tensor):
            return tensor.detach()  # a node that holds its own output would never go away
        for saved in self._stash:
            if saved.still_here is not None and _same(saved.still_here, tensor):
                return saved
        saved = _Saved(self._slabs.like(tensor), tensor.device, tensor.detach())
        self._copy(saved.host, tensor)
        saved.copied = self._mark()
        self._stash.append(saved)
        if len(self._stash) > STASH:
            self._let_go(self._stash.popleft())
        return saved

    def unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        if saved.still_here is not None:
            return saved.still_here
        back = torch.empty_strided(
            saved.host.size(), saved.host.stride(), dtype=saved.host.dtype, device=saved.device
        )
        self._copy(back, saved.host)
        self._wait(self._mark())
        return back

    def step_over(self) -> None:
        """Let go of what is left; the next step writes over the host's copies."""
        while self._stash:
            self._let_go(self._stash.popleft())
        self._slabs.reset()

    def _let_go(self, saved: _Saved) -> None:
        self._wait(saved.copied)
        saved.still_here = None

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        if self._stream is None:
            with self._slabs.uncounted():
                to.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)

    def _mark(self) -> Any:
        return None if self._stream is None else self._stream.record_event()

    def _wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its strides leave no holes: else a copy with the same strides would need more."""
    pairs = sorted(zip(tensor.stride(), tensor.size(), strict=True))
    expected = 1
    for stride, size in pairs:
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.size() == other.size()
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and version_of(one) == version_of(other)
    )


def save_all(layers: Iterable[nn.Module], hooks: HostHooks) -> None:
    """Every layer's saved tensors go to the host."""
    for layer in layers:
        layer.forward = functools.partial(_hooked, hooks, layer.forward)  # type: ignore[method-assign]


def save_inputs(layers: Iterable[nn.Module], hooks: HostHooks) -> None:
    """Every layer is recomputed, from an input that waits on the host."""
    for layer in layers:
        recomputed = functools.partial(_reentrant, layer.forward)
        layer.forward = functools.partial(_hooked, hooks, recomputed)  # type: ignore[method-assign]


def _hooked(
    hooks: HostHooks, forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any
) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        return forward(*args, **kwargs)


def _reentrant(
    forward: Callable[..., torch.Tensor], hidden: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    # Only what requires grad may be among its inputs; the rest is the same for all layers.
    run = functools.partial(_from_input, forward, args, kwargs)
    out: torch.Tensor = checkpoint(run, hidden, use_reentrant=True, preserve_rng_state=False)
    return out


def _from_input(
    forward: Callable[..., torch.Tensor], args: Any, kwargs: Any, hidden: torch.Tensor
) -> torch.Tensor:
    return forward(hidden, *args, **kwargs)
