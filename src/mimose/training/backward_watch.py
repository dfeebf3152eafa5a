"""Detects when the backward of a step begins and ends, and whether one is still possible."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from mimose.execution import at_end_of_backward, nodes_of
from mimose.tensors import keeps_graph, tensors_in


class Watched(Protocol):
    """A step whose backward is watched."""

    over: bool
    """Whether its backward is over."""

    def goes_on(self) -> None: ...
    def backward_ends(self) -> None: ...
    def later_backward_ends(self) -> None: ...


class BackwardWatch:
    """Tells a step when its backward begins and ends, by hooks in its graph.

    The graph owns the hooks, and they hold no tensors. When the graph is freed, so are the hooks,
    and no backward is possible any more.
    """

    def __init__(self, step: Watched) -> None:
        self._step = step
        self._graphs: weakref.ref[_Sentinel] | None = None
        """Alive as long as one of the graphs with hooks is; None if none has any."""
        self.passes = 1
        """The number of forwards that have begun before the backward."""
        self.pending = True
        """Whether the graph of the current pass has no hooks yet."""
        self.begun = False
        self.retained = False
        """Whether the graph outlives its backward."""
        self._in_later = False

    def another_pass(self) -> None:
        """Another forward begins before the backward."""
        self.passes += 1
        self.pending = True

    def watch(self, _: Any, out: Any) -> None:
        """Put hooks into the graph of all tensors in `out`: the loss may use only one of them."""
        nodes = nodes_of(tensors_in(out))
        if not nodes:
            return
        self.pending = False
        sentinel = None if self._graphs is None else self._graphs()
        if sentinel is None:
            sentinel = _Sentinel(self)
            self._graphs = weakref.ref(sentinel)
        for node in nodes:
            node.register_prehook(sentinel.backward_arrives)

    @property
    def blind(self) -> bool:
        """Whether no graph has a hook, so that a backward would not be noticed."""
        return self._graphs is None

    @property
    def impossible(self) -> bool:
        """Whether all graphs were freed, so that no backward is possible."""
        return self._graphs is not None and self._graphs() is None

    def backward_arrives(self) -> None:
        """A backward has reached the step's graph: the step's own backward, or a later one."""
        if not self.begun:
            self.begun = True
            self.retained = keeps_graph()
            self._step.goes_on()
            at_end_of_backward(self._end)
        elif self._step.over and not self._in_later:
            self._in_later = True
            at_end_of_backward(self._later_end)

    def _end(self) -> None:
        if not self._step.over:
            self._step.backward_ends()

    def _later_end(self) -> None:
        self._in_later = False
        self._step.later_backward_ends()


class _Sentinel:
    """Owned by a step's graphs and freed with them; its method is the hook in these graphs."""

    __slots__ = ("__weakref__", "_watch")

    def __init__(self, watch: BackwardWatch) -> None:
        self._watch = watch

    def backward_arrives(self, *_: Any) -> None:
        self._watch.backward_arrives()
