"""A training loop of one's own, within a memory budget.

Run `python examples/plain_loop.py --memory-budget 26MiB`.
"""

import argparse
import random

import torch
from torch import nn

import mimose

CUDA = torch.cuda.is_available()


class Classifier(nn.Module):
    """Tells which of two classes a text is of."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(1000, width)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-budget", default="8GiB" if CUDA else "26MiB")
    parser.add_argument("--steps", type=int, default=100 if CUDA else 12)
    parser.add_argument("--width", type=int, default=1024 if CUDA else 64)
    options = parser.parse_args()

    random.seed(0)
    device = torch.device("cuda" if CUDA else "cpu")
    model = Classifier(options.width, layers=6).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    handle = mimose.auto_checkpoint(model, options.memory_budget)  # the one line that matters

    for step in range(options.steps):
        length = random.randint(100, 1000) if CUDA else random.randint(16, 128)
        tokens = torch.randint(0, 1000, (8, length), device=device)
        labels = torch.randint(0, 2, (8,), device=device)
        loss = nn.functional.cross_entropy(model(tokens), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{step}: length {length}, loss {loss:.3f}, {handle.stats().last_plan or 'observed'}")

    print(handle.explain(tokens), handle.stats(), sep="\n\n")


if __name__ == "__main__":
    main()
