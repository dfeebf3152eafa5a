"""Batches of images: real proportions, sizes that change from batch to batch.

The sizes are those of the images in COCO val2017. `Pictures` are for classifiers, whose batches
hold images of one size; a detector scales and pads `Scenes` of different sizes itself.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, final

import torch

from mimose.bench.batches import LENGTHS, Batch, BatchShape, RandomTensors, Source, spread

Size = tuple[int, int]
"""Height and width."""

_SAMPLES = 48
"""How many of a run's sizes are observed: both sides vary, and memory may grow in steps."""
_SMALLER = 4
"""By how much sides are divided for small models."""


class _Images(Source):
    """What batches of images have in common: memory goes by the area."""

    axis: ClassVar[str] = "image area, megapixels"
    sides: ClassVar[int] = 2

    def largest(self, shapes: Sequence[BatchShape]) -> BatchShape:
        full = max(shape.rows for shape in shapes)
        return max((s for s in shapes if s.rows == full), key=self.elements)

    def samples(self, shapes: Sequence[BatchShape], count: int | None = None) -> list[BatchShape]:
        full = max(shape.rows for shape in shapes)
        by_size = {shape.lengths: shape for shape in shapes if shape.rows == full}
        ordered = sorted(by_size.values(), key=self.elements)
        return [ordered[at] for at in spread(0, len(ordered) - 1, count or _SAMPLES)]

    def extent(self, lengths: Sequence[int]) -> float:
        height, width = lengths
        return height * width / 1e6

    def elements(self, shape: BatchShape) -> int:
        height, width = shape.lengths
        return shape.rows * height * width


@final
@dataclass(frozen=True, slots=True)
class Pictures(_Images):
    """Batches whose images all have one size: the proportions of a real image, scaled at random.

    This is how batches by aspect ratio at several resolutions look to a model.
    """

    shorter: tuple[int, int] = (256, 448)
    """The range of the shorter side."""
    multiple: int = 1
    """Both sides are multiples of this."""
    slimmest: float = 2.0
    """The longer side is at most so many times the shorter."""

    def draw(self, random: Random, rows: int, *, small: bool) -> BatchShape:
        (proportions,) = random.choices(*_counts())
        return BatchShape(rows, self._scaled(proportions, random.randint(*self.shorter), small))

    def longest(self, rows: int, *, small: bool) -> BatchShape:
        sizes, _ = _counts()
        scaled = (self._scaled(size, self.shorter[1], small) for size in sizes)
        return BatchShape(rows, max(scaled, key=lambda size: (size[0] * size[1], size)))

    def _scaled(self, proportions: Size, shorter: int, small: bool) -> Size:
        longer = shorter * min(self.slimmest, max(proportions) / min(proportions))
        height, width = proportions
        sides = (shorter, longer) if height <= width else (longer, shorter)
        low, high = (self._rounded(side, small) for side in sides)
        return low, high

    def _rounded(self, side: float, small: bool) -> int:
        smaller = _SMALLER if small else 1
        multiple = max(1, self.multiple // smaller)
        return multiple * round(side / smaller / multiple)


@final
@dataclass(frozen=True, slots=True)
class Scenes(_Images):
    """Batches of images of different sizes, which the detector scales and pads."""

    def draw(self, random: Random, rows: int, *, small: bool) -> BatchShape:
        return self._batch(random.choices(*_counts(), k=rows), small)

    def longest(self, rows: int, *, small: bool) -> BatchShape:
        """With the flattest and the slimmest image, which are scaled to the longest sides."""
        sizes, _ = _counts()
        by_proportion = sorted(sizes, key=lambda size: size[0] / size[1])
        ends = [by_proportion[0], by_proportion[-1]]
        return self._batch((ends * rows)[: max(rows, 2)], small)

    @staticmethod
    def _batch(sizes: Sequence[Size], small: bool) -> BatchShape:
        smaller = _SMALLER if small else 1
        images = tuple((height // smaller, width // smaller) for height, width in sizes)
        return BatchShape(len(images), padded(images, small), images)


def sides_of_detector(small: bool) -> Size:
    """What the detector scales an image's shorter side to, and how long the other may become."""
    return (64, 107) if small else (800, 1333)


def padded(images: Sequence[Sequence[int]], small: bool) -> Size:
    """The size of the batch that the detector makes of images of these sizes.

    Each image is scaled; the batch is as high as the highest and as wide as the widest, in
    multiples of 32.
    """
    shorter, longer = sides_of_detector(small)
    scaled = []
    for sides in images:
        scale = min(shorter / min(sides), longer / max(sides))
        scaled.append([-(-int(side * scale) // 32) * 32 for side in sides])
    return max(height for height, _ in scaled), max(width for _, width in scaled)


def size_for_detector(small: bool) -> Callable[..., tuple[int, int, int]]:
    """The function to pass as `input_size=`: of the images, their number and their padded size."""

    def input_size(images: list[torch.Tensor], targets: object = None) -> tuple[int, int, int]:
        return len(images), *padded([image.shape[1:] for image in images], small)

    return input_size


@functools.cache
def _counts() -> tuple[list[Size], list[int]]:
    with (LENGTHS / "coco_val2017_sizes.csv").open() as opened:
        rows = list(csv.DictReader(opened))
    sizes = [(int(row["height"]), int(row["width"])) for row in rows]
    return sizes, [int(row["count"]) for row in rows]


def labelled(random: RandomTensors, shape: BatchShape) -> Batch:
    """Images with a class each."""
    return {
        "pixel_values": random.uniform(shape.rows, 3, *shape.lengths),
        "labels": random.integers(10, shape.rows),
    }


def labelled_at_any_resolution(random: RandomTensors, shape: BatchShape) -> Batch:
    """The same for a ViT, which is told to stretch its position embeddings."""
    return {**labelled(random, shape), "interpolate_pos_encoding": True}


def annotated(random: RandomTensors, shape: BatchShape) -> Batch:
    """Images with 1 to 20 labelled boxes each."""
    images = [random.uniform(3, *size) for size in shape.images]
    return {"images": images, "targets": [_target(random, size) for size in shape.images]}


def _target(random: RandomTensors, size: Size) -> dict[str, torch.Tensor]:
    """Boxes as left, top, right, bottom, with at least a tenth of the image's sides each."""
    height, width = size
    count = random.host.randint(1, 20)
    start = 0.5 * random.uniform(count, 2)
    extent = 0.1 + 0.4 * random.uniform(count, 2)
    scale = torch.tensor([width, height], device=start.device)
    boxes = torch.cat([start * scale, (start + extent) * scale], dim=1)
    return {"boxes": boxes, "labels": 1 + random.integers(90, count)}
