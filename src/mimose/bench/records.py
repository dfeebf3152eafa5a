"""The results file: one JSON object a line, written as things are measured.

The first line says where, with what and how; then a line for what is known of each task (`survey`),
for its estimators, and for each run. A file can be continued: what it holds is not measured again.
A line that was cut by a crash is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mimose
from mimose.bench.extras import BenchError
from mimose.bench.harness import Run, Steps
from mimose.bench.survey import Survey

FORMAT = 2
"""Format 1 is read, too: what it calls `paper` is the contestant `greedy+shuttle`."""
_READ = (1, 2)
_BEFORE = {"leg": 0}
"""Conditions that older files do not name."""

Key = tuple[str, int | None, str, int]
"""A run: task, budget in bytes, contestant, round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Which code made a run: a file may be continued by another commit's."""

    commit: str = "unknown"
    tree_state: str | None = None
    """Clean, dirty or unknown; None in files that do not tell."""
    source_tree: str | None = None
    """Git's hash of `src/mimose`."""

    @classmethod
    def of(cls, around: dict[str, Any]) -> Code:
        """From what was recorded around a measurement, or of a run."""
        known = {name: around[name] for name in cls.__dataclass_fields__ if name in around}
        return cls(**known)

    def __str__(self) -> str:
        return self.commit[:7] + (" (dirty)" if self.tree_state == "dirty" else "")


UNKNOWN = Code()


@dataclass(slots=True, kw_only=True)
class Record:
    """One run, with what identifies it."""

    task: str
    budget_bytes: int | None
    contestant: str
    round: int
    run: Run
    code: Code = UNKNOWN

    @property
    def key(self) -> Key:
        return self.task, self.budget_bytes, self.contestant, self.round


@dataclass(slots=True)
class Results:
    """A results file, read."""

    path: Path
    header: dict[str, Any]
    surveys: dict[str, Survey] = field(default_factory=dict)
    limits: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    estimators: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    records: dict[Key, Record] = field(default_factory=dict)

    @property
    def conditions(self) -> dict[str, Any]:
        conditions: dict[str, Any] = self.header["conditions"]
        return conditions


class ResultsFile:
    """A results file being written; `with ResultsFile.opened(...)`."""

    def __init__(self, results: Results) -> None:
        self.results = results

    @classmethod
    def opened(cls, path: Path, header: dict[str, Any]) -> ResultsFile:
        """A new file, or an old one to be continued if it was made the same way."""
        header = json.loads(json.dumps({"kind": "header", "format": FORMAT, **header}))
        if not path.exists() or path.stat().st_size == 0:
            _append(path, header)
            return cls(Results(path, header))
        results = read(path)
        if results.header["format"] != FORMAT:
            raise BenchError(
                f"{path} has format {results.header['format']}, and new runs are written in format "
                f"{FORMAT}: write to another --out"
            )
        _refuse_other(results, header)
        _drop_cut_line(path)
        return cls(results)

    def add_survey(self, survey: Survey) -> None:
        self.results.surveys[survey.task] = survey
        _append(self.results.path, {"kind": "survey", **survey.to_plain()})

    def add_limits(self, task: str, limits: Iterable[Any]) -> None:
        rows = [asdict(limit) for limit in limits]
        known = self.results.limits.setdefault(task, [])
        new = [row for row in rows if row not in known]
        if new:
            known.extend(new)
            _append(self.results.path, {"kind": "limits", "task": task, "limits": new})

    def add_estimators(self, task: str, rows: list[dict[str, Any]]) -> None:
        self.results.estimators[task] = rows
        _append(self.results.path, {"kind": "estimators", "task": task, "rows": rows})

    def add(self, record: Record) -> None:
        self.results.records[record.key] = record
        entry = asdict(record)
        _append(self.results.path, {"kind": "run", **entry.pop("code"), **entry})


def read(path: Path) -> Results:
    """Read a results file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}") from error
    header = _parsed(lines[0]) if lines else None
    if header is None or header.get("kind") != "header":
        raise BenchError(f"{path} is not a results file of mimose bench")
    if header.get("format") not in _READ:
        raise BenchError(
            f"{path} has format {header.get('format')} (mimose {header.get('mimose')}); this is "
            f"mimose {mimose.__version__}, which reads formats {_READ[0]} to {FORMAT}: measure "
            "anew into another --out"
        )
    results = Results(path, header)
    for line in lines[1:]:
        entry = _parsed(line)
        if entry is not None:
            _take(results, entry)
    return results


def _take(results: Results, entry: dict[str, Any]) -> None:
    kind = entry.pop("kind")
    if kind == "survey":
        results.surveys[entry["task"]] = Survey.from_plain(entry)
    elif kind == "limits":
        results.limits.setdefault(entry["task"], []).extend(entry["limits"])
    elif kind == "estimators":
        results.estimators[entry["task"]] = entry["rows"]
    elif kind == "run":
        entry["run"] = Run(**{**entry["run"], "steps": Steps(**entry["run"]["steps"])})
        own = {name: entry[name] for name in ("task", "budget_bytes", "contestant", "round", "run")}
        if results.header["format"] == 1 and own["contestant"] == "paper":
            own["contestant"] = "greedy+shuttle"
        record = Record(**own, code=Code.of(entry))
        results.records[record.key] = record


def _refuse_other(results: Results, header: dict[str, Any]) -> None:
    old = results.header
    memory = ("expandable_segments", "page_bytes", "environment", "allocator")
    for name in ("mimose", "machine", "torch", "transformers", *memory):
        if old.get(name) != header.get(name):
            raise BenchError(
                f"{results.path} was measured with {name} {old.get(name)}, and here it is "
                f"{header.get(name)}: results of both in one file could not be compared. Write to "
                "another --out"
            )
    for name, value in header["conditions"].items():
        results.conditions.setdefault(name, _BEFORE.get(name))
        if results.conditions[name] != value:
            raise BenchError(
                f"{results.path} was measured with {name} = {results.conditions.get(name)}, and "
                f"now it is {value}: repeat the former arguments, or write to another --out"
            )


def _append(path: Path, entry: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, separators=(",", ":")) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _drop_cut_line(path: Path) -> None:
    whole = path.read_bytes()
    if not whole.endswith(b"\n"):
        path.write_bytes(whole[: whole.rfind(b"\n") + 1])


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
