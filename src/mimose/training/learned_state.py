"""The learned costs across runs: saved by `state_dict`, loaded before the first step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mimose.errors import warn
from mimose.execution import is_distributed
from mimose.interception import BlockInterceptor
from mimose.memory import LinkSpeed
from mimose.training.scheduler import Scheduler

FORMAT = 3
_READABLE = (1, 2, FORMAT)
"""Formats that can be loaded. Each one is the format of the observations in it."""


class LearnedState:
    """Saves and loads the cost models, the verdicts on blocks and the speed of the host link.

    A state consists of plain numbers and strings.
    """

    def __init__(self, scheduler: Scheduler, blocks: Sequence[str]) -> None:
        self._scheduler = scheduler
        self._blocks = blocks
        self._loaded: Mapping[str, Any] | None = None
        self._identity: dict[str, Any] | None = None
        self._verdicts: list[dict[str, Any] | None] = []
        self._speed = LinkSpeed()

    @property
    def waits(self) -> bool:
        """Whether loaded state waits for the first step."""
        return self._loaded is not None

    def settle(
        self,
        model: nn.Module,
        device: torch.device,
        interceptors: Sequence[BlockInterceptor],
        speed: LinkSpeed,
    ) -> None:
        """The first training step begins: check the loaded state against the model, and use it."""
        self._identity = identity_of(model, self._blocks, device)
        self._speed = speed
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._use(loaded, interceptors)

    def load(self, state: Mapping[str, Any], interceptors: Sequence[BlockInterceptor]) -> None:
        """Load the result of `to_plain`; a state of something else is refused with a warning."""
        if self._identity is not None:
            self._use(state, interceptors)
        elif (reason := difference(state, {})) is None:
            self._loaded = state
        else:  # unusable for any model
            _refuse(reason)

    def to_plain(self, interceptors: Sequence[BlockInterceptor]) -> dict[str, Any]:
        """The learned costs, as plain numbers and strings."""
        if self._identity is None:
            return dict(self._loaded) if self._loaded is not None else {"format": FORMAT}
        return {
            "format": FORMAT,
            "identity": self._identity,
            "chapters": self._scheduler.to_plain(),
            "blocks": self._verdicts or [one.verdict for one in interceptors],
            **({"link": list(self._speed.speeds)} if self._speed.known else {}),
        }

    def detach(self, interceptors: Sequence[BlockInterceptor]) -> None:
        """Store the verdicts on blocks before their interceptors are removed."""
        self._verdicts = [interceptor.verdict for interceptor in interceptors]

    def _use(self, state: Mapping[str, Any], interceptors: Sequence[BlockInterceptor]) -> None:
        assert self._identity is not None
        try:
            reason = difference(state, self._identity)
            if reason is None and "identity" in state:  # without one, nothing was learned
                link = LinkSpeed()
                if "link" in state:
                    link.adopt(*state["link"])
                self._scheduler.take_in(state["chapters"], len(self._blocks))
                try:
                    _adopt_verdicts(state.get("blocks", []), interceptors)
                except Exception:
                    self._scheduler.forget()
                    raise
                if link.known:
                    self._speed.adopt(*link.speeds)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            reason = f"it is damaged ({error!r})"
        if reason is not None:
            _refuse(reason)


def _refuse(reason: str) -> None:
    warn(f"the loaded state_dict cannot be used: {reason}. Costs are measured again")


def _adopt_verdicts(
    verdicts: Sequence[Mapping[str, Any] | None], interceptors: Sequence[BlockInterceptor]
) -> None:
    """Use the saved verdicts instead of trying the blocks again.

    Several ranks try them again, to detect which blocks issue collectives.
    """
    if is_distributed():
        return
    for interceptor, verdict in zip(interceptors, verdicts, strict=False):
        if verdict is not None and interceptor.trusted is None:
            interceptor.adopt(verdict)


def identity_of(model: nn.Module, blocks: Sequence[str], device: torch.device) -> dict[str, Any]:
    """The properties that learned costs depend on, as plain numbers and strings."""
    shapes = [(tuple(p.shape), str(p.dtype)) for p in model.parameters()]
    kinds = [type(module).__name__ for module in model.modules()]
    return {
        "blocks": len(blocks),
        "precision": ", ".join(sorted({dtype for _, dtype in shapes})),
        "model": hashlib.sha256(repr((list(blocks), shapes, kinds)).encode()).hexdigest()[:16],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": str(torch.__version__),
    }


def difference(state: Mapping[str, Any], present: Mapping[str, Any]) -> str | None:
    """Why a saved state cannot be used for a model of this identity; None if it can."""
    if "format" not in state:
        return f"it is not the result of handle.state_dict(){_hint(state)}"
    if state["format"] not in _READABLE:
        found, readable = state["format"], ", ".join(map(str, _READABLE))
        return f"its format is {found!r}, but this version of mimose reads formats {readable}"
    known = state.get("identity", present)
    for name, value in present.items():
        if known.get(name) != value:
            if name == "model":
                return "it belongs to a model with other modules or parameters"
            return f"{name} was {known.get(name)!r} when it was saved and is {value!r} now"
    return None


def _hint(state: Mapping[str, Any]) -> str:
    """Names the entry of a checkpoint that contains the state, if there is one."""
    for name, value in state.items():
        if isinstance(value, Mapping) and value.get("format") in _READABLE:
            return f", but contains one at {name!r}: pass that one"
    return ""
