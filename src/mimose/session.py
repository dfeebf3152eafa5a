"""mimose on one model: attach, the steps, detach. Read this first.

A batch comes in. Its first block opens a step: the batch's size and the memory in use then decide.
If the estimator can tell what this size costs, the planner (or the cache) gives the plan and the
blocks run under it; if not, blocks are recomputed and the collector learns. At the end of the
backward the step is over, and what it has taught is kept for the next.

    batch → InputSize → (PlanCache | Estimator → Profile → Planner) → Plan → blocks → observations

`Scheduler` decides, `Step` carries a decision out, `Setting` knows the device and its bytes. When
memory runs out all the same, `Mimose.retry` runs the step again under a stricter plan.
"""

from __future__ import annotations

import inspect
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar, final

import torch
from torch import nn

from mimose.allocator import refuse_choice
from mimose.attach import Attachment
from mimose.block_names import described
from mimose.blocks import Block, Selector, find_blocks
from mimose.budget import parse_budget, text_of
from mimose.bypass import Tripwire, refuse_compiled, refuse_lazy
from mimose.collector import Ride
from mimose.engine import Engine
from mimose.errors import ArgumentError, ConflictError
from mimose.identity import FORMAT, difference
from mimose.inputs import (
    InputSize,
    Layout,
    SizeFunction,
    arguments_in_words,
    refuse_other_arguments,
)
from mimose.notebook import handle_html
from mimose.planners import Guarded, Planner, planner_named
from mimose.ranks import Agreement
from mimose.rebuilt import Rebuilt
from mimose.recording import Recorder, refuse_unwritable
from mimose.recovery import recover
from mimose.report import Explanation, Floor, Stats, explain_plan
from mimose.root import RootSeat
from mimose.scheduler import Scheduler
from mimose.shuttle import Shuttle
from mimose.switch import switched_off
from mimose.takeover import refuse_foreign
from mimose.trees import bytes_of

log = logging.getLogger("mimose")

T = TypeVar("T")

_COLLECTORS: dict[str, type[Ride]] = {"ride": Ride, "shuttle": Shuttle}


def auto_checkpoint(
    model: nn.Module,
    memory_budget: int | str = "auto",
    *,
    blocks: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
    planner: str | Planner = "optimal",
    collector: str = "ride",
    enforce: bool = False,
    allocator: str = "auto",
    input_size: SizeFunction | None = None,
    record: str | os.PathLike[str] | None = None,
) -> Mimose:
    """Train `model` within `memory_budget`, recomputing no more than each batch's size demands.

    The training loop stays as it is. The budget bounds what PyTorch's allocator holds for this
    process on the model's device: `"6GiB"`, `"6GB"`, `"80%"`, bytes, or `"auto"` for what is free.

    Args:
        model: Any module; it keeps its type, its `state_dict` keys and its hooks.
        memory_budget: How much memory the process may hold.
        blocks: The modules to keep or recompute as a whole, if the structure does not tell: names
            or globs, classes, modules, a predicate of name and module, or several of these.
        exclude: Blocks to leave alone, selected the same way.
        planner: `"optimal"`, `"greedy"`, `"static"`, `"keep_all"`, `"recompute_all"`, or an object
            with `plan(profile, available_bytes)`.
        collector: `"ride"`, or `"shuttle"` for the paper's double forward.
        enforce: Also make the budget the allocator's hard limit.
        allocator: `"auto"` sets PyTorch's CUDA allocator up for batches of varying size until
            `detach`, unless you have configured it yourself; `"leave"` leaves it as it is.
        input_size: Your own measure of a batch, a function of the forward's arguments.
        record: A file to write the run to, a line a step, for `mimose report` and `mimose plan`;
            if it exists, `run-2.jsonl` and so on (`handle.recording` tells which).

    Returns:
        A handle: `explain(**batch)`, `stats()`, `detach()`; also a context manager.

    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2)
    >>> with auto_checkpoint(model, "1GiB") as handle:
    ...     model(torch.rand(2, 8, 16)).sum().backward()
    >>> handle.stats().steps
    1
    """
    return Mimose(
        model,
        memory_budget,
        blocks=blocks,
        exclude=exclude,
        planner=planner,
        collector=collector,
        enforce=enforce,
        allocator=allocator,
        input_size=input_size,
        record=record,
    )


@final
class Mimose(Engine):
    """mimose attached to a model; made by `auto_checkpoint`."""

    def __init__(
        self,
        model: nn.Module,
        memory_budget: int | str,
        *,
        blocks: Selector | Iterable[Selector] | None,
        exclude: Selector | Iterable[Selector] | None,
        planner: str | Planner,
        collector: str,
        enforce: bool,
        allocator: str,
        input_size: SizeFunction | None,
        record: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"auto_checkpoint takes a torch.nn.Module, not {model!r}")
        off = switched_off()
        if not off:
            _refuse_data_parallel(model)
            refuse_lazy(model)
        budget = parse_budget(memory_budget)
        _refuse_options(collector, enforce, allocator, input_size)
        scheduler = Scheduler(_chosen(planner))
        found = [] if off else find_blocks(model, blocks=blocks, exclude=exclude)
        super().__init__(
            model,
            found,
            budget,
            scheduler=scheduler,
            collector=_COLLECTORS[collector],
            enforce=enforce,
            allocator=allocator,
            measure=input_size,
        )
        self._retrying = False
        if off:
            log.info("MIMOSE_DISABLE is set: the model is left as it is")
            return
        former = _former_on(model)
        same_blocks = _others_on(found, former)
        if former is None:  # else it was looked at then; one compiled since has none
            refuse_compiled(model)
        refuse_foreign(model, found)
        if record is not None:
            refuse_unwritable(record)
        if former is not None:  # nothing refuses from here on
            log.info("mimose was attached to this model already: the new call replaces the former")
            former.owner.detach()
        for other in same_blocks:
            log.info(
                "mimose was attached to these blocks already: the new call replaces the former"
            )
            other.detach()
        if record is not None:
            self._herald.recorder = Recorder(record)  # only now: it may be the former's file
        self._attachment = Attachment(model, found, self)
        self._agreement = Agreement(self._attachment.seats)
        self._rebuilt = Rebuilt(self._attachment.seats)
        self._tripwire = Tripwire(model, found)
        self._root.take()
        _attached.add(self)
        device = _first_device(model)
        self._herald.attached(type(model).__name__, described(found), budget, device)
        self._set_allocator_up(device)

    def detach(self) -> None:
        super().detach()
        _attached.discard(self)

    @property
    def _blocks(self) -> list[nn.Module]:
        """The modules under this handle that are still alive."""
        seats = [] if self._attachment is None else self._attachment.seats
        return [module for seat in seats if (module := seat.module_if_alive) is not None]

    # What people call

    @property
    def attached(self) -> bool:
        """Whether the model's blocks are under this handle."""
        return self._attachment is not None

    def __enter__(self) -> Mimose:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        state = "attached" if self.attached else "detached"
        budget = text_of(self.budget_bytes) if self.budget_bytes else str(self._budget)
        return f"<mimose on {len(self._names)} blocks, {budget}, {state}>"

    def _repr_html_(self) -> str:
        return handle_html(repr(self)[1:-1], self.stats())

    @property
    def recording(self) -> Path | None:
        """The file that this run is recorded to; None without `record=`.

        Where that file had another run in it already, the next free number is in its name.
        """
        recorder = self._herald.recorder
        return None if recorder is None else recorder.path

    def stats(self) -> Stats:
        """What has happened so far, as values that also read well when printed."""
        self._read_observations()
        return self._stats.filled_in(
            cache=self._scheduler.cache,
            knowledge=self._scheduler.knowledge,
            budget_bytes=self.budget_bytes,
            reserve_bytes=self._setting.reserve.bytes if self._setting else None,
        )

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Why a batch gets the plan that it gets. Takes what the model's forward takes.

        Answers before planning has begun, too, as far as anything is known then.
        """
        if not args and not kwargs:
            raise ArgumentError(
                "explain takes a batch, as the model's forward does: explain(**batch)"
            )
        self._read_observations()
        size = self._size_of(args, kwargs, self._argument_names)
        known = self._scheduler.knowledge.layouts
        if size.layout not in known and self._measure is None:
            refuse_other_arguments(self._root.module.forward, args, kwargs)
        explanation = explain_plan(
            size=self._scheduler.knowledge.whole(size),
            blocks=self._names,
            knowledge=self._scheduler.knowledge,
            planner=self._scheduler.planner,
            setting=self._setting,
            base_bytes=self._stats.last_base_bytes,
            floor=self._floor(),
        )
        note = self._note(known=explanation.plan is not None)
        if known and size.layout not in known:
            note = note or _other_arguments(size, known[0])
        return replace(explanation, note=note)

    def _note(self, *, known: bool) -> str:
        if not self.attached:
            would = "; attached, it would do this" if known else ""
            return f"mimose is not attached, so the model trains as it is{would}"
        if self._setting is None and self._loaded is not None:
            return "what an earlier run has learned is taken in with the first step"
        return ""

    def retry(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call `function`, a forward and a backward; once more if memory runs out.

        Then with more blocks recomputed, and at last with all: random numbers, buffers and
        gradients are as if the failed attempts had never been. Leave the optimizer's step outside.

        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> handle = auto_checkpoint(model, "1GiB", blocks=nn.Linear)
        >>> def step(batch):
        ...     model(batch).sum().backward()
        >>> handle.retry(step, torch.ones(2, 4))
        >>> handle.detach()
        """
        if self._attachment is None or self._retrying:  # inside another: that one tries again
            return function(*args, **kwargs)
        self._retrying = True
        try:
            return recover(self, function, args, kwargs)
        finally:
            self._retrying = False

    def state_dict(self) -> dict[str, Any]:
        """What was learned: plain numbers and strings, for `load_state_dict` in a later run."""
        self._read_observations()
        setting = self._setting
        if setting is None:
            return dict(self._loaded) if self._loaded is not None else {"format": FORMAT}
        return {
            "format": FORMAT,
            "identity": self._identity,
            "chapters": self._scheduler.to_plain(),
            "blocks": self._block_verdicts(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know what `state_dict` gave: planning begins with the first step.

        What was learned of another model, device, precision or torch is refused with a warning,
        and training observes anew.
        """
        known = state if isinstance(state, Mapping) else {}
        if self._setting is not None:
            self._take_in(known)
        elif (reason := difference(known, {})) is None:
            self._loaded = known
        else:  # whatever model it is for
            self._observe_anew(reason)

    def _floor(self) -> Floor:
        if self._setting is not None:
            setting = self._setting
            return Floor(setting.budget_bytes, setting.parameter_bytes, setting.gradient_bytes)
        parameters = list(self._root.module.parameters())
        trained = bytes_of(p for p in parameters if p.requires_grad)
        return Floor(self.budget_bytes, bytes_of(parameters), trained)


def _first_device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _other_arguments(size: InputSize, trained: Layout) -> str:
    return (
        f"training gave the model {arguments_in_words(trained)}, and this is "
        f"{arguments_in_words(size.layout)}: of other arguments nothing is known, explain takes "
        "those of training"
    )


_attached: weakref.WeakSet[Mimose] = weakref.WeakSet()
"""Handles whose blocks are taken. Looking at the model would not do: the blocks of a part may lie
inside of one that the whole model's handle has taken."""


def _others_on(found: list[Block], former: RootSeat | None) -> list[Mimose]:
    """Other handles on the very same blocks, to be replaced; one that shares some is refused."""
    own, same = {id(block.module) for block in found}, []
    inside = {id(part): block.name for block in found for part in block.module.modules()}
    for other in [one for one in _attached if former is None or one is not former.owner]:
        theirs = other._blocks
        taken = {id(block) for block in theirs}
        if taken == own:
            same.append(other)
            continue
        within = {id(part) for block in theirs for part in block.modules()}
        shared = {inside[key] for key in taken & inside.keys()}
        shared |= {block.name for block in found if id(block.module) in within}
        if shared:
            _refuse_shared(sorted(shared), len(found), other)
    return same


def _refuse_shared(shared: list[str], found: int, other: Mimose) -> NoReturn:
    shown = ", ".join(shared[:3]) + (", …" if len(shared) > 3 else "")
    raise ConflictError(
        f"{len(shared)} of the {found} blocks found here ({shown}) are under another handle "
        f"already, {other!r}: a block can follow one budget only. Attach once, to the whole model; "
        "or detach() the other handle first; or leave these blocks out by exclude="
    )


def _former_on(model: nn.Module) -> RootSeat | None:
    occupant = model.__dict__.get("_compiled_call_impl")
    return occupant if isinstance(occupant, RootSeat) else None


def _chosen(planner: str | Planner) -> Planner:
    chosen = planner_named(planner)
    return chosen if isinstance(planner, str) else Guarded(chosen)


def refuse_options(memory_budget: int | str, options: Mapping[str, Any]) -> None:
    """Refuse what `auto_checkpoint` would refuse of any model, before there is one."""
    given = inspect.signature(auto_checkpoint).bind(None, memory_budget, **options)
    given.apply_defaults()
    taken = given.arguments
    parse_budget(memory_budget)
    _refuse_options(taken["collector"], taken["enforce"], taken["allocator"], taken["input_size"])
    _chosen(taken["planner"])


def _refuse_options(
    collector: str, enforce: bool, allocator: str, input_size: SizeFunction | None
) -> None:
    if collector not in tuple(_COLLECTORS):
        raise ArgumentError(f"collector={collector!r} is neither 'ride' nor 'shuttle'")
    if not isinstance(enforce, bool):
        raise ArgumentError(f"enforce={enforce!r} is neither True nor False")
    refuse_choice(allocator)
    if input_size is not None and not callable(input_size):
        raise ArgumentError(
            f"input_size={input_size!r} is no function: give one of the forward's arguments, e.g. "
            "lambda input_ids, **_: tuple(input_ids.shape)"
        )


def _refuse_data_parallel(model: nn.Module) -> None:
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise ConflictError(
            "the model is in nn.DataParallel, which copies it for each device at each step: use "
            "one process a device, `torchrun --nproc-per-node=N train.py` with "
            "DistributedDataParallel"
        )
