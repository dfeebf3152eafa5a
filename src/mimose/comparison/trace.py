"""The operators of one training step, in order, with what each needs and when tensors are freed.

A trace is in copy-on-write form: an operator that changes a tensor in place makes a new tensor that
`replaces` the old one, and the old one is released. So every tensor has one value, which can be
computed again from the inputs of its call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mimose.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that was there before the step, such as a parameter. It is never evicted."""

    tensor: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that a call makes."""

    tensor: int
    size_bytes: int
    """Size of its storage; 0 if it shares the storage of an input."""
    alias_of: int | None = None
    """The input whose storage it shares; None if it has its own."""
    replaces: int | None = None
    """The input that the call changed in place, and that this output stands for from now on."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator."""

    name: str
    nanoseconds: int
    inputs: tuple[int, ...]
    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """The program drops its last reference to a tensor."""

    tensor: int


Event = Constant | Call | Release


@dataclass(frozen=True)
class Trace:
    """The events of one step. A tensor that is never released must exist after the step.

    >>> trace = Trace((
    ...     Constant(0, 100),
    ...     Call("relu", 5, (0,), (Output(1, 100),)),
    ...     Call("view", 1, (1,), (Output(2, 0, alias_of=1),)),
    ...     Release(1),
    ...     Call("sum", 4, (2,), (Output(3, 4),)),
    ...     Release(2),
    ... ))
    >>> trace.nanoseconds, trace.peak_bytes, trace.survivors
    (10, 204, (3,))
    """

    events: tuple[Event, ...]
    device: str = "cpu"

    def __post_init__(self) -> None:
        check = TraceCheck()
        for event in self.events:
            check.admit(event)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The operator calls, in order."""
        return tuple(event for event in self.events if isinstance(event, Call))

    @property
    def nanoseconds(self) -> int:
        """Time of all calls when nothing is computed twice."""
        return sum(call.nanoseconds for call in self.calls)

    @property
    def constant_bytes(self) -> int:
        """Bytes that are in use throughout."""
        return sum(event.size_bytes for event in self.events if isinstance(event, Constant))

    @property
    def survivors(self) -> tuple[int, ...]:
        """Tensors that were made in the step and never released, such as gradients."""
        made = [output.tensor for call in self.calls for output in call.outputs]
        released = {event.tensor for event in self.events if isinstance(event, Release)}
        return tuple(tensor for tensor in made if tensor not in released)

    @property
    def peak_bytes(self) -> int:
        """Highest memory in use when nothing is evicted."""
        return max(_bytes_in_use(self.events), default=0)


def _bytes_in_use(events: tuple[Event, ...]) -> Iterator[int]:
    """Memory in use after each event."""
    in_use, storages = 0, _Storages()
    for event in events:
        if isinstance(event, Constant):
            storages.constant(event)
            in_use += event.size_bytes
        elif isinstance(event, Call):
            storages.make(event)
            in_use += sum(output.size_bytes for output in event.outputs)
        else:
            in_use -= storages.release(event.tensor)
        yield in_use


class _Storages:
    """How many tensors of each storage are referenced. A storage has the name of its first one."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self._references: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def constant(self, event: Constant) -> None:
        self._of[event.tensor] = event.tensor
        self._references[event.tensor] = 2  # one for the owner: constants are never freed
        self._sizes[event.tensor] = event.size_bytes

    def make(self, call: Call) -> None:
        for output in call.outputs:
            if output.alias_of is None:
                storage = output.tensor
                self._sizes[storage] = output.size_bytes
            else:
                storage = self._of[output.alias_of]
            self._of[output.tensor] = storage
            self._references[storage] = self._references.get(storage, 0) + 1

    def release(self, tensor: int) -> int:
        """Drop a reference; the bytes that this frees."""
        storage = self._of[tensor]
        self._references[storage] -= 1
        return 0 if self._references[storage] else self._sizes[storage]


class TraceCheck:
    """Admits events in order, and raises at the first that contradicts those before it."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._released: set[int] = set()

    def admit(self, event: Event) -> None:
        """Raise an `ArgumentError` if this event cannot follow the events before it."""
        if isinstance(event, Constant):
            self._make(event.tensor, event.size_bytes)
        elif isinstance(event, Call):
            self._call(event)
        else:
            self._use(event.tensor, "release")
            self._released.add(event.tensor)

    def _call(self, call: Call) -> None:
        if call.nanoseconds < 0:
            raise ArgumentError(f"{call.name} takes {call.nanoseconds} ns; a time is at least 0")
        for tensor in call.inputs:
            self._use(tensor, call.name)
        for output in call.outputs:
            for named in (output.alias_of, output.replaces):
                if named is not None and named not in call.inputs:
                    raise ArgumentError(
                        f"output {output.tensor} of {call.name} names tensor {named}, "
                        f"which is not an input of the call"
                    )
            if output.alias_of is not None and output.size_bytes:
                raise ArgumentError(
                    f"output {output.tensor} of {call.name} shares the storage of tensor "
                    f"{output.alias_of} and so must have 0 bytes of its own, not "
                    f"{output.size_bytes}"
                )
            self._make(output.tensor, output.size_bytes)

    def _use(self, tensor: int, what: str) -> None:
        if tensor not in self._known:
            raise ArgumentError(f"{what} uses tensor {tensor}, which does not exist yet")
        if tensor in self._released:
            raise ArgumentError(f"{what} uses tensor {tensor}, which was released before")

    def _make(self, tensor: int, size_bytes: int) -> None:
        if tensor in self._known:
            raise ArgumentError(f"tensor {tensor} is made twice")
        if size_bytes < 0:
            raise ArgumentError(f"tensor {tensor} has {size_bytes} bytes; a size is at least 0")
        self._known.add(tensor)
