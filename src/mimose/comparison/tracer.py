"""Record the operators of one training step as a `Trace`, on a CPU or a CUDA device."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mimose.comparison.trace import Call, Constant, Event, Output, Release, Trace
from mimose.errors import ArgumentError
from mimose.memory import Clock
from mimose.tensors import argument_tensors, storage_of, tensors_in

_WAIT_CYCLES = 200_000
"""How long a CUDA device waits before each recorded call: about 0.1 ms."""


def record_trace(
    step: Callable[[], object], *, device: str | torch.device = "cpu", warm_up_steps: int = 1
) -> Trace:
    """Run a training step and record its operators.

    The step is run `warm_up_steps` times before, so that the times are not those of a first run.
    Let it begin with `zero_grad()`: gradients that exist before are constants, and adding to a
    constant makes a copy of it.

    >>> model, batch = nn.Linear(4, 4), torch.ones(2, 4)
    >>> def step():
    ...     model.zero_grad()
    ...     model(batch).sum().backward()
    >>> trace = record_trace(step)
    >>> trace.calls[1].name, trace.constant_bytes
    ('aten.addmm.default', 112)

    Args:
        step: runs forward and backward once. What it returns is dropped.
        device: where the step runs. Tensors on other devices count as 0 bytes.
        warm_up_steps: how often the step is run before it is recorded.
    """
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device must be cpu or cuda; got {where}")
    for _ in range(warm_up_steps):
        step()
    gc.collect()  # what is garbage now must not be freed, and so recorded, in the step
    recorder = _Recorder(where)
    with recorder:
        step()
    gc.collect()  # what only a cycle keeps does not survive the step
    return recorder.finished()


@dataclass(eq=False)
class _Known:
    """A storage that a recorded call has used or made."""

    first: int
    """The tensor that stands for the storage as a whole."""
    is_constant: bool
    tensors: dict[tuple[Any, ...], int] = field(default_factory=dict)
    """Its tensors by their view of it. What autograd saves and unpacks is the same tensor."""

    def named(self, tensor: torch.Tensor) -> int:
        return self.tensors.get(_view(tensor), self.first)

    def all_tensors(self) -> list[int]:
        return list(dict.fromkeys((self.first, *self.tensors.values())))

    def views_of_constant(self) -> list[int]:
        """Views that the step made of a constant: they are no results of the step."""
        return self.all_tensors()[1:] if self.is_constant else []


@dataclass(frozen=True)
class _Timed:
    """A call whose time is read at the end, when the device has finished."""

    call: Call
    start: Any
    end: Any


class _Recorder(TorchDispatchMode):
    """Sees every operator call; finalizers of storages report what is freed.

    A lock guards what is known of storages: on CUDA the backward runs in a thread of its own.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._clock = Clock(device)
        self._constants: list[Constant] = []
        self._events: list[_Timed | Release] = []
        self._known: dict[int, _Known] = {}
        self._finalizers: dict[int, weakref.finalize[..., Any]] = {}
        self._tensors = 0
        self._lock = threading.RLock()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = argument_tensors(args, kwargs)
        with self._lock:
            inputs = tuple(name for tensor in given if (name := self._input(tensor)) is not None)
        _let_host_go_ahead(self._device)
        start = self._clock.mark()
        result = func(*args, **kwargs)
        end = self._clock.mark()
        with self._lock:
            self._record(str(func), inputs, list(_written(func, args, kwargs)), result, start, end)
        return result

    def finished(self) -> Trace:
        """What was recorded. Constants come first: they were there before the first call."""
        for finalizer in self._finalizers.values():
            finalizer.detach()
        for known in self._known.values():
            self._events += map(Release, known.views_of_constant())
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return Trace((*self._constants, *map(self._event, self._events)), self._device.type)

    def _event(self, event: _Timed | Release) -> Event:
        if isinstance(event, Release):
            return event
        call = event.call
        seconds = self._clock.seconds(event.start, event.end) or 0.0
        if self._device.type == "cuda" and _only_views(call):
            seconds = 0.0  # no kernel was launched
        return Call(call.name, round(seconds * 1e9), call.inputs, call.outputs)

    def _record(
        self,
        name: str,
        inputs: tuple[int, ...],
        written: list[torch.Tensor],
        result: Any,
        start: Any,
        end: Any,
    ) -> None:
        changed, replaced = self._change(written)
        made = [out for tensor in tensors_in(result) if (out := self._output(tensor, inputs))]
        self._events.append(_Timed(Call(name, 0, inputs, (*changed, *made)), start, end))
        self._events += map(Release, replaced)

    def _input(self, tensor: torch.Tensor) -> int | None:
        """The name of an input. What was not seen before is a constant."""
        storage = storage_of(tensor)
        if storage is None:
            return None
        known = self._known.get(storage._cdata)
        if known is None:
            known = self._add(storage, tensor, is_constant=True)
            self._constants.append(Constant(known.first, self._bytes(storage)))
        return known.named(tensor)

    def _change(self, written: list[torch.Tensor]) -> tuple[list[Output], list[int]]:
        """New tensors for those changed in place, and the ones that they replace.

        All views of a changed storage change with it, so one new tensor replaces all of them.
        """
        outputs, replaced = [], []
        for storage, tensor in _by_storage(written):
            known = self._known[storage._cdata]
            old, replaced_here = known.named(tensor), known.all_tensors()
            known.first, known.is_constant = self._new_name(), False
            known.tensors = {}
            outputs.append(Output(known.first, self._bytes(storage), None, old))
            replaced += replaced_here
        return outputs, replaced

    def _output(self, tensor: torch.Tensor, inputs: tuple[int, ...]) -> Output | None:
        """What a call makes: a storage or a view. None if the tensor is known already."""
        storage = storage_of(tensor)
        if storage is None:
            return None
        known = self._known.get(storage._cdata)
        if known is None:
            known = self._add(storage, tensor, is_constant=False)
            return Output(known.first, self._bytes(storage))
        shared = next((one for one in inputs if one in known.all_tensors()), None)
        if shared is None or _view(tensor) in known.tensors:
            return None
        known.tensors[_view(tensor)] = view = self._new_name()
        return Output(view, 0, alias_of=shared)

    def _add(
        self, storage: torch.UntypedStorage, tensor: torch.Tensor, *, is_constant: bool
    ) -> _Known:
        name, key = self._new_name(), storage._cdata
        known = self._known[key] = _Known(name, is_constant, {_view(tensor): name})
        self._finalizers[key] = weakref.finalize(storage, self._freed, key)
        self._finalizers[key].atexit = False
        return known

    def _freed(self, key: int) -> None:
        with self._lock:
            known = self._known.pop(key)  # another storage may get the same address
            del self._finalizers[key]
            gone = known.views_of_constant() if known.is_constant else known.all_tensors()
            self._events += map(Release, gone)

    def _new_name(self) -> int:
        self._tensors += 1
        return self._tensors - 1

    def _bytes(self, storage: torch.UntypedStorage) -> int:
        return storage.nbytes() if storage.device.type == self._device.type else 0


def _let_host_go_ahead(device: torch.device) -> None:
    """Make a CUDA device wait before a call, so that the host has launched the call by then.

    Otherwise the device would be idle, and the time of a short kernel would be that of its launch.
    """
    wait = getattr(torch.cuda, "_sleep", None)  # private: without it, launches are in the times
    if device.type == "cuda" and wait is not None:
        wait(_WAIT_CYCLES)


def _only_views(call: Call) -> bool:
    return bool(call.outputs) and all(output.alias_of is not None for output in call.outputs)


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Which part of its storage a tensor shows, and how."""
    layout = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return *layout, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The arguments that an operator changes in place, by its schema.

    A change that the schema does not declare, such as that of batch normalisation's running
    statistics, is not recorded.
    """
    schema = getattr(func, "_schema", None)  # higher-order operators have none
    for at, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[at] if at < len(args) else kwargs.get(argument.name))


def _by_storage(
    tensors: list[torch.Tensor],
) -> Iterator[tuple[torch.UntypedStorage, torch.Tensor]]:
    """Each storage once, with the first of the tensors on it."""
    seen = set()
    for tensor in tensors:
        storage = storage_of(tensor)
        if storage is not None and storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage, tensor
