"""Run a function without keeping its activations; rebuild them when the backward asks.

With `on_host.py`, the only file that touches autograd's saved-tensor hooks. It knows nothing of
models or plans. What it promises, and where the code relies on it:

1. Gradients equal those of the plain function, bit for bit.
2. RNG, autocast, attention backends and default device are those of the forward
   (`ExecutionContext`).
3. Buffers are updated once a step (`BufferSnapshot`).
4. A tensor that was rebuilt lives until it is used, or until its block's part of the graph is
   freed; a second backward rebuilds it again.
5. Arguments are held as autograd holds saved tensors: changed in place, they raise; inside an
   outer checkpoint they belong to the outer one and are not pinned.
6. The recompute stops as soon as the last tensor that it owes is there.
7. Another number or shape of saved tensors than in the forward is an error that names the block.
8. An exception leaves no hook, no state and no tensor behind.

Nesting follows from two facts: only the innermost hooks see a saved tensor, and the arguments of an
inner checkpoint are saved tensors of the outer one. So whatever an inner recompute needs, it asks
of the outer one first.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch.autograd.graph import saved_tensors_hooks

from mimose.errors import RecomputeError
from mimose.execution.autograd import Listener, hooks_are_active
from mimose.execution.context import ExecutionContext, outside_vmap
from mimose.execution.dry_run import DryRun, DryRunRecorder, outputs_match
from mimose.execution.frame_observer import FrameObserver
from mimose.execution.on_host import ArgumentsOnHost, MovedStorage
from mimose.execution.recomputed_tensors import REMEDY, AllThere, RecomputedTensors
from mimose.execution.saved_arguments import ArgumentsSavedByGraph, SavedArguments
from mimose.execution.saved_kinds import SavedKinds
from mimose.memory import HostMemory
from mimose.tensors import (
    argument_tensors,
    is_out_of_memory,
    is_parameter,
    release_traceback,
    shape_of,
    task_id,
    unknown_task,
)

RunAsFound = Callable[..., Any]
"""Calls a function with its arguments, with something else as a forward found it (buffers,
attributes), and then restores the present state."""


class KeptTensor:
    """A tensor that is kept until it is evicted. Only the graph holds this, and lets go of it when
    it would let go of a tensor that it saved itself."""

    __slots__ = ("__weakref__", "index", "tensor", "version")

    index: int
    """Its number among the saved tensors, once it is evicted."""
    tensor: torch.Tensor | None
    version: int


class Frame:
    """One run of a function whose activations are rebuilt: its forward, then its recomputes.

    A saved tensor is known by its number. In the graph the number stands for it; when the backward
    asks for one, all are rebuilt and wait in `recomputed` until they are asked for. `KeptTensor`s
    stand for activations that are kept.
    """

    __slots__ = (
        "__weakref__",
        "check",
        "complete",
        "early_stop",
        "evictable",
        "execution_context",
        "found",
        "function",
        "keeping",
        "kept",
        "listener",
        "make_room",
        "name",
        "observer",
        "recomputed",
        "run",
        "saved",
        "saved_arguments",
        "touched",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        name: str = "",
        run: int = -1,
        listener: Listener | None = None,
        make_room: Callable[[], bool] | None = None,
        preserve_rng: bool = True,
        check: bool = True,
        early_stop: bool = True,
        found: Sequence[RunAsFound] = (),
        keeping: bool = False,
    ) -> None:
        tensors = argument_tensors(args, kwargs)
        self.function = function
        self.name = name
        self.listener, self.run = listener, run
        self.observer: FrameObserver | None = None
        if listener is not None and listener.measures:
            self.observer = FrameObserver(listener, run, args, kwargs)
        self.make_room = make_room
        """Frees memory of other runs when a recompute runs out of it; whether any came free."""
        self.check = check
        self.early_stop = early_stop
        self.found = tuple(found)
        self.keeping = keeping
        self.kept: list[weakref.ref[KeptTensor]] = []
        self.evictable = False
        """Whether its kept activations can be evicted before the backward comes to them."""
        self.touched = False
        self.execution_context = ExecutionContext(tensors, preserve_rng=preserve_rng)
        self.saved_arguments: SavedArguments | ArgumentsSavedByGraph | ArgumentsOnHost
        if hooks_are_active():
            self.saved_arguments = ArgumentsSavedByGraph(args, kwargs)
        else:
            self.saved_arguments = SavedArguments(args, kwargs, tensors)
        self.saved = SavedKinds()
        self.recomputed = RecomputedTensors()
        self.complete = False

    def forward(self, args: Any, kwargs: Any) -> Any:
        cuda_was_up = torch.cuda.is_initialized()
        if self.keeping:
            out = self._keeping_forward(args, kwargs)
        else:
            with saved_tensors_hooks(self._packer(), self._unpack):
                out = self.function(*args, **kwargs)
            if self.observer is not None:
                self.observer.forward_ends(out)
        self.complete = True
        if not cuda_was_up and self.execution_context.generators and torch.cuda.is_initialized():
            raise RuntimeError(
                f"{self._title}: PyTorch's device state was initialized in the forward pass of a "
                "checkpoint, so its RNG could not be captured: use the device once before"
            )
        return out

    def _keeping_forward(self, args: Any, kwargs: Any) -> Any:
        kept: list[KeptTensor] = []
        try:
            with saved_tensors_hooks(self._keeper(kept), self._unpack_kept):
                out = self.function(*args, **kwargs)
            self.kept = list(map(weakref.ref, kept))
            if self.observer is not None:
                tensors = [each.tensor for each in kept if each.tensor is not None]
                self.observer.has_kept(tensors, out)
            return out
        finally:
            kept.clear()  # the graph holds the hooks, and the hooks hold this list

    def note_kinds(self) -> None:
        """Record the kinds of the tensors that are kept: a recompute will be compared with them.

        The tensor at a place whose node is gone is unknown, and nobody will ask for it.
        """
        if self.kept and not len(self.saved):
            refs = (ref() for ref in self.kept)
            self.saved.take([None if kept is None else kept.tensor for kept in refs])

    def dry_run(self, out: Any, *, count_operators: bool) -> DryRun:
        """Recompute at once and compare.

        For a frame made with `keeping=True`. The activations stay, and the backward uses them as if
        there were no checkpoint, unless they are let go of. Without memory to try, they are let go
        of here, and the error is raised. Operators cannot be counted in compiled code.
        """
        self.note_kinds()
        watch = DryRunRecorder(self)
        try:
            with watch if count_operators else nullcontext():
                rebuilt = self._replay(watch.pack, watch.unpack)
        except Exception as error:
            if is_out_of_memory(error):
                self.evict()
                raise
            return DryRun(f"it raised {type(error).__name__}: {error}")
        finally:
            watch.clear()
        if watch.packed != len(self.saved):
            return DryRun(
                f"it saved {watch.packed} tensors where the forward saved {len(self.saved)}"
            )
        if self.saved.misfits:
            return DryRun(self.saved.describe_misfits())
        try:
            if not outputs_match(out, rebuilt):
                return DryRun("its outputs have other values")
        except Exception as error:  # nested tensors, say
            return DryRun(f"its outputs cannot be compared ({type(error).__name__}: {error})")
        return DryRun(None, watch.operators_since_pack if count_operators else None)

    @property
    def can_be_evicted(self) -> bool:
        """Whether it keeps its activations, and its backward has not begun."""
        return self.evictable and not self.touched

    def evict(self) -> None:
        """Drop the activations that were kept: the backward recomputes them."""
        self.note_kinds()
        self.keeping = self.evictable = False
        for index, ref in enumerate(self.kept):
            kept = ref()
            if kept is not None:
                kept.tensor, kept.index = None, index
        self.kept = []

    def move_arguments(
        self, movable: Sequence[torch.Tensor], host: HostMemory
    ) -> list[MovedStorage]:
        """Let these arguments wait in host memory until the recompute; what moves.

        None do inside an outer checkpoint, which holds them itself, nor if one was changed in place
        since the forward began, which the recompute will complain about.
        """
        if not isinstance(self.saved_arguments, SavedArguments) or self.saved_arguments.changed:
            return []
        self.saved_arguments = on_host = ArgumentsOnHost(self.saved_arguments, movable, host)
        return on_host.moved

    def keep(self) -> None:
        """Keep the activations of this run for good: no recompute, and nothing held for one.

        For a frame made with `keeping=True`. Arguments that lead to the frame's own graph would
        otherwise hold it, and it them, where no garbage collector sees that.
        """
        self.function, self.found, self.evictable = _as_it_is, (), False
        self.observer = None
        self.saved_arguments = SavedArguments((), {}, [])

    def _packer(self) -> Callable[[torch.Tensor], int]:
        saved, observer = self.saved, self.observer
        shapes, dtypes, devices = saved.shapes, saved.dtypes, saved.devices

        def pack(tensor: torch.Tensor) -> int:
            shapes.append(shape_of(tensor))
            dtypes.append(tensor.dtype)
            devices.append(tensor.get_device())
            return len(shapes) - 1

        def pack_and_look(tensor: torch.Tensor) -> int:
            assert observer is not None
            observer.saves(tensor)
            return pack(tensor)

        return pack if observer is None else pack_and_look

    def _keeper(self, kept: list[KeptTensor]) -> Callable[[torch.Tensor], KeptTensor]:
        """What sees the tensors that a forward saves whose activations are kept.

        It runs for each of them, so whatever can wait until the forward is over does.
        """
        observer, new = self.observer, KeptTensor.__new__

        def keep(tensor: torch.Tensor) -> KeptTensor:
            stands_for = new(KeptTensor)
            # Detached, or an output would hold the node that saves it. A leaf is nobody's output.
            stands_for.tensor = tensor if tensor.is_leaf else tensor.detach()
            stands_for.version = tensor._version
            kept.append(stands_for)
            return stands_for

        def keep_and_look(tensor: torch.Tensor) -> KeptTensor:
            if is_parameter(tensor):
                assert observer is not None
                observer.parameters.add(len(kept))
            return keep(tensor)

        return keep if observer is None else keep_and_look

    def _unpack_kept(self, kept: KeptTensor) -> torch.Tensor:
        tensor = kept.tensor
        if tensor is None:
            return self._unpack(kept.index)
        if tensor._version != kept.version:
            self._raise_changed(tensor)
        if self.complete and not self.touched:  # else a backward inside of the forward asks
            self.touched = True
            if self.listener is not None:
                self.listener.before_use(self.run)
        return tensor

    def _unpack(self, index: int) -> torch.Tensor:
        run = _exec_group()
        if run is None:
            run = task_id()
        recomputed = self.recomputed
        if run != recomputed.backward or run == _OUTSIDE:
            self._recompute()
            recomputed.backward = run
        tensor = recomputed.take(index)
        if tensor is None:
            return self._unpack_again(index)
        if recomputed.changed(index, tensor):
            self._raise_changed(tensor)
        if run == _OUTSIDE:  # no backward will ask for the others
            recomputed.clear()
        elif self.observer is not None:
            self.observer.hold_until_used(tensor)
        return tensor

    def _raise_changed(self, tensor: torch.Tensor) -> NoReturn:
        raise RuntimeError(
            f"{self._title}: one of the variables needed for gradient computation has been "
            "modified by an inplace operation: "
            f"{list(shape_of(tensor))} {tensor.dtype}"
        )

    def _unpack_again(self, index: int) -> torch.Tensor:
        if task_id is not unknown_task:
            raise RecomputeError(
                f"{self._title}: Unpack is being triggered for a tensor that was already unpacked "
                "once. Performing two backward calls that overlap under one GraphExecGroup is not "
                "allowed, nor is reading ctx.saved_tensors twice in one backward: read it once"
            )
        self._recompute()  # another backward, as far as one can tell
        tensor = self.recomputed.take(index)
        assert tensor is not None
        return tensor

    def _recompute(self) -> None:
        """Rebuild all activations; once more if memory ran out and some could be freed."""
        handled = sys.exc_info()[1]  # the caller's, and not ours to clear
        try:
            self._rebuild()
        except Exception as error:
            if self.make_room is None or not is_out_of_memory(error) or not self.make_room():
                raise
            release_traceback(error, keep=handled)
        else:
            return
        self._rebuild()

    def _rebuild(self) -> None:
        self.recomputed.clear()
        listener = self.listener if self.complete else None
        if listener is not None:
            listener.before_recompute(self.run)
        packer = self.recomputed.packer(
            self.saved,
            self._title,
            complete=self.complete,
            early_stop=self.early_stop,
            check=self.check,
        )
        self._replay(packer, self.recomputed.looker_up(self._title))
        if listener is not None:
            listener.after_recompute(self.run)
        if len(self.recomputed) < len(self.saved):
            self._fail(
                "A different number of tensors was saved during the original forward and "
                f"recomputation: {len(self.saved)} and {len(self.recomputed)}"
            )
        if self.saved.misfits:
            self._fail(self.saved.describe_misfits())

    def _replay(
        self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> Any:
        try:
            args, kwargs = self.saved_arguments.unpack()
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._title}: {error}. Work on a copy of it, or exclude this block"
            ) from None
        self.saved.misfits.clear()
        self.recomputed.backward = None
        run: Callable[..., Any] = self.execution_context.run
        try:
            with outside_vmap(), saved_tensors_hooks(pack, unpack), torch.enable_grad():
                for run_as_found in self.found:
                    run = functools.partial(run_as_found, run)
                return run(self.function, args, kwargs)
        except AllThere:
            return None
        except BaseException as error:
            if self._stopped_in_script(error):
                return None
            if not self.keeping:
                self.recomputed.clear()
            raise

    def _stopped_in_script(self, error: BaseException) -> bool:
        """Whether this was a stop: TorchScript makes an error of its own of any exception."""
        there = len(self.recomputed) == len(self.saved) and self.complete and not self.keeping
        return there and self.early_stop and isinstance(error, RuntimeError)

    def _fail(self, problem: str) -> NoReturn:
        self.recomputed.clear()
        raise RecomputeError(f"{self._title}: {problem}. {REMEDY}")

    @property
    def _title(self) -> str:
        function = self.function
        return self.name or getattr(function, "__qualname__", "") or type(function).__qualname__


_OUTSIDE = -1
"""What tells that no backward is running."""


_exec_group: Callable[[], Any] = getattr(torch._C, "_get_graph_exec_group", lambda: None)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
