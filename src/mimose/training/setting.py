"""The device, its memory meter and the budget in bytes, fixed at the first training forward."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from mimose.costs import Option
from mimose.errors import ConflictError, warn
from mimose.memory import Clock, Meter, Reading, meter_for, reserve_for
from mimose.tensors import Gradients, Parameters, bytes_of
from mimose.training.allocator_history import AllocatorHistory
from mimose.training.host_use import HostUse
from mimose.training.lookout import Lookout
from mimose.units import Budget, text_of


class Setting:
    """The device that a model trains on, and the bytes that it may use there.

    Created late, so that the order of attaching, moving, wrapping and preparing does not matter.
    """

    def __init__(
        self,
        model: nn.Module,
        budget: Budget,
        *,
        enforce: bool = False,
        host_bytes: int | None = 0,
        choices: frozenset[Option] = frozenset(Option),
    ) -> None:
        self.open = True
        self._model = weakref.ref(model)
        self.device = device_of(model)
        self._parameters = Parameters(model)
        self._all_parameters = self._parameters.current()
        self.parameter_bytes = bytes_of(self._all_parameters)
        self.look_again()
        self.lookout = Lookout(model, self.device)
        self._forwards = 0
        self.clock = Clock(self.device)
        self.meter = meter_for(self.device)
        reading = self.meter.read()
        self.budget_bytes = _budget_in_bytes(budget, self.meter, reading, self.device)
        self.reserve = reserve_for(self.budget_bytes, self.meter)
        self._grain = max(1, self.budget_bytes >> 13)
        self.history = AllocatorHistory(self.budget_bytes, self.meter, self.reserve, reading)
        self.host = HostUse(self.device, host_bytes, choices)
        if enforce:
            self.meter.limit(self.budget_bytes - spare_bytes(self.budget_bytes, self.meter))

    def close(self) -> None:
        """Remove the allocator's limit, stop the meter, release all references."""
        self.open = False
        self.meter.limit(None)
        self.meter.close()
        self.host.close()
        self._parameters, self._all_parameters = Parameters(nn.Module()), []
        self.gradients = Gradients([])
        self.lookout = Lookout(nn.Module(), self.device)

    def available(self, in_use: int) -> int:
        """Bytes that a step may add to the memory in use at its start."""
        return self.budget_bytes - self.reserve.bytes - in_use

    def look_for_replaced(self, *, certain: bool = False) -> None:
        """Release parameters that were replaced, and use the new ones.

        Checks the first parameter only, since code that replaces one usually replaces all; every
        64th forward checks all, and finds added ones. Ignores FSDP2's temporary parameters, which
        have another type. With `certain`, checks all now.
        """
        self._forwards += 1
        former = self._all_parameters
        if certain or self._forwards % 64 == 0:
            self._parameters.refresh()
        elif self._parameters.first() is former[0]:
            return
        now = self._parameters.current()
        same_types = {type(parameter) for parameter in now} == {type(p) for p in former}
        if same_types and [id(p) for p in now] != [id(p) for p in former]:
            self._all_parameters = now
            model = self._model()
            if model is not None:
                self.lookout = Lookout(model, self.device)
            self.look_again()

    def look_again(self) -> None:
        """Find the trained parameters again, because they may have changed."""
        self.gradients = Gradients(p for p in self._all_parameters if p.requires_grad)
        self.gradient_bytes = self.gradients.bytes

    def rounded(self, number_of_bytes: int) -> int:
        """Round down to a multiple of 1/8192 of the budget.

        So steps with nearly equal room share a plan.
        """
        return number_of_bytes // self._grain * self._grain

    def bracket(self, stale_bytes: int) -> tuple[int, int]:
        """The numbers below and above this one; steps between the same two share a plan.

        They are at most an eighth of this number apart, and at most 0.4 % of the budget. They are
        so far apart because the bytes of the last step's outputs differ in almost every step.
        """
        finest = 1 << max(0, stale_bytes.bit_length() - 4)
        grain = max(self._grain, min(finest, self.budget_bytes >> 8))
        least = stale_bytes // grain * grain
        return least, least + grain if stale_bytes else 0


def spare_bytes(budget_bytes: int, meter: Meter) -> int:
    """How far below the budget a hard limit must be: the allocator may exceed it by a few pages."""
    return max(budget_bytes // 500, meter.overshoot_bytes)


def device_of(model: nn.Module) -> torch.device:
    """The single device of a model; raises if there are several or none."""
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        shown = " and ".join(sorted(map(str, devices))) or "no device: it has no parameters"
        raise ConflictError(
            f"the model is on {shown}, but mimose supports one device per process: move the model "
            "to one device, or distribute it with torchrun and FSDP"
        )
    return devices.pop()


def first_device(model: nn.Module) -> torch.device:
    """The device of the first parameter, for use before the setting is created."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _budget_in_bytes(budget: Budget, meter: Meter, reading: Reading, device: torch.device) -> int:
    number = budget.in_bytes(
        device_bytes=meter.device_bytes, free_bytes=meter.free_bytes(), own_bytes=reading.held
    )
    if number > meter.device_bytes:
        whose = "this machine's" if device.type == "cpu" else f"{device}'s"
        warn(
            f"memory_budget={text_of(number)} is more than {whose} "
            f"{text_of(meter.device_bytes)}: the budget is that"
        )
        return meter.device_bytes
    if number <= reading.in_use:
        warn(
            f"memory_budget={text_of(number)} is less than the {text_of(reading.in_use)} in use "
            "before the first step (parameters and other tensors): every block will be recomputed, "
            "and training will still exceed the budget. Raise memory_budget"
        )
    return number
