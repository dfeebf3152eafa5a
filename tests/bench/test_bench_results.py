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
import pages  # noqa: E402
import raw_files  # noqa: E402
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
    assert {name for name, _ in named} >= {"README.md", "BENCHMARKS.md", "how-it-works.md"}
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


def test_the_pages_of_results_come_of_the_raw_files() -> None:
    current, replaced = tables.json_files()
    written = (RESULTS / "README.md").read_text("utf-8")
    assert tables.without_ages(written) == tables.page(current) + "\n"
    history = (RESULTS / "HISTORY.md").read_text("utf-8")
    assert history == tables.page(replaced, tables.HISTORY) + "\n"


def test_the_page_of_results_says_of_every_file_how_old_it_is() -> None:
    written = (RESULTS / "README.md").read_text("utf-8")
    ages = written.partition(tables.AGE_BEGIN)[2].partition(tables.AGE_END)[0]
    named = dict(re.findall(r"\| `([\w.-]+)` \| [0-9a-f]{7} \| (.+) \|", ages))
    assert set(named) == {path.name for path in raw_files.newest(raw_files.all_files())}
    assert all(re.fullmatch(r"current|\d+ changes? since", age) for age in named.values())


@needs_history
def test_a_result_is_current_until_what_it_measures_changes() -> None:
    head, start = git("rev-parse", "HEAD"), git("rev-list", "--max-parents=0", "HEAD")
    assert head is not None
    assert start is not None
    assert raw_files.age(head, "promise") == "current"
    first = start.splitlines()[0]
    assert re.fullmatch(r"\d+ changes since", raw_files.age(first, "promise"))
    assert raw_files.age("0" * 40, "promise") == "unknown"


def test_of_files_of_one_kind_the_newest_counts() -> None:
    names = (
        "2026-11-15-h200-promise.json",
        "2026-11-18-h200-promise.json",
        "2026-11-16-cpu-x.json",
    )
    found = [path.name for path in raw_files.newest(map(Path, names))]
    assert found == ["2026-11-16-cpu-x.json", "2026-11-18-h200-promise.json"]


def test_the_main_benchmark_is_reported_first() -> None:
    assert raw_files.kind_of(raw_files.reported()[0]) == "h200-bench"


@pytest.mark.parametrize(
    "block", [b for b in pages.BLOCKS if not b.changes_with_commits], ids=lambda b: b[:2]
)
def test_what_pages_take_from_the_raw_files_is_what_these_say(block: pages.Block) -> None:
    assert block.written() == block.make()


def test_pages_say_how_old_their_tables_are() -> None:
    ages = [block for block in pages.BLOCKS if block.changes_with_commits]
    assert {block.page for block in ages} == {"README.md", "BENCHMARKS.md"}
    assert all("code" in block.written() for block in ages)


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
    made = list(claims.claims())
    assert {claim.page for claim in made} == {"docs/limits.md", "docs/how-it-works.md"}
    assert [claim for claim in made if not claim.is_made] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_beside_a_commit_has_a_figure_that_no_file_has(page: Path) -> None:
    assert claims.unclaimed(str(page.relative_to(ROOT))) == []


def test_a_figure_that_is_not_the_files_would_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (claim, *_) = claims.claims()
    figure = claim.words.split()[0]
    text = (ROOT / claim.page).read_text("utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / claim.page).write_text(text.replace(f"{figure} ms", "9.87 ms"))
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    claims._words_of.cache_clear()
    assert not claim.is_made
    (found,) = claims.unclaimed(claim.page)
    assert found.startswith("9.87: ")
    claims._words_of.cache_clear()
