"""The tasks: a model, a batch size, and batches of real lengths or image sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import nn

from mimose.bench import images, models, texts, vision_models
from mimose.bench.batches import Batch, BatchShape, RandomTensors, Source
from mimose.bench.extras import BenchError
from mimose.bench.images import Pictures, Scenes
from mimose.bench.texts import Texts
from mimose.tensors import SizeFunction

PAPER_TASKS = ("MC-Roberta", "QA-XLNet", "QA-Bert", "TC-Bert")

_SMALL_ROWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model, a batch size and where the shapes of its batches come from."""

    name: str
    rows: int
    source: Source
    make: Callable[[bool, str], nn.Module]
    """Of `small` and the attention's name."""
    fill: Callable[[RandomTensors, BatchShape], Batch]
    precision: str = "fp32"
    attention: str = "eager"
    attentions: tuple[str, ...] = ("eager", "sdpa")
    loss: Callable[[Any], torch.Tensor] = operator.attrgetter("loss")
    """Of the model's output."""
    input_size: Callable[[bool], SizeFunction] | None = None
    """What to pass as `input_size=`, of `small`; None where mimose finds the size itself."""
    needs: tuple[str, ...] = ()
    """Packages of the extra `vision` that the model needs."""

    def shapes(self, steps: int, *, scale: int, small: bool, seed: int = 0) -> list[BatchShape]:
        """The shape of each batch of a run; the last one is half full."""
        rows = self._rows(scale, small)
        draw = Random(seed)
        counts = [rows] * (steps - 1) + [max(1, rows // 2)]
        return [self.source.draw(draw, n, small=small) for n in counts]

    def longest_of_data(self, *, scale: int, small: bool) -> BatchShape:
        """The largest batch that the data could give, drawn in a run or not."""
        return self.source.longest(self._rows(scale, small), small=small)

    def _rows(self, scale: int, small: bool) -> int:
        return (_SMALL_ROWS if small else self.rows) * scale

    def batch(self, shape: BatchShape, number: int, device: torch.device) -> Batch:
        """The batch of this number: the same for everybody, and no draw from the common RNG."""
        return self.fill(RandomTensors(device, number), shape)


def task_named(name: str) -> Task:
    """The task of this name, in whatever case."""
    for known, task in TASKS.items():
        if known.lower() == name.strip().lower():
            return task
    raise BenchError(f"there is no task {name!r}; the tasks are {', '.join(TASKS)}")


def _sum_of_losses(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(output.values())).sum()


_TEXT = (
    Task(
        name="MC-Roberta",
        rows=16,
        source=Texts(("swag_roberta.csv",)),
        make=models.roberta_chooser,
        fill=texts.choices,
    ),
    Task(
        name="QA-XLNet",
        rows=16,
        source=Texts(("squad_xlnet.csv",)),
        make=models.xlnet_reader,
        fill=texts.spans,
        attentions=("eager",),
    ),
    Task(
        name="QA-Bert",
        rows=12,
        source=Texts(("squad_bert.csv",)),
        make=models.bert_reader,
        fill=texts.spans,
    ),
    Task(
        name="TC-Bert",
        rows=32,
        source=Texts(("qqp_bert.csv",)),
        make=models.bert_classifier,
        fill=texts.classified,
    ),
    Task(
        name="SFT-Llama",
        rows=8,
        source=Texts(("instruct_cl100k.csv",), cut=4096),
        make=models.llama,
        fill=texts.continued,
        precision="bf16",
        attention="sdpa",
    ),
    # Two real distributions, though not of one data set: a reader's input, a sentence out.
    Task(
        name="T5-base",
        rows=16,
        source=Texts(("squad_bert.csv", "swag_roberta.csv")),
        make=models.t5_base,
        fill=texts.translated,
    ),
)

_VISION = (
    Task(
        name="Swin-T",
        rows=32,
        source=Pictures(),
        make=vision_models.swin_tiny,
        fill=images.labelled,
    ),
    Task(
        name="ResNet-50",
        rows=64,
        source=Pictures(),
        make=vision_models.resnet_50,
        fill=images.labelled,
    ),
    Task(
        name="ViT",
        rows=32,
        source=Pictures(multiple=16),
        make=vision_models.vit_base,
        fill=images.labelled_at_any_resolution,
        precision="amp",
        attention="sdpa",
    ),
    Task(
        name="Faster-RCNN",
        rows=4,
        source=Scenes(),
        make=vision_models.faster_rcnn,
        fill=images.annotated,
        loss=_sum_of_losses,
        input_size=images.size_for_detector,
        needs=("torchvision",),
    ),
)

TASKS: dict[str, Task] = {task.name: task for task in (*_TEXT, *_VISION)}
