"""Key-value caches among a block's arguments: used as in plain training, never written twice."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import mimose
from compare import assert_same_gradients

WIDTH = 8


class CacheLayer:
    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None

    def reset(self) -> None:
        self.keys = None


class Cache:
    """A key-value cache like those of transformers."""

    def __init__(self) -> None:
        self.layers: list[CacheLayer] = []

    def get_seq_length(self, layer: int = 0) -> int:
        keys = self.layers[layer].keys if layer < len(self.layers) else None
        return 0 if keys is None else keys.shape[1]

    def update(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        while len(self.layers) <= layer:
            self.layers.append(CacheLayer())
        past = self.layers[layer].keys
        both = keys if past is None else torch.cat([past, keys], dim=1)
        self.layers[layer].keys = both
        return both


class Attention(nn.Module):
    """Adds its keys to a cache and attends to all keys in it."""

    runs = 0  # of all of them; a recompute would leave an instance's own as it was

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.keys = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.made: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor, past: Cache | None = None) -> torch.Tensor:
        Attention.runs += 1
        keys = self.keys(x)
        self.made.append(weakref.ref(keys))
        if past is not None:
            keys = past.update(keys, self.layer)
        x = x + torch.softmax(x @ keys.mT, -1) @ keys
        return x + self.mlp(x)


def stack() -> nn.ModuleList:
    return nn.ModuleList(Attention(i) for i in range(3))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = stack()

    def forward(
        self, x: torch.Tensor, past: Cache | None = None, use_cache: bool | None = None
    ) -> tuple[torch.Tensor, Cache]:
        past = past or Cache()
        for layer in self.layers:
            x = layer(x, past=past)
        return x, past


class Reader(Decoder):
    """A second stack reads the cache that the first one has written."""

    def __init__(self) -> None:
        super().__init__()
        self.readers = stack()

    def forward(
        self, x: torch.Tensor, past: Cache | None = None, use_cache: bool | None = None
    ) -> tuple[torch.Tensor, Cache]:
        x, past = super().forward(x, past)
        y = x[:, : 1 + past.get_seq_length() // 2]
        for layer in self.readers:
            y = layer(y, past)
        return y, past


class Twice(Decoder):
    """A second pass through the same stack reads what the first one has written."""

    def forward(
        self, x: torch.Tensor, past: Cache | None = None, use_cache: bool | None = None
    ) -> tuple[torch.Tensor, Cache]:
        x, past = super().forward(x, past)
        return super().forward(x[:, :2], past)


def inputs(step: int) -> torch.Tensor:
    return torch.randn(2, 4 + step, WIDTH, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("kind", [Decoder, Reader, Twice])
def test_caches_are_read_as_in_plain_training(kind: type[Decoder]) -> None:
    model = kind()
    plain = copy.deepcopy(model)
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        for step in range(4):
            for each in (model, plain):
                each(inputs(step))[0].pow(2).sum().backward()
            assert_same_gradients(model, plain)


def tiny(kind: str) -> nn.Module:
    import transformers

    if kind == "CTRLLMHeadModel":
        config: Any = transformers.CTRLConfig(vocab_size=50, n_embd=16, dff=16, n_layer=3, n_head=2)
    else:
        config = transformers.GPTNeoXJapaneseConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2
        )
    model: nn.Module = getattr(transformers, kind)(config)
    return model.train()


@pytest.mark.parametrize("kind", ["CTRLLMHeadModel", "GPTNeoXJapaneseForCausalLM"])
def test_layers_that_transformers_would_not_checkpoint_train_with_their_cache(kind: str) -> None:
    model, tokens = tiny(kind), torch.randint(0, 50, (2, 9))
    plain = copy.deepcopy(model)
    layer = next(m for n, m in model.named_modules() if n.endswith((".h.0", ".layers.0")))
    seen: list[weakref.ref[torch.Tensor]] = []
    layer.register_forward_hook(lambda *call: seen.append(weakref.ref(call[1][0])))
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        for _ in range(3):
            for each in (model, plain):
                torch.manual_seed(1)
                each(input_ids=tokens, labels=tokens).loss.backward()
            assert_same_gradients(model, plain)
    gc.collect()
    assert len(seen) == 3
    assert not any(ref() is not None for ref in seen)


def test_keys_of_a_recomputed_block_are_freed_after_its_run() -> None:
    model = Decoder()
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        for step in range(3):
            for layer in model.layers:
                layer.made.clear()
            out, cache = model(inputs(step))
            alive = [ref() is not None for layer in model.layers for ref in layer.made]
            out.sum().backward()
    assert not any(alive)
    assert cache.get_seq_length() == 0


def test_a_cache_holds_no_tensor_after_the_step() -> None:
    model = Decoder()
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        for step in range(3):
            out, cache = model(inputs(step), use_cache=True)
            out.sum().backward()
            del out, cache
            gc.collect()
            assert not any(ref() is not None for layer in model.layers for ref in layer.made)


def test_a_requested_cache_is_filled_once() -> None:
    model = Decoder()
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        for step in range(3):
            out, cache = model(inputs(step), use_cache=True)
            (out.sum() + sum(layer.keys.sum() for layer in cache.layers)).backward()
            assert cache.get_seq_length() == 4 + step


def test_a_block_with_a_tuned_prefix_in_its_cache_is_recomputed() -> None:
    model = Decoder()
    plain = copy.deepcopy(model)

    def tuned(model: Decoder) -> Any:
        prefix = torch.linspace(-1, 1, 2 * 3 * WIDTH).view(2, 3, WIDTH).requires_grad_()
        past = Cache()
        for layer in range(3):
            past.update(prefix, layer)
        model(inputs(0), past)[0].sum().backward()
        return prefix.grad

    expected = [tuned(plain) for _ in range(2)]
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        assert torch.equal(tuned(model), expected[0])
        before = Attention.runs
        assert torch.equal(tuned(model), expected[1])
    assert Attention.runs - before == 2 * 3
    assert_same_gradients(model, plain)


def test_a_cache_first_read_in_a_later_step_warns_and_is_filled_from_then_on() -> None:
    model = Decoder()
    with mimose.auto_checkpoint(model, "1GiB", planner="recompute_all"):
        for step in range(2):
            model(inputs(step))[0].sum().backward()
        _, cache = model(inputs(2))
        with pytest.warns(UserWarning, match="cache is read.*use_cache=True"):
            model(inputs(2), cache)[0].sum().backward()
        _, cache = model(inputs(3))
        assert cache.get_seq_length() == 7
