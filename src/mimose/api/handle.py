"""`auto_checkpoint` and its handle: attach, train, detach. Read this first.

The first block of a batch opens a step. The scheduler takes the batch's size and the memory in use,
and the cost model predicts what this size costs. The planner (or the plan cache) returns a plan,
and the blocks run under it. If the prediction is not trusted, the step is observed too: the
collector measures what each block costs, and kept activations are evicted if memory runs short.

    batch → InputSize → Prediction → Plan → Directive (one per call) → StepRecord → events
                            ↑                                              │
                        CostModel ←──────── StepObservation ←──────────────┘

`Scheduler` chooses the plan, `Step` executes it, `Setting` holds the device and the budget in
bytes. If memory still runs out, `Mimose.retry` runs the step again under a stricter plan.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, final

from torch import nn

from mimose.api.explaining import explain_batch
from mimose.api.guarded_subscriber import GuardedSubscriber
from mimose.api.occupied import attached_engines, engines_on_same_blocks, interceptor_on
from mimose.api.options import checked_options, checked_planner
from mimose.api.switch import switched_off
from mimose.errors import ArgumentError, ConflictError
from mimose.interception import (
    Block,
    Selector,
    find_blocks,
    refuse_compiled,
    refuse_lazy,
    refuse_other_checkpointing,
)
from mimose.planning import Planner
from mimose.reporting import (
    Explanation,
    HostStats,
    Recorder,
    RunningStats,
    Stats,
    handle_html,
    refuse_unwritable,
)
from mimose.tensors import SizeFunction
from mimose.training import Engine, HostUse, Scheduler, Subscriber, retry_step
from mimose.units import parse_budget

log = logging.getLogger("mimose")

T = TypeVar("T")


def auto_checkpoint(
    model: nn.Module,
    memory_budget: int | str = "auto",
    *,
    blocks: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
    planner: str | Planner = "optimal",
    collector: str = "ride",
    enforce: bool = False,
    host_memory: int | str = "auto",
    choices: Iterable[str] | None = None,
    allocator: str = "auto",
    input_size: SizeFunction | None = None,
    record: str | os.PathLike[str] | None = None,
) -> Mimose:
    """Train `model` within `memory_budget`, recomputing no more than each batch's size demands.

    The training loop does not change. The budget bounds the bytes that PyTorch's allocator holds
    for this process on the model's device: `"6GiB"`, `"6GB"`, `"80%"`, bytes, or `"auto"` for all
    free memory.

    Args:
        model: Any module. Its type, its `state_dict` keys and its hooks do not change.
        memory_budget: How much memory the process may hold.
        blocks: The modules to keep, move or recompute as a whole, if mimose does not find them:
            names or globs, classes, modules, a predicate of name and module, or a list of these.
        exclude: Blocks to leave out, selected the same way.
        planner: `"optimal"`, `"greedy"`, `"greedy_literal"`, `"static"`, `"keep_all"`,
            `"recompute_all"`, or an object with `plan(profile, available_bytes)`.
        collector: `"ride"` measures blocks while they are kept or recomputed; `"shuttle"` is the
            paper's double forward.
        enforce: Also set the budget as the allocator's hard limit.
        host_memory: Host memory that activations may use while they wait for their backward:
            `"auto"` for at most a quarter of what is free, `0` for none, `"16GiB"` or bytes.
        choices: What plans may choose from for each block: `"keep"`, `"save_on_host"`,
            `"recompute"` and `"recompute_from_host"`; all of them by default.
        allocator: `"auto"` configures PyTorch's CUDA allocator for batches of varying size until
            `detach`, unless you have configured it yourself; `"leave"` does not change it.
        input_size: A function that returns the size of a batch from the forward's arguments.
        record: A file to record the run to, one line per step, for `mimose report` and
            `mimose plan`. If it exists, `run-2.jsonl` and so on (see `handle.recording`).

    Returns:
        A handle with `explain(**batch)`, `stats()` and `detach()`; also a context manager. If the
        model already has a handle, that one is detached first.

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
        host_memory=host_memory,
        choices=choices,
        allocator=allocator,
        input_size=input_size,
        record=record,
    )


@final
class Mimose:
    """mimose attached to a model; made by `auto_checkpoint`."""

    def __init__(
        self,
        model: nn.Module,
        memory_budget: int | str,
        *,
        blocks: Selector | Iterable[Selector] | None,
        exclude: Selector | Iterable[Selector] | None,
        planner: str | Planner,
        record: str | os.PathLike[str] | None,
        **options: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"auto_checkpoint needs a torch.nn.Module; got {model!r}")
        self._disabled = disabled = switched_off()
        if not disabled:
            _refuse_data_parallel(model)
            refuse_lazy(model)
        budget = parse_budget(memory_budget)
        checked = checked_options(**options)
        scheduler = Scheduler(checked_planner(planner))
        found = [] if disabled else find_blocks(model, blocks=blocks, exclude=exclude)
        self._engine = Engine(model, found, budget, scheduler, checked)
        self._retrying = False
        self._recorder: Recorder | None = None
        self._stats = RunningStats()
        self._engine.events.subscribe(self._stats)
        if disabled:
            log.info("MIMOSE_DISABLE is set: the model trains without mimose")
        else:
            self._attach(model, found, record)

    def _attach(
        self, model: nn.Module, blocks: list[Block], record: str | os.PathLike[str] | None
    ) -> None:
        """Replace earlier handles on these blocks; if anything is refused, leave them in place."""
        former = interceptor_on(model)
        same_blocks = engines_on_same_blocks(blocks, former)
        if former is None:  # a former handle has made this check
            refuse_compiled(model)
        refuse_other_checkpointing(model, blocks)
        if record is not None:
            refuse_unwritable(record)
        for engine in [*([former.owner] if former else []), *same_blocks]:
            log.info("mimose was already attached to this model: this call replaces the old handle")
            engine.detach()
        attached_engines.difference_update(same_blocks)
        if record is not None:
            self._recorder = Recorder(record)  # after detach: both may record to the same file
            self._engine.events.subscribe(self._recorder)
        self._engine.attach(blocks)
        attached_engines.add(self._engine)

    @property
    def attached(self) -> bool:
        """Whether this handle controls the model's blocks."""
        return self._engine.attached

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None for "auto" or a percentage until the first training step."""
        return self._engine.budget_bytes

    def detach(self) -> None:
        """Restore the model. `stats`, `explain` and `state_dict` still work afterwards."""
        self._engine.detach()
        attached_engines.discard(self._engine)

    def __enter__(self) -> Mimose:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __reduce__(self) -> Any:
        # A model may hold its own handle. Copies and pickles of a model are plain, so theirs
        # gets None.
        return type(None), ()

    def __repr__(self) -> str:
        return "<mimose, switched off by MIMOSE_DISABLE>" if self._disabled else repr(self._engine)

    def _repr_html_(self) -> str:
        return handle_html(repr(self)[1:-1], self.stats())

    @property
    def recording(self) -> Path | None:
        """The file that this run is recorded to; None without `record=`.

        If the requested file already existed, its name has the next free number.
        """
        return None if self._recorder is None else self._recorder.path

    def stats(self) -> Stats:
        """Statistics of the run so far; print them for a summary."""
        self._engine.read_observations()
        setting = self._engine.setting
        return self._stats.snapshot(
            cache=self._engine.scheduler.cache,
            cost_model=self._engine.scheduler.cost_model,
            budget_bytes=self.budget_bytes,
            reserve_bytes=setting.reserve.bytes if setting else None,
            host=_host_stats(setting.host) if setting else HostStats(),
        )

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Explain the plan of a batch; call it with the arguments of the model's forward.

        Before the costs of this size can be predicted, the explanation has no plan.
        """
        return explain_batch(self._engine, self._stats.last_base_bytes, args, kwargs)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Pass all further events to `subscriber`: steps, their plans and peaks, observations.

        Override the methods of `mimose.training.Subscriber` that you need. They are called while
        training runs, so keep them short. A subscriber that raises an exception gets no more
        events; a warning says so.
        """
        self._engine.events.subscribe(GuardedSubscriber(subscriber))

    def retry(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call `function`, a forward and a backward, and call it again if memory runs out.

        Each retry recomputes more blocks, the last one all of them. Random numbers, buffers,
        gradients and attributes of blocks are restored first. Call the optimizer outside of
        `function`.

        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> handle = auto_checkpoint(model, "1GiB", blocks=nn.Linear)
        >>> def step(batch):
        ...     model(batch).sum().backward()
        >>> handle.retry(step, torch.ones(2, 4))
        >>> handle.detach()
        """
        if not callable(function):
            raise ArgumentError(
                "retry() needs a function that runs a forward and a backward, then its arguments: "
                f"handle.retry(step, batch); got {type(function).__name__} instead of a function"
            )
        if not self._engine.attached or self._retrying:  # the outer call retries
            return function(*args, **kwargs)
        self._retrying = True
        try:
            return retry_step(self._engine, function, args, kwargs)
        finally:
            self._retrying = False

    def state_dict(self) -> dict[str, Any]:
        """The learned costs as plain numbers and strings, for `load_state_dict` in a later run."""
        return self._engine.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, so that planning starts at the first step.

        A state of another model, device, precision or torch version is ignored with a warning.
        """
        self._engine.load_state(state if isinstance(state, Mapping) else {})


def _host_stats(host: HostUse) -> HostStats:
    host.read_times()
    return HostStats(
        moved_bytes=host.moved_bytes,
        held_bytes=host.held_bytes,
        stalled_seconds=host.stalled_seconds,
    )


def _refuse_data_parallel(model: nn.Module) -> None:
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise ConflictError(
            "the model is wrapped in nn.DataParallel, which copies it to each device at each step: "
            "use DistributedDataParallel with one process per device, "
            "`torchrun --nproc-per-node=N train.py`"
        )
