"""What `mimose` promises to the outside, and what it needs for that."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import mimose
import models

NAMES = [
    "ArgumentError",
    "BlocksError",
    "BudgetError",
    "ConflictError",
    "Mimose",
    "MimoseError",
    "MimoseWarning",
    "OutOfMemory",
    "RecomputeError",
    "auto_checkpoint",
    "checkpoint",
]


def test_public_names_are_these_and_no_others() -> None:
    assert sorted(mimose.__all__) == NAMES
    public = {
        name
        for name, value in vars(mimose).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(NAMES)


def test_every_public_name_says_what_it_is() -> None:
    for name in NAMES:
        assert inspect.getdoc(getattr(mimose, name)), name


def test_every_public_function_shows_how_it_is_called() -> None:
    functions = [name for name in NAMES if inspect.isfunction(getattr(mimose, name))]
    assert functions == ["auto_checkpoint", "checkpoint"]
    for name in functions:
        assert f"{name}(" in (inspect.getdoc(getattr(mimose, name)) or ""), name
        assert ">>>" in (inspect.getdoc(getattr(mimose, name)) or ""), name


HANDLE = [
    "attached",
    "budget_bytes",
    "detach",
    "explain",
    "load_state_dict",
    "recording",
    "retry",
    "state_dict",
    "stats",
    "subscribe",
]


def test_a_handle_shows_these_names_and_no_others() -> None:
    model = models.Encoder()
    with mimose.auto_checkpoint(model, "1GiB") as handle:
        assert [name for name in dir(handle) if not name.startswith("_")] == HANDLE


def test_the_api_page_names_all_that_a_handle_shows() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    assert [name for name in HANDLE if name not in page] == []


def test_public_methods_of_the_handle_say_what_they_do() -> None:
    for name, member in vars(mimose.Mimose).items():
        if not name.startswith("_"):
            assert inspect.getdoc(member), name


def test_importing_the_core_needs_torch_and_numpy_alone() -> None:
    extras = "transformers accelerate lightning typer rich sklearn matplotlib peft"
    code = f"import sys, mimose; print([m for m in {extras!r}.split() if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
