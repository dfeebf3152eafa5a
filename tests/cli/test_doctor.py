"""The doctor finds what is wrong, says what mends it, and is silent where nothing is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

import models
from mimose.doctor import NOTE, OK, PROBLEM, examine, main


def kinds(model: nn.Module | None = None, budget: str | None = None) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {OK: [], NOTE: [], PROBLEM: []}
    for finding in examine(model, budget):
        found[finding.kind].append(f"{finding.what} → {finding.remedy}")
    return found


def test_a_good_machine_has_no_problem() -> None:
    found = kinds()
    assert found[PROBLEM] == []
    assert any(what.startswith("torch 2.") for what in found[OK])


def test_blocks_that_would_be_found_are_named() -> None:
    found = kinds(models.Encoder().train())
    assert any("3 blocks in Encoder: encoder.layers.0" in what for what in found[OK])
    assert found[PROBLEM] == []


def test_a_model_without_blocks_is_a_problem_with_a_remedy() -> None:
    (problem,) = kinds(nn.Linear(4, 4))[PROBLEM]
    assert "no blocks found in Linear" in problem
    assert "blocks=" in problem


def test_weights_that_exceed_the_budget_are_a_problem() -> None:
    big = nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4), num_layers=2)
    (problem,) = kinds(big, "4MiB")[PROBLEM]
    assert "no plan can help" in problem
    assert kinds(big, "1GiB")[PROBLEM] == []


def test_a_frozen_model_is_a_problem() -> None:
    (problem,) = kinds(models.Encoder().requires_grad_(False))[PROBLEM]
    assert "no parameter requires a gradient" in problem


def test_data_parallel_is_a_problem() -> None:
    (problem,) = kinds(nn.DataParallel(models.Encoder()))[PROBLEM]
    assert "DistributedDataParallel" in problem


def test_eval_mode_is_noted() -> None:
    assert any("model.train()" in note for note in kinds(models.Encoder().eval())[NOTE])


def test_being_switched_off_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMOSE_DISABLE", "1")
    (problem,) = kinds()[PROBLEM]
    assert "unset MIMOSE_DISABLE" in problem


def test_an_allocator_that_tells_nothing_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    (problem,) = kinds()[PROBLEM]
    assert "take backend:cudaMallocAsync out" in problem


def test_the_examined_model_is_left_as_it_was() -> None:
    model = models.Encoder()
    examine(model)
    assert not any(m.__dict__.get("_compiled_call_impl") for m in model.modules())


def test_the_command_makes_the_model_and_tells_by_its_exit_status(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_nets.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2), 4)\n"
        "def none(): return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["--model", "my_nets:make"]) == 0
    assert "4 blocks in TransformerEncoder" in capsys.readouterr().out
    assert main(["--model", "my_nets:make", "--budget", "1MiB", "--json"]) in (0, 1)
    assert all(set(f) == {"kind", "what", "remedy"} for f in json.loads(capsys.readouterr().out))
    for wrong, why in (
        ("my_nets", "write module:factory"),
        ("my_nets:nothing", "cannot be made"),
        ("nowhere:make", "cannot be made"),
        ("my_nets:none", "not a nn.Module"),
    ):
        assert main(["--model", wrong]) == 2
        err = capsys.readouterr().err
        assert why in err
        assert err.count("\n") == 1
    assert main(["--budget", "6G"]) == 2
    assert "did you mean 6GiB?" in capsys.readouterr().err


def test_a_transformers_configuration_is_examined_without_its_weights(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert main(["--config", str(tmp_path)]) == 0
    assert "12 blocks in BertModel: encoder.layer.0" in capsys.readouterr().out
    assert main(["--config", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
