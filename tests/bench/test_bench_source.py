"""Results name the code that made them: a commit, and files that are the commit's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mimose.bench.circumstances import circumstances
from mimose.bench.extras import BenchError
from mimose.bench.source import git_hash, source

FILES = {
    "__init__.py": "one\n",
    "a.py": "two\n",
    "a/deep.py": "three\n",  # git sorts a folder as if its name ended in a slash
    "a0.py": "four = 4\n",
    "data/lengths.csv": "length,count\n",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with compiled code in it, in no repository."""
    folder = tmp_path / "src" / "package"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in ("a", "gone"):  # of a folder that is gone, compiled code may be left
        (folder / name / "__pycache__").mkdir(parents=True, exist_ok=True)
        (folder / name / "__pycache__" / "x.cpython-312.pyc").write_bytes(b"compiled")
    return folder


@pytest.fixture
def committed(package: Path) -> Path:
    """The same, committed."""
    git(package.parents[1], "init", "--quiet")
    git(package, "add", "*.py", "*.csv")
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    git(package, *who, "commit", "--quiet", "--message", "all")
    return package


@pytest.fixture(autouse=True)
def _nothing_passed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIMOSE_COMMIT", "MIMOSE_TREE"):
        monkeypatch.delenv(name, raising=False)


def git(folder: Path, *words: str) -> str:
    command = ["git", *words]
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_hash_of_a_folder_is_gits_own(committed: Path) -> None:
    assert git_hash(committed) == git(committed, "rev-parse", "HEAD:./")
    assert git_hash(committed / "a.py") == git(committed, "rev-parse", "HEAD:./a.py")


def test_files_as_committed_are_clean(committed: Path) -> None:
    found = source(package=committed)
    assert found.state == "clean"
    assert found.commit == git(committed, "rev-parse", "HEAD")
    assert found.tree == git(committed, "rev-parse", "HEAD:./")


@pytest.mark.parametrize("name", ["a/deep.py", "new.py"])
def test_a_changed_or_new_file_is_refused_unless_dirty_code_is_allowed(
    committed: Path, name: str
) -> None:
    (committed / name).write_text("changed\n")
    with pytest.raises(BenchError, match=r"could not be traced.* Commit first, or say --allow-d"):
        source(package=committed)
    found = source(package=committed, allow_dirty=True)
    assert found.state == found.to_plain()["tree_state"] == "dirty"
    assert found.tree == git_hash(committed)


def test_an_unknown_commit_is_refused_with_what_to_set(package: Path) -> None:
    with pytest.raises(BenchError, match=r"in no repository.* Set MIMOSE_COMMIT and MIMOSE_TREE"):
        source(package=package)
    assert source(package=package, allow_dirty=True).to_plain()["commit"] == "unknown"


def test_without_git_commit_and_hash_are_passed_in_and_the_hash_is_checked(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIMOSE_COMMIT", "c0ffee")
    with pytest.raises(BenchError, match="not MIMOSE_TREE to check the files by"):
        source(package=package)
    monkeypatch.setenv("MIMOSE_TREE", git_hash(package))
    assert (source(package=package).commit, source(package=package).state) == ("c0ffee", "clean")
    (package / "a.py").write_text("changed\n")
    with pytest.raises(BenchError, match=r"has the hash .* and at commit c0ffee "):
        source(package=package)


def test_what_git_knows_counts_more_than_what_is_passed_in(
    committed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIMOSE_COMMIT", "c0ffee")
    monkeypatch.setenv("MIMOSE_TREE", "0" * 40)
    assert source(package=committed).commit == git(committed, "rev-parse", "HEAD")


def test_scripts_that_are_imported_count_too(
    committed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(committed))
    __import__("a0")
    try:
        found = source(package=committed / "data", scripts=committed)
        assert found.scripts == {"a0.py": git(committed, "rev-parse", "HEAD:./a0.py")}
        (committed / "a0.py").write_text("changed\n")
        with pytest.raises(BenchError, match=r"not as at commit .*: a0\.py"):
            source(package=committed / "data", scripts=committed)
    finally:
        del sys.modules["a0"]


def test_circumstances_tell_code_versions_machine_environment_and_allocator() -> None:
    around = circumstances("cpu", allow_dirty=True)
    for name in ("commit", "tree_state", "source_tree", "scripts", "date", "machine"):
        assert name in around
    for name in ("python", "torch", "transformers", "mimose", "environment", "allocator"):
        assert name in around
