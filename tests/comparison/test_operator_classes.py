"""What a forward leaves in memory, by class of operators."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mimose.comparison import class_of, kept_by_class, record_trace


def kept_by(module: nn.Module, batch: torch.Tensor) -> dict[str, int]:
    outputs: list[torch.Tensor] = []

    def forward() -> None:
        outputs[:] = [module(batch)]

    return kept_by_class(record_trace(forward))


def test_what_the_backward_needs_counts_for_the_operator_that_made_it() -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    kept = kept_by(module, torch.ones(10, 8))
    # GELU saves its input, made by the first product; the second saves what GELU made.
    assert kept == {"matrix product": 4 * 10 * (16 + 4), "activation": 4 * 10 * 16}


def test_what_is_freed_before_the_forward_ends_does_not_count() -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 1).sum()  # the sum needs no value of its input

    assert kept_by(Sum(), torch.ones(10, 8, requires_grad=True)) == {"other": 4}


def test_a_storage_of_which_only_a_view_is_left_counts_in_full() -> None:
    class Part(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.exp(x)[0]

    assert kept_by(Part(), torch.ones(10, 8)) == {"elementwise": 4 * 10 * 8}


@pytest.mark.parametrize("batch", [1, 3])
def test_a_view_of_the_batch_has_no_bytes(batch: int) -> None:
    assert kept_by(nn.Flatten(), torch.ones(batch, 2, 2)) == {}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.up = nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.query(x) @ x.transpose(1, 2), dim=-1)
        return torch.relu(self.up(weights @ x))


def test_softmax_grows_with_the_square_of_the_length_and_the_rest_with_the_length() -> None:
    short, long = (kept_by(Attention(), torch.ones(2, length, 8)) for length in (4, 8))
    assert long["softmax"] == 4 * short["softmax"] > 0
    assert long["activation"] == 2 * short["activation"] > 0


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten.bmm.default", "matrix product"),
        ("aten._softmax.default", "softmax"),
        ("aten.native_layer_norm.default", "normalisation"),
        ("aten._scaled_dot_product_efficient_attention.default", "attention"),
        ("aten.relu_.default", "activation"),
        ("aten.add.Tensor", "elementwise"),
        ("aten.nll_loss_forward.default", "other"),
        ("torchvision.roi_align.default", "other"),
    ],
)
def test_operators_have_the_class_of_their_name(operator: str, kind: str) -> None:
    assert class_of(operator) == kind
