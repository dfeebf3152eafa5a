"""Lightning's `Trainer`, under either of its names: `lightning.pytorch` and `pytorch_lightning`.

    trainer = lightning.Trainer(callbacks=[MimoseCallback(memory_budget="20GiB")])

Fabric needs no callback: call `mimose.auto_checkpoint(model, …)` before or after `fabric.setup`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, final

from mimose.api import Mimose
from mimose.integrations import missing
from mimose.integrations.trainer_session import TrainerSession
from mimose.interception import Selector
from mimose.planning import Planner
from mimose.tensors import SizeFunction

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:

    def _callbacks() -> tuple[type, ...]:
        """The `Callback` classes of all installed packages: each trainer accepts only its own."""
        names = ("lightning.pytorch", "pytorch_lightning")
        installed = [name for name in names if importlib.util.find_spec(name.partition(".")[0])]
        if not installed:
            raise missing("lightning", "lightning")
        return tuple(importlib.import_module(name).Callback for name in installed)

    Callback = type("Callback", _callbacks(), {})


@final
class MimoseCallback(Callback):
    """Runs `Trainer.fit` within `memory_budget`, with a plan for every batch.

    Metrics named `mimose/…` are logged every `log_every_n_steps`. The learned costs are saved in
    the trainer's checkpoints, so that a resumed run plans from its first step. The model is
    restored when `fit` ends, also by an exception. A step that runs out of memory is not retried,
    because a callback cannot run it again.

    Args:
        memory_budget: This and all other arguments are those of `mimose.auto_checkpoint`.

    >>> trainer = Trainer(callbacks=[MimoseCallback(memory_budget="20GiB")])  # doctest: +SKIP
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
        self._session = TrainerSession(
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
        self._logged_at = 0

    def __repr__(self) -> str:
        return f"MimoseCallback({self._session})"

    @property
    def handle(self) -> Mimose | None:
        """The handle of the current or last fit; None before the first."""
        return self._session.handle

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logged_at = trainer.global_step
        self._session.begin(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        step, interval = trainer.global_step, trainer.log_every_n_steps  # type: ignore[attr-defined]
        if interval and step != self._logged_at and step % interval == 0:
            self._logged_at = step
            pl_module.log_dict(self._session.metrics(), on_step=True, on_epoch=False)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._session.end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._session.end()

    def state_dict(self) -> dict[str, Any]:
        return self._session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._session.load_state_dict(state_dict)
