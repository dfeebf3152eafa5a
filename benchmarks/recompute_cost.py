"""What recomputing every block costs: plain training, torch's checkpoint and mimose, interleaved.

    python benchmarks/recompute_cost.py --out results.json

The three take turns step by step on one model with the same batches, so that whatever else the host
does hits all of them. Reported is the time that each adds to plain training, and its ratio.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from common import bert_base, circumstances, llama_1b, parser_of, save, spread
from mimose.interception import (
    KEEP,
    RECOMPUTE_EVERYTHING,
    Attachment,
    Block,
    BlockInterceptor,
    Directive,
    find_blocks,
)

Batch = dict[str, torch.Tensor]


def _classify(batch: int, length: int, device: str) -> Batch:
    return {
        "input_ids": torch.randint(5, 1000, (batch, length), device=device),
        "labels": torch.randint(0, 2, (batch,), device=device),
    }


def _predict(batch: int, length: int, device: str) -> Batch:
    ids = torch.randint(5, 1000, (batch, length), device=device)
    return {"input_ids": ids, "labels": ids, "use_cache": False}  # type: ignore[dict-item]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Batch], int, int, torch.dtype]] = {
    "BERT-base 32×30": (bert_base, _classify, 32, 30, torch.float32),
    "BERT-base 96×448": (bert_base, _classify, 96, 448, torch.float32),
    "Llama-1B 1×256": (llama_1b, _predict, 1, 256, torch.bfloat16),
    "Llama-1B 8×1024": (llama_1b, _predict, 8, 1024, torch.bfloat16),
}
SMALL = {
    "BERT-tiny 8×30": (
        lambda: bert_base(
            hidden_size=64, num_hidden_layers=4, num_attention_heads=2, intermediate_size=128
        ),
        _classify,
        8,
        30,
        torch.float32,
    )
}


class _Plain:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class _Torch(_Plain):
    def __enter__(self) -> None:
        self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def __exit__(self, *_: object) -> None:
        self.model.gradient_checkpointing_disable()


class _Mimose(_Plain):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.attachment = Attachment(model, find_blocks(model), RECOMPUTE_EVERYTHING)
        self.attachment.detach()

    def __enter__(self) -> None:
        self.attachment.intercept_again()

    def __exit__(self, *_: object) -> None:
        self.attachment.detach()


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _step(model: nn.Module, batch: Batch, device: str) -> float:
    _synchronize(device)
    start = time.perf_counter()
    model(**batch).loss.backward()
    _synchronize(device)
    seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    return seconds


def measure(case: Any, device: str, rounds: int, warmup: int = 5) -> dict[str, Any]:
    make, batch_of, batch, length, dtype = case
    torch.manual_seed(0)
    with torch.device(device):
        model = make().to(dtype).train()
    ways = {"plain": _Plain(model), "torch": _Torch(model), "mimose": _Mimose(model)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(rounds + warmup):
        data = batch_of(batch, length, device)
        for name in names[turn % 3 :] + names[: turn % 3]:
            with ways[name]:
                seconds = _step(model, data, device)
            if turn >= warmup:
                times[name].append(seconds)
    added = {
        name: [t - p for t, p in zip(times[name], times["plain"], strict=True)]
        for name in ("torch", "mimose")
    }
    medians = {name: spread(values)["median"] for name, values in added.items()}
    ratios = [m / t for m, t in zip(added["mimose"], added["torch"], strict=True) if t > 0]
    return {
        "seconds": {name: spread(values) for name, values in times.items()},
        "added_seconds": {name: spread(values) for name, values in added.items()},
        "added_ratio": medians["mimose"] / medians["torch"],
        "added_ratio_by_round": spread(ratios),
    }


class _Keep:
    def direct(self, block: int, args: Any, kwargs: Any) -> Directive:
        return KEEP

    def ran_out(self, block: int) -> None:
        raise AssertionError("no block is guarded here")


class _Nothing(nn.Module):
    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x


def kept_cost(calls: int = 20_000, repeats: int = 15) -> dict[str, Any]:
    """Microseconds that a kept block's call takes beyond an unattached one's."""
    block, x = _Nothing().train(), torch.ones(1, requires_grad=True)
    interceptor = BlockInterceptor(Block("block", block), 0, _Keep())

    def per_call() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            block(x, mask=None)
        return (time.perf_counter() - start) / calls * 1e6

    extra = []
    for _ in range(repeats):
        bare = per_call()
        interceptor.take()
        extra.append(per_call() - bare)
        interceptor.leave()
    return {"microseconds": spread(extra)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--small", action="store_true", help="a tiny model, for a CPU")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    results = {"benchmark": "recompute_cost", **circumstances(options.allow_dirty), "cases": {}}
    results["kept_block"] = kept_cost()
    print("kept block", results["kept_block"], flush=True)
    for name, case in (SMALL if options.small else CASES).items():
        results["cases"][name] = outcome = measure(case, device, options.rounds)
        print(name, f"added, mimose / torch: {outcome['added_ratio']:.3f}", flush=True)
        save(results, options.out)


if __name__ == "__main__":
    main()
