"""The tasks: real lengths and image sizes, models of texts and images, small enough for a CPU."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from bench_parts import arena

from mimose.bench.arena import Arena, Conditions
from mimose.bench.extras import BenchError
from mimose.bench.images import padded
from mimose.bench.workloads import PAPER_TASKS, TASKS, task_named
from mimose.interception.blocks import find_blocks

PUBLISHED_MILLIONS = {
    "SFT-Llama": (1000, 1250),
    "T5-base": (215, 280),
    "Swin-T": (28, 29),
    "ResNet-50": (25, 26),
    "ViT": (86, 87),
    "Faster-RCNN": (41, 42),
}


def test_a_batch_is_padded_to_its_longest_so_larger_batches_are_longer() -> None:
    one, eight = (TASKS["TC-Bert"].shapes(50, scale=s, small=False) for s in (1, 8))
    assert all(shape.rows == 32 for shape in one[:-1])
    assert all(shape.rows == 256 for shape in eight[:-1])
    mean = [sum(shape.lengths[0] for shape in shapes) / 50 for shapes in (one, eight)]
    assert mean[1] > mean[0] + 10


def test_padded_lengths_lie_in_the_range_that_the_paper_gives() -> None:
    lengths = [s.lengths[0] for s in TASKS["QA-Bert"].shapes(400, scale=1, small=False)[:-1]]
    assert 140 < min(lengths) < 250
    assert max(lengths) == 512


def test_the_last_batch_is_kept_half_full() -> None:
    shapes = TASKS["QA-XLNet"].shapes(5, scale=1, small=False)
    assert [shape.rows for shape in shapes] == [16, 16, 16, 16, 8]


def test_the_same_seed_gives_the_same_batches_and_another_does_not() -> None:
    task = TASKS["QA-Bert"]
    first, again, other = (task.shapes(20, scale=1, small=False, seed=s) for s in (0, 0, 1))
    assert first == again != other


def test_making_a_batch_leaves_the_common_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    task = TASKS["MC-Roberta"]
    batch = task.batch(task.shapes(2, scale=1, small=True)[0], 7, torch.device("cpu"))
    assert torch.rand(1) == expected
    assert batch["input_ids"].dim() == 3


def needs_packages_of(name: str) -> None:
    """Skip where torchvision is missing, or was built for another torch."""
    if TASKS[name].needs:
        pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))


@pytest.mark.parametrize("name", TASKS)
def test_every_task_trains_and_has_blocks(name: str) -> None:
    needs_packages_of(name)
    with arena(name).trainee() as trainee:
        assert len(find_blocks(trainee.model)) >= 4
        before = [parameter.clone() for parameter in trainee.model.parameters()]
        loss = trainee.step(arena(name).shapes[0], 0)
        assert torch.isfinite(loss)
        after = trainee.model.parameters()
        assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", TASKS)
def test_full_models_have_the_published_number_of_parameters(name: str) -> None:
    needs_packages_of(name)
    with torch.device("meta"):
        model = TASKS[name].make(False, TASKS[name].attention)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    low, high = PUBLISHED_MILLIONS.get(name, (105, 130))
    assert low < millions < high


def test_images_have_the_proportions_of_real_ones_at_many_sizes() -> None:
    shapes = TASKS["Swin-T"].shapes(300, scale=1, small=False)
    sizes = {shape.lengths for shape in shapes}
    assert len(sizes) > 200
    assert {height < width for height, width in sizes} == {True, False}
    assert all(256 <= min(size) <= 448 for size in sizes)
    assert all(max(size) <= 2 * min(size) for size in sizes)
    in_patches = TASKS["ViT"].shapes(100, scale=1, small=False)
    assert all(side % 16 == 0 for shape in in_patches for side in shape.lengths)


def test_the_largest_batch_of_images_is_one_that_was_drawn() -> None:
    here = arena("Swin-T")
    assert here.largest in here.shapes
    areas = [math.prod(shape.lengths) for shape in here.shapes[:-1]]
    assert math.prod(here.largest.lengths) == max(areas)
    assert math.prod(here.longest.lengths) >= max(areas)


def test_a_detectors_images_have_sizes_of_their_own_and_the_batch_is_padded() -> None:
    task = TASKS["Faster-RCNN"]
    shapes = task.shapes(50, scale=1, small=False)
    assert all(len(shape.images) == shape.rows for shape in shapes)
    assert any(len(set(shape.images)) > 1 for shape in shapes)
    assert {side % 32 for shape in shapes for side in shape.lengths} == {0}
    # One image is twice as wide as high, so its longer side decides: 667 × 1333.
    assert padded([(480, 640)], small=False) == (800, 1088)
    assert padded([(300, 600)], small=False) == (672, 1344)
    assert padded([(480, 640), (640, 480)], small=False) == (1088, 1088)


def test_mimose_sees_a_detectors_batch_as_the_detector_pads_it() -> None:
    here = arena("Faster-RCNN")
    for shape in (*here.shapes, here.longest):
        assert here.size_of(shape).dims == (shape.rows, *shape.lengths)


def test_without_torchvision_the_detector_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("torchvision.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(BenchError, match=r"needs torchvision.*pip install 'torchvision>="):
        TASKS["Faster-RCNN"].make(True, "eager")


def test_the_paper_has_four_tasks() -> None:
    assert len(PAPER_TASKS) == 4
    assert set(PAPER_TASKS) < set(TASKS)


def test_an_unknown_task_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(BenchError, match="'QA-GPT'; the tasks are MC-Roberta, QA-XLNet"):
        task_named("QA-GPT")
    assert task_named("qa-bert") is TASKS["QA-Bert"]


def test_an_attention_that_a_model_does_not_have_is_refused() -> None:
    conditions = Conditions(device="cpu", steps=4, small=True, attention="sdpa")
    with pytest.raises(BenchError, match="--attention sdpa: QA-XLNet has only eager"):
        Arena(TASKS["QA-XLNet"], conditions)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("amp", torch.float32)])
def test_precision_decides_the_weights(precision: str, dtype: torch.dtype) -> None:
    conditions = Conditions(device="cpu", steps=3, small=True, precision=precision)
    other = Arena(TASKS["TC-Bert"], conditions)
    with other.trainee() as trainee:
        assert {p.dtype for p in trainee.model.parameters()} == {dtype}
        assert torch.isfinite(trainee.step(other.shapes[0], 0))
