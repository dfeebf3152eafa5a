"""The graph of storages that the DTR simulator works on."""

from __future__ import annotations

from typing import final

from mimose.comparison.trace import Call


@final
class Storage:
    """Memory that is evicted and recomputed as a whole: a tensor with all of its views."""

    __slots__ = (
        "children",
        "last_access",
        "locks",
        "nanoseconds",
        "parents",
        "references",
        "resident",
        "size_bytes",
        "tensors",
    )

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.nanoseconds = 0
        """Time of the calls that made it and its views."""
        self.last_access = 0
        """When it was last an input, or was first made; in nanoseconds of simulated compute."""
        self.locks = 0
        """Uses that forbid its eviction now. Constants and survivors keep one forever."""
        self.references = 0
        """Its tensors that the program still holds."""
        self.resident = False
        self.tensors: list[Tensor] = []
        self.parents: dict[Storage, None] = {}
        """Storages that its tensors are computed from. A dictionary, for its order."""
        self.children: dict[Storage, None] = {}


@final
class Tensor:
    """A tensor: a storage's first, or a view of it."""

    __slots__ = ("defined", "maker", "size_bytes", "storage")

    def __init__(self, storage: Storage, maker: Node | None, size_bytes: int) -> None:
        self.storage = storage
        self.maker = maker
        """The call that makes it; None for a constant."""
        self.size_bytes = size_bytes
        self.defined = maker is None
        """Whether it exists. A view is lost with its storage, and must be made again itself."""


@final
class Node:
    """A call in the graph."""

    __slots__ = ("index", "inputs", "nanoseconds", "output_bytes", "outputs")

    def __init__(self, index: int, call: Call, inputs: list[Tensor]) -> None:
        self.index = index
        """Which call of the trace it is (0 = first)."""
        self.nanoseconds = call.nanoseconds
        self.output_bytes = sum(output.size_bytes for output in call.outputs)
        self.inputs = inputs
        self.outputs: list[Tensor] = []


def attach(node: Node, storage: Storage, size_bytes: int) -> Tensor:
    """Add an output to a call: a tensor on this storage."""
    tensor = Tensor(storage, node, size_bytes)
    if all(other.maker is not node for other in storage.tensors):
        storage.nanoseconds += node.nanoseconds
    storage.tensors.append(tensor)
    storage.references += 1
    node.outputs.append(tensor)
    for given in node.inputs:
        if given.storage is not storage:
            storage.parents[given.storage] = None
            given.storage.children[storage] = None
    return tensor
