"""Lightning's Trainer, under both of its names, and Fabric train under mimose as without."""

from __future__ import annotations

import csv
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.fabric import Fabric
from rise import budget_for, rise_of
from torch import nn
from torch.utils.data import DataLoader

import loops
import mimose
import models
from mimose.errors import MimoseWarning
from mimose.integrations.lightning import MimoseCallback

BOTH_NAMES = pytest.mark.parametrize("pl", [lightning.pytorch, pytorch_lightning])


def module_of(pl: ModuleType = lightning.pytorch, layers: int = 4) -> Any:
    """A LightningModule that, like most, never calls its own `forward` in training."""

    class Encodes(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.encoder = models.Encoder(layers)
            self.losses: list[float] = []

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss = models.loss_of(self.encoder, batch)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
            self.log("validation", models.loss_of(self.encoder, batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    return Encodes()


def fit(
    pl: ModuleType,
    module: Any,
    folder: Path,
    *callbacks: Any,
    ckpt_path: str | None = None,
    **changes: Any,
) -> Any:
    options = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": pl.loggers.CSVLogger(folder),
    }
    trainer = pl.Trainer(callbacks=list(callbacks), **{**options, **changes})
    loader, few = (DataLoader(list(batches()[:count]), batch_size=None) for count in (14, 2))
    torch.manual_seed(1)
    trainer.fit(module, loader, few, ckpt_path=ckpt_path)
    return trainer


@loops.once
def batches() -> list[loops.Batch]:
    return loops.texts(loops.lengths(14))


def rows(folder: Path) -> list[dict[str, str]]:
    (file,) = folder.rglob("metrics.csv")
    with file.open() as lines:
        return list(csv.DictReader(lines))


def twins(pl: ModuleType, folder: Path, **changes: Any) -> tuple[Any, Any, mimose.Mimose]:
    """The same fit twice: plain, and under a budget that plain exceeds."""
    plain, ours = module_of(pl), module_of(pl)
    rise = rise_of(lambda: fit(pl, plain, folder / "plain", **changes))
    callback = MimoseCallback(budget_for(rise, 0.6))
    fit(pl, ours, folder / "ours", callback, **changes)
    assert callback.handle is not None
    return plain, ours, callback.handle


@BOTH_NAMES
def test_fit_is_the_same_bit_for_bit_and_within_the_budget(pl: ModuleType, tmp_path: Path) -> None:
    plain, ours, handle = twins(pl, tmp_path)
    stats = handle.stats()
    assert ours.losses == plain.losses
    assert stats.peak_bytes <= (stats.budget_bytes or 0)
    assert stats.runs_kept
    assert stats.runs_recomputed
    assert len({row["mimose/blocks_recomputed"] for row in rows(tmp_path / "ours")}) > 1


@pytest.mark.parametrize("changes", [{"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}])
def test_fit_is_the_same_however_it_is_set(changes: dict[str, Any], tmp_path: Path) -> None:
    plain, ours, handle = twins(lightning.pytorch, tmp_path, **changes)
    assert ours.losses == plain.losses
    assert handle.stats().planned_steps
    assert handle.stats().peak_bytes <= (handle.stats().budget_bytes or 0)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"memory_budget": "6G"}, mimose.MimoseError, "6GiB"),
        ({"planner": "best"}, mimose.MimoseError, "best"),
        ({"bloks": "encoder"}, TypeError, "bloks"),
    ],
)
def test_callback_says_at_once_what_cannot_work(
    options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        MimoseCallback(**options)


def test_callback_shows_its_arguments_and_where_it_stands(tmp_path: Path) -> None:
    taken = list(inspect.signature(mimose.auto_checkpoint).parameters.values())[1:]
    assert list(inspect.signature(MimoseCallback).parameters.values()) == taken
    callback = MimoseCallback("1GiB", planner="greedy")
    asked = "MimoseCallback(memory_budget='1GiB', planner='greedy'; "
    assert repr(callback) == f"{asked}not attached yet)"
    fit(lightning.pytorch, module_of(), tmp_path, callback, max_steps=1)
    assert repr(callback) == f"{asked}<mimose on 4 blocks, 1.00 GiB, detached>)"


def test_nothing_is_left_on_the_module_after_the_fit(tmp_path: Path) -> None:
    module = module_of()
    before = loops.places(module.encoder)
    fit(lightning.pytorch, module, tmp_path, MimoseCallback("1GiB"), max_steps=2)
    assert loops.places(module.encoder) == before
    assert not loops.interceptors(module)


def test_metrics_reach_the_logger_at_its_interval(tmp_path: Path) -> None:
    callback = MimoseCallback("1GiB")
    trainer = fit(lightning.pytorch, module_of(), tmp_path, callback, log_every_n_steps=2)
    told = [row for row in rows(tmp_path) if row.get("mimose/peak_gib")]
    assert len(told) == 7
    assert told[-1]["mimose/predicted_peak_gib"]
    assert float(told[-1]["mimose/blocks_recomputed"]) == 0
    assert callback.handle is not None
    observed = sum(float(row["mimose/observed_steps"]) for row in told)
    assert observed == callback.handle.stats().observed_steps
    assert "mimose/recompute_share" in trainer.callback_metrics


@BOTH_NAMES
def test_resumed_fit_plans_from_its_first_step(pl: ModuleType, tmp_path: Path) -> None:
    first, resumed = module_of(pl), module_of(pl)
    trainer = fit(pl, first, tmp_path / "first", MimoseCallback("1GiB"))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    callback = MimoseCallback("1GiB")
    fit(
        pl,
        resumed,
        tmp_path / "second",
        callback,
        ckpt_path=str(tmp_path / "saved.ckpt"),
        max_epochs=2,
    )
    assert callback.handle is not None
    assert callback.handle.stats().steps == 14
    assert callback.handle.stats().observed_steps == 0


def test_knowledge_of_another_module_is_refused_and_the_fit_goes_on(tmp_path: Path) -> None:
    other, callback = MimoseCallback("1GiB"), MimoseCallback("1GiB")
    fit(lightning.pytorch, module_of(layers=3), tmp_path / "other", other)
    callback.load_state_dict(other.state_dict())
    with pytest.warns(MimoseWarning, match="state_dict cannot be used"):
        fit(lightning.pytorch, module_of(), tmp_path / "ours", callback)
    assert callback.handle is not None
    assert callback.handle.stats().observed_steps


def test_exception_leaves_nothing_on_the_module(tmp_path: Path) -> None:
    module, callback = module_of(), MimoseCallback("1GiB")

    def broken(batch: Any) -> None:
        models.loss_of(module.encoder, batch)
        raise ZeroDivisionError

    before = loops.places(module.encoder)
    module.training_step = broken
    with pytest.raises(ZeroDivisionError):
        fit(lightning.pytorch, module, tmp_path, callback)
    assert callback.handle is not None
    assert callback.handle.stats().steps == 1
    assert loops.places(module.encoder) == before


# Fabric


def fabric_losses(attach: str, budget: int | str) -> tuple[list[float], mimose.Mimose | None]:
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
    model: nn.Module = models.Encoder(4)
    handle = mimose.auto_checkpoint(model, budget) if attach == "before" else None
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-3))
    if attach == "after":
        handle = mimose.auto_checkpoint(wrapped, budget)
    torch.manual_seed(1)
    losses = []
    for batch in batches():
        loss = models.loss_of(wrapped, batch)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if handle is not None:
        handle.detach()
    return losses, handle


@loops.once
def plain_fabric() -> tuple[list[float], int]:
    """Its losses, and how far memory rises."""
    losses: list[float] = []
    return losses, rise_of(lambda: losses.extend(fabric_losses("never", 0)[0]))


@pytest.mark.parametrize("attach", ["before", "after"])
def test_fabric_trains_the_same_whichever_comes_first(attach: str) -> None:
    plain, rise = plain_fabric()
    losses, handle = fabric_losses(attach, budget_for(rise, 0.7))
    assert handle is not None
    assert losses == plain
    assert handle.stats().runs_kept
    assert handle.stats().runs_recomputed
