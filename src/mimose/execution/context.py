"""The global state that a forward depends on: RNG, autocast, attention backends, default device.

It is captured when a block runs and restored for its recompute. On CUDA the backward runs on
another thread with its own thread-local state, so all of it is set explicitly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

_AUTOCAST_DEVICES = ("cuda", "cpu")


class ExecutionContext:
    """The execution context of one forward, in which a recompute can run."""

    __slots__ = ("autocast", "device", "generators", "sdpa")

    def __init__(self, tensors: list[torch.Tensor], *, preserve_rng: bool) -> None:
        self.generators = generator_states(tensors) if preserve_rng else []
        self.autocast = _autocast_state()
        self.sdpa = _sdpa_state()
        self.device = _default_device()

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call `function` in this context, then restore the present one."""
        present = [(generator, generator.get_state()) for generator, _ in self.generators]
        sdpa = _sdpa_state()
        try:
            for generator, state in self.generators:
                generator.set_state(state)
            if sdpa != self.sdpa:
                _set_sdpa(self.sdpa)
            autocast, device = _autocast_state(), _default_device()
            if not any(self.autocast) and not any(autocast) and device == self.device:
                return function(*args, **kwargs)
            with ExitStack() as stack:
                self._enter_contexts(stack, device)
                return function(*args, **kwargs)
        finally:
            if sdpa != self.sdpa:
                _set_sdpa(sdpa)
            for generator, state in present:
                generator.set_state(state)

    def _enter_contexts(self, stack: ExitStack, present_device: torch.device | None) -> None:
        for kind, state in zip(_AUTOCAST_DEVICES, self.autocast, strict=True):
            if state is None:
                stack.enter_context(torch.autocast(kind, enabled=False))
            else:
                dtype, cache = state
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
        if present_device != self.device:
            stack.enter_context(self.device or torch.device("cpu"))


def on_unsupported_device(tensors: list[torch.Tensor]) -> bool:
    """Whether some tensor is on a device whose RNG is not captured here."""
    return any(t.device.type not in ("cpu", "cuda", "meta") for t in tensors)


def generator_states(tensors: list[torch.Tensor]) -> list[tuple[torch.Generator, torch.Tensor]]:
    """torch's default generators that a call with these tensors may use, with their states."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        devices = {t.device.index for t in tensors if t.is_cuda}
        devices.add(torch.cuda.current_device())
        generators += [torch.cuda.default_generators[index] for index in sorted(devices)]
    return [(generator, generator.get_state()) for generator in generators]


def _autocast_state() -> tuple[tuple[torch.dtype, bool] | None, ...]:
    return tuple(
        (torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
        if torch.is_autocast_enabled(device)
        else None
        for device in _AUTOCAST_DEVICES
    )


def _default_device() -> torch.device | None:
    # get_default_device() takes microseconds. Without a function mode, none is set.
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


def _sdpa_state() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _set_sdpa(state: tuple[bool, ...]) -> None:
    cuda = torch.backends.cuda
    cuda.enable_flash_sdp(state[0])
    cuda.enable_mem_efficient_sdp(state[1])
    cuda.enable_math_sdp(state[2])
    cuda.enable_cudnn_sdp(state[3])


def outside_vmap() -> Any:
    """A context without vmap: a batched backward (`is_grads_batched`) runs under it, while the
    forward did not."""
    return nullcontext() if _VMAP_KEYS is None else torch._C._ExcludeDispatchKeyGuard(_VMAP_KEYS)


def _vmap_keys() -> Any:
    try:
        return torch._C.DispatchKeySet(torch._C._dispatch_key_parse("VmapMode"))
    except (AttributeError, RuntimeError):
        return None


_VMAP_KEYS = _vmap_keys() if hasattr(torch._C, "_ExcludeDispatchKeyGuard") else None
