"""transformers' `Trainer`, and everything derived from it: `SFTTrainer`, `Seq2SeqTrainer`, …

    enable(trainer, memory_budget="20GiB")
    trainer.train()

A callback alone could do less: callbacks never see a batch, cannot run a step again, and are told
of a log after TensorBoard and the others were. So `enable` also stands in front of three methods of
the one trainer that it is given: `train`, `training_step` and `log`.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from torch import nn

from mimose.api import Mimose, refuse_options, switched_off
from mimose.errors import ArgumentError, ConflictError
from mimose.integrations import missing
from mimose.integrations.companion import Companion
from mimose.interception import Selector, find_blocks
from mimose.planning import Planner
from mimose.reporting import Explanation, Stats
from mimose.tensors import SizeFunction

try:
    from accelerate.utils import DynamoBackend  # type: ignore[import-untyped]
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ImportError as error:
    raise missing("transformers with accelerate", "hf") from error

log = logging.getLogger("mimose")


def enable(
    trainer: Trainer,
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
) -> Enabled:
    """Let `trainer` train within `memory_budget`. To be called before `trainer.train()`.

    While it trains, every micro-batch gets its own plan, and one that runs out of memory is run
    again under a stricter plan. The trainer's logs gain values named `mimose/…`, its checkpoints a
    file from which `resume_from_checkpoint` goes on without observing anew. When `train()` is over,
    in whatever way, the model is as before.

    Args:
        trainer: A `Trainer`, or anything derived from it.
        memory_budget: As for `mimose.auto_checkpoint`; so are all others.

    >>> enabled = enable(trainer, memory_budget="20GiB")  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    >>> print(enabled.stats())  # doctest: +SKIP
    """
    # Say at once what would otherwise be found out when training begins.
    if not isinstance(trainer, Trainer):
        raise ArgumentError(
            f"enable takes a transformers.Trainer, not a {type(trainer).__name__}: for a model in "
            "a loop of your own call mimose.auto_checkpoint"
        )
    options = {
        "blocks": blocks,
        "exclude": exclude,
        "planner": planner,
        "collector": collector,
        "enforce": enforce,
        "allocator": allocator,
        "input_size": input_size,
        "record": record,
    }
    refuse_options(memory_budget, options)
    if not switched_off():
        _refuse_data_parallel(trainer.args)
        _blocks_of(trainer.model, options)
    former = vars(trainer).get("train")
    if isinstance(former, _Stand):
        log.info("mimose was enabled for this trainer already: the new call replaces the former")
        former.owner.disable()
    return Enabled(trainer, memory_budget, options)


@final
class Enabled:
    """mimose in one trainer; made by `enable`."""

    def __init__(self, trainer: Trainer, memory_budget: int | str, options: dict[str, Any]) -> None:
        self._trainer = trainer
        self._options = options
        self._companion = Companion(memory_budget, **options)
        self._presence = _Presence(self._companion)
        trainer.add_callback(self._presence)
        self._stands = [
            _Stand(self, trainer, "train", self._train),
            _Stand(self, trainer, "training_step", self._training_step),
            _Stand(self, trainer, "log", self._log),
        ]

    def __repr__(self) -> str:
        state = self._companion if self._stands else "disabled"
        return f"<mimose in {type(self._trainer).__name__}: {state}>"

    @property
    def handle(self) -> Mimose | None:
        """mimose on the model: of the present run, or of the last one; None before the first."""
        return self._companion.handle

    def stats(self) -> Stats:
        """What has happened in the present run, or in the last one."""
        return self.handle.stats() if self.handle else Stats()

    def explain(self, **batch: Any) -> Explanation:
        """Why a batch gets the plan that it gets."""
        if self.handle is None:
            raise ConflictError("nothing is known of any batch before trainer.train() has begun")
        return self.handle.explain(**batch)

    def disable(self) -> None:
        """The trainer is as before; so is the model."""
        self._companion.end()
        if self._stands:
            self._trainer.remove_callback(self._presence)
        while self._stands:
            self._stands.pop().leave()

    def _train(
        self, plain: Callable[..., Any], resume_from_checkpoint: Any = None, *args: Any, **more: Any
    ) -> Any:
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self._trainer.args.output_dir)  # type: ignore[no-untyped-call]
        if folder:
            self._companion.load(Path(folder))
        with _blocks_compiled_instead(self._trainer, self._presence, self._options):
            try:
                return plain(resume_from_checkpoint, *args, **more)
            finally:
                self._companion.end()

    def _training_step(
        self, plain: Callable[..., Any], model: nn.Module, inputs: Any, *args: Any, **more: Any
    ) -> Any:
        handle = self.handle
        if handle is None or not handle.attached:
            return plain(model, inputs, *args, **more)

        def attempt() -> Any:
            # A step may take things out of its inputs (labels, for a smoothed loss).
            own = copy.copy(inputs) if isinstance(inputs, MutableMapping) else inputs
            return plain(model, own, *args, **more)

        return handle.retry(attempt)

    def _log(
        self, plain: Callable[..., Any], logs: dict[str, float], *args: Any, **more: Any
    ) -> Any:
        if _is_of_training(logs):
            logs.update(self._companion.row())
        return plain(logs, *args, **more)


class _Presence(TrainerCallback):
    """Attaches when training begins, saves beside each checkpoint, detaches at the end."""

    def __init__(self, companion: Companion) -> None:
        self._companion = companion
        self.when_attaching: Callable[[nn.Module], None] = lambda model: None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        assert model is not None
        if args.gradient_checkpointing and not (self._companion.attached or switched_off()):
            log.warning(
                "gradient_checkpointing=True: mimose decides for each batch which of the model's "
                "layers are recomputed, instead of recomputing all of them"
            )
        self.when_attaching(model)
        self._companion.begin(model)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if args.should_save:
            self._companion.save(_checkpoint_folder(args, state))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._companion.end()


@final
class MimoseCallback(_Presence):
    """mimose for those who prefer `callbacks=[MimoseCallback(memory_budget="20GiB")]`.

    Prefer `enable`. A callback never sees a batch, nor the step that runs it. Therefore

    - a step that runs out of memory is not run again: the error ends the training;
    - mimose's values never reach TensorBoard, W&B and the like, which have logged before any
      callback of yours is called: they are printed, and are in `trainer.state.log_history`;
    - what an earlier run has learned is found again only if that run's checkpoint lies in this
      trainer's `output_dir`;
    - `torch_compile=True` is refused, since the model is compiled as a whole before it is asked;
    - after an exception the model stays attached: call `callback.handle.detach()`.
    """

    def __init__(
        self,
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
    ) -> None:
        super().__init__(
            Companion(
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
        )

    def __repr__(self) -> str:
        return f"MimoseCallback({self._companion})"

    @property
    def handle(self) -> Mimose | None:
        """mimose on the model: of the present run, or of the last one; None before the first."""
        return self._companion.handle

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        if not switched_off():
            _refuse_data_parallel(args)
            _refuse_compiled(args)
        if state.global_step:
            self._companion.load(_checkpoint_folder(args, state))
        super().on_train_begin(args, state, control, model)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if logs is not None and _is_of_training(logs):
            row = self._companion.row()
            logs.update(row)
            state.log_history[-1].update(row)


class _Stand:
    """Stands in front of one method of one trainer, until `leave`."""

    def __init__(
        self, owner: Enabled, trainer: Trainer, name: str, instead: Callable[..., Any]
    ) -> None:
        self.owner = owner
        self._place, self._name = vars(trainer), name
        self._former = self._place.get(name)
        plain = getattr(trainer, name)
        self._call = functools.partial(instead, plain)
        functools.update_wrapper(self, plain)
        self._place[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def leave(self) -> None:
        if self._place.get(self._name) is not self:
            return
        if self._former is None:
            del self._place[self._name]
        else:
            self._place[self._name] = self._former


@contextmanager
def _blocks_compiled_instead(
    trainer: Trainer, presence: _Presence, options: dict[str, Any]
) -> Iterator[None]:
    """With `torch_compile=True`, compile each block: compiled as a whole, a model has none."""
    plugin = trainer.accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO or switched_off():
        yield
        return
    how, backend = plugin.to_kwargs(), plugin.backend
    compiled: list[nn.Module] = []

    def compile_blocks(model: nn.Module) -> None:
        for block in _blocks_of(model, options):
            if block._compiled_call_impl is None:
                block.compile(**how)
                compiled.append(block)

    log.warning("torch_compile=True: blocks are compiled one by one, not the model as a whole")
    plugin.backend, presence.when_attaching = DynamoBackend.NO, compile_blocks
    try:
        yield
    finally:
        plugin.backend = backend
        for block in compiled:
            del block._compiled_call_impl


def _blocks_of(model: nn.Module | None, options: dict[str, Any]) -> list[nn.Module]:
    assert model is not None
    found = find_blocks(model, blocks=options.get("blocks"), exclude=options.get("exclude"))
    return [block.module for block in found]


def _checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _is_of_training(logs: dict[str, float]) -> bool:
    """And neither of an evaluation nor the summary at the end."""
    return "loss" in logs


def _refuse_compiled(args: TrainingArguments) -> None:
    if args.torch_compile:
        raise ConflictError(
            "torch_compile=True has compiled the model as a whole, so that no block can be decided "
            "upon: use mimose.integrations.huggingface.enable(trainer), which has the blocks "
            "compiled one by one"
        )


def _refuse_data_parallel(args: TrainingArguments) -> None:
    if args.n_gpu > 1:
        raise ConflictError(
            f"Trainer would spread the model over {args.n_gpu} devices by nn.DataParallel, which "
            "copies it for each device at each step: start one process a device, `torchrun "
            f"--nproc-per-node={args.n_gpu} train.py`, or train on one, CUDA_VISIBLE_DEVICES=0"
        )
