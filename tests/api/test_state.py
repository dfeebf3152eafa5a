"""What was learned outlives the run, and is recognised where it does not hold."""

from __future__ import annotations

import copy
import io
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mimose
import models
from loops import (
    Batch,
    Predictions,
    adamw,
    bert,
    labelled,
    lengths,
    once,
    peak_of_plain,
    plain_losses,
    task,
    texts,
    train,
)
from mimose.costs.run_cost import RunCost
from mimose.errors import MimoseWarning
from parts import bf16

State = dict[str, Any]


def autocast_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    with bf16():
        return models.loss_of(model, batch)


def learned(model: nn.Module, batches: list[Batch], budget: int | str, **options: Any) -> State:
    twin = copy.deepcopy(model)
    with mimose.auto_checkpoint(twin, budget) as handle:
        train(twin, batches, **options)
        return handle.state_dict()


@once
def _learned_in_task(name: str, steps: int | None, options: tuple[tuple[str, Any], ...]) -> State:
    model, batches, budget = task(name)
    with mimose.auto_checkpoint(model, budget, **dict(options)) as handle:
        train(model, batches[:steps])
        return handle.state_dict()


def learned_in_task(name: str, steps: int | None = None, **options: Any) -> State:
    """What so many steps of a task have taught."""
    return copy.deepcopy(_learned_in_task(name, steps, tuple(options.items())))


def through_torch(state: State) -> State:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_json(state: State) -> State:
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("through", [through_torch, through_json])
@pytest.mark.parametrize("name", ["bert", "encoder"])
def test_resumed_run_plans_from_its_first_step(
    name: str, through: Callable[[State], State]
) -> None:
    model, batches, budget = task(name)
    state = learned_in_task(name)
    assert through(state) == state
    with mimose.auto_checkpoint(model, budget, enforce=True) as handle:
        handle.load_state_dict(through(state))
        losses = train(model, batches)
        stats = handle.stats()
    assert stats.observed_steps == 0
    assert stats.planned_steps == len(batches)
    assert stats.runs_recomputed > 0
    assert stats.peak_bytes <= budget
    assert losses == plain_losses(name)


def test_what_was_loaded_is_saved_again_before_any_step() -> None:
    model, _, budget = task("encoder")
    state = learned_in_task("encoder", 10)
    with mimose.auto_checkpoint(model, budget) as handle:
        handle.load_state_dict(state)
        assert handle.state_dict() == state


def test_state_before_any_step_loads_without_a_word() -> None:
    model, batches, budget = task("encoder")
    with mimose.auto_checkpoint(copy.deepcopy(model), budget) as handle:
        empty = handle.state_dict()
    with mimose.auto_checkpoint(model, budget) as handle:
        handle.load_state_dict(through_torch(empty))
        train(model, batches[:6])
        assert handle.stats().observed_steps > 1


def test_state_can_be_loaded_between_steps() -> None:
    model, batches, budget = task("encoder")
    state = learned_in_task("encoder", 10)
    with mimose.auto_checkpoint(model, budget) as handle:
        train(model, batches[:1])
        handle.load_state_dict(state)
        train(model, batches[1:6])
        stats = handle.stats()
    assert (stats.observed_steps, stats.planned_steps) == (1, 5)


def test_state_of_a_detached_handle_is_that_of_its_training() -> None:
    model, batches, budget = task("encoder")
    with mimose.auto_checkpoint(model, budget) as handle:
        train(model, batches[:8])
        state = handle.state_dict()
    assert handle.state_dict() == state


def _loaded_and_trained(
    handle: mimose.Mimose, state: State, model: nn.Module, batches: list[Batch], **options: Any
) -> list[float]:
    handle.load_state_dict(state)
    return train(model, batches, **options)


def assert_refused(
    state: State,
    model: nn.Module,
    batches: list[Batch],
    budget: int | str,
    match: str,
    **options: Any,
) -> None:
    """The reason is told, training observes anew and is plain training."""
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, budget) as handle:
        with pytest.warns(MimoseWarning, match=match) as said:
            losses = _loaded_and_trained(handle, state, model, batches, **options)
        stats = handle.stats()
        again = handle.state_dict()
    assert len([one for one in said if one.category is MimoseWarning]) == 1
    assert losses == train(plain, batches, **options)
    assert stats.observed_steps >= 1
    assert stats.planned_steps > 0
    with mimose.auto_checkpoint(plain, budget) as handle:  # what it learned is of use again
        handle.load_state_dict(again)
        train(plain, batches[:3], **options)
        assert handle.stats().observed_steps == 0


SAME = [40] * 4


def test_knowledge_of_another_model_is_refused() -> None:
    state = learned(models.Encoder(), texts_of(SAME), "64MiB")
    wider = models.Encoder(width=48)
    assert_refused(state, wider, texts_of(SAME), "64MiB", "other modules or parameters")
    deeper = models.Encoder(layers=4)
    assert_refused(
        state, deeper, texts_of(SAME), "64MiB", "blocks was 3 when it was saved and is 4 now"
    )


def texts_of(lengths: list[int]) -> list[Batch]:
    return [{"input_ids": batch["input_ids"]} for batch in labelled(lengths)]


def test_knowledge_of_other_weights_precision_is_refused() -> None:
    state = learned(models.Encoder(), texts_of(SAME), "64MiB")
    half = models.Encoder().bfloat16()
    assert_refused(state, half, texts_of(SAME), "64MiB", "precision was 'torch.float32'")


def test_knowledge_under_autocast_is_refused_without_it() -> None:
    state = learned(bert(), labelled(SAME), "64MiB", loss_of=autocast_loss)
    match = "autocast was torch.bfloat16, now is off"
    assert_refused(state, bert(), labelled(SAME), "64MiB", match)
    state = learned(bert(), labelled(SAME), "64MiB")
    match = "autocast was off, now is torch.bfloat16"
    assert_refused(state, bert(), labelled(SAME), "64MiB", match, loss_of=autocast_loss)


def test_knowledge_of_another_attention_implementation_is_refused() -> None:
    eager, sdpa = bert(), bert()
    eager.set_attn_implementation("eager")
    sdpa.set_attn_implementation("sdpa")
    state = learned(eager, labelled(SAME), "64MiB")
    match = "attention implementation was eager, now is sdpa"
    assert_refused(state, sdpa, labelled(SAME), "64MiB", match)


def test_knowledge_with_other_parameters_trained_is_refused() -> None:
    frozen = bert()
    frozen.bert.embeddings.requires_grad_(False)
    frozen.bert.encoder.layer[0].requires_grad_(False)
    state = learned(frozen, labelled(SAME), "64MiB")
    assert_refused(state, bert(), labelled(SAME), "64MiB", "other parameters are trained")


@pytest.fixture(scope="module")
def good() -> State:
    torch.manual_seed(0)
    return learned(models.Encoder(), texts_of([60, 50, 40, 60, 30, 20, 55]), "64MiB")


def changed(state: State, *path: Any, value: Any) -> State:
    """A copy with something else at the end of a path; without it, if the value is `...`."""
    state = copy.deepcopy(state)
    place: Any = state
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return state


FIRST = ("chapters", 0, "knowledge", "observations", 0)
NANOSECONDS, SAVED = map(RunCost._fields.index, ("nanoseconds", "saved"))
DAMAGES: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "another torch": (("identity", "torch"), "1.0.0", "torch was '1.0.0'"),
    "another device": (("identity", "device"), "cuda", "device was 'cuda'"),
    "another format": (("format",), 99, "its format is 99"),
    "no format": (("format",), ..., "it is not the result of"),
    "no chapters": (("chapters",), ..., "damaged"),
    "chapters of another kind": (("chapters",), 7, "damaged"),
    "no regime": (("chapters", 0, "regime"), ..., "damaged"),
    "half a regime": (("chapters", 0, "regime", "trained"), ..., "damaged"),
    "identity of another kind": (("identity",), "encoder", "damaged"),
    "identity missing a part": (("identity", "device"), ..., "device was None"),
    "no dimensions": ((*FIRST, "dims"), [], "damaged"),
    "too many dimensions": ((*FIRST, "dims"), [4, 60, 60], "damaged"),
    "words for numbers": ((*FIRST, "tail"), "many", "damaged"),
    "nothing for numbers": ((*FIRST, "tail"), None, "damaged"),
    "one number of two": ((*FIRST, "head"), [1], "damaged"),
    "no end": ((*FIRST, "head"), [float("inf"), 1], "damaged"),
    "not a number": ((*FIRST, "runs", 0, 0), float("nan"), "damaged"),
    "a run too few": ((*FIRST, "runs", 0), ..., "damaged"),
    "half a run": ((*FIRST, "runs", 0), [1, 2], "damaged"),
    "a block that is not there": ((*FIRST, "pattern", 0), [17, 0], "damaged"),
    "a run named twice": ((*FIRST, "pattern", 1), [0, 0], "damaged"),
    "gradients of other runs": (
        ("chapters", 0, "knowledge", "gradients"),
        [[[[0, 0]], []]],
        "damaged",
    ),
    "gradients of a run too few": ((*FIRST, "gradients", 0), ..., "damaged"),
    "time that goes backwards": ((*FIRST, "runs", 0, NANOSECONDS), -1, "damaged"),
    "less than nothing": ((*FIRST, "runs", 0, SAVED), -5, "damaged"),
    "half a verdict on a block": (("blocks", 0, "changing"), ..., "damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_or_foreign_state_is_refused_with_the_reason(good: State, damage: str) -> None:
    path, value, match = DAMAGES[damage]
    state = changed(good, *path, value=value)
    assert_refused(state, models.Encoder(), texts_of(SAME), "64MiB", match)


@pytest.mark.parametrize("nonsense", [{}, {"format": 99}, [], "state", None])
def test_nonsense_is_refused(nonsense: Any) -> None:
    assert_refused(nonsense, models.Encoder(), texts_of(SAME), "64MiB", "cannot be used")


@pytest.mark.parametrize("nonsense", [{}, {"format": 99}, "state"])
def test_nonsense_is_refused_at_once(nonsense: Any) -> None:
    with mimose.auto_checkpoint(models.Encoder(), "64MiB") as handle:
        with pytest.warns(MimoseWarning, match="cannot be used: it"):
            handle.load_state_dict(nonsense)
        assert handle.state_dict() == {"format": 3}


def test_a_whole_checkpoint_is_told_where_the_state_is() -> None:
    with mimose.auto_checkpoint(models.Encoder(), "64MiB") as handle:
        state = handle.state_dict()
        with pytest.warns(
            MimoseWarning, match="but contains one at 'mimose': pass that one"
        ) as said:
            handle.load_state_dict({"model": {}, "mimose": state})
    assert said[0].filename == __file__


def in_format_1(state: State, *, gaps: bool) -> State:
    """The same as it was written when runs had levels, at first without gaps between them."""
    state = copy.deepcopy(state)
    knowledge = state["chapters"][0]["knowledge"]
    knowledge["born"], knowledge["born_beside"] = knowledge.pop("gradients"), []
    for observation in knowledge["observations"]:
        costs = [RunCost(*run) for run in observation["runs"]]
        starts = itertools.accumulate(cost.boundary for cost in costs)
        allocated = observation.pop("gradients")
        observation["runs"] = [
            _levels(*run, gaps=gaps) for run in zip(costs, starts, allocated, strict=True)
        ]
        all_allocated = observation.pop("all_gradients")
        observation["tail"] -= max(0, all_allocated - allocated[0])
        observation.update(gradients_born=observation.pop("allocates"), all_born=all_allocated)
        del observation["format"]
    return {**state, "format": 1}


def in_format_2(state: State) -> State:
    """The same as it was written when runs had two numbers less."""
    state = copy.deepcopy(state)
    for observation in state["chapters"][0]["knowledge"]["observations"]:
        observation["runs"] = [run[: NANOSECONDS + 2] for run in observation["runs"]]
        observation["format"] = 2
    return {**state, "format": 2}


def _levels(cost: RunCost, start: int, born: int, *, gaps: bool) -> list[Any]:
    levels = [start, start + cost.forward_peak, start + cost.backward_entry, born]
    own = [cost.saved, cost.recompute_peak, cost.backward_peak]
    shared = [cost.output_saved, cost.droppable_input]
    gap = [start + cost.between_blocks_peak] if gaps else []
    return [*levels, *own, *shared, cost.nanoseconds / 1e9, cost.fixed, 0, *gap]


@pytest.mark.parametrize("number", [1, 2])
def test_what_was_written_in_older_formats_is_the_same_knowledge(good: State, number: int) -> None:
    model = models.Encoder()
    older = in_format_1(good, gaps=True) if number == 1 else in_format_2(good)
    with mimose.auto_checkpoint(model, "64MiB") as handle:
        handle.load_state_dict(older)
        train(model, texts_of([60]))
        again = handle.state_dict()
    expected = copy.deepcopy(good["chapters"])
    for observation in expected[0]["knowledge"]["observations"]:
        for run in observation["runs"]:
            run[-2:] = [False, 0]  # what older formats did not have
    assert again["chapters"] == expected


@pytest.mark.parametrize("gaps", [True, False])
def test_what_was_written_in_format_1_is_understood(good: State, gaps: bool) -> None:
    older = in_format_1(good, gaps=gaps)
    model = models.Encoder()
    with mimose.auto_checkpoint(model, "64MiB") as handle:
        handle.load_state_dict(older)
        train(model, texts_of(SAME))
        assert handle.stats().observed_steps == 0


def test_numbers_that_are_merely_wrong_cost_no_step_and_no_bit() -> None:
    model, batches, budget = task("encoder")
    state = learned_in_task("encoder", 10)
    for observation in state["chapters"][0]["knowledge"]["observations"]:
        for run in observation["runs"]:
            run[:NANOSECONDS] = [int(0.5 * number) for number in run[:NANOSECONDS]]
    with mimose.auto_checkpoint(model, budget, enforce=True) as handle:
        handle.load_state_dict(state)
        torch.manual_seed(1)
        losses = []

        def step(batch: Batch) -> float:
            loss = models.loss_of(model, batch)
            loss.backward()
            return loss.item()

        with adamw(model) as optimizer:
            for batch in batches:
                losses.append(handle.retry(step, batch))
                optimizer.step()
                optimizer.zero_grad()
        stats = handle.stats()
    assert losses == plain_losses("encoder")
    assert stats.recoveries < 5
    assert stats.observed_steps > 0


def test_a_resumed_run_stays_within_its_budget_from_the_first_step() -> None:
    model, longest = models.Encoder(layers=6), texts([150] * 3)
    budget = int(0.35 * peak_of_plain(model, longest))
    twin = copy.deepcopy(model)
    with mimose.auto_checkpoint(twin, budget) as handle:
        train(twin, texts([40, 120, 60, 90, 140, 100, 30, 150]))
        state = json.loads(json.dumps(handle.state_dict()))
    with mimose.auto_checkpoint(model, budget) as handle:
        handle.load_state_dict(state)
        train(model, texts([150, 140, 120, 40, 100]))
        stats = handle.stats()
    assert stats.observed_steps == 0
    assert stats.runs_recomputed > 0
    assert stats.peak_bytes <= budget


def test_resumed_steps_that_add_to_gradients_are_told_from_others() -> None:
    """Most parameters are those of experts that no loss reaches."""
    model = models.Encoder()
    model.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(100))
    state, batches = None, texts(lengths(40, 10, 40), batch=2)
    for observed in (range(5, 16), range(1)):
        with mimose.auto_checkpoint(model, "64MiB", planner="recompute_all") as handle:
            if state is not None:
                handle.load_state_dict(state)
            seen = Predictions(handle)
            train(model, batches, micro_steps=4, after_step=seen)
            state = handle.state_dict()
            assert handle.stats().observed_steps in observed
        assert min(seen.errors) > -0.003


HOST = {"host_memory": "1GiB"}


@pytest.mark.parametrize("through", [through_torch, through_json])
def test_the_speed_of_the_link_to_the_host_is_kept(through: Callable[[State], State]) -> None:
    model, batches, budget = task("bert")
    state = learned_in_task("bert", **HOST)
    assert min(state["link"]) > 0
    state["link"] = [0.25, 0.5]  # as of another machine
    with mimose.auto_checkpoint(model, budget, **HOST) as handle:
        handle.load_state_dict(through(state))
        losses = train(model, batches)
        told = handle.explain(**max(batches, key=lambda batch: batch["input_ids"].numel()))
        again = handle.state_dict()
    assert told.profile is not None
    assert told.profile.link is not None
    assert (told.profile.link.to_host, told.profile.link.from_host) == (0.25, 0.5)
    assert again["link"] == [0.25, 0.5]
    assert losses == plain_losses("bert")


def test_a_state_from_before_there_was_a_link_is_still_read() -> None:
    model, batches, budget = task("bert")
    state = learned_in_task("bert", **HOST)
    del state["link"]
    with mimose.auto_checkpoint(model, budget, **HOST) as handle:
        handle.load_state_dict(state)
        train(model, batches)
        stats = handle.stats()
    assert stats.observed_steps == 0
    assert stats.moved_bytes > 0


def test_a_run_without_the_host_learns_no_speed() -> None:
    assert "link" not in learned_in_task("bert")


@pytest.mark.parametrize("link", [[0, 1], [1.0, float("nan")], [1.0], "fast", [None, 1]])
def test_a_damaged_speed_is_refused(good: State, link: Any) -> None:
    state = {**good, "link": link}
    assert_refused(state, models.Encoder(), texts_of(SAME), "64MiB", match="damaged")
