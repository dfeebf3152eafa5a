"""A session holds its budget, trains bit for bit as without it, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import re

import pytest
import torch
from torch import nn

import mimose
import models
from compare import assert_same_gradients
from loops import (
    BATCHES,
    MODELS,
    Predictions,
    bert,
    counted,
    interceptors,
    labelled,
    lengths,
    once,
    peak_of_plain,
    places,
    task,
    texts,
    throwing_dice,
    tight_budget,
    train,
)
from mimose.errors import ConflictError
from mimose.memory.storage_counter import StorageCounter
from mimose.training import Collector, Shuttle

PLANNERS = ("optimal", "greedy", "static", "keep_all", "recompute_all")


@pytest.fixture(autouse=True)
def _stops_counting() -> object:
    yield
    gc.collect()
    assert StorageCounter._shared is None, "a session was left open"


@pytest.mark.parametrize("name", MODELS)
def test_planning_begins_after_at_most_five_observed_steps_and_is_said_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, batches, budget = task(name)
    caplog.clear()
    with caplog.at_level(logging.INFO, "mimose"), mimose.auto_checkpoint(model, budget):
        train(model, batches)
    said = [m for m in caplog.messages if "plans from now on" in m]
    assert len(said) == 1
    observed = re.search(r"3 blocks, (\d+) steps observed, budget [\d.]+ MiB, reserve", said[0])
    assert observed is not None
    assert int(observed[1]) <= 5


@pytest.mark.parametrize(
    ("budget", "told"), [("1GiB", "1.00 GiB"), ("7%", "7% of the device"), ("auto", "auto")]
)
def test_attaching_says_in_one_line_what_was_found(
    caplog: pytest.LogCaptureFixture, budget: str, told: str
) -> None:
    with caplog.at_level(logging.INFO, "mimose"):
        mimose.auto_checkpoint(models.Encoder(), budget)
    (line,) = caplog.messages
    assert line == (
        "mimose is attached to Encoder: 3 blocks encoder.layers.* (TransformerEncoderLayer), "
        f"budget {told}, on cpu"
    )


@pytest.mark.parametrize("enforce", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_peak_stays_within_a_budget_that_plain_training_exceeds(name: str, enforce: bool) -> None:
    model, batches, budget = task(name)
    assert peak_of_plain(model, batches) > budget
    with counted() as counter:
        with mimose.auto_checkpoint(model, budget, enforce=enforce) as handle:
            train(model, batches)
            stats = handle.stats()
        assert stats.peak_bytes <= budget
        assert abs(stats.peak_bytes - counter.peak) <= 0.001 * counter.peak
    assert stats.planned_steps > 10
    assert stats.runs_kept > 0


def test_more_budget_is_used_to_recompute_less() -> None:
    seen = []
    for share in (0.1, 0.5, 1.3):
        model, batches, budget = task("encoder", share)
        with mimose.auto_checkpoint(model, budget) as handle:
            train(model, batches)
            seen.append(handle.stats().runs_recomputed)
    assert sorted(seen, reverse=True) == seen
    assert seen[0] > seen[-1] == 0


@pytest.mark.parametrize("name", models.ALL)
def test_predicted_peaks_of_random_plans_are_the_real_ones(name: str) -> None:
    sizes = {} if name in ("vit", "swin", "resnet") else {"length": 64}
    model, batch = models.ALL[name](batch=8, **sizes)
    with throwing_dice(model, "1GiB") as handle:
        predictions = Predictions(handle)
        train(model, [batch] * 14, after_step=predictions)
    predictions.assert_exact(steps=12)


@pytest.mark.parametrize("name", MODELS)
def test_predicted_peaks_hold_for_sizes_never_seen(name: str) -> None:
    model, batches = MODELS[name](), BATCHES[name]([160, 20, *lengths(22)])
    with throwing_dice(model, "1GiB") as handle:
        predictions = Predictions(handle)
        train(model, batches, after_step=predictions)
    predictions.assert_exact(steps=15)


@once
def _plain_run() -> tuple[nn.Module, list[dict[str, torch.Tensor]], list[float], int]:
    model, batches = models.Encoder(), texts(lengths(150, 8, 40), batch=2)
    return model, batches, train(copy.deepcopy(model), batches), tight_budget(model, batches[:40])


@pytest.mark.filterwarnings("ignore::mimose.errors.MimoseWarning")
@pytest.mark.parametrize("collector", ["ride", "shuttle"])
@pytest.mark.parametrize("planner", PLANNERS)
def test_losses_are_those_of_plain_training_bit_for_bit(planner: str, collector: str) -> None:
    model, batches, losses, budget = _plain_run()
    steps = 150 if (planner, collector) == ("optimal", "ride") else 60
    model = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, budget, planner=planner, collector=collector) as handle:
        assert train(model, batches[:steps]) == losses[:steps]
        stats = handle.stats()
    assert stats.steps == steps
    assert stats.planned_steps > steps // 2
    assert planner == "recompute_all" or stats.runs_kept
    assert planner == "keep_all" or stats.runs_recomputed


@pytest.mark.parametrize("collector", [Collector, Shuttle])
def test_both_collectors_observe_the_same_bytes(collector: type[Collector]) -> None:
    model, batch = models.bert(8, 64)
    with throwing_dice(model, "1GiB", collector=collector) as handle:
        predictions = Predictions(handle)
        train(model, [batch] * 10, after_step=predictions)
    predictions.assert_exact(steps=8)


def test_unknown_size_is_observed_and_known_size_is_planned_from_the_third_step_on() -> None:
    model, batches = models.Encoder(), texts([50] * 6)
    kinds = []
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        train(model, batches, after_step=lambda: kinds.append(handle.stats().planned_steps))
    assert kinds == [0, 0, 1, 2, 3, 4]


def test_last_smaller_batch_of_an_epoch_is_planned_without_observing() -> None:
    model, epoch, budget = task("encoder")
    with mimose.auto_checkpoint(model, budget) as handle:
        train(model, epoch)
        observed = handle.stats().observed_steps
        train(model, texts([100], batch=3))
        assert handle.stats().observed_steps == observed
        assert str(handle.stats().last_size) == "3×100"


def test_repeated_sizes_take_their_plan_from_the_cache() -> None:
    model, batches = models.Encoder(), texts([50, 30, 40, 20] * 6)
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        train(model, batches[:16])
        before = handle.stats()
        train(model, batches[16:])
        after = handle.stats()
    assert after.cache_hits - before.cache_hits >= 7  # the first has no optimizer state yet
    assert after.cache_misses - before.cache_misses <= 1


def test_attaching_again_replaces_the_former_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, batches = models.Encoder(), texts([30] * 4)
    before = places(model)
    first = mimose.auto_checkpoint(model, "1GiB")
    train(model, batches[:2])
    with caplog.at_level(logging.INFO, "mimose"):
        second = mimose.auto_checkpoint(model, "1GiB", blocks="encoder.layers.*")
    assert [m for m in caplog.messages if "replaces the old handle" in m]
    assert not first.attached
    assert second.attached
    assert len(interceptors(model)) == 1 + 3
    train(model, batches)
    assert first.stats().steps == 2
    assert second.stats().steps == 4
    second.detach()
    assert places(model) == before


def test_detach_restores_every_module_and_lifts_the_limit() -> None:
    model, batches = bert(), labelled([40] * 4)
    before = places(model)
    handle = mimose.auto_checkpoint(model, "4MiB", enforce=True)
    train(model, batches)
    assert places(model) != before
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(5 << 20, dtype=torch.uint8)
    handle.detach()
    assert places(model) == before
    assert torch.zeros(5 << 20, dtype=torch.uint8).sum() == 0
    assert not handle.attached
    assert "detached" in repr(handle)
    handle.detach()
    assert handle.stats().steps == 4


def test_context_manager_detaches_also_after_an_error() -> None:
    model = models.Encoder()
    before = places(model)
    handle = mimose.auto_checkpoint(model, "1GiB")
    with pytest.raises(TypeError), handle:
        train(model, [*texts([20]), {"wrong": torch.ones(2)}])
    assert handle.stats().steps == 1
    assert not handle.attached
    assert places(model) == before


def test_forgotten_handle_goes_on_planning() -> None:
    model, batches = models.Encoder(), texts(lengths(12))
    plain = copy.deepcopy(model)
    mimose.auto_checkpoint(model, "1GiB")
    gc.collect()
    assert train(model, batches) == train(plain, batches)
    root = interceptors(model)[0]
    assert root.owner.scheduler.cost_model.ready
    root.owner.detach()


def test_model_that_is_dropped_takes_limit_and_counting_along() -> None:
    model = models.Encoder()
    mimose.auto_checkpoint(model, "4MiB", enforce=True)
    train(model, texts([20] * 3))
    counter = StorageCounter._shared
    assert counter is not None
    del model
    gc.collect()
    limit, shared = counter.limit, StorageCounter._shared
    if shared is not None:  # leave no limit to the tests that follow
        counter.limit = None
        counter._users = 1
        counter.release()
    assert limit is None
    assert shared is None


def test_a_handle_says_that_its_model_is_gone() -> None:
    model = models.Encoder()
    handle = mimose.auto_checkpoint(model, "1GiB")
    batch = texts([20])[0]
    handle.detach()
    del model
    gc.collect()
    with pytest.raises(mimose.MimoseError, match="is gone"):
        handle.explain(**batch)
    assert handle.stats().steps == 0


@pytest.mark.parametrize("value", ["1", "true"])
def test_mimose_disable_leaves_the_model_untouched(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIMOSE_DISABLE", value)
    model, batches = models.Encoder(), texts([20] * 4)
    plain, before = copy.deepcopy(model), places(model)
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        assert places(model) == before
        assert not handle.attached
        assert train(model, batches) == train(plain, batches)
        assert handle.stats().steps == 0
        assert "not attached" in str(handle.explain(**batches[0]))
    for refused in (nn.Linear(2, 2), nn.LazyLinear(2), nn.DataParallel(models.Encoder())):
        assert not mimose.auto_checkpoint(refused, "1GiB").attached


def test_order_of_attaching_and_converting_does_not_matter() -> None:
    model, batches = models.Encoder(), texts([40] * 10)
    with throwing_dice(model, "50%") as handle:
        assert handle.budget_bytes is None
        model.double()
        for parameter in model.embedding.parameters():
            parameter.requires_grad_(False)
        predictions = Predictions(handle)
        train(model, batches, after_step=predictions)
        assert handle.budget_bytes is not None
        assert handle.budget_bytes > 1 << 28
    predictions.assert_exact(steps=8)


@pytest.mark.parametrize("when", ["before", "after"])
def test_checkpointing_of_the_model_is_taken_over(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, batches = bert(), labelled([30] * 6)
    plain = copy.deepcopy(model)
    caplog.set_level(logging.INFO, "mimose")
    if when == "before":
        model.gradient_checkpointing_enable()
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        if when == "after":
            model.gradient_checkpointing_enable()
        assert train(model, batches) == train(plain, batches)
        assert not model.bert.encoder.layer[0].gradient_checkpointing
        assert handle.stats().runs_kept > 0
    assert model.bert.encoder.layer[0].gradient_checkpointing
    said = [m for m in caplog.messages if "instead of the model's own checkpointing" in m]
    assert len(said) == 1


def test_gradients_after_detaching_in_the_middle_of_a_step_are_those_of_the_plain_model() -> None:
    model, batches = models.Encoder(), texts([30] * 3)
    plain = copy.deepcopy(model)
    handle = mimose.auto_checkpoint(model, "1GiB")
    train(model, batches)
    train(plain, batches)
    for each in (model, plain):
        torch.manual_seed(2)
        loss = models.loss_of(each, batches[0])
        if each is model:
            handle.detach()
        loss.backward()
    assert_same_gradients(model, plain)


def test_a_handle_on_a_part_and_one_on_the_whole_are_refused_in_either_order() -> None:
    model = models.Encoder()
    for first, second in ((model, model.encoder.layers), (model.encoder.layers, model)):
        blocks = {id(model): nn.TransformerEncoderLayer, id(model.encoder.layers): nn.Linear}
        with mimose.auto_checkpoint(first, "30MiB", blocks=blocks[id(first)]) as handle:
            with pytest.raises(ConflictError, match=r"another handle.*30.00 MiB.*detach\(\)"):
                mimose.auto_checkpoint(second, "1GiB", blocks=blocks[id(second)])
            assert handle.attached
            models.loss_of(model, {"input_ids": torch.ones(2, 5, dtype=torch.long)}).backward()
            assert handle.stats().steps == 1
    assert not interceptors(model)


def test_two_parts_that_share_a_block_are_refused_and_others_are_not() -> None:
    shared = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(5)]
    first, second, third = (nn.Sequential(*shared[a:b]) for a, b in ((0, 3), (2, 4), (3, 5)))
    with mimose.auto_checkpoint(first, "1GiB"):
        with pytest.raises(ConflictError, match=r"1 of the 2 blocks found here \(0\)"):
            mimose.auto_checkpoint(second, "1GiB")
        mimose.auto_checkpoint(third, "1GiB").detach()
    mimose.auto_checkpoint(second, "1GiB").detach()


def test_a_handle_on_a_wrapper_replaces_the_one_on_what_it_wraps() -> None:
    model = models.Encoder()
    former = mimose.auto_checkpoint(model, "30MiB")
    with mimose.auto_checkpoint(nn.Sequential(model), "1GiB") as handle:
        assert handle.attached
        assert not former.attached
    assert not interceptors(model)


def test_a_model_that_holds_its_own_handle_can_be_copied_and_pickled() -> None:
    model = models.Encoder()
    model.handle = mimose.auto_checkpoint(model, "1GiB")
    train(model, texts([20]))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.handle is None
        train(copied, texts([21]))
    assert model.handle.stats().steps == 1
    model.handle.detach()
