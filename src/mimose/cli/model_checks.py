"""Checks of a model for `mimose doctor`: its blocks, and the memory that no plan can save."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import nn

from mimose.api import auto_checkpoint
from mimose.cli.findings import NOTE, OK, PROBLEM, Finding
from mimose.errors import MimoseError
from mimose.interception import describe_blocks, find_blocks
from mimose.units import text_of

HEADLESS = Finding(
    NOTE,
    "the configuration names no transformers architecture: the model was checked without the head "
    "that training adds",
    'add "architectures": ["…ForSequenceClassification"] to config.json, or use --model',
)


def check_model(
    model: nn.Module,
    budget_bytes: int | None,
    select: Sequence[str] | None,
    exclude: Sequence[str] | None,
) -> Iterator[Finding]:
    try:
        blocks = find_blocks(model, blocks=select, exclude=exclude)
        budget = "auto" if budget_bytes is None else budget_bytes
        auto_checkpoint(model, budget, blocks=select, exclude=exclude, allocator="leave").detach()
    except MimoseError as error:
        what, _, remedy = _typed(str(error)).partition(": ")
        yield Finding(PROBLEM, what, remedy)
        return
    yield Finding(OK, f"in {type(model).__name__}: {describe_blocks(blocks)}")
    inside = _distinct_bytes(p for block in blocks for p in block.module.parameters())
    whole = _distinct_bytes(model.parameters())
    if whole and inside < whole // 4:
        yield Finding(
            NOTE,
            f"the blocks hold only {inside / whole:.0%} of the parameters: much memory may be used "
            "outside them",
            "choose other blocks with --blocks if these are not the repeated layers",
        )
    yield from _floor(model, budget_bytes)
    if not model.training:
        yield Finding(
            NOTE, "the model is in eval mode, in which nothing is recomputed", "model.train()"
        )


def _typed(message: str) -> str:
    """A message with the options of the command line instead of `blocks=` and `exclude=`."""
    message = message.replace(" or blocks=MyLayer", "")
    return re.sub(r"""\b(blocks|exclude)=\[?['"]([^'"]*)['"]\]?""", r"--\1 '\2'", message)


def _floor(model: nn.Module, budget_bytes: int | None) -> Iterator[Finding]:
    """Memory that no plan can save: parameters, gradients, optimizer state."""
    weights = _distinct_bytes(model.parameters())
    trained = _distinct_bytes(p for p in model.parameters() if p.requires_grad)
    floor = weights + 3 * trained
    if not trained:
        yield Finding(PROBLEM, "no parameter requires a gradient", "model.requires_grad_(True)")
    what = (
        f"parameters {text_of(weights)}, gradients {text_of(trained)}, AdamW state "
        f"{text_of(2 * trained)}: {text_of(floor)} without activations"
    )
    if budget_bytes is not None and floor >= budget_bytes:
        yield Finding(
            PROBLEM,
            f"{what}, but the budget is {text_of(budget_bytes)}: no plan can help",
            "raise the budget, train fewer parameters (LoRA), or use an optimizer with less state",
        )
    else:
        yield Finding(OK, what)


def _distinct_bytes(parameters: Iterator[nn.Parameter]) -> int:
    return sum({id(p): p.nbytes for p in parameters}.values())
