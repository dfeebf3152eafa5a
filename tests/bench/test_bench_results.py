"""What is published: commits exist, and tables and claims in prose come of the raw files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mimose.bench.analysis import Sheet
from mimose.bench.records import read
from mimose.bench.report import BEGIN, END
from mimose.bench.sections import page, short_page

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "BENCHMARKS.md", *sorted((ROOT / "docs").glob("*.md")))

sys.path.insert(0, str(ROOT / "benchmarks"))

import claims  # noqa: E402
import claims_of_bench  # noqa: E402
import tables  # noqa: E402


def git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


needs_history = pytest.mark.skipif(
    git("rev-parse", "--is-shallow-repository") != "false", reason="needs the whole history"
)


def recorded() -> Iterator[tuple[str, dict[str, Any]]]:
    """What each file says of the code that made it; files of `mimose bench` once for each run."""
    for path in sorted(RESULTS.glob("*.json")):
        yield path.name, json.loads(path.read_text())
    for path in sorted(RESULTS.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if entry["kind"] == "run":
                yield path.name, entry


@needs_history
def test_every_commit_named_in_results_is_in_the_history() -> None:
    named = {(name, result["commit"]) for name, result in recorded()}
    assert len({name for name, _ in named}) >= 10
    unknown = [
        (name, commit)
        for name, commit in named
        if git("merge-base", "--is-ancestor", commit, "HEAD") is None
    ]
    assert unknown == []


@needs_history
def test_every_commit_named_in_prose_is_in_the_history() -> None:
    prose = {path.name: path.read_text("utf-8") for path in PAGES}
    named = {
        (name, commit)
        for name, text in prose.items()
        for commit in re.findall(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7}\b", text)
    }
    assert {commit for _, commit in named} >= {"f5bba53", "54e956f"}
    unknown = [
        (name, commit)
        for name, commit in named
        if git("merge-base", "--is-ancestor", commit, "HEAD") is None
    ]
    assert unknown == []


def test_results_with_a_hash_of_their_code_are_of_code_that_is_a_commits() -> None:
    states = {result["tree_state"] for _, result in recorded() if "tree_state" in result}
    assert states <= {"clean"}


@needs_history
def test_the_hash_of_the_code_in_results_is_that_of_their_commit() -> None:
    wrong = [
        name
        for name, result in recorded()
        if "source_tree" in result
        and git("rev-parse", f"{result['commit']}:src/mimose") != result["source_tree"]
    ]
    wrong += [
        f"{name}: {script}"
        for name, result in recorded()
        for script, its_hash in result.get("scripts", {}).items()
        if git("rev-parse", f"{result['commit']}:benchmarks/{script}") != its_hash
    ]
    assert wrong == []


def test_the_page_of_results_comes_of_the_raw_files() -> None:
    assert tables.page(RESULTS.glob("*.json")) + "\n" == (RESULTS / "README.md").read_text("utf-8")


def sheets_of(text: str) -> list[Sheet]:
    """Of the files that a page names, in its order."""
    names = dict.fromkeys(re.findall(r"[\w.-]+\.jsonl", text.partition("\n\n## ")[0]))
    assert names
    return [Sheet(read(RESULTS / name)) for name in names]


def test_the_ratios_and_goals_of_the_benchmark_come_of_the_raw_files() -> None:
    text = (ROOT / "BENCHMARKS.md").read_text("utf-8")
    link, _, written = text.partition(BEGIN)[2].partition(END)[0].strip().partition("\n\n")
    assert written == "\n\n".join(short_page(sheets_of(link)))


def test_the_tables_of_the_benchmark_come_of_the_raw_files() -> None:
    text = (RESULTS / "bench" / "README.md").read_text("utf-8")
    tables = text[text.index("## Time and memory") : text.index("## Figures")].strip()
    goals = text[text.rindex("## Goals") :].strip()
    assert f"{tables}\n\n{goals}" == "\n\n".join(page(sheets_of(text)))


def test_every_claim_in_prose_is_what_the_raw_files_say() -> None:
    made = [*claims.claims(), *claims_of_bench.claims()]
    assert {claim.page for claim in made} > {"README.md", "BENCHMARKS.md"}
    assert [claim for claim in made if not claim.is_made] == []


def test_a_figure_that_is_not_the_files_would_be_found() -> None:
    assert claims.Claim("BENCHMARKS.md", "1,180 of them in runs with surprises").is_made
    assert not claims.Claim("BENCHMARKS.md", "5,000 of them in runs with surprises").is_made
