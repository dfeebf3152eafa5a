"""DTR, simulated: evict storages when memory runs short, recompute them when they are needed.

After Kirisame et al., "Dynamic Tensor Rematerialization" (ICLR 2021). A trace is replayed under a
budget. Before a call its inputs are recomputed if they were evicted, and then storages are evicted,
by a heuristic, until its outputs fit. A storage is evicted at once when the program releases it,
even if an evicted storage may need it again: then it is recomputed, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mimose.comparison.dtr_graph import Node, Tensor
from mimose.comparison.dtr_heuristics import EquivalenceClasses, Heuristic
from mimose.comparison.dtr_runtime import Action, Failed, Failure, Runtime
from mimose.comparison.trace import Call, Constant, Trace
from mimose.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a simulated run cost; up to its failure, if it failed."""

    budget_bytes: float
    peak_bytes: int
    nanoseconds: int
    base_nanoseconds: int
    evictions: int
    """Evictions to make room; not those of storages that the program had released."""
    recomputed_calls: int
    accesses: int
    """Storages that the heuristic looked at."""
    failure: Failure | None = None

    @property
    def overhead(self) -> float:
        """Time of all calls over the time of a run that computes nothing twice."""
        return self.nanoseconds / self.base_nanoseconds if self.base_nanoseconds else 1.0


def simulate(
    trace: Trace,
    budget_bytes: float = math.inf,
    heuristic: Callable[[], Heuristic] = EquivalenceClasses,
    *,
    overhead_limit: float = 10.0,
    watch: Callable[[Action], None] | None = None,
) -> Simulation:
    """Replay a trace under a budget.

    >>> from mimose.comparison import Call, Constant, Output, Release
    >>> trace = Trace((
    ...     Constant(0, 1),
    ...     Call("f", 10, (0,), (Output(1, 4),)),
    ...     Call("g", 10, (1,), (Output(2, 4),)),
    ...     Call("h", 10, (2,), (Output(3, 4),)),
    ...     Call("backward", 10, (3, 1), (Output(4, 1),)),
    ...     Release(1), Release(2), Release(3),
    ... ))
    >>> simulate(trace).overhead, simulate(trace, 10).overhead
    (1.0, 1.25)

    Args:
        trace: the step.
        budget_bytes: bytes that may be in use at any time, with constants.
        heuristic: makes the heuristic that chooses what to evict; one of `HEURISTICS`.
        overhead_limit: the run fails when recomputing takes more than this times the base time,
            less one.
        watch: called with every call and eviction, in order.
    """
    if not budget_bytes > 0:
        raise ArgumentError(f"budget_bytes must be positive; got {budget_bytes}")
    limit = (overhead_limit - 1) * trace.nanoseconds
    runtime = Runtime(budget_bytes, heuristic(), limit, watch)
    try:
        _replay(trace, runtime)
        failure = None
    except Failed as failed:
        failure = failed.reason
    return Simulation(
        budget_bytes=budget_bytes,
        peak_bytes=runtime.peak_bytes,
        nanoseconds=runtime.now,
        base_nanoseconds=trace.nanoseconds,
        evictions=runtime.evictions,
        recomputed_calls=runtime.recomputed_calls,
        accesses=runtime.heuristic.total_accesses,
        failure=failure,
    )


def _replay(trace: Trace, runtime: Runtime) -> None:
    tensors: dict[int, Tensor] = {}
    calls = 0
    for event in trace.events:
        if isinstance(event, Constant):
            tensors[event.tensor] = runtime.constant(event.size_bytes)
        elif isinstance(event, Call):
            node = Node(calls, event, [tensors[one] for one in event.inputs])
            made = runtime.first_run(node, event.outputs, tensors)
            tensors.update(zip((out.tensor for out in event.outputs), made, strict=True))
            calls += 1
        else:
            runtime.release(tensors[event.tensor])
    for survivor in trace.survivors:
        runtime.keep(tensors[survivor])
