"""Lightning within a memory budget, on texts of varying length.

Run `python examples/lightning_module.py --memory-budget 26MiB`.
"""

import argparse
import random

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

from mimose.integrations.lightning import MimoseCallback

CUDA = torch.cuda.is_available()


class Classifier(lightning.LightningModule):
    """Tells which of two classes a text is of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(1000, width)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        tokens, labels = batch
        answers = self.head(self.encoder(self.embedding(tokens)).mean(1))
        return nn.functional.cross_entropy(answers, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


def batch(longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = random.randint(longest // 8, longest)
    return torch.randint(0, 1000, (8, length)), torch.randint(0, 2, (8,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-budget", default="8GiB" if CUDA else "26MiB")
    parser.add_argument("--steps", type=int, default=100 if CUDA else 12)
    options = parser.parse_args()

    callback = MimoseCallback(memory_budget=options.memory_budget)  # the one line that matters
    trainer = lightning.Trainer(
        callbacks=[callback], max_epochs=1, logger=False, enable_checkpointing=False
    )
    batches = [batch(1024 if CUDA else 128) for _ in range(options.steps)]
    trainer.fit(Classifier(1024 if CUDA else 64), DataLoader(batches, batch_size=None))
    print(callback.handle.stats())


if __name__ == "__main__":
    main()
