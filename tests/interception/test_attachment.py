"""A model with intercepted blocks trains as the plain one and is otherwise unchanged."""

from __future__ import annotations

import copy
import functools
import io
import logging
import pickle
import random
import types
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import models
from compare import Storages, assert_same_buffers, assert_same_gradients
from mimose.errors import MimoseWarning
from mimose.execution.autograd import Listener
from mimose.interception.attachment import (
    RECOMPUTE_EVERYTHING,
    Attachment,
)
from mimose.interception.blocks import find_blocks
from mimose.interception.directive import RECOMPUTE, Directive, Director
from parts import DECODERS, AtRandom, Overheard, bf16, train_model, without_cache

LENGTH = {"gpt2": 9, "llama": 9, "lora": 9, "t5": 5}


class Asked:
    """Recomputes every block and remembers the calls."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def direct(self, block: int, args: Any, kwargs: Any) -> Directive:
        self.blocks.append(block)
        return RECOMPUTE

    def ran_out(self, block: int) -> None:
        raise AssertionError("nothing is kept")


class Recomputes(Listener):
    """Counts recomputes and ignores the rest."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def before_recompute(self, run: int) -> None:
        self.blocks.append(run)


def attach(
    model: nn.Module, director: Director = RECOMPUTE_EVERYTHING, **selection: Any
) -> Attachment:
    return Attachment(model, find_blocks(model, **selection), director)


def listen(
    model: nn.Module, director: Director = RECOMPUTE_EVERYTHING, **selection: Any
) -> Recomputes:
    """Attach, and count recomputes."""
    listener = Recomputes()
    attach(model, Overheard(director, listener), **selection)
    return listener


@pytest.mark.parametrize("director", [RECOMPUTE_EVERYTHING, AtRandom()], ids=["all", "some"])
@pytest.mark.parametrize("context", [nullcontext, bf16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", models.ALL)
def test_gradients_buffers_and_rng_are_those_of_the_plain_model(
    name: str, context: Callable[[], Any], director: Director
) -> None:
    model, batch = models.ALL[name]()
    plain = copy.deepcopy(model)
    batch = without_cache(name, batch)
    plain_rng = train_model(plain, batch, context=context)
    listener = listen(model, director)
    assert torch.equal(train_model(model, batch, context=context), plain_rng)
    assert listener.blocks
    assert_same_gradients(model, plain)
    assert_same_buffers(model, plain)


@pytest.mark.parametrize("director", [RECOMPUTE_EVERYTHING, AtRandom()], ids=["all", "some"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoder_with_its_default_cache_trains_as_plain(name: str, director: Director) -> None:
    model, batch = models.ALL[name]()
    plain = copy.deepcopy(model)
    attach(model, director)
    train_model(plain, batch)
    train_model(model, batch)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("name", DECODERS)
def test_cache_of_a_decoder_is_never_written_twice(name: str) -> None:
    model, batch = models.ALL[name]()
    attach(model)
    for _ in range(2):  # the first use is rehearsed, the second is not
        out = model(**batch)
        out.loss.backward()
        cache = out.past_key_values
        assert cache is None or cache.get_seq_length() in (0, LENGTH[name])


def test_layer_that_runs_several_times_a_step_is_recomputed_each_time() -> None:
    from transformers import AlbertConfig, AlbertForSequenceClassification

    sizes = {"hidden_size": 16, "embedding_size": 8, "intermediate_size": 32}
    config = AlbertConfig(vocab_size=50, num_hidden_layers=3, num_attention_heads=2, **sizes)
    model = AlbertForSequenceClassification(config).train()
    batch = {"input_ids": torch.randint(5, 50, (2, 7)), "labels": torch.tensor([0, 1])}
    plain = copy.deepcopy(model)
    listener = listen(model)
    train_model(plain, batch)
    train_model(model, batch)
    assert len(listener.blocks) == 3 * 3
    assert_same_gradients(model, plain)


def test_gradients_accumulate_over_batches_of_different_lengths() -> None:
    model, _ = models.bert()
    plain = copy.deepcopy(model)
    attach(model, AtRandom())
    batches = [models.bert(length=length)[1] for length in (4, 9, 6)]
    for each in (plain, model):
        torch.manual_seed(1)
        for batch in batches:
            models.loss_of(each, batch).backward()
    assert_same_gradients(model, plain)


def outside(model: nn.Module) -> tuple[Any, ...]:
    """What other code sees of a model."""
    return (
        type(model),
        repr(model),
        list(model.state_dict()),
        [name for name, _ in model.named_parameters()],
        [(name, type(module)) for name, module in model.named_modules()],
        [dict(module._forward_hooks) for module in model.modules()],
        [dict(module._forward_pre_hooks) for module in model.modules()],
        [dict(module._backward_hooks) for module in model.modules()],
    )


@pytest.mark.parametrize("name", models.ALL)
def test_attaching_changes_no_type_state_dict_key_parameter_name_or_hook(name: str) -> None:
    model, batch = models.ALL[name]()
    before = outside(model)
    attach(model)
    assert outside(model) == before
    train_model(model, batch, steps=1)
    assert outside(model) == before


def test_hooks_of_a_block_run_once_a_step() -> None:
    model, batch = models.encoder()
    counts = {"pre": 0, "post": 0, "backward": 0}

    def count(what: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[what] += 1

        return hook

    for block in find_blocks(model):
        block.module.register_forward_pre_hook(count("pre"))
        block.module.register_forward_hook(count("post"))
        block.module.register_full_backward_hook(count("backward"))
    attach(model)
    train_model(model, batch, steps=3)
    assert counts == {"pre": 9, "post": 9, "backward": 9}


def test_hooks_that_change_inputs_and_outputs_keep_gradients_exact() -> None:
    model, batch = models.encoder()
    for block in find_blocks(model):
        block.module.register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))
        block.module.register_forward_hook(lambda _, args, out: out.sin())
    plain = copy.deepcopy(model)
    attach(model)
    train_model(plain, batch)
    train_model(model, batch)
    assert_same_gradients(model, plain)


def test_forward_replaced_on_the_instance_is_the_one_that_runs() -> None:
    model, batch = models.encoder()
    plain = copy.deepcopy(model)
    for each in (model, plain):
        layer = each.encoder.layers[1]
        layer.forward = lambda *args, _of=layer, **kw: type(_of).forward(_of, *args, **kw).sin()
    replaced = model.encoder.layers[1].forward
    attach(model)
    train_model(plain, batch)
    train_model(model, batch)
    assert_same_gradients(model, plain)
    assert model.encoder.layers[1].__dict__["forward"] is replaced


def via_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def via_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, via_pickle, via_torch_save])
@pytest.mark.parametrize("name", models.ALL)
def test_copy_of_an_attached_model_is_plain_and_independent(
    name: str, duplicate: Callable[[nn.Module], nn.Module]
) -> None:
    model, batch = models.ALL[name]()
    plain = copy.deepcopy(model)
    asked = Asked()
    attach(model, asked)
    models.loss_of(model, batch).backward()
    model.zero_grad()
    asked.blocks.clear()
    copied = duplicate(model)
    assert all("_compiled_call_impl" not in module.__dict__ for module in copied.modules())
    train_model(plain, batch, steps=1)
    train_model(copied, batch, steps=1)
    assert not asked.blocks
    assert_same_gradients(copied, plain)
    assert all(p.grad is None for p in model.parameters())


def insides(model: nn.Module) -> dict[tuple[str, ...], int]:
    """The identity of everything in the model's modules."""
    found = {}
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            found[name, key] = id(value)
            if isinstance(value, dict):
                found.update({(name, key, str(inner)): id(v) for inner, v in value.items()})
    return found


@pytest.mark.parametrize("name", models.ALL)
def test_detaching_leaves_the_model_as_before(name: str) -> None:
    model, batch = models.ALL[name]()
    before = insides(model)
    attachment = attach(model, Asked())
    for _ in range(2):
        models.loss_of(model, batch).backward()
    attachment.detach()
    assert list(insides(model).items()) == list(before.items())
    attachment.interceptors[0].director.blocks.clear()
    models.loss_of(model, batch).backward()
    assert not attachment.interceptors[0].director.blocks


def test_a_later_attachment_replaces_an_earlier_one() -> None:
    model, batch = models.encoder()
    first, second = Asked(), Asked()
    before = insides(model)
    former, latter = attach(model, first), attach(model, second)
    train_model(model, batch, steps=1)
    assert not first.blocks
    assert len(second.blocks) == 3
    former.detach()
    train_model(model, batch, steps=1)
    assert len(second.blocks) == 6
    latter.detach()
    assert insides(model) == before


@pytest.mark.parametrize("name", models.ALL)
def test_evaluation_runs_the_plain_model(name: str) -> None:
    model, batch = models.ALL[name]()
    asked = Asked()
    listener = listen(model, asked)
    with torch.no_grad():
        models.loss_of(model, batch)
    model.eval()
    models.loss_of(model, batch).backward()
    assert not asked.blocks
    assert not listener.blocks
    model.train()
    models.loss_of(model, batch).backward()
    assert asked.blocks
    assert listener.blocks


class Diary:
    """A counter without a `__dict__`, so that its state cannot be found."""

    __slots__ = ("pages",)

    def __init__(self) -> None:
        self.pages: list[int] = []

    def append(self, page: int) -> None:
        self.pages.append(page)

    def __len__(self) -> int:
        return len(self.pages)


class Odd(nn.Module):
    """A block with a state that has changed when it is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = Diary()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class RemembersItsCalls(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        return self.linear(x).sin() * (3 if len(self.seen) == 1 else 1)


class DoesMoreAtFirst(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        x = self.linear(x)
        return x.sin().exp() if len(self.seen) == 1 else x.sin()


class GivesAnotherShape(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        x = torch.cat([x, x]) if len(self.seen) == 1 else x
        return self.linear(x).sin()


class RaisesTheSecondTime(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        if len(self.seen) == 2:
            raise LookupError("gone")
        return self.linear(x).sin()


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (RemembersItsCalls, "other values"),
        (DoesMoreAtFirst, "saved 3 tensors where the forward saved 4"),
        (GivesAnotherShape, "different metadata"),
        (RaisesTheSecondTime, "raised LookupError: gone"),
    ],
)
def test_block_that_cannot_be_recomputed_is_detected_in_its_first_run_and_kept(
    kind: type[Odd], problem: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4))
    plain, x = copy.deepcopy(model), torch.randn(3, 4)
    listener = listen(model, blocks=["0", "1", "2"])
    steps = 1 if kind is RaisesTheSecondTime else 3  # its second step raises anyway
    for _ in range(steps):
        plain(x).pow(2).sum().backward()
    message = f"block '1' cannot be recomputed: .*{problem}.*kept from now on"
    with pytest.warns(MimoseWarning, match=message):
        out = model(x)
    out.pow(2).sum().backward()
    for _ in range(steps - 1):
        model(x).pow(2).sum().backward()  # a second warning would be an error
    assert_same_gradients(model, plain)
    assert listener.blocks == [2, 0] * steps


def test_several_blocks_of_a_class_that_cannot_be_recomputed_give_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(*(RemembersItsCalls() for _ in range(3)))
    attach(model, blocks=RemembersItsCalls)
    with caplog.at_level(logging.INFO, "mimose"), pytest.warns(MimoseWarning) as said:
        model(torch.randn(3, 4))
    (warning,) = (str(warning.message) for warning in said)
    assert warning.startswith("block '0' cannot be recomputed: ")
    assert "exclude='0'" in warning
    assert "which of the 2 other RemembersItsCalls are the same" in warning
    logged = [line for line in caplog.messages if "cannot be recomputed" in line]
    assert [line.partition("cannot")[0] for line in logged] == [
        "mimose: block '1' ",
        "mimose: block '2' ",
    ]


class RunsOutTheSecondTime(Odd):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        if len(self.seen) == 2:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
        return self.linear(x).sin()


def test_a_trial_without_enough_memory_is_repeated_later() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), RunsOutTheSecondTime()), torch.randn(3, 4)
    plain = copy.deepcopy(model)
    attachment = attach(model, blocks=["1"])
    (interceptor,) = attachment.interceptors
    plain[1].seen.pages = [0, 0]
    for expected in (None, True):
        model(x).sum().backward()
        plain(x).sum().backward()
        assert interceptor.trusted is expected
    assert_same_gradients(model, plain)


def test_first_use_leaves_no_activation_behind() -> None:
    model, batch = models.sequential()
    attach(model, blocks=["0", "3", "4"])
    with Storages(model, batch["x"]) as storages:
        out = model(**batch)
        first = storages.live()
        del out
        out = model(**batch)
        assert storages.live() == first
        del out
        assert storages.live() == 0


RUNS: Counter[nn.Module] = Counter()
"""How often each block has run. Not an attribute, because attributes distinguish blocks."""


class Twin(nn.Module):
    """May draw from Python's generator."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        RUNS[self] += 1
        if self.rate and random.random() < self.rate:
            x = -x
        return self.inner(x).tanh() * 2


def test_blocks_built_alike_are_tried_once() -> None:
    """The first block is run, tried and recomputed; blocks built alike are not tried."""
    model = nn.Sequential(*(Twin() for _ in range(4)))
    plain = copy.deepcopy(model)
    x = torch.randn(3, 4, requires_grad=True)
    attachment = attach(model, blocks=list(model))
    model(x).sum().backward()
    plain(x).sum().backward()
    assert [RUNS[block] for block in model] == [3, 2, 2, 2]
    assert all(interceptor.trusted for interceptor in attachment.interceptors)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("seed", range(3))
def test_block_of_the_same_class_with_another_computation_is_tried_itself(seed: int) -> None:
    model = nn.Sequential(Twin(), Twin(0.5), Twin(), Twin(0.5))
    plain = copy.deepcopy(model)
    x = torch.randn(3, 4, requires_grad=True)
    random.seed(seed)
    plain(x).sum().backward()
    attach(model, blocks=list(model))
    random.seed(seed)
    model(x).sum().backward()
    assert [RUNS[block] for block in model] == [3, 3, 2, 3]
    assert_same_gradients(model, plain)


def test_block_of_the_same_class_with_a_longer_forward_is_tried_itself() -> None:
    class Deep(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.times = times

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            RUNS[self] += 1
            for _ in range(self.times):
                x = self.inner(x).tanh()
            return x * 2

    model = nn.Sequential(Deep(1), Deep(2), Deep(1), Deep(2))
    attach(model, blocks=list(model))
    model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert [RUNS[block] for block in model] == [3, 3, 2, 2]


class Private(nn.Module):
    """Optionally draws from a hidden generator: then it cannot be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.draws: Any = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return (x if not self.decides() else x * DICE.random()).tanh() * 2

    def decides(self) -> bool:
        draws = self.draws
        return bool(draws() if callable(draws) else getattr(draws, "on", draws))


DICE = random.Random(0)


class Draws:
    on = True


def _patched(self: Private, x: torch.Tensor) -> torch.Tensor:
    return (self.inner(x) * DICE.random()).tanh() * 2


def _shaken(module: nn.Module, args: Any) -> Any:
    return (args[0] * DICE.random(),)


ODD_ONES: dict[str, Callable[[Private], object]] = {
    "number": lambda block: setattr(block, "draws", 1),
    "list": lambda block: setattr(block, "draws", [1]),
    "object": lambda block: setattr(block, "draws", Draws()),
    "tensor": lambda block: setattr(block, "draws", torch.tensor(1)),
    "partial": lambda block: setattr(block, "draws", functools.partial(bool, 1)),
    "forward": lambda block: setattr(block, "forward", types.MethodType(_patched, block)),
    "hook": lambda block: block.inner.register_forward_pre_hook(_shaken),
}


@pytest.mark.parametrize("odd", ODD_ONES)
def test_block_that_differs_in_anything_is_tried_itself(odd: str) -> None:
    model = nn.Sequential(*(Private() for _ in range(4)))
    for block in list(model)[2:]:
        ODD_ONES[odd](block)
    attachment = attach(model, blocks=list(model))
    with pytest.warns(MimoseWarning, match="cannot be recomputed"):
        model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert [interceptor.trusted for interceptor in attachment.interceptors] == [
        True,
        True,
        False,
        False,
    ]
