"""The peak and the extra time of a schedule, by the terms of the timeline.

The bytes in use between two operations, above the step's start, are the sum of

    inputs        the boundaries of all runs so far (in the backwards: up to the run whose backward
                  is next), less those that are off the device. A run's input counts as long as the
                  input itself or the run's activations are there.
    activations   of each run that has them: `saved`, less `output_saved` while the next run's input
                  counts (the same bytes), less `droppable_input` once its input was dropped, less
                  `shared_casts` in the forwards
    gradient      in the backwards: `backward_entry` of the run whose backward is next

An operation peaks above that by `forward_peak` or `recompute_peak` of its run, and a backward by
`saved` and `backward_peak`. For schedules that do what a plan does this is exactly
`mimose.costs.peak`. Where a run's input is dropped and rebuilt, it is the same model applied to
more cases; transfers are taken to take no time.
"""

from __future__ import annotations

from dataclasses import dataclass

from mimose.comparison.schedules import (
    Backward,
    Drop,
    Forward,
    Item,
    Move,
    Operation,
    Recompute,
    Schedule,
    ScheduleError,
)
from mimose.costs import Option, Profile

_Tensors = tuple[Item, int]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a schedule costs."""

    peak_bytes: int
    """Above the step's start."""
    extra_nanoseconds: int
    """Time of all recomputes."""
    moved_bytes: int
    """Bytes that leave the device; each comes back once."""


def evaluate(profile: Profile, schedule: Schedule) -> Evaluation:
    """The cost of a schedule; an impossible one raises an error that names the operation."""
    state = _State(profile)
    for index, operation in enumerate(schedule):
        problem = state.problem(operation)
        if problem:
            raise ScheduleError(index, operation, problem)
        state.apply(operation)
    if state.next_backward >= 0:
        problem = f"the backward of run {state.next_backward} is missing"
        raise ScheduleError(len(schedule), None, problem)
    state.end()
    return Evaluation(state.peak, state.nanoseconds, state.moved)


class _State:
    """The state after part of a schedule: what is on the device, what comes next, and the peak."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.runs = profile.runs
        self.on_device: set[_Tensors] = {(Item.INPUT, 0)}
        self.on_host: set[_Tensors] = set()
        self.forwards_done = 0
        self.next_backward = len(profile.runs) - 1
        """The run whose backward is next."""
        self.in_backward = False
        self.peak = self.nanoseconds = self.moved = 0

    # What is possible

    def problem(self, operation: Operation) -> str | None:
        """Why this operation is impossible now; None if it is possible."""
        k = operation.run
        if not 0 <= k < len(self.runs):
            return f"there are {len(self.runs)} runs"
        if isinstance(operation, Forward):
            return self._problem_of_forward(operation)
        if isinstance(operation, Recompute):
            return self._problem_of_recompute(operation)
        if isinstance(operation, Backward):
            return self._problem_of_backward(k)
        if isinstance(operation, Drop):
            return self._problem_of_removal(operation.item, k)
        if operation.to_device:
            where = (operation.item, k) in self.on_host
            return None if where else f"the {operation.item.value} of run {k} is not on the host"
        return self._problem_of_removal(operation.item, k)

    def _problem_of_forward(self, operation: Forward) -> str | None:
        k = operation.run
        if k != self.forwards_done:
            return f"the next forward is that of run {self.forwards_done}"
        if self.runs[k].fixed and not operation.keep:
            return f"run {k} cannot be recomputed, so it must be kept"
        return self._missing(Item.INPUT, k)

    def _problem_of_recompute(self, operation: Recompute) -> str | None:
        k = operation.run
        if k >= self.forwards_done or k > self.next_backward:
            return f"run {k} had no forward yet, or had its backward already"
        if self.runs[k].fixed:
            return f"run {k} cannot be recomputed"
        if operation.keep and (Item.ACTIVATIONS, k) in self.on_device | self.on_host:
            return f"the activations of run {k} are there already"
        return self._missing(Item.INPUT, k)

    def _problem_of_backward(self, k: int) -> str | None:
        if self.forwards_done < len(self.runs):
            return f"the forward of run {self.forwards_done} is missing"
        if k != self.next_backward:
            return f"the next backward is that of run {self.next_backward}"
        return self._missing(Item.ACTIVATIONS, k)

    def _problem_of_removal(self, item: Item, k: int) -> str | None:
        if item is Item.ACTIVATIONS and self.runs[k].fixed:
            return f"run {k} cannot be recomputed: what it saves must stay"
        alone = (Item.ACTIVATIONS, k) not in self.on_device
        if item is Item.INPUT and alone and k and self.runs[k - 1].fixed:
            return f"run {k - 1} cannot be recomputed: the input of run {k} must stay"
        return self._missing(item, k)

    def _missing(self, item: Item, k: int) -> str | None:
        if (item, k) in self.on_device:
            return None
        where = "on the host" if (item, k) in self.on_host else "not there"
        verb = "are" if item is Item.ACTIVATIONS else "is"
        return f"the {item.value} of run {k} {verb} {where}"

    # What happens

    def apply(self, operation: Operation) -> None:
        if isinstance(operation, Forward):
            self._forward(operation)
        elif isinstance(operation, Recompute):
            self._recompute(operation)
        elif isinstance(operation, Backward):
            self._backward(operation.run)
        elif isinstance(operation, Drop):
            self.on_device.discard((operation.item, operation.run))
        else:
            self._move(operation)

    def end(self) -> None:
        self._enter_backward()
        self._update_peak(self.profile.tail)

    def _forward(self, operation: Forward) -> None:
        k = operation.run
        cost = self.runs[k].under(Option.KEEP if operation.keep else Option.RECOMPUTE)
        self._update_peak(self._bytes_in_use() + cost.forward_peak)
        self.forwards_done += 1
        self._add_outputs(k, operation.keep)

    def _recompute(self, operation: Recompute) -> None:
        if self.forwards_done == len(self.runs):
            self._enter_backward()
        k = operation.run
        run = self.runs[k]
        rise = run.recompute_peak if operation.keep else run.forward_peak
        self._update_peak(self._bytes_in_use() + self._gradient() + rise)
        self.nanoseconds += run.nanoseconds
        self._add_outputs(k, operation.keep)

    def _backward(self, k: int) -> None:
        self._enter_backward()
        run, dropped = self.runs[k], (Item.INPUT, k) not in self.on_device
        level = self._bytes_in_use(without=k)
        if run.fixed:
            self._update_peak(level + run.under(Option.KEEP).backward_peak)
        else:
            above = run.saved - dropped * run.droppable_input + run.backward_peak
            self._update_peak(level + self._gradient() + above)
        for things in (self.on_device, self.on_host):
            things -= {(Item.ACTIVATIONS, k), (Item.INPUT, k)}
        self.next_backward -= 1

    def _move(self, operation: Move) -> None:
        moved = operation.item, operation.run
        source, target = (self.on_device, self.on_host)[:: -1 if operation.to_device else 1]
        before = self._bytes_in_use()
        source.discard(moved)
        if not operation.to_device:
            self.moved += max(0, before - self._bytes_in_use())
        target.add(moved)
        self._update_peak(self._bytes_in_use() + self._gradient())

    def _add_outputs(self, k: int, keep: bool) -> None:
        last = self.next_backward if self.forwards_done == len(self.runs) else self.forwards_done
        if k + 1 <= last and (Item.INPUT, k + 1) not in self.on_host:
            self.on_device.add((Item.INPUT, k + 1))
        if keep:
            self.on_device.add((Item.ACTIVATIONS, k))

    def _enter_backward(self) -> None:
        """Run the head, once."""
        if self.in_backward:
            return
        absent = self._absent_input_bytes(len(self.runs) - 1)
        held = sum(self._activation_bytes(k) for k in range(len(self.runs)))
        self._update_peak(held - absent + self.profile.head_forward)
        self.in_backward = True
        held = sum(self._activation_bytes(k, in_head=True) for k in range(len(self.runs)))
        self._update_peak(held - absent + self.profile.head_backward)

    # Bytes

    def _update_peak(self, level: int) -> None:
        self.peak = max(self.peak, level)

    def _gradient(self) -> int:
        return self.runs[self.next_backward].backward_entry if self.in_backward else 0

    def _bytes_in_use(self, without: int = -1) -> int:
        """The bytes in use, apart from the gradient; without the activations of one run."""
        top = (
            self.next_backward if self.in_backward else min(self.forwards_done, len(self.runs) - 1)
        )
        inputs = sum(run.boundary for run in self.runs[: top + 1]) - self._absent_input_bytes(top)
        return inputs + sum(self._activation_bytes(k) for k in range(top + 1) if k != without)

    def _absent_input_bytes(self, top: int) -> int:
        """The bytes of inputs up to this run that are off the device."""
        return sum(max(0, self.runs[k].boundary) for k in range(top + 1) if not self._has_input(k))

    def _has_input(self, k: int) -> bool:
        return (Item.INPUT, k) in self.on_device or (Item.ACTIVATIONS, k) in self.on_device

    def _activation_bytes(self, k: int, *, in_head: bool = False) -> int:
        """What a run's activations add to the inputs."""
        run = self.runs[k]
        if (Item.ACTIVATIONS, k) not in self.on_device or run.fixed:
            return 0
        dropped = (Item.INPUT, k) not in self.on_device
        last = len(self.runs) - 1 if in_head or not self.in_backward else self.next_backward - 1
        shared = k == last if k == len(self.runs) - 1 else k <= last and self._has_input(k + 1)
        held = max(0, run.saved - dropped * run.droppable_input - shared * run.output_saved)
        return held if self.in_backward else max(0, held - run.shared_casts)
