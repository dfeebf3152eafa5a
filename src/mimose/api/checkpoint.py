"""`mimose.checkpoint`: a drop-in replacement for `torch.utils.checkpoint.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from mimose.execution import BufferSnapshot, Frame, buffers_a_call_may_change, on_unsupported_device
from mimose.tensors import argument_tensors


def checkpoint(
    function: Callable[..., Any],
    /,
    *args: Any,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    early_stop: bool = True,
    context_fn: Callable[[], Any] | None = None,
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """Call `function` without keeping its activations; recompute them in the backward.

    A drop-in for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)` that updates
    module buffers (BatchNorm) once instead of twice. Calls with `context_fn` or `debug`, or on
    devices other than CPU and CUDA, are passed on to torch's implementation.

    >>> layer = torch.nn.Linear(4, 4)
    >>> checkpoint(layer, torch.ones(2, 4)).sum().backward()
    """
    if use_reentrant:
        raise ValueError(
            "mimose.checkpoint does not support use_reentrant=True: remove it, or call "
            "torch.utils.checkpoint.checkpoint"
        )
    if determinism_check not in ("default", "none"):
        raise ValueError(
            f"determinism_check should be one of ['default', 'none'], but got {determinism_check}"
        )
    if (
        context_fn is not None
        or debug
        or getattr(torch_checkpoint, "_checkpoint_debug_enabled", None)
        or torch.compiler.is_compiling()
        or on_unsupported_device(argument_tensors(args, kwargs))
    ):
        options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
        return torch_checkpoint.checkpoint(
            function,
            *args,
            use_reentrant=False,
            preserve_rng_state=preserve_rng_state,
            determinism_check=determinism_check,
            early_stop=early_stop,
            debug=debug,
            **options,
            **kwargs,
        )
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    forced = getattr(torch_checkpoint, "_enable_checkpoint_early_stop", None)
    slots = buffers_a_call_may_change(function, args, kwargs)
    frame = Frame(
        function,
        args,
        kwargs,
        preserve_rng=preserve_rng_state,
        check=determinism_check == "default",
        early_stop=early_stop if forced is None else forced,
        found=[BufferSnapshot(slots).run] if slots else [],
    )
    return frame.forward(args, kwargs)
