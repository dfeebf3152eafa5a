"""DistributedDataParallel: each rank plans for its own batch, within its own budget.

Run `torchrun --nproc-per-node=2 examples/ddp.py --memory-budget 32MiB`.
"""

import argparse
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mimose

CUDA = torch.cuda.is_available()


class Classifier(nn.Module):
    """Tells which of two classes a text is of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(1000, width)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-budget", default="8GiB" if CUDA else "32MiB")
    parser.add_argument("--steps", type=int, default=100 if CUDA else 12)
    options = parser.parse_args()

    dist.init_process_group("nccl" if CUDA else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
    model = DistributedDataParallel(Classifier(1024 if CUDA else 64).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    random.seed(dist.get_rank())  # other lengths on each rank

    handle = mimose.auto_checkpoint(model, options.memory_budget)  # the one line that matters
    for step in range(options.steps):
        length = random.randint(100, 1000) if CUDA else random.randint(16, 128)
        model(torch.randint(0, 1000, (8, length), device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        plan = handle.stats().last_plan or "observed"
        print(f"rank {dist.get_rank()}, step {step}: {length}, {plan}")
    print(handle.stats())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
