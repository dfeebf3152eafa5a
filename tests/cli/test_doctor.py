"""The doctor finds what is wrong, says what mends it, and is silent where nothing is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

import models
from mimose.api import extras
from mimose.cli import machine_checks
from mimose.cli.doctor import examine, main
from mimose.cli.findings import NOTE, OK, PROBLEM


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
    assert any("in Encoder: 3 blocks encoder.layers.* (" in what for what in found[OK])
    assert found[PROBLEM] == []


def test_a_model_without_blocks_is_a_problem_with_a_remedy() -> None:
    (problem,) = kinds(nn.Linear(4, 4))[PROBLEM]
    assert "no blocks found in Linear" in problem
    assert problem.endswith("Name the modules to plan for: --blocks 'encoder.layer.*'")


def test_blocks_that_cannot_be_selected_are_named_by_the_options() -> None:
    (problem,) = (f for f in examine(models.Encoder(), blocks=["*"]) if f.kind == PROBLEM)
    assert problem.what == "--blocks '*' selects the whole model"


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
    assert "remove backend:cudaMallocAsync from" in problem


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
        "def own(): raise ValueError('my own')\n"
        "def deep(): return nn.Linear('a', 4)\n"
        "def two(a, b): return nn.Linear(a, b)\n"
    )
    (tmp_path / "needs_more.py").write_text("\nimport nowhere\n")
    monkeypatch.chdir(tmp_path)
    assert main(["--model", "my_nets:make"]) == 0
    assert "in TransformerEncoder: 4 blocks layers.*" in capsys.readouterr().out
    chosen = ["--blocks", "layers.*.linear1", "--blocks", "layers.*.linear2"]
    assert main(["--model", "my_nets:make", *chosen, "--exclude", "layers.0.linear1"]) == 0
    assert (
        "7 blocks layers.*.linear2, layers.1.linear1 … layers.3.linear1 (Linear)"
        in capsys.readouterr().out
    )
    assert main(["--blocks", "layers.*"]) == 2
    assert "add --model or --config" in capsys.readouterr().err
    assert main(["--model", "my_nets:make", "--budget", "1MiB", "--json"]) in (0, 1)
    assert all(set(f) == {"kind", "what", "remedy"} for f in json.loads(capsys.readouterr().out))
    for wrong, why in (
        ("my_nets", "must be module:factory"),
        ("my_nets:nothing", "'my_nets:nothing' failed: AttributeError"),
        ("nowhere:make", "'nowhere:make' failed: ModuleNotFoundError"),
        ("my_nets:none", "returned 3. It must return an nn.Module"),
        ("my_nets:own", "failed: ValueError: my own (my_nets.py, line 5)\n"),
        ("my_nets:deep", "(my_nets.py, line 6)\n"),
        ("my_nets:two", ". The factory must take no arguments\n"),
        ("my_nets:nothing", ". The module must be importable from this folder\n"),
        ("needs_more:make", "No module named 'nowhere' (needs_more.py, line 2)\n"),
    ):
        assert main(["--model", wrong]) == 2
        err = capsys.readouterr().err
        assert why in err
        assert err.count("\n") == 1
    assert main(["--budget", "6G"]) == 2
    assert "did you mean 6GiB?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--modle", "x"], "No such option: --modle (Possible options: --model)."),
        (["x"], "No such argument: x."),
        (["--model", "a:b", "--config", "c"], "not allowed with argument --model."),
    ],
)
def test_invalid_arguments_are_answered_in_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("mimose doctor: ")
    assert err.endswith(f"{told} Try: mimose doctor --help\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("budget", "kind", "words"),
    [("1TiB", PROBLEM, ": too large"), ("50%", OK, ""), ("auto", OK, "")],
)
def test_a_budget_is_held_against_the_machine_without_a_model(
    budget: str, kind: str, words: str
) -> None:
    (said,) = (what for what in kinds(budget=budget)[kind] if what.startswith("a budget of"))
    assert words in said


def test_a_share_of_the_device_is_held_against_the_weights() -> None:
    large = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 4, device="meta"), num_layers=99)
    (problem,) = kinds(large, "0.01%")[PROBLEM]
    assert "no plan can help" in problem


def test_missing_extras_are_noted_with_their_use(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch": "2.11", "numpy": "2.0", "rich": "99.0"}
    for module in (machine_checks, extras):
        monkeypatch.setattr(module, "version_of", there.get)
    notes = [note for note in kinds()[NOTE] if "not installed" in note]
    told = [
        "typer ",
        "transformers and accelerate",
        "lightning",
        "scikit-learn, matplotlib and xgboost",
    ]
    assert [note.startswith(start) for note, start in zip(notes, told, strict=True)] == [True] * 4
    assert "all commands but `mimose doctor`" in notes[0]
    assert "pip install 'typer>=" in notes[0]


def configuration(folder: Path, **values: object) -> str:
    small = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", **small, **values}))
    return str(folder)


def test_a_configuration_is_examined_with_the_head_that_it_names(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    assert main(["--config", configuration(tmp_path, architectures=["BertForMaskedLM"])]) == 0
    said = capsys.readouterr().out
    assert "in BertForMaskedLM: 3 blocks bert.encoder.layer.* (BertLayer)" in said
    assert "without the head" not in said
    assert main(["--config", configuration(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "in BertModel: 3 blocks encoder.layer.*" in said
    assert "without the head" in said


def test_a_configuration_that_cannot_be_had_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name, why in ((str(tmp_path / "nowhere"), "form"), ("nobody/nothing", "cannot be reached")):
        assert main(["--config", name]) == 2
        err = capsys.readouterr().err
        assert why in err
        assert err.count("\n") == 1  # each attempt of the hub's would be told
