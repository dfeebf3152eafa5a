"""Every example is short, marks the line that matters, and does what it says."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
ALL = sorted(FOLDER.glob("*.py"))
MARK = "# the one line that matters"


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, where libraries are loaded already: with budgets that other tests allow."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(FOLDER / name), run_name="__main__")


def output_of(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(FOLDER / name), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(FOLDER.parent / "src"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.stem)
def test_example_is_short_and_marks_one_line(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert len(lines) < 60
    assert sum(line.endswith(MARK) for line in lines) == 1


def test_plain_loop_keeps_some_blocks_and_recomputes_others() -> None:
    out = output_of("plain_loop.py", "--steps=10")
    plans = {line.split()[-1] for line in out.splitlines() if ": length " in line}
    assert any({"r", "K"} <= set(plan) for plan in plans)
    assert "this plan: " in out
    assert "10 steps:" in out


def test_sft_compares_three_ways(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("sft_lora.py", "--steps=6", monkeypatch=monkeypatch)
    rows = [line for line in capsys.readouterr().out.splitlines() if "peak" in line]
    peaks = {row[:22].strip(): int(row.split()[-2]) for row in rows}
    assert peaks["every layer recomputed"] < peaks["mimose"] < peaks["everything kept"]


def test_trainer_logs_and_sums_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("trainer.py", "--steps=8", "--memory-budget=1GiB", monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    assert "'mimose/predicted_peak_gib'" in out
    assert "8 steps:" in out


def test_lightning_module_sums_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("lightning_module.py", "--steps=8", "--memory-budget=1GiB", monkeypatch=monkeypatch)
    assert "8 steps:" in capsys.readouterr().out
