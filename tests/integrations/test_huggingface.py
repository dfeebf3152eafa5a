"""transformers' Trainer under mimose trains as it does without, within a budget."""

from __future__ import annotations

import functools
import inspect
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DynamoBackend
from trainers import (
    Rise,
    arguments,
    bert,
    logged,
    losses,
    measured,
    padded,
    places,
    sentences,
    trainer_of,
    twins,
)
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
)

import loops
import mimose
from mimose.errors import ConflictError, MimoseWarning
from mimose.integrations.huggingface import MimoseCallback, enable


@pytest.fixture(scope="module")
def plain() -> Rise:
    """One plain training that several tests compare with."""
    return measured(trainer_of())


VARIANTS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "gradient accumulation": {"gradient_accumulation_steps": 2, "max_steps": 8},
    "batches grouped by length": {"train_sampling_strategy": "group_by_length"},
    "autocast": {"bf16": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 3, "label_smoothing_factor": 0.1},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_the_same_bit_for_bit_and_within_the_budget(variant: str) -> None:
    pair = twins(functools.partial(trainer_of, **VARIANTS[variant]))
    pair.assert_same()
    pair.assert_planned()
    assert logged(pair.ours, "eval_loss") == logged(pair.plain, "eval_loss")


def test_nothing_is_left_on_the_model_after_training() -> None:
    trainer = trainer_of(max_steps=3)
    before = places(trainer.model)
    enabled = enable(trainer, "1GiB")
    trainer.train()
    assert enabled.handle is not None
    assert not enabled.handle.attached
    assert places(trainer.model) == before


def test_nothing_is_left_on_the_model_after_an_exception() -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    trainer = trainer_of(own={"compute_loss_func": broken})
    before = places(trainer.model)
    enable(trainer, "1GiB")
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert places(trainer.model) == before


def test_disable_leaves_the_trainer_as_it_was() -> None:
    trainer = trainer_of(max_steps=2)
    before, callbacks = dict(vars(trainer)), list(trainer.callback_handler.callbacks)
    enabled = enable(trainer, "1GiB")
    assert vars(trainer) != before
    for _ in range(2):
        enabled.disable()
        assert vars(trainer) == before
        assert trainer.callback_handler.callbacks == callbacks
    trainer.train()
    assert enabled.handle is None


def test_warnings_point_at_the_line_that_called_train() -> None:
    trainer = trainer_of(max_steps=6)
    enable(trainer, "1MiB")
    with pytest.warns(MimoseWarning) as said:
        trainer.train()
    places = {Path(warning.filename).name for warning in said if warning.category is MimoseWarning}
    assert places == {Path(__file__).name}


@pytest.mark.parametrize(("made", "own"), [(enable, ["trainer"]), (MimoseCallback, [])])
def test_arguments_are_shown_as_those_of_auto_checkpoint(made: Any, own: list[str]) -> None:
    taken = inspect.signature(mimose.auto_checkpoint).parameters
    shown = inspect.signature(made).parameters
    assert list(shown.values())[len(own) :] == list(taken.values())[1:]


def test_what_was_enabled_shows_what_was_asked_for_and_where_it_stands() -> None:
    trainer = trainer_of(max_steps=1)
    enabled = enable(trainer, "1GiB", exclude="*.layer.0")
    asked = "memory_budget='1GiB', exclude='*.layer.0'; "
    assert repr(enabled) == f"<mimose in Trainer: {asked}not attached yet>"
    trainer.train()
    assert repr(enabled) == (
        f"<mimose in Trainer: {asked}<mimose on 3 blocks, 1.00 GiB, detached>>"
    )
    enabled.disable()
    assert repr(enabled) == "<mimose in Trainer: disabled>"
    assert repr(MimoseCallback("80%")) == "MimoseCallback(memory_budget='80%'; not attached yet)"


def test_a_model_is_no_trainer() -> None:
    with pytest.raises(mimose.ArgumentError, match=r"not a Linear.*call mimose\.auto_checkpoint"):
        enable(torch.nn.Linear(2, 2), "1GiB")  # type: ignore[arg-type]


def test_second_call_of_enable_replaces_the_first() -> None:
    trainer = trainer_of(max_steps=2)
    first, second = enable(trainer, "1GiB"), enable(trainer, "2GiB")
    trainer.train()
    assert first.handle is None
    assert second.stats().budget_bytes == 2 << 30
    assert second.stats().steps == 2


def test_second_run_of_a_trainer_plans_from_its_first_step() -> None:
    trainer = trainer_of(max_steps=8)
    enabled = enable(trainer, "1GiB")
    trainer.train()
    assert enabled.stats().observed_steps
    trainer.train()
    assert enabled.stats().steps == 8
    assert enabled.stats().observed_steps == 0


def test_checkpointing_that_the_trainer_switches_on_is_taken_over(
    plain: Rise, caplog: pytest.LogCaptureFixture
) -> None:
    budget = plain.budget(0.6)
    trainer = trainer_of(gradient_checkpointing=True)
    enabled = enable(trainer, budget)
    with caplog.at_level(logging.INFO, "mimose"):
        trainer.train()
    assert losses(trainer) == losses(plain.trainer)
    assert enabled.stats().runs_kept
    assert enabled.stats().runs_recomputed
    assert "gradient_checkpointing=True: mimose decides" in caplog.text
    assert "mimose decides now instead of the model's own checkpointing" in caplog.text
    assert trainer.model.is_gradient_checkpointing


def test_logs_tell_peaks_and_recomputing(plain: Rise) -> None:
    trainer = trainer_of()
    enabled = enable(trainer, plain.budget(0.6))
    trainer.train()
    rows = [row for row in trainer.state.log_history if "mimose/predicted_peak_gib" in row]
    # Plans from predictions that are not trusted yet are logged without a predicted peak.
    assert 3 <= len(rows) <= enabled.stats().planned_steps
    planned = [row for row in trainer.state.log_history if "mimose/blocks_recomputed" in row]
    assert len(planned) == enabled.stats().planned_steps
    for row in rows:
        assert row["mimose/real_peak_gib"] == pytest.approx(
            row["mimose/predicted_peak_gib"], rel=0.05
        )
        assert row["mimose/peak_gib"] <= row["mimose/budget_gib"]
        assert 0 <= row["mimose/blocks_recomputed"] <= 4
        assert 0 <= row["mimose/recompute_share"] <= 1
        assert row["mimose/recoveries"] == 0
    assert sum(logged(trainer, "mimose/observed_steps")) == enabled.stats().observed_steps
    unplanned = [r for r in trainer.state.log_history if r.get("mimose/observed_steps") == 1]
    assert unplanned
    assert not any("mimose/recompute_share" in row for row in unplanned)


def scalars(folder: Path) -> set[str]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return set(events.Tags()["scalars"])


def test_logs_reach_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    trainer = trainer_of(report_to="tensorboard", max_steps=8)
    enable(trainer, "1GiB")
    trainer.train()
    assert {"train/mimose/predicted_peak_gib", "train/mimose/peak_gib"} <= scalars(tmp_path)


def test_resumed_training_plans_from_its_first_step_and_goes_on_as_before(
    plain: Rise, tmp_path: Path
) -> None:
    saving = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 8}
    first = trainer_of(**saving)
    enable(first, plain.budget(0.6))
    first.train()
    resumed = trainer_of(**saving)
    enabled = enable(resumed, plain.budget(0.6))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert enabled.stats().steps == 4
    assert enabled.stats().observed_steps == 0
    assert losses(resumed) == losses(first) == losses(plain.trainer)


def test_knowledge_is_found_in_the_last_checkpoint_by_name_or_not(tmp_path: Path) -> None:
    saving = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 8}
    first = trainer_of(**saving, max_steps=8)
    enable(first, "1GiB")
    first.train()
    assert json.loads((tmp_path / "checkpoint-8" / "mimose.json").read_text())
    resumed = trainer_of(**saving, max_steps=10)
    enabled = enable(resumed, "1GiB")
    resumed.train(resume_from_checkpoint=True)
    assert (enabled.stats().steps, enabled.stats().observed_steps) == (2, 0)


def test_knowledge_of_another_model_is_refused_and_training_goes_on(tmp_path: Path) -> None:
    saving = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 4}
    other = trainer_of(bert(layers=3), max_steps=4, save_strategy="steps", save_steps=4)
    enable(other, "1GiB")
    other.train()
    trainer = trainer_of(**saving, max_steps=4)
    trainer.train()
    learned = Path(other.args.output_dir) / "checkpoint-4" / "mimose.json"
    (tmp_path / "checkpoint-4" / "mimose.json").write_text(learned.read_text())
    resumed = trainer_of(**saving, max_steps=6)
    enabled = enable(resumed, "1GiB")
    with pytest.warns(MimoseWarning, match="state_dict cannot be used"):
        resumed.train(resume_from_checkpoint=True)
    assert enabled.stats().observed_steps == 2


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{no", r"\(Expecting property name enclosed in double quotes: line 1 column 2 .*\):"),
        ("[1, 2]", r"\(it holds a list instead of an object\):"),
    ],
)
def test_damaged_knowledge_is_refused_and_training_goes_on(
    content: str, told: str, tmp_path: Path
) -> None:
    saving = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2}
    trainer_of(**saving, max_steps=2).train()
    (tmp_path / "checkpoint-2" / "mimose.json").write_text(content)
    resumed = trainer_of(**saving, max_steps=3)
    enabled = enable(resumed, "1GiB")
    with pytest.warns(MimoseWarning, match=f"damaged {told}"):
        resumed.train(resume_from_checkpoint=True)
    assert enabled.stats().observed_steps == 1


def test_checkpoint_without_knowledge_is_resumed_all_the_same(tmp_path: Path) -> None:
    saving = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 4}
    trainer_of(**saving, max_steps=4).train()
    resumed = trainer_of(**saving, max_steps=5)
    enabled = enable(resumed, "1GiB")
    resumed.train(resume_from_checkpoint=True)
    assert enabled.stats().steps == 1


class RunsOut:
    """A loss whose computation runs out of memory at some of its calls."""

    def __init__(self, *at: int) -> None:
        self._at = at
        self.calls = 0

    def __call__(self, outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls in self._at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate too much")
        return torch.nn.functional.cross_entropy(outputs.logits, labels)


def test_step_that_runs_out_of_memory_is_run_again_to_the_same_end() -> None:
    accumulating = {"gradient_accumulation_steps": 2, "max_steps": 6}
    plain = trainer_of(own={"compute_loss_func": RunsOut()}, **accumulating)
    plain.train()
    trainer = trainer_of(own={"compute_loss_func": RunsOut(4, 11)}, **accumulating)
    enabled = enable(trainer, "1GiB")
    trainer.train()
    assert losses(trainer) == losses(plain)
    assert enabled.stats().recoveries == 2
    assert logged(trainer, "mimose/recoveries")[-1] == 2


def test_batch_that_never_fits_is_left_to_auto_find_batch_size() -> None:
    def never_four(outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        if len(labels) > 3:
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")  # words that Accelerate does not know
        return torch.nn.functional.cross_entropy(outputs.logits, labels)

    trainer = trainer_of(
        own={"compute_loss_func": never_four}, auto_find_batch_size=True, max_steps=8
    )
    before = places(trainer.model)
    enabled = enable(trainer, "1GiB")
    trainer.train()
    assert trainer._train_batch_size < 4
    assert len(losses(trainer)) == 8
    assert enabled.stats().planned_steps
    assert places(trainer.model) == before


def test_generation_during_training_is_left_alone() -> None:
    def make() -> Trainer:
        torch.manual_seed(0)
        config = T5Config(
            d_model=32, num_layers=3, num_heads=2, d_ff=64, d_kv=16, vocab_size=50,
            decoder_start_token_id=0,
        )  # fmt: skip
        return Seq2SeqTrainer(
            model=T5ForConditionalGeneration(config),
            args=Seq2SeqTrainingArguments(
                **arguments(max_steps=10),
                predict_with_generate=True,
                generation_max_length=6,
                eval_strategy="steps",
                eval_steps=5,
            ),
            train_dataset=sentences(48),
            eval_dataset=sentences(4, seed=1),
            data_collator=lambda rows: {**padded(rows), "labels": padded(rows)["input_ids"]},
            compute_metrics=lambda told: {"sum": float(told.predictions.sum())},
        )

    pair = twins(make)
    pair.assert_same()
    pair.assert_planned()
    assert logged(pair.ours, "eval_sum") == logged(pair.plain, "eval_sum")
    assert len(logged(pair.ours, "eval_sum")) == 2


def test_model_made_anew_for_each_run_is_attached_to_in_its_turn() -> None:
    made = []

    def make() -> torch.nn.Module:
        made.append(bert())
        return made[-1]

    trainer = Trainer(
        model_init=make,
        args=trainer_of(max_steps=2).args,
        train_dataset=sentences(8),
        data_collator=padded,
    )
    enabled = enable(trainer, "1GiB")
    trainer.train()
    assert len(made) == 2
    assert enabled.stats().steps == 2


def test_whole_model_compilation_becomes_compilation_of_its_blocks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[Any] = []

    class Looks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.append([interceptor.compiled for interceptor in loops.interceptors(trainer.model)])

    trainer = trainer_of(
        torch_compile=True,
        torch_compile_backend="aot_eager",
        max_steps=2,
        own={"callbacks": [Looks()]},
    )
    plugin = trainer.accelerator.state.dynamo_plugin
    assert plugin.backend == DynamoBackend.AOT_EAGER
    before = places(trainer.model)
    enable(trainer, "1GiB")
    trainer.train()
    assert "blocks are compiled one by one" in caplog.text
    assert sum(compiled is not None for compiled in seen[-1]) == 4
    assert plugin.backend == DynamoBackend.AOT_EAGER
    assert places(trainer.model) == before
    assert type(trainer.model_wrapped) is type(trainer.model)


def test_data_parallel_is_refused_with_the_torchrun_line() -> None:
    trainer = trainer_of()
    trainer.args._n_gpu = 2
    with pytest.raises(ConflictError, match="torchrun --nproc-per-node=2"):
        enable(trainer, "1GiB")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"memory_budget": "much"}, "much"),
        ({"planner": "best"}, "best"),
        ({"collector": "stamps"}, "stamps"),
        ({"blocks": "bert.nothing"}, "nothing"),
    ],
)
def test_enable_says_at_once_what_cannot_work(options: dict[str, Any], says: str) -> None:
    trainer = trainer_of()
    before = dict(vars(trainer))
    with pytest.raises(mimose.MimoseError, match=says):
        enable(trainer, **options)
    assert vars(trainer) == before


# As a callback


def test_callback_keeps_the_budget_and_appears_in_the_history(plain: Rise) -> None:
    callback = MimoseCallback(plain.budget(0.6))
    trainer = trainer_of(own={"callbacks": [callback]})
    before = places(trainer.model)
    trainer.train()
    assert losses(trainer) == losses(plain.trainer)
    assert callback.handle is not None
    assert callback.handle.stats().peak_bytes <= (callback.handle.budget_bytes or 0)
    assert len(set(logged(trainer, "mimose/blocks_recomputed"))) > 1
    assert places(trainer.model) == before


def test_callback_resumes_from_its_own_output_folder(tmp_path: Path) -> None:
    saving = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 8}
    trainer_of(**saving, max_steps=8, own={"callbacks": [MimoseCallback("1GiB")]}).train()
    callback = MimoseCallback("1GiB")
    resumed = trainer_of(**saving, max_steps=10, own={"callbacks": [callback]})
    resumed.train(resume_from_checkpoint=True)
    assert callback.handle is not None
    assert callback.handle.stats().steps == 2
    assert callback.handle.stats().observed_steps == 0


def test_callback_refuses_a_model_compiled_as_a_whole() -> None:
    trainer = trainer_of(torch_compile=True, own={"callbacks": [MimoseCallback("1GiB")]})
    with pytest.raises(ConflictError, match=r"enable\(trainer\)"):
        trainer.train()


@pytest.mark.parametrize("name", ["enable", "callback"])
def test_switched_off_by_the_environment_training_is_plain(
    plain: Rise, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIMOSE_DISABLE", "1")
    own = {"callbacks": [MimoseCallback("1GiB")]} if name == "callback" else {}
    trainer = trainer_of(max_steps=2, own=own)
    if name == "enable":
        trainer.accelerator.state.dynamo_plugin.backend = DynamoBackend.EAGER
        enable(trainer, "1GiB")
    trainer.train()
    assert losses(trainer) == losses(plain.trainer)[:2]
    assert not logged(trainer, "mimose/peak_gib")
