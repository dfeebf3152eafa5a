"""With `torch_compile=True`, compile each block of a `Trainer`'s model instead of the whole."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import DynamoBackend  # type: ignore[import-untyped]
from torch import nn
from transformers import Trainer

from mimose.api import switched_off
from mimose.integrations.trainer_callback import AttachingCallback
from mimose.interception import find_blocks

log = logging.getLogger("mimose")


@contextmanager
def blocks_compiled_instead(
    trainer: Trainer, callback: AttachingCallback, options: dict[str, Any]
) -> Iterator[None]:
    """While active, compile each block instead of the whole model; restores the blocks."""
    plugin = trainer.accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO or switched_off():
        yield
        return
    compile_options, backend = plugin.to_kwargs(), plugin.backend
    compiled: list[nn.Module] = []

    def compile_blocks(model: nn.Module) -> None:
        for block in blocks_of(model, options):
            if block._compiled_call_impl is None:
                block.compile(**compile_options)
                compiled.append(block)

    log.warning("torch_compile=True: blocks are compiled one by one, not the model as a whole")
    plugin.backend, callback.before_attaching = DynamoBackend.NO, compile_blocks
    try:
        yield
    finally:
        plugin.backend = backend
        for block in compiled:
            del block._compiled_call_impl


def blocks_of(model: nn.Module | None, options: dict[str, Any]) -> list[nn.Module]:
    """The blocks that mimose would find in this model."""
    assert model is not None
    found = find_blocks(model, blocks=options.get("blocks"), exclude=options.get("exclude"))
    return [block.module for block in found]
