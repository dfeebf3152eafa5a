"""transformers' `Trainer` and its subclasses: `SFTTrainer`, `Seq2SeqTrainer`, …

    enable(trainer, memory_budget="20GiB")
    trainer.train()

Callbacks do not see batches, cannot retry a step, and receive logs after TensorBoard and the like.
So `enable` also wraps three methods of the given trainer: `train`, `training_step` and `log`.
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
    host_memory: int | str = "auto",
    choices: Iterable[str] | None = None,
    allocator: str = "auto",
    input_size: SizeFunction | None = None,
    record: str | os.PathLike[str] | None = None,
) -> Enabled:
    """Make `trainer` train within `memory_budget`. Call this before `trainer.train()`.

    Every micro-batch gets its own plan. If it runs out of memory, it is run again under a stricter
    plan. Metrics named `mimose/…` are added to the trainer's logs. The learned costs are saved in
    its checkpoints, and `resume_from_checkpoint` loads them. The model is restored when `train()`
    ends, also by an exception.

    Args:
        trainer: A `Trainer` or a subclass.
        memory_budget: This and all other arguments are those of `mimose.auto_checkpoint`.

    >>> enabled = enable(trainer, memory_budget="20GiB")  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    >>> print(enabled.stats())  # doctest: +SKIP
    """
    if not isinstance(trainer, Trainer):
        raise ArgumentError(
            f"enable() needs a transformers.Trainer, not a {type(trainer).__name__}: for your own "
            "training loop, call mimose.auto_checkpoint"
        )
    options: dict[str, Any] = {
        "blocks": blocks,
        "exclude": exclude,
        "planner": planner,
        "collector": collector,
        "enforce": enforce,
        "host_memory": host_memory,
        "choices": choices,
        "allocator": allocator,
        "input_size": input_size,
        "record": record,
    }
    refuse_options(memory_budget, **options)
    if not switched_off():
        _refuse_data_parallel(trainer.args)
        _blocks_of(trainer.model, options)
    former = vars(trainer).get("train")
    if isinstance(former, _Wrapper):
        log.info("mimose was already enabled for this trainer: this call replaces the old one")
        former.owner.disable()
    return Enabled(trainer, memory_budget, options)


@final
class Enabled:
    """mimose in one trainer; returned by `enable`."""

    def __init__(self, trainer: Trainer, memory_budget: int | str, options: dict[str, Any]) -> None:
        self._trainer = trainer
        self._options = options
        self._companion = Companion(memory_budget, **options)
        self._callback = _Callback(self._companion)
        trainer.add_callback(self._callback)
        self._wrappers = [
            _Wrapper(self, trainer, "train", self._train),
            _Wrapper(self, trainer, "training_step", self._training_step),
            _Wrapper(self, trainer, "log", self._log),
        ]

    def __repr__(self) -> str:
        state = self._companion if self._wrappers else "disabled"
        return f"<mimose in {type(self._trainer).__name__}: {state}>"

    @property
    def handle(self) -> Mimose | None:
        """The handle of the current or last run; None before the first."""
        return self._companion.handle

    def stats(self) -> Stats:
        """Statistics of the current or last run."""
        return self.handle.stats() if self.handle else Stats()

    def explain(self, **batch: Any) -> Explanation:
        """Explain the plan of a batch."""
        if self.handle is None:
            raise ConflictError("there are no plans yet: call trainer.train() before explain()")
        return self.handle.explain(**batch)

    def disable(self) -> None:
        """Restore the trainer and the model."""
        self._companion.end()
        if self._wrappers:
            self._trainer.remove_callback(self._callback)
        while self._wrappers:
            self._wrappers.pop().remove()

    def _train(
        self, plain: Callable[..., Any], resume_from_checkpoint: Any = None, *args: Any, **more: Any
    ) -> Any:
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self._trainer.args.output_dir)  # type: ignore[no-untyped-call]
        if folder:
            self._companion.load(Path(folder))
        with _blocks_compiled_instead(self._trainer, self._callback, self._options):
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
            # A step may remove entries of its inputs (such as labels, for label smoothing).
            copied = copy.copy(inputs) if isinstance(inputs, MutableMapping) else inputs
            return plain(model, copied, *args, **more)

        return handle.retry(attempt)

    def _log(
        self, plain: Callable[..., Any], logs: dict[str, float], *args: Any, **more: Any
    ) -> Any:
        if _is_training_log(logs):
            logs.update(self._companion.row())
        return plain(logs, *args, **more)


class _Callback(TrainerCallback):
    """Attaches when training begins, saves the state with each checkpoint, detaches at the end."""

    def __init__(self, companion: Companion) -> None:
        self._companion = companion
        self.before_attaching: Callable[[nn.Module], None] = lambda model: None

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
                "gradient_checkpointing=True: mimose decides for each batch which layers are "
                "recomputed, instead of recomputing all of them"
            )
        self.before_attaching(model)
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
class MimoseCallback(_Callback):
    """mimose as a callback: `callbacks=[MimoseCallback(memory_budget="20GiB")]`.

    Prefer `enable`, because a callback cannot wrap the training step. With the callback

    - a step that runs out of memory is not retried: the error ends the training;
    - metrics of mimose do not reach TensorBoard, W&B and the like, which log before user callbacks
      are called: they are printed and stored in `trainer.state.log_history`;
    - a resumed run loads the learned costs only from a checkpoint in this trainer's `output_dir`;
    - `torch_compile=True` is refused, since the whole model is compiled before mimose is called;
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
        host_memory: int | str = "auto",
        choices: Iterable[str] | None = None,
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
                host_memory=host_memory,
                choices=choices,
                allocator=allocator,
                input_size=input_size,
                record=record,
            )
        )

    def __repr__(self) -> str:
        return f"MimoseCallback({self._companion})"

    @property
    def handle(self) -> Mimose | None:
        """The handle of the current or last run; None before the first."""
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
        if logs is not None and _is_training_log(logs):
            row = self._companion.row()
            logs.update(row)
            state.log_history[-1].update(row)


class _Wrapper:
    """Replaces one method of one trainer until `remove`."""

    def __init__(
        self, owner: Enabled, trainer: Trainer, name: str, replacement: Callable[..., Any]
    ) -> None:
        self.owner = owner
        self._attributes, self._name = vars(trainer), name
        self._former = self._attributes.get(name)
        plain = getattr(trainer, name)
        self._call = functools.partial(replacement, plain)
        functools.update_wrapper(self, plain)
        self._attributes[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def remove(self) -> None:
        if self._attributes.get(self._name) is not self:  # wrapped again by something else
            return
        if self._former is None:
            del self._attributes[self._name]
        else:
            self._attributes[self._name] = self._former


@contextmanager
def _blocks_compiled_instead(
    trainer: Trainer, callback: _Callback, options: dict[str, Any]
) -> Iterator[None]:
    """With `torch_compile=True`, compile each block instead of the whole model."""
    plugin = trainer.accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO or switched_off():
        yield
        return
    compile_options, backend = plugin.to_kwargs(), plugin.backend
    compiled: list[nn.Module] = []

    def compile_blocks(model: nn.Module) -> None:
        for block in _blocks_of(model, options):
            if block._compiled_call_impl is None:
                block.compile(**compile_options)
                compiled.append(block)

    log.warning("torch_compile=True: blocks are compiled one by one, not the model as a whole")
    plugin.backend, callback.before_attaching = DynamoBackend.NO, compile_blocks
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


def _is_training_log(logs: dict[str, float]) -> bool:
    """False for the logs of an evaluation and for the summary at the end."""
    return "loss" in logs


def _refuse_compiled(args: TrainingArguments) -> None:
    if args.torch_compile:
        raise ConflictError(
            "torch_compile=True has compiled the model as a whole, which hides its blocks: use "
            "mimose.integrations.huggingface.enable(trainer), which compiles the blocks one by one"
        )


def _refuse_data_parallel(args: TrainingArguments) -> None:
    if args.n_gpu > 1:
        raise ConflictError(
            f"Trainer would train on {args.n_gpu} devices with nn.DataParallel, which copies the "
            "model to each device at each step: start one process per device with `torchrun "
            f"--nproc-per-node={args.n_gpu} train.py`, or set CUDA_VISIBLE_DEVICES=0 to use one"
        )
