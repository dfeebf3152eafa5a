"""What goes wrong gets a clear error or a safe continuation, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

import mimose
import models
from chains import SIZE
from compare import assert_same_gradients, no_hooks
from loops import bert, labelled, peak_of_recomputing, places, plain_losses, task, texts, train
from mimose.costs import InputSize
from mimose.costs.timeline import Profile
from mimose.errors import (
    ArgumentError,
    BlocksError,
    BudgetError,
    ConflictError,
    MimoseError,
    MimoseWarning,
)
from mimose.planning.plan import Plan
from mimose.planning.planners import Optimal, Static
from mimose.reporting.reader import read_recording
from mimose.training.events import Events
from mimose.training.notifications import Notifications
from mimose.training.setting import Setting
from mimose.units import parse_budget

# What cannot be read


@pytest.mark.parametrize(
    ("budget", "remedy"),
    [
        (0.8, '"80%"'),
        (6, '"6GiB"'),
        (6.5, '"6.5GiB"'),
        ("6", "6GiB"),
        ("6G", "6GiB"),
        ("lots", '"6GiB"'),
        ("120%", "between 0% and 100%"),
        ("-3GiB", '"6GiB"'),
        (-1, '"6GiB"'),
        (0, '"6GiB"'),
        (None, '"6GiB"'),
        (True, '"6GiB"'),
        (float("nan"), '"6GiB"'),
        (float("inf"), '"6GiB"'),
        ("", '"6GiB"'),
    ],
)
def test_malformed_budget_is_refused_with_the_spelling_that_works(budget: Any, remedy: str) -> None:
    model = models.Encoder()
    before = places(model)
    with pytest.raises(BudgetError) as error:
        mimose.auto_checkpoint(model, budget)
    assert remedy in str(error.value)
    assert isinstance(error.value, ValueError)
    assert places(model) == before


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"planner": "best"}, ArgumentError, "'best' is none of 'optimal', 'greedy'"),
        ({"planner": object()}, ArgumentError, "plan(profile, available_bytes)"),
        ({"planner": Optimal}, ArgumentError, "Optimal is a class: give an instance"),
        ({"collector": "walk"}, ArgumentError, "must be 'ride' or 'shuttle'; got 'walk'"),
        ({"collector": []}, ArgumentError, "must be 'ride' or 'shuttle'; got []"),
        ({"enforce": "no"}, ArgumentError, "enforce= must be True or False; got 'no'"),
        ({"input_size": 3}, ArgumentError, "input_size= must be a function"),
        ({"record": 3}, ArgumentError, "record= must be a file path such as 'run.jsonl'; got 3"),
        ({"blocks": 3}, BlocksError, "blocks=3 is not a selector"),
        ({"blocks": "decoder.*"}, BlocksError, "decoder.*"),
        ({"blocks": nn.Conv2d}, BlocksError, "Conv2d"),
        ({"blocks": []}, BlocksError, "blocks"),
        ({"exclude": "encoder.layers.*"}, BlocksError, "excludes every block"),
    ],
)
def test_unknown_name_is_refused_and_the_model_left_alone(
    options: dict[str, Any], error: type[MimoseError], words: str
) -> None:
    model = models.Encoder()
    before = places(model)
    with pytest.raises(error) as caught:
        mimose.auto_checkpoint(model, "1GiB", **options)
    assert words in str(caught.value)
    assert places(model) == before


@pytest.mark.parametrize(
    "options",
    [
        {"memory_budget": "lots"},
        {"planner": "best"},
        {"blocks": "decoder.*"},
        {"record": "no/such/directory/run.jsonl"},
        {"record": "."},
    ],
    ids=repr,
)
def test_refused_attachment_leaves_the_former_one_in_place(options: dict[str, Any]) -> None:
    model = models.Encoder()
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        before = places(model)
        with pytest.raises(MimoseError):
            mimose.auto_checkpoint(model, **options)
        assert handle.attached
        assert places(model) == before
        train(model, texts([20]))
        assert handle.stats().steps == 1


def test_attachment_refused_for_what_was_wrapped_since_leaves_the_former_in_place() -> None:
    model = models.Encoder()
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        before = places(model)
        layers = model.encoder.layers
        layers[1] = offload_wrapper(layers[1])
        with pytest.raises(ConflictError, match="offloads"):
            mimose.auto_checkpoint(model, "1GiB")
        layers[1] = layers[1]._checkpoint_wrapped_module
        assert handle.attached
        assert places(model) == before


def test_refused_attachment_leaves_an_earlier_recording_alone(tmp_path: Path) -> None:
    model, file = models.Encoder(), tmp_path / "run.jsonl"
    with mimose.auto_checkpoint(model, "1GiB", record=file):
        train(model, texts([20]))
    recorded = file.read_bytes()
    with pytest.raises(ArgumentError):
        mimose.auto_checkpoint(model, "1GiB", record=file, planner="best")
    assert file.read_bytes() == recorded


def test_attachment_that_replaces_another_leaves_its_file_whole(tmp_path: Path) -> None:
    model, file = models.Encoder(), tmp_path / "run.jsonl"
    mimose.auto_checkpoint(model, "1GiB", record=file)
    train(model, texts([20, 30]))
    with mimose.auto_checkpoint(model, "1GiB", record=file) as handle:
        train(model, texts([40]))
    assert [line.size.dims[1] for line in read_recording(file).steps] == [20, 30]
    assert handle.recording is not None
    assert [line.size.dims[1] for line in read_recording(handle.recording).steps] == [40]


def lazy() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(3))
    )


def test_lazy_model_is_refused_until_it_has_run_once() -> None:
    model, batch = lazy(), torch.rand(4, 8)
    with pytest.raises(ArgumentError, match=r"'0\.0\.weight' has no shape.*call the model once"):
        mimose.auto_checkpoint(model, "1GiB")
    with torch.no_grad():
        model(batch)
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        for _ in range(4):
            model(batch).sum().backward()
            plain(batch).sum().backward()
        assert handle.stats().planned_steps > 0
    assert_same_gradients(model, plain)


# Planners that fail


class Absent:
    def plan(self, profile: Profile, available_bytes: int) -> Any:
        return None


class TooShort:
    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        return Plan((True,), 0, 0.0, True)


class Raises:
    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        raise ZeroDivisionError("of one's own")


@pytest.mark.parametrize(
    ("planner", "words"),
    [
        (Absent(), "planner Absent returned None, which is no Plan"),
        (TooShort(), "planner TooShort returned a plan of 1 choices for 3 runs"),
        (Raises(), "planner Raises raised ZeroDivisionError"),
        (Static(Absent()), "planner Static raised AttributeError"),  # type: ignore[arg-type]
    ],
    ids=lambda value: type(value).__name__,
)
def test_planner_that_gives_no_plan_is_named_once_and_training_goes_on(
    planner: Any, words: str
) -> None:
    model, batches = models.Encoder(), texts([20, 20, 20, 30, 30, 30])
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, "1GiB", planner=planner) as handle:
        with pytest.warns(MimoseWarning) as said:
            losses = train(model, batches)
        stats = handle.stats()
        assert handle.explain(**batches[0]).plan.kept == 0
    assert losses == train(plain, batches)
    assert len(said) == 1
    assert words in str(said[0].message)
    assert stats.planned_steps > 0
    assert stats.runs_kept == 0


def test_recording_names_ones_own_planner(tmp_path: Path) -> None:
    model, file = models.Encoder(), tmp_path / "run.jsonl"
    with mimose.auto_checkpoint(model, "1GiB", planner=TooShort(), record=file):
        train(model, texts([20]))
    assert read_recording(file).header.planner == "too_short"


@pytest.mark.parametrize("wrap", [lambda m: nn.DataParallel(m), lambda m: nn.Sequential(m, m)])
def test_data_parallel_is_refused_with_the_line_to_type_instead(wrap: Any) -> None:
    model = wrap(nn.DataParallel(models.Encoder()))
    with pytest.raises(ConflictError, match=r"torchrun --nproc-per-node"):
        mimose.auto_checkpoint(model, "1GiB")


def test_model_on_two_devices_is_refused_at_its_first_forward() -> None:
    model = models.Encoder()
    before = places(model)
    model.extra = nn.Linear(2, 2, device="meta")
    with mimose.auto_checkpoint(model, "1GiB"):
        with pytest.raises(ConflictError, match=r"is on cpu and meta.*one device"):
            train(model, texts([20]))
        assert no_hooks()
        del model.extra
        train(model, texts([20]))
    assert len(places(model)) == len(before)


def test_model_on_a_device_that_nobody_can_read_is_refused() -> None:
    model = models.Encoder().to("meta")
    with (
        mimose.auto_checkpoint(model, "1GiB"),
        pytest.raises(ConflictError, match="is on meta"),
    ):
        model(torch.zeros(2, 9, dtype=torch.long, device="meta"))


class Untold(models.Encoder):
    """Makes its own input."""

    def forward(self, length: int) -> torch.Tensor:  # type: ignore[override]
        return super().forward(torch.arange(length)[None] % 50)


def test_forward_without_tensors_says_what_to_pass() -> None:
    model = Untold()
    with (
        mimose.auto_checkpoint(model, "1GiB"),
        pytest.raises(ArgumentError, match=r"no tensors.*input_size=lambda"),
    ):
        model(9)
    with mimose.auto_checkpoint(model, "1GiB", input_size=lambda length: length) as handle:
        for _ in range(3):
            model(9).sum().backward()
        assert handle.stats().planned_steps == 1


class Queries(models.Encoder):
    """Without a batch, it trains on a query of its own."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.query = torch.arange(9)[None]

    def forward(self, ids: Any = None) -> torch.Tensor:  # type: ignore[override]
        own = not isinstance(ids, torch.Tensor) or ids.dim() == 0
        return super().forward(self.query if own else ids)


@pytest.mark.parametrize("planner", ["optimal", "recompute_all"])
@pytest.mark.parametrize("empty", [None, [], torch.tensor(3)], ids=["None", "list", "0-d"])
def test_single_batches_without_tensors_train_as_in_the_plain_model(
    empty: Any, planner: str
) -> None:
    model = Queries()
    plain = copy.deepcopy(model)
    batches = [torch.randint(50, (2, 8 + step)) if step % 5 else empty for step in range(1, 18)]
    for batch in batches:
        (plain(batch) + plain(empty)).sum().backward()
        plain(batch).sum().backward()
    with mimose.auto_checkpoint(model, "1GiB", planner=planner) as handle:
        for batch in batches:
            (model(batch) + model(empty)).sum().backward()
            model(batch).sum().backward()
        assert handle.explain(empty).size.passes[0] == InputSize((), ())
        assert handle.stats().planned_steps > 0
    assert_same_gradients(model, plain)


def test_input_size_that_returns_no_number_is_refused() -> None:
    model = models.Encoder()
    with (
        mimose.auto_checkpoint(model, "1GiB", input_size=lambda **_: "long"),
        pytest.raises(ArgumentError, match=r"input_size= returned 'long'"),
    ):
        train(model, texts([20]))


# Steps that break off


class Mishap(Exception):
    """What user code raises."""


Failure = Callable[[nn.Module, dict[str, torch.Tensor]], None]


def between_forward_and_backward(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    models.loss_of(model, batch)
    raise Mishap


def _raise_in_block(model: nn.Module, error: type[BaseException]) -> Any:
    def hook(*_: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            raise error

    return model.encoder.layers[1].dropout1.register_forward_hook(hook)


def inside_a_block(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    handle = _raise_in_block(model, Mishap)
    try:
        models.loss_of(model, batch)
    finally:
        handle.remove()


def out_of_memory_in_a_block(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    handle = _raise_in_block(model, torch.OutOfMemoryError)
    try:
        models.loss_of(model, batch)
    finally:
        handle.remove()


def after_the_blocks(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    def hook(*_: Any) -> None:
        raise Mishap

    handle = model.head.register_forward_hook(hook)
    try:
        models.loss_of(model, batch)
    finally:
        handle.remove()


def _backward_raises(
    model: nn.Module, batch: dict[str, torch.Tensor], error: type[BaseException]
) -> None:
    def hook(*_: Any) -> None:
        raise error

    handle = model.encoder.layers[0].linear2.weight.register_hook(hook)
    try:
        models.loss_of(model, batch).backward()
    finally:
        handle.remove()


def inside_the_backward(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    _backward_raises(model, batch, Mishap)


def interrupted_in_the_backward(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    _backward_raises(model, batch, KeyboardInterrupt)


def ten_forwards_without_backward(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    for _ in range(10):
        models.loss_of(model, batch)


def ten_forwards_held_at_once(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    losses = [models.loss_of(model, batch) for _ in range(10)]
    assert len(losses) == 10


FAILURES = [
    between_forward_and_backward,
    inside_a_block,
    out_of_memory_in_a_block,
    after_the_blocks,
    inside_the_backward,
    interrupted_in_the_backward,
    ten_forwards_without_backward,
    ten_forwards_held_at_once,
]


def _fail(failure: Failure, model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    with contextlib.suppress(Mishap, KeyboardInterrupt, torch.OutOfMemoryError):
        failure(model, batch)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("planner", ["optimal", "recompute_all"])
def test_step_that_breaks_off_leaves_model_rng_and_planning_intact(
    failure: Failure, planner: str
) -> None:
    model, batches = models.Encoder(), texts([40, 30, 50, 20, 60, 25, 35, 45, 55, 30, 40, 50])
    plain = copy.deepcopy(model)
    states: list[list[torch.Tensor]] = []
    with mimose.auto_checkpoint(model, "64MiB", planner=planner) as handle:
        attached = places(model)
        for each in (plain, model):
            torch.manual_seed(1)
            states.append([])
            for i, batch in enumerate(batches):
                if i in (0, 2, 9):  # at first, while observing, while planning
                    _fail(failure, each, batch)
                    assert no_hooks()
                each.zero_grad()
                models.loss_of(each, batch).backward()
                states[-1].append(torch.get_rng_state())
        assert_same_gradients(model, plain)
        assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
        assert places(model) == attached
        before = handle.stats().planned_steps
        train(model, batches[:3])
        assert handle.stats().planned_steps == before + 3
        assert handle.stats().worst_shortfall <= 0.003


def test_forward_that_is_held_for_ever_does_not_stop_planning() -> None:
    model, batches = models.Encoder(), texts([40] * 6)
    with mimose.auto_checkpoint(model, "64MiB") as handle:
        train(model, batches)
        held = models.loss_of(model, batches[0])  # a figure for a log, say, with its graph
        before = handle.stats()
        train(model, batches)
        after = handle.stats()
    assert held.requires_grad
    assert after.planned_steps - before.planned_steps >= 4


def test_error_in_a_recompute_leaves_rng_and_the_next_steps_intact() -> None:
    model, batches = models.Encoder(), texts([40] * 6)
    plain = copy.deepcopy(model)

    def hook(*call: Any) -> Any:  # one that returns something is called in recomputes, too
        if torch._C._current_graph_task_id() != -1:
            raise Mishap
        return call[-1]

    with mimose.auto_checkpoint(model, "64MiB", planner="recompute_all") as handle:
        for at in (1, 4):
            assert train(model, batches[:at]) == train(plain, batches[:at])
            removable = model.encoder.layers[1].dropout1.register_forward_hook(hook)
            loss = models.loss_of(model, batches[0])
            state = torch.get_rng_state()
            with pytest.raises(Mishap):
                loss.backward()
            removable.remove()
            model.zero_grad()
            assert torch.equal(torch.get_rng_state(), state)
            assert no_hooks()
        assert train(model, batches) == train(plain, batches)
        assert handle.stats().planned_steps > 4


# Budgets that do not fit


def test_budget_beyond_the_device_is_clamped_with_a_warning() -> None:
    model = models.Encoder()
    with mimose.auto_checkpoint(model, "900TiB") as handle:
        with pytest.warns(MimoseWarning, match=r"is more than this machine's .*iB: the budget is"):
            train(model, texts([20]))
        train(model, texts([20]))
        assert handle.budget_bytes is not None
        assert handle.budget_bytes < 900 << 40


def test_budget_below_what_is_in_use_is_said_once_and_training_goes_on() -> None:
    model, batches = bert(), labelled([40] * 8)
    plain = copy.deepcopy(model)
    ballast = torch.zeros(4 << 20, dtype=torch.uint8)
    with mimose.auto_checkpoint(model, "2MiB") as handle:
        with pytest.warns(MimoseWarning) as said:
            losses = train(model, batches)
        stats = handle.stats()
    assert losses == train(plain, batches)
    assert stats.planned_steps == 6
    assert stats.runs_kept == 0
    in_use = [str(w.message) for w in said if "in use before the first step" in str(w.message)]
    assert len(in_use) == 1
    assert "memory_budget=2.00 MiB is less than the" in in_use[0]
    assert "Raise memory_budget" in in_use[0]
    assert ballast.nbytes == 4 << 20


def test_budget_below_all_recomputed_is_said_once_with_numbers_and_remedy() -> None:
    model, batches, _ = task("encoder")
    budget = int(0.8 * peak_of_recomputing(model, batches))
    with mimose.auto_checkpoint(model, budget) as handle:
        with pytest.warns(MimoseWarning) as said:
            losses = train(model, batches)
        stats = handle.stats()
    assert losses == plain_losses("encoder")
    assert len(said) == 1
    message = str(said[0].message)
    assert re.search(r"with every block recomputed, [\d.]+ .iB more than the budget of", message)
    assert "raise memory_budget or shorten the batch" in message
    assert "saves only" not in message
    assert "input 4×" in message
    assert stats.runs_recomputed > 0
    assert stats.runs_kept > 0, "small batches fit all the same"


class WideHead(models.Encoder):
    """Nearly all of its memory is outside of its blocks."""

    def __init__(self) -> None:
        super().__init__(layers=2, width=8)
        self.wide = nn.Linear(8, 2000)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.wide(self.encoder(self.embedding(input_ids))).tanh().exp().mean((1, 2))


def test_blocks_that_save_next_to_nothing_are_told_so() -> None:
    model, batches = WideHead(), texts([10, 20, 40, 30, 40])
    budget = int(0.8 * peak_of_recomputing(model, batches))
    with mimose.auto_checkpoint(model, budget), pytest.warns(MimoseWarning) as said:
        train(model, batches)
    message = str(said[0].message)
    assert re.search(r"saves only [\d.]+ .iB of the [\d.]+ .iB.*blocks=", message)


@pytest.mark.parametrize(("fits", "said"), [(True, 0), (False, 1)])
def test_a_plan_is_not_too_large_where_predictions_have_long_been_too_high(
    fits: bool, said: int
) -> None:
    setting = Setting(models.Encoder(), parse_budget("1GiB"), enforce=False)
    above = setting.available(0) + 1
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        plan = Plan((True, False), above, 0.0, fits)
        Notifications(Events()).tell_if_too_little(setting, SIZE, plan, 0)
    setting.close()
    assert len(heard) == said


@pytest.mark.parametrize("parts", ["", "encoder"])
def test_training_in_eval_mode_is_told_so_once(parts: str) -> None:
    model, batch = models.Encoder(), texts([40])[0]
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        model.get_submodule(parts).eval()
        for _ in range(2):  # once or twice somebody may want a gradient
            models.loss_of(model, batch).backward()
        with pytest.warns(MimoseWarning, match=r"in eval mode.*call model\.train\(\)"):
            models.loss_of(model, batch).backward()
        models.loss_of(model, batch).backward()
        assert handle.stats().steps == 0
        model.train()
        models.loss_of(model, batch).backward()
        assert handle.stats().steps == 1


@pytest.mark.parametrize("fails", [(0, 3), (0, 2), (0, 1, 2)])
def test_backwards_that_fail_halfway_do_not_keep_planning_from_beginning(
    fails: tuple[int, ...],
) -> None:
    """Their losses are held until the next: their graphs are alive."""
    model, batches = models.Encoder(5), texts([40, 50, 30, 60, 35, 55, 45, 20] * 3)
    with mimose.auto_checkpoint(model, "64MiB") as handle:
        for number, batch in enumerate(batches):
            loss = models.loss_of(model, batch)
            out = model.encoder.layers[2].norm2.weight
            hook = out.register_hook(_mishap) if number in fails else contextlib.nullcontext()
            with hook, contextlib.suppress(Mishap):
                loss.backward()
            model.zero_grad()
    assert handle.stats().planned_steps > 10
    assert str(handle.stats().last_plan) == "KKKKK"


def _mishap(_: torch.Tensor) -> None:
    raise Mishap


# What host memory and other offloading cannot be


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"record": ""}, r"record= must be a file path .*; got ''"),
        ({"host_memory": "lots"}, r"host_memory='lots'.*'16GiB'"),
        ({"host_memory": -1}, r"host_memory=-1.*'16GiB'"),
        ({"host_memory": "-1GiB"}, r"host_memory='-1GiB'.*'16GiB'"),
        ({"host_memory": 16}, r"host_memory=16 means 16 bytes, .* did you mean \"16GiB\"\?"),
        ({"host_memory": "1KiB"}, r"'1KiB' is below the minimum of 1 MiB; use 'auto', 0 to"),
        ({"host_memory": "16"}, r"'16' has no unit; did you mean 16GiB\? Use 'auto', 0 to"),
        ({"host_memory": "100TiB"}, r"host_memory='100TiB' is more than .* give less, or 'auto'"),
        ({"host_memory": "50%"}, r"host_memory='50%'.*'16GiB'"),
        ({"host_memory": "9999TiB"}, r"more than the .*iB that this machine has"),
        ({"choices": ("keep", "recompute", "cpu")}, r"'cpu'; the names are keep, save_on_host"),
        ({"choices": ()}, r"must contain 'keep' and 'recompute'"),
        ({"choices": ("keep", "save_on_host")}, r"must contain 'keep' and 'recompute'"),
        ({"choices": "recompute"}, r"must contain 'keep' and 'recompute'"),
        ({"choices": 5}, r"choices=5 must be a collection of names.*the names are keep"),
    ],
)
def test_host_options_that_mean_nothing_are_refused(options: dict[str, Any], told: str) -> None:
    model = bert()
    before = places(model)
    with pytest.raises(ArgumentError, match=told):
        mimose.auto_checkpoint(model, "1GiB", **options)
    assert places(model) == before


def test_checkpointing_of_transformers_that_offloads_is_refused_by_name() -> None:
    model: Any = bert()
    if "offload" not in inspect.signature(model.gradient_checkpointing_enable).parameters:
        pytest.skip("this version of transformers has no offload=")
    model.gradient_checkpointing_enable(offload=True)
    with pytest.raises(ConflictError, match=r"offload=True.*gradient_checkpointing_disable"):
        mimose.auto_checkpoint(model, "1GiB")


def test_saving_on_the_cpu_by_torch_is_refused_by_name() -> None:
    model, batches, budget = task("bert")
    with (
        mimose.auto_checkpoint(model, budget),
        torch.autograd.graph.save_on_cpu(),
        pytest.raises(ConflictError, match=r"torch's save_on_cpu: take the model out"),
    ):
        models.loss_of(model, batches[0])
    assert no_hooks()
