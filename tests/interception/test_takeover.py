"""A model's own checkpointing is taken over, or refused with a reason."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
    offload_wrapper,
)

import mimose
import models
from compare import assert_same_gradients
from mimose.errors import ConflictError
from mimose.interception.attachment import RECOMPUTE_EVERYTHING, Attachment
from mimose.interception.blocks import find_blocks
from parts import Counted


def attach(model: nn.Module) -> Attachment:
    return Attachment(model, find_blocks(model), RECOMPUTE_EVERYTHING)


def chain(*wrappers: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(wrap(Counted()) for wrap in wrappers))


def step(model: nn.Module) -> None:
    torch.manual_seed(1)
    model(torch.ones(2, 4)).pow(2).sum().backward()


def flags(model: nn.Module) -> list[bool]:
    return [
        module.gradient_checkpointing
        for module in model.modules()
        if hasattr(module, "gradient_checkpointing")
    ]


def test_checkpointing_enabled_while_training_is_taken_over() -> None:
    model, batch = models.ALL["bert"]()
    plain = copy.deepcopy(model)
    handle = mimose.auto_checkpoint(model, "1GiB")
    for each in (model, plain):
        torch.manual_seed(1)
        for i in range(6):
            if i == 3:
                each.gradient_checkpointing_enable()
            models.loss_of(each, batch).backward()
    assert_same_gradients(model, plain)
    assert not any(flags(model))
    handle.detach()
    assert any(flags(model))


def test_checkpointing_disabled_while_attached_stays_disabled() -> None:
    model, _ = models.ALL["bert"]()
    model.gradient_checkpointing_enable()
    handle = mimose.auto_checkpoint(model, "1GiB")
    model.gradient_checkpointing_disable()
    handle.detach()
    assert not any(flags(model))


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "swin"])
def test_checkpointing_of_transformers_is_off_while_attached_and_restored_after(name: str) -> None:
    model, batch = models.ALL[name]()
    plain = copy.deepcopy(model)
    model.gradient_checkpointing_enable()
    assert any(flags(model))
    before = flags(model)
    attachment = attach(model)
    assert not any(flags(model))
    assert attachment.takeover
    for each in (plain, model):
        torch.manual_seed(1)
        cache = {"use_cache": False} if name in ("gpt2", "t5") else {}
        models.loss_of(each, {**batch, **cache}).backward()
    assert_same_gradients(model, plain)
    attachment.detach()
    assert flags(model) == before


def test_model_without_checkpointing_has_nothing_to_take_over() -> None:
    assert not attach(chain(Counted, Counted)).takeover


def test_checkpoint_wrapper_is_bypassed_while_attached_and_restored_after() -> None:
    model = chain(checkpoint_wrapper, checkpoint_wrapper, checkpoint_wrapper)
    plain = nn.Sequential(*(copy.deepcopy(wrapper._checkpoint_wrapped_module) for wrapper in model))
    before = [dict(wrapper.__dict__) for wrapper in model]
    attachment = attach(model)
    step(model)  # the first use is rehearsed
    model.zero_grad()
    for wrapper in model:
        wrapper._checkpoint_wrapped_module.tally.starts = 0
    step(model)
    assert [wrapper._checkpoint_wrapped_module.starts for wrapper in model] == [2, 2, 2]
    step(plain)
    for wrapper, part in zip(model, plain, strict=True):
        assert_same_gradients(wrapper._checkpoint_wrapped_module, part)
    attachment.detach()
    assert [dict(wrapper.__dict__) for wrapper in model] == before


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_copy_of_an_attached_wrapped_model_has_its_own_checkpointing(
    duplicate: Callable[[nn.Module], nn.Module],
) -> None:
    model = chain(checkpoint_wrapper, checkpoint_wrapper)
    original = duplicate(model)
    attach(model)
    copied = duplicate(model)
    for wrapper in copied:
        assert isinstance(wrapper, CheckpointWrapper)
        assert isinstance(wrapper.checkpoint_fn, functools.partial)
        assert wrapper.checkpoint_fn.func is torch_checkpoint.checkpoint
    step(copied)
    step(original)
    assert [wrapper._checkpoint_wrapped_module.starts for wrapper in copied] == [2, 2]
    assert_same_gradients(copied, original)
    assert all(p.grad is None for p in model.parameters())


def test_offload_wrapper_is_refused() -> None:
    model = chain(lambda part: part, offload_wrapper)
    with pytest.raises(ConflictError, match=r"'1' offloads its activations.*unwrap"):
        attach(model)


def selective(part: nn.Module) -> nn.Module:
    saved = [torch.ops.aten.addmm.default]
    context_fn = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, saved)
    return checkpoint_wrapper(part, context_fn=context_fn)


def test_selective_wrapper_is_refused() -> None:
    with pytest.raises(ConflictError, match=r"'1' is checkpointed selectively.*Unwrap"):
        attach(chain(checkpoint_wrapper, selective))


def test_refusal_leaves_the_model_as_it_was() -> None:
    model = chain(checkpoint_wrapper, selective)
    before = [dict(module.__dict__) for module in model.modules()]
    with pytest.raises(ConflictError):
        attach(model)
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_foreign_hooks_around_a_block_are_refused_with_its_name() -> None:
    model = chain(Counted, Counted)
    attach(model)
    with pytest.raises(ConflictError, match=r"block '0'.*save_on_cpu"), save_on_cpu():
        step(model)


def test_block_inside_mimose_checkpoint_is_refused_with_its_name() -> None:
    model = chain(Counted, Counted)
    with (
        mimose.auto_checkpoint(model, "1GiB", blocks=["0", "1"]),
        pytest.raises(ConflictError, match=r"block '0'.*mimose\.checkpoint"),
    ):
        mimose.checkpoint(model, torch.ones(2, 4)).pow(2).sum().backward()


@pytest.mark.parametrize("flagged", [True, False])
def test_transformers_does_not_warn_about_caches(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, flagged: bool
) -> None:
    from transformers.utils import logging as theirs

    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")
    words = "incompatible with gradient checkpointing"

    def told(model: nn.Module, batch: dict[str, torch.Tensor]) -> bool:
        theirs.warning_once.cache_clear()
        caplog.clear()
        model(**batch).loss.backward()
        return words in caplog.text

    model, batch = models.llama()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    assert told(model, batch), "nothing is tested"
    if not flagged:
        model.gradient_checkpointing_disable()  # type: ignore[operator]
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        assert not any(told(model, batch) for _ in range(4))
