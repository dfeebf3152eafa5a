"""transformers' `Trainer` and its subclasses: `SFTTrainer`, `Seq2SeqTrainer`, …

    enable(trainer, memory_budget="20GiB")
    trainer.train()

Callbacks do not see batches, cannot retry a step, and receive logs after TensorBoard and other
loggers. So `enable` also wraps three methods of the given trainer: `train`, `training_step` and
`log`.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any, final

from torch import nn

from mimose.api import Mimose, refuse_options, switched_off
from mimose.errors import ArgumentError, ConflictError
from mimose.integrations import missing
from mimose.integrations.method_wrapper import MethodWrapper
from mimose.integrations.trainer_session import TrainerSession
from mimose.interception import Selector
from mimose.planning import Planner
from mimose.reporting import Explanation, Stats
from mimose.tensors import SizeFunction

try:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from mimose.integrations.block_compilation import blocks_compiled_instead, blocks_of
    from mimose.integrations.trainer_callback import AttachingCallback, checkpoint_folder
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
        blocks_of(trainer.model, options)
    former = vars(trainer).get("train")
    if isinstance(former, MethodWrapper):
        log.info("mimose was already enabled for this trainer: this call replaces the old one")
        former.owner.disable()
    return Enabled(trainer, memory_budget, options)


@final
class Enabled:
    """mimose in one trainer; returned by `enable`."""

    def __init__(self, trainer: Trainer, memory_budget: int | str, options: dict[str, Any]) -> None:
        self._trainer = trainer
        self._options = options
        self._session = TrainerSession(memory_budget, **options)
        self._callback = AttachingCallback(self._session)
        trainer.add_callback(self._callback)
        self._wrappers = [
            MethodWrapper(self, trainer, "train", self._train),
            MethodWrapper(self, trainer, "training_step", self._training_step),
            MethodWrapper(self, trainer, "log", self._log),
        ]

    def __repr__(self) -> str:
        state = self._session if self._wrappers else "disabled"
        return f"<mimose in {type(self._trainer).__name__}: {state}>"

    @property
    def handle(self) -> Mimose | None:
        """The handle of the current or last run; None before the first."""
        return self._session.handle

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
        self._session.end()
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
            self._session.load(Path(folder))
        with blocks_compiled_instead(self._trainer, self._callback, self._options):
            try:
                return plain(resume_from_checkpoint, *args, **more)
            finally:
                self._session.end()

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
            logs.update(self._session.metrics())
        return plain(logs, *args, **more)


@final
class MimoseCallback(AttachingCallback):
    """mimose as a callback: `callbacks=[MimoseCallback(memory_budget="20GiB")]`.

    Prefer `enable`, because a callback cannot wrap the training step. With the callback

    - a step that runs out of memory is not retried: the error ends the training;
    - metrics of mimose do not reach TensorBoard, W&B and other loggers, which log before user
      callbacks are called: they are printed and stored in `trainer.state.log_history`;
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
            TrainerSession(
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
        return f"MimoseCallback({self._session})"

    @property
    def handle(self) -> Mimose | None:
        """The handle of the current or last run; None before the first."""
        return self._session.handle

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
            self._session.load(checkpoint_folder(args, state))
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
            row = self._session.metrics()
            logs.update(row)
            state.log_history[-1].update(row)


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
