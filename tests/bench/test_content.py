"""`benchmarks/content.py` at a small size: what it compares is what it says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import content
import content_passes
import tables_of_content
from content_cases import WORDS, Experts, fresh, moe, rows
from content_evictable import WAYS, evictable
from content_passes import LOOPS


def test_experts_that_run_as_one_padded_batch_do_what_each_would_alone() -> None:
    torch.manual_seed(0)
    layer = Experts(16)
    tokens = torch.randn(50, 16)
    weight, expert = layer.gate(tokens).softmax(-1).max(-1)
    alone = torch.stack(
        [
            w * torch.nn.functional.gelu(x @ layer.up[e]) @ layer.down[e]
            for x, w, e in zip(tokens, weight, expert, strict=True)
        ]
    )
    torch.testing.assert_close(layer.routed(tokens), alone)
    assert len(expert.unique()) > 3


@pytest.mark.parametrize("make", [rows, moe])
def test_a_step_sees_the_same_in_every_run(make: Any) -> None:
    losses = []
    for _ in range(2):
        case = fresh(lambda: make("cpu", 3), "cpu")
        for number in (2, 0):
            torch.manual_seed(number)
            losses.append(float(case.loss(number)().detach()))
    assert losses[:2] == losses[2:]
    assert losses[0] != losses[1]


def test_later_blocks_see_the_share_of_tokens_that_the_content_says() -> None:
    case = rows("cpu", 8)
    seen: list[tuple[int, int]] = []
    case.model.embedding.register_forward_hook(
        lambda _, args, out: seen.append((args[0].numel(), int((args[0] < WORDS // 2).sum())))
    )
    reached: list[int] = []
    case.model.chosen[0].register_forward_hook(lambda _, args, out: reached.append(len(args[0])))
    for number in range(8):
        case.loss(number)()
    assert reached == [chosen for _, chosen in seen]
    shares = [chosen / tokens for tokens, chosen in seen]
    assert min(shares) < 0.5 < max(shares) <= 1


def test_a_case_is_trained_under_a_budget_and_every_step_has_its_price(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = content.content("rows", "cpu", 10, torch_all=True)
    told = found["summary"]
    assert found["plain_exceeds"] == 0.5
    assert told["lost"] == 0
    assert told["priced_steps"] == sum(told["kinds"].values()) == 10
    assert told["held_over_budget"] <= 1
    assert told["runs_recomputed"] >= told["runs_recomputed_by_oracle"] > 0
    assert len(found["torch_all_seconds"]) == 10
    assert capsys.readouterr().out.startswith("rows")
    result = {**AROUND, "cases": {"rows": found}}
    (row,) = table_of(result)
    assert row[:2] == ["rows", "10"]
    assert row[3:5] == ["50%", "0"]


def test_an_outlier_fits_only_recomputed() -> None:
    found = content.outlier("cpu", 6)
    assert found["recomputed"] < found["budget"] < found["kept"]
    assert found["lost"] == []
    assert len(found["rows"]["seconds"]) == 27
    assert found["rows"]["recomputed"][6] > 0
    text = "".join(tables_of_content.content({**AROUND, "outlier": found}))
    assert "Out of memory: 0;" in text


def test_steps_run_in_the_ways_that_are_timed() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(4))
    )
    x = torch.randn(16, 8)
    found = evictable("stack", model, lambda: model(x).sum(), "cpu", steps=5)
    assert list(found["seconds"]) == list(WAYS)
    # A step that ran in another way, after a surprise, is not counted.
    assert all(3 <= spread["n"] <= 5 for spread in found["seconds"].values())
    (row,) = table_of({**AROUND, "evictable": {"stack": found}})
    assert row[0] == "stack"
    assert row[1].endswith("×1.000")


@pytest.mark.parametrize("name", LOOPS)
def test_several_passes_are_trained_under_a_budget(name: str) -> None:
    run = content_passes.passes(name, "cpu", 12)
    assert run["lost"] == []
    assert run["held_over_budget"] <= 1
    assert run["compared"] > 0
    assert run["worst_under"] <= 0.003
    (row,) = table_of({**AROUND, "passes": {name: run}})
    assert row[0] == name


AROUND = {
    "machine": "m",
    "torch": "t",
    "transformers": "h",
    "python": "p",
    "date": "d",
    "commit": "c" * 40,
}


def table_of(result: dict[str, Any]) -> list[list[str]]:
    """The rows of the only table; all are as long as its header."""
    (text,) = (part for part in tables_of_content.content(result) if part.startswith("|"))
    lines = [line.strip("| ").split(" | ") for line in text.strip().splitlines()]
    assert len({len(line) for line in lines}) == 1
    return lines[2:]
