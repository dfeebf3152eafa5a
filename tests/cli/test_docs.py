"""The documentation builds, its links lead somewhere, and what it shows can be run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mimose
from loops import task, train
from mimose.reporting import Explanation, Stats
from mimose.reporting.outlook import Outlook
from mimose.reporting.reader import read_recording
from mimose.training import Subscriber

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    gone = [
        target
        for target in targets
        if not target.startswith(("http", "#"))
        and not (page.parent / target.split("#")[0]).exists()
    ]
    assert gone == []


def test_the_planner_of_the_documentation_plans(recording_file: Path) -> None:
    text = (ROOT / "docs" / "planners.md").read_text("utf-8")
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0].partition("\n\nhandle =")[0]
    names: dict[str, object] = {}
    exec(code, names)
    planner = names["KeepTheSlowest"]()  # type: ignore[operator]
    model, batches, budget = task("encoder")
    with mimose.auto_checkpoint(model, budget, planner=planner) as handle:
        train(model, batches)
        assert handle.stats().peak_bytes <= budget
        assert handle.stats().runs_kept > 0
    recording = read_recording(recording_file)
    outlook = Outlook.of(recording, planner=planner)
    profile = outlook.profile(recording.steps[-1].size)
    assert profile is not None
    assert outlook.plan(profile, budget).fits


def test_the_program_in_the_quick_start_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "quick-start.md").read_text("utf-8")
    (program,) = (c for c in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class " in c)
    names: dict[str, Any] = {}
    exec(program, names)
    names["handle"].detach()
    said = capsys.readouterr().out
    assert "observed" in said
    assert re.search(r"^\d+ [rK]*r[rK]*K[rK]*$", said, re.MULTILINE)


def test_every_event_of_a_subscriber_is_listed() -> None:
    text = (ROOT / "docs" / "looking.md").read_text("utf-8")
    listed = re.findall(r"^\| `(\w+)\(", text, re.MULTILINE)
    assert listed == [name for name in vars(Subscriber) if not name.startswith("_")]


def test_the_documentation_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("material")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    text = (tmp_path / "api" / "index.html").read_text("utf-8")
    assert sorted(name for name in _public_names() if f'id="mimose.{name}"' not in text) == []


def _public_names() -> Iterator[str]:
    """What people may call or read, as the page's anchors name it."""
    yield from ("auto_checkpoint", "checkpoint")
    own = [name for name in vars(mimose.Mimose) if not name.startswith("_")]
    yield from (f"Mimose.{name}" for name in (*own, "budget_bytes", "detach"))
    for kind in (Stats, Explanation):
        where = f"{kind.__module__.removeprefix('mimose.')}.{kind.__name__}"
        yield from (f"{where}.{name}" for name in dir(kind) if not name.startswith("_"))
    yield from (f"integrations.huggingface.{n}" for n in ("enable", "Enabled", "MimoseCallback"))
    yield "integrations.lightning.MimoseCallback"
