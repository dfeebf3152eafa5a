"""The raw results: which file is the newest of its kind, and how old the code in it is.

    python benchmarks/raw_files.py bench      # the newest files of `mimose bench`, for --report

A file's name is its date, its device and its kind; of files that differ in nothing but the date,
the newest counts and the others are history. A result is current if nothing of what it measures
has changed since its commit.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"

TRAINING = ("costs", "estimation", "planning", "tensors", "memory", "execution", "interception")
TRAINING = (*TRAINING, "training", "api", "units.py", "errors.py")
"""The packages that take part in training; what people look at afterwards changes no result."""
MEASURED = {
    "transfers_quality": ("costs", "planning"),
    "planning_cost": ("costs", "estimation", "planning", "training"),
    "dtr_against_simrd": ("comparison",),
    "estimators_on_surveys": ("costs", "estimation"),
    "operator_memory": ("comparison", "bench"),
    "same_graph": ("costs", "planning", "comparison"),
    "solvers": ("costs", "planning", "comparison"),
    "bench": (*TRAINING, "bench"),
}
"""By benchmark, where that is not just the code that trains."""


def kind_of(path: Path) -> str:
    """Device and kind: `2026-11-16-h200-bench-quick.jsonl` is of the kind `h200-bench-quick`."""
    return path.stem.split("-", 3)[3]


def newest(paths: Iterable[Path]) -> list[Path]:
    """Of each kind the newest, by name."""
    found: dict[str, Path] = {}
    for path in sorted(paths):
        found[kind_of(path)] = path
    return sorted(found.values())


def latest(kind: str) -> Path | None:
    """The newest file of a kind, such as `h200-promise`; None if there is none."""
    return next((path for path in newest(all_files()) if kind_of(path) == kind), None)


def loaded(kind: str) -> dict[str, Any] | None:
    """What the newest JSON file of a kind holds; None if there is none."""
    path = latest(kind)
    if path is None:
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def all_files() -> list[Path]:
    return sorted([*RESULTS.glob("*.json"), *RESULTS.glob("*.jsonl")])


def reported() -> list[Path]:
    """The newest files of `mimose bench` on a GPU: the main one first, the longest name last."""
    files = [path for path in newest(RESULTS.glob("*.jsonl")) if "-h200-bench" in path.name]
    return sorted(files, key=lambda path: (len(kind_of(path)), kind_of(path)))


@functools.cache
def age(commit: str, benchmark: str) -> str:
    """How far the code of today is from the code that was measured, as git tells."""
    paths = [f"src/mimose/{name}" for name in MEASURED.get(benchmark, TRAINING)]
    done = subprocess.run(
        ["git", "rev-list", "--count", f"{commit}..HEAD", "--", *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return "unknown"
    return changes(int(done.stdout))


def changes(count: int) -> str:
    if not count:
        return "current"
    return f"{count} change{'s' * (count > 1)} since"


def oldest_commit(path: Path) -> tuple[str, str]:
    """A file's benchmark and the commit that made it; of several, that of the first run."""
    if path.suffix == ".json":
        result = json.loads(path.read_text())
        return result["benchmark"], result["commit"]
    with path.open() as file:
        for line in file:
            entry = json.loads(line)
            if entry["kind"] == "run":
                return "bench", entry["commit"]
    return "bench", "unknown"


def main() -> None:
    if sys.argv[1:] != ["bench"]:
        raise SystemExit(__doc__)
    print(" ".join(f"--report {path.relative_to(ROOT)}" for path in reported()))


if __name__ == "__main__":
    main()
