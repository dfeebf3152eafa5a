"""What is out of date is measured again, in parts, by commands that the scripts understand."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import measure
import raw_files
from measure import MEASUREMENTS, Measurement
from mimose.bench.command import app
from mimose.bench.lineup import contestant_named
from mimose.bench.source import source
from mimose.bench.workloads import task_named

WRITES_ITS_TIME_LIMIT = """
import json, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
found = json.loads(out.read_text())["parts"] if out.exists() else []
out.write_text(json.dumps({"parts": [*found, sys.argv[1:]]}))
"""


class _Understood(Exception):
    """A script has parsed its command line."""


def of_scripts(*, bench: bool) -> list[str]:
    return [name for name, m in MEASUREMENTS.items() if m.command.startswith("bench ") == bench]


@pytest.mark.parametrize("name", of_scripts(bench=False))
def test_scripts_understand_their_commands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self: argparse.ArgumentParser, *args: Any) -> None:
        parse(self, *args)
        raise _Understood

    _, script, *options = MEASUREMENTS[name].arguments(Path("out.json"), 300)
    monkeypatch.setattr(sys, "argv", [script, *options])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    with pytest.raises(_Understood):
        importlib.import_module(Path(script).stem).main()


@pytest.mark.parametrize("name", of_scripts(bench=True))
def test_bench_understands_its_commands(name: str) -> None:
    _, *options = MEASUREMENTS[name].arguments(Path("out.jsonl"), 300)[3:]
    understood = typer.main.get_command(app).make_context("bench", ["--tables", *options]).params
    assert all(map(task_named, understood["tasks"].split(",")))
    assert all(map(contestant_named, understood["contestants"].split(",")))
    assert understood["time_limit"] == 285


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where two scripts of this test's own write to, and no results are known."""
    script = tmp_path / "script.py"
    script.write_text(WRITES_ITS_TIME_LIMIT)
    known = {"whole": Measurement(str(script), 60), "in parts": Measurement(f"{script}", 20, True)}
    monkeypatch.setattr(measure, "MEASUREMENTS", known)
    monkeypatch.setattr(raw_files, "RESULTS", tmp_path)
    return tmp_path


def parts_in(folder: Path, name: str) -> list[list[str]]:
    (path,) = folder.glob(f"*-cpu-{name}.json")
    parts: list[list[str]] = json.loads(path.read_text())["parts"]
    return parts


def test_what_does_not_fit_into_the_time_is_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure.measure(["whole", "in parts"], folder, 50, "cpu")
    assert "whole: left out" in capsys.readouterr().out
    assert not list(folder.glob("*whole*"))
    ((*_, option, limit),) = parts_in(folder, "in parts")
    assert option == "--time-limit"
    assert 20 < int(limit) <= 35


@pytest.mark.parametrize("same", [True, False])
def test_a_part_goes_on_where_the_last_one_of_the_same_code_stopped(
    folder: Path, same: bool
) -> None:
    tree = source(allow_dirty=True).tree if same else "another"
    before = {"parts": [["before"]], "source_tree": tree}
    (folder / "2020-01-01-cpu-in parts.json").write_text(json.dumps(before))
    into = folder / "new"
    assert measure.measure(["in parts"], into, 50, "cpu")
    found = parts_in(into, "in parts")
    assert [part[0] for part in found] == (["before", "--out"] if same else ["--out"])


def test_a_failure_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "script.py").write_text("raise SystemExit(3)")
    assert not measure.measure(["whole"], folder, 100, "cpu")
    assert "whole: failed with 3" in capsys.readouterr().out


def test_results_of_other_code_are_out_of_date_and_parts_may_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure.out_of_date("cpu") == ["whole", "in parts"]
    monkeypatch.setattr(measure, "state", lambda name, device: "current")
    assert measure.out_of_date("cpu") == ["in parts"]
