"""A callback of transformers' `Trainer` that attaches mimose while it trains."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from mimose.api import switched_off
from mimose.integrations.trainer_session import TrainerSession

log = logging.getLogger("mimose")


class AttachingCallback(TrainerCallback):
    """Attaches when training begins, saves the state with each checkpoint, detaches at the end."""

    def __init__(self, session: TrainerSession) -> None:
        self._session = session
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
        if args.gradient_checkpointing and not (self._session.attached or switched_off()):
            log.warning(
                "gradient_checkpointing=True: mimose decides for each batch which layers are "
                "recomputed, instead of recomputing all of them"
            )
        self.before_attaching(model)
        self._session.begin(model)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if args.should_save:
            self._session.save(checkpoint_folder(args, state))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._session.end()


def checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """The folder of the checkpoint that the trainer saves at this step."""
    return Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
