"""Which code runs: the commit, and whether the files are really those of it.

The package as it was imported is hashed the way git hashes a folder, so the hash can be compared
with `git rev-parse COMMIT:src/mimose`, on the machine that measures and by anybody later. Where
there is no repository, as on a machine that has only a copy of the files, commit and hash are
passed in:

    MIMOSE_COMMIT=$(git rev-parse HEAD) MIMOSE_TREE=$(git rev-parse HEAD:src/mimose)
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mimose
from mimose.bench.extras import BenchError

PACKAGE = Path(mimose.__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The code that runs."""

    commit: str
    """All 40 digits, or "unknown"."""
    tree: str
    """Git's hash of the package's folder as it was imported."""
    state: Literal["clean", "dirty", "unknown"]
    """Whether the files are the commit's; unknown where nothing tells what the commit's are."""
    why: str = ""
    """What is wrong where the state is not clean."""
    scripts: dict[str, str]
    """Git's hashes of the scripts beside the package that have a part in this, by name."""

    def to_plain(self) -> dict[str, Any]:
        """What results carry."""
        return {
            "commit": self.commit,
            "tree_state": self.state,
            "source_tree": self.tree,
            "scripts": self.scripts,
        }


def source(
    *, allow_dirty: bool = False, scripts: Path | None = None, package: Path = PACKAGE
) -> Source:
    """The code that runs; refused if it is not a commit's, unless dirty code is allowed.

    Args:
        allow_dirty: accept files that differ from the commit, or an unknown commit.
        scripts: a folder whose modules count as well, as far as they are imported.
        package: the folder that is hashed.
    """
    found = _found(package, {} if scripts is None else _imported_from(scripts))
    if found.state != "clean" and not allow_dirty:
        raise BenchError(
            f"{found.why}: results could not be traced to a commit. {_REMEDIES[found.state]}, or "
            "say --allow-dirty"
        )
    return found


_REMEDIES = {
    "dirty": "Commit first",
    "unknown": "Set MIMOSE_COMMIT and MIMOSE_TREE as CONTRIBUTING.md says",
}


def git_hash(path: Path) -> str:
    """Git's hash of a file, or of a folder with all that is in it but compiled code."""
    if path.is_file():
        return _object_hash("blob", path.read_bytes())
    return tree_hash((p.name, p.is_dir(), git_hash(p)) for p in path.iterdir() if _counts(p))


def _counts(path: Path) -> bool:
    """Whether git would know it: files other than compiled code, and folders that hold some."""
    if path.is_dir():
        return path.name != "__pycache__" and any(map(_counts, path.iterdir()))
    return path.suffix != ".pyc"


def tree_hash(entries: Iterable[tuple[str, bool, str]]) -> str:
    """Git's hash of a folder: for each entry its name, whether it is a folder, and its hash."""
    ordered = sorted(entries, key=lambda entry: entry[0] + "/" * entry[1])
    lines = (
        f"{'40000' if folder else '100644'} {name}\0".encode() + bytes.fromhex(its_hash)
        for name, folder, its_hash in ordered
    )
    return _object_hash("tree", b"".join(lines))


def _object_hash(kind: str, content: bytes) -> str:
    head = f"{kind} {len(content)}\0".encode()
    return hashlib.sha1(head + content, usedforsecurity=False).hexdigest()


def _found(package: Path, scripts: dict[str, Path]) -> Source:
    commit, expected = _by_git(package) or _by_environment()
    tree = git_hash(package)
    changed = [name for name, path in scripts.items() if not _as_committed(path)]
    state: Literal["clean", "dirty", "unknown"] = "clean"
    why = ""
    if commit is None:
        state, why = "unknown", f"the commit that runs is not known: {package} is in no repository"
    elif expected is None:
        state, why = "unknown", "MIMOSE_COMMIT is set, but not MIMOSE_TREE to check the files by"
    elif expected != tree:
        state = "dirty"
        why = f"{package} has the hash {tree[:12]}, and at commit {commit[:12]} {expected[:12]}"
    elif changed:
        state, why = "dirty", f"not as at commit {commit[:12]}: {', '.join(changed)}"
    return Source(
        commit=commit or "unknown",
        tree=tree,
        state=state,
        why=why,
        scripts={name: git_hash(path) for name, path in scripts.items()},
    )


def _by_git(package: Path) -> tuple[str, str] | None:
    """Commit and hash of the package's folder in it; None if the package is in no repository."""
    commit, tree = _git(package, "rev-parse", "HEAD"), _git(package, "rev-parse", "HEAD:./")
    return (commit, tree) if commit and tree else None


def _by_environment() -> tuple[str | None, str | None]:
    return os.environ.get("MIMOSE_COMMIT") or None, os.environ.get("MIMOSE_TREE") or None


def _as_committed(path: Path) -> bool:
    """Whether a file is the commit's; without git, the hash in the results tells later."""
    if _git(path.parent, "rev-parse", "HEAD") is None:
        return True
    return _git(path.parent, "rev-parse", f"HEAD:./{path.name}") == git_hash(path)


def _imported_from(folder: Path) -> dict[str, Path]:
    """The files of modules that are imported from a folder, by name."""
    known = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    paths = {Path(file).resolve() for file in known if file}
    inside = (path for path in sorted(paths) if path.parent == folder.resolve())
    return {path.name: path for path in inside if path.is_file()}  # torch.classes names none


def _git(folder: Path, *words: str) -> str | None:
    """What git answers; None if it is not there, or has nothing to say."""
    command = ["git", *words]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
