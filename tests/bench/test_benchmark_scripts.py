"""The scripts in `benchmarks/` at a small size: what they compare is what they say."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chains import chain, run
from mimose.bench.progress import Deadline
from mimose.planning import RecomputeAll

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import convergence
import llama_lora
import measured
import offloading
import promise
import sft_8b
import tables_of_training
from promise_cases import CASES, OUTLIER_EVERY, Where

TINY = replace(convergence.SMALL, layers=2, batches=6, longest=24)


@pytest.fixture
def _default_algorithms() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_default_algorithms")
def test_three_ways_to_train_end_in_the_same_weights_bit_for_bit() -> None:
    def trained(way: str, budget: int | None = None) -> dict[str, Any]:
        return convergence.train(convergence.Job(way, 1e-3, True, TINY, budget))

    plain, checkpointed = trained("plain"), trained("torch-all")
    budget = convergence.budget_of(plain, checkpointed)
    ours = trained("mimose", budget)
    assert len(plain["losses"]) == 18
    assert plain["losses"] == checkpointed["losses"] == ours["losses"]
    assert plain["weights"] == checkpointed["weights"] == ours["weights"]
    assert ours["recomputed"] > 0
    assert max(ours["peaks"]) <= budget < max(plain["peaks"])
    other = convergence.train(convergence.Job("plain", 2e-3, True, TINY))
    assert other["weights"] != plain["weights"]


def test_texts_of_a_topic_have_its_words_and_labels() -> None:
    made = convergence.texts(TINY, 200, seed=0)
    for topic in range(TINY.topics):
        first = 2 + topic * TINY.words_of_topic
        own = range(first, first + TINY.words_of_topic)
        shares = [
            sum(word in own for word in text.words) / len(text.words)
            for text in made
            if text.topic == topic
        ]
        others = [
            sum(word in own for word in text.words) / len(text.words)
            for text in made
            if text.topic != topic
        ]
        assert sum(shares) / len(shares) > 3 * sum(others) / len(others)


def gradients(model: llama_lora.LlamaLora, tokens: int) -> tuple[float, list[torch.Tensor]]:
    loss = model(torch.arange(tokens)[None] % 100)
    loss.backward()  # type: ignore[no-untyped-call]
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return float(loss.detach()), found


@pytest.mark.parametrize("way", [offloading.save_all, offloading.save_inputs])
def test_offloading_gives_the_gradients_of_plain_training(way: Any) -> None:
    model = llama_lora.make(3, "cpu", **llama_lora.SMALL)
    expected = [gradients(model, tokens) for tokens in (600, 900)]
    slabs = offloading.Slabs(1 << 30, pinned=False)
    hooks = offloading.HostHooks(slabs, model, torch.device("cpu"))
    way(model.model.layers, hooks)
    for tokens, (loss, wanted) in zip((600, 900), expected, strict=True):
        same, found = gradients(model, tokens)
        hooks.step_over()
        assert same == loss
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert slabs.taken_bytes > 0


def test_a_step_without_a_backward_leaves_nothing_behind() -> None:
    model = llama_lora.make(2, "cpu", **llama_lora.SMALL)
    hooks = offloading.HostHooks(
        offloading.Slabs(1 << 30, pinned=False), model, torch.device("cpu")
    )
    offloading.save_all(model.model.layers, hooks)
    weight = weakref.ref(model.model.layers[0].self_attn.q_proj.down.weight)
    loss = model(torch.arange(600)[None] % 100)
    hooks.step_over()
    del loss, model, hooks
    gc.collect()
    assert weight() is None


def test_a_host_that_is_too_small_is_said_to_be() -> None:
    slabs = offloading.Slabs(8 << 20, pinned=False)
    slabs.like(torch.empty(2 << 20, dtype=torch.uint8))
    slabs.like(torch.empty(3 << 20, dtype=torch.uint8))
    with pytest.raises(offloading.HostTooSmall, match="no more than"):
        slabs.like(torch.empty(3 << 20, dtype=torch.uint8))
    slabs.reset()
    assert slabs.like(torch.empty(3 << 20, dtype=torch.uint8)).nbytes == 3 << 20


def test_rows_have_the_spread_of_real_lengths_up_to_the_longest() -> None:
    many = sft_8b.rows_like_instructions(2000, longest=6030)
    assert sorted(many)[1000] == pytest.approx(1230, abs=10)  # the median is 123 of 603
    assert max(many) <= 6030
    few = sft_8b.rows_like_instructions(12, longest=6030)
    assert len(set(few)) == 12
    assert few != sorted(few)
    assert min(few) < 800
    assert max(few) > 2300


def test_every_nth_layer_is_recomputed_with_the_largest_n_that_fits() -> None:
    layer = run(boundary=10, saved=100, recompute_peak=110, forward_peak=10, nanoseconds=1)
    profile = chain(*[layer] * 6)
    least = RecomputeAll().plan(profile, 0).peak_bytes
    assert sft_8b.every_n_that_fits(profile, least) == 1
    # Layers 1, 3 and 5 are kept; what the last one keeps is there in its backward in any case.
    assert sft_8b.every_n_that_fits(profile, least + 200) == 2
    assert sft_8b.every_n_that_fits(profile, 1 << 40) == 6


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """All contestants on a small model."""
    course = sft_8b.Course(4, 256, "cpu")
    path = tmp_path_factory.mktemp("sft") / "results.json"
    options = Namespace(steps=6, out=path, contestants=list(sft_8b.CONTESTANTS))
    results: dict[str, Any] = {"caps": {}}
    try:
        assert sft_8b.under_cap(results, "24GB", course, options, Deadline(None))
        before = path.read_bytes()
        assert sft_8b.under_cap(results, "24GB", course, options, Deadline(None))
        assert path.read_bytes() == before  # nothing is measured again
    finally:
        course.meter.close()
    return path, results


def test_all_contestants_train_the_same_rows_to_the_same_losses(
    compared: tuple[Path, dict[str, Any]],
) -> None:
    case = json.loads(compared[0].read_text())["caps"]["24GB"]
    ran = {name: run for name, run in case["runs"].items() if "missing" not in run}
    assert {"torch-all", "mimose", "mimose-two-options", "oracle", "all-on-host"} <= set(ran)
    losses = {name: [row["loss"] for row in run["rows"]] for name, run in ran.items()}
    assert all(each == losses["torch-all"] for each in losses.values())
    assert [row["tokens"] for row in ran["mimose"]["rows"]] == case["lengths"]
    assert all(run["longest"]["tokens"] == 256 for run in ran.values())


def test_every_contestant_stays_under_the_cap(compared: tuple[Path, dict[str, Any]]) -> None:
    runs = compared[1]["caps"]["24GB"]["runs"]
    assert all(run["held_over_cap"] <= 1 for run in runs.values() if "missing" not in run)
    assert runs["mimose"]["recomputed"] < 1
    assert runs["all-on-host"]["host_bytes"] > 0
    assert runs["oracle"]["observed_steps"] <= runs["mimose"]["observed_steps"]


AROUND = {
    "machine": "m",
    "torch": "t",
    "transformers": "h",
    "python": "p",
    "date": "d",
    "commit": "c" * 40,
    "layers": 4,
}


def test_the_tables_of_caps_have_a_row_for_every_contestant(
    compared: tuple[Path, dict[str, Any]],
) -> None:
    (table,) = (t for t in tables_of_training.sft_8b({**AROUND, **compared[1]}) if t[0] == "|")
    rows = [line.split(" | ") for line in table.strip().splitlines()[2:]]
    assert [row[2] for row in rows] == list(sft_8b.CONTESTANTS)
    assert rows[0][4] == "1.000"  # torch-all over itself
    assert len({len(row) for row in rows}) == 1


def test_time_is_compared_on_rows_that_both_finished() -> None:
    one = {"rows": [{"seconds": 1.0}, {"seconds": 9.0}, {"failure": "out of memory"}]}
    other = {"rows": [{"seconds": 2.0}, {"failure": "out of memory"}, {"seconds": 5.0}]}
    assert tables_of_training.time_over(one, other) == 0.5
    nothing = {"rows": [{"failure": "out of memory"}] * 3}
    assert tables_of_training.time_over(one, nothing) is None


def test_the_table_of_measured_results_has_a_row_for_what_is_in_the_files(
    compared: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    files: dict[str, Any] = {"h200-sft_8b": {**AROUND, **compared[1]}}
    monkeypatch.setattr(measured, "loaded", files.get)
    monkeypatch.setattr(measured, "sheet", files.get)
    (row,) = measured.rows()
    assert row.question == "On the workload of today?"
    assert "up to 256 tokens at 24GB" in row.run
    assert "of recomputing everything" in row.result
    assert "no out-of-memory" in row.result


def test_what_was_measured_otherwise_is_not_continued(tmp_path: Path) -> None:
    options = Namespace(out=tmp_path / "results.json")
    header = {"commit": "a", "source_tree": "b", "machine": "c", "layers": 4, "torch": "d"}
    assert sft_8b.opened(options, header) is header
    options.out.write_text(json.dumps({**header, "caps": {"24GB": {}}}))
    assert sft_8b.opened(options, header)["caps"] == {"24GB": {}}
    with pytest.raises(SystemExit, match="measured with layers 4, and here it is 8"):
        sft_8b.opened(options, {**header, "layers": 8})


HEADER = {"benchmark": "promise", "source_tree": "a", "machine": "b", "torch": "c"}
HERE = Where("cpu", small=True)


def test_a_promise_is_kept_in_parts_of_one_file(tmp_path: Path) -> None:
    path = tmp_path / "promise.json"
    for wanted in (12, 30):
        parts = promise.Parts(path, HEADER, {"rows": wanted})
        promise.measure(parts, HERE, float("inf"), slice_seconds=600)
        assert parts.next_case() is None
    case = json.loads(path.read_text())["cases"]["rows"]
    assert [run["steps"] for run in case["runs"]] == [12, 18]
    assert [run["seed"] for run in case["runs"]] == [1, 2]
    assert case["steps"] == 30
    assert case["lost"] == []
    assert case["held_over_budget"] <= 1
    assert case["observed_steps"] == sum(run["observed_steps"] for run in case["runs"])
    assert case["runs_recomputed"] > 0
    with pytest.raises(SystemExit, match="measured with torch c, and here it is d"):
        promise.Parts(path, {**HEADER, "torch": "d"}, {"rows": 30})


def test_the_case_with_the_least_of_its_steps_is_next(tmp_path: Path) -> None:
    path = tmp_path / "promise.json"
    cases = {"rows": {"steps": 50}, "outliers": {"steps": 30}}
    path.write_text(json.dumps({**HEADER, "cases": cases}))
    assert promise.Parts(path, HEADER, {"rows": 200, "outliers": 60}).next_case() == "rows"
    assert promise.Parts(path, HEADER, {"rows": 60, "outliers": 60}).next_case() == "outliers"
    assert promise.Parts(path, HEADER, {"rows": 50, "outliers": 30}).next_case() is None


def test_lost_steps_are_numbered_through_all_runs_of_a_case() -> None:
    run = dict.fromkeys(promise.ADDED, 0)
    nothing = {"surprises": {"evicted": 1}, "held_over_budget": 0.9, "reserve_share": 0.03}
    process = {"process": {"grown_bytes": 5, "grown_objects": 2}}
    one = {**run, **nothing, **process, "steps": 100, "lost": [[7, "no"]]}
    two = {**run, **nothing, **process, "steps": 100, "lost": [[3, "no"]]}
    case = promise.together(1 << 30, [one, two])
    assert case["lost"] == [[7, "no"], [103, "no"]]
    assert case["surprises"] == {"evicted": 2}
    assert case["process"] == {"grown_bytes": 5, "grown_objects": 2}


@pytest.mark.parametrize("name", [name for name in CASES if name != "detector"])
def test_every_case_gives_losses_that_can_be_trained(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make(HERE).train()
    losses = [float(loss().detach()) for loss in case.losses(model, HERE, 3, 1)]
    assert len(losses) == 3
    assert all(abs(loss) < 1e4 for loss in losses)


def test_every_so_often_a_batch_is_ten_times_as_long() -> None:
    seen: list[int] = []

    class Lengths(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            seen.append(input_ids.shape[1])
            return Namespace(loss=torch.zeros(()))

    for loss in CASES["outliers"].losses(Lengths(), HERE, OUTLIER_EVERY + 1, 1):
        loss()
    assert seen[OUTLIER_EVERY - 1] == 10 * max(seen[: OUTLIER_EVERY - 1])
    assert seen[OUTLIER_EVERY] < seen[OUTLIER_EVERY - 1] / 5


def test_surprises_are_counted_by_step_and_kind() -> None:
    from mimose.estimation import Surprise
    from mimose.training import StepRecord

    size = chain(run()).size
    plain: dict[str, Any] = {
        "size": size,
        "plan": None,
        "observed": False,
        "predicted_peak_bytes": 100,
        "real_peak_bytes": 100,
        "peak_bytes": None,
        "peak_held_bytes": None,
        "reserve_bytes": 0,
    }
    counted = promise.Surprises()
    counted.step_over(StepRecord(**plain))
    counted.step_over(StepRecord(**{**plain, "real_peak_bytes": 104}))
    ran_out = frozenset({Surprise.OUT_OF_MEMORY})
    counted.step_over(StepRecord(**plain, evictions=2, surprises=ran_out))
    assert counted.steps == 2
    assert counted.kinds == {"peak_higher": 1, "evicted": 1, "out_of_memory": 1}
