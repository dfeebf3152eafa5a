"""The pages of raw results: all tables of the newest files, and of those that they replaced.

    python benchmarks/tables.py

writes `README.md` and `HISTORY.md` in `benchmarks/results/`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import tables_of_budgets as budgets
import tables_of_content as content
import tables_of_costs as costs
import tables_of_field as field
import tables_of_host as host
import tables_of_training as training
from mimose.bench.markdown import table
from raw_files import RESULTS, age, all_files, newest, oldest_commit

AGE_BEGIN, AGE_END = "<!-- age: begin -->", "<!-- age: end -->"
"""What lies between changes with every commit; all else follows from the files."""

INTRODUCTION = """\
# Results

Made by `benchmarks/tables.py` from the files beside this page, of each kind the newest;
[older ones](HISTORY.md) have a page of their own, and so has [`mimose bench`](bench/README.md).
Figures hold for the commits that are named. In files without `source_tree` the commit was typed in
by hand and not checked.
"""
HISTORY = """\
# Results that newer ones have replaced

Made by `benchmarks/tables.py`. Figures hold for the commits that are named.
"""

Writer = Callable[[dict[str, Any]], Iterator[str]]
WRITERS: dict[str, Writer] = {
    "ablation": costs.ablation,
    "allocator": budgets.allocator,
    "before_after": costs.before_after,
    "content": content.content,
    "convergence": training.convergence,
    "dtr_against_simrd": field.dtr_against_simrd,
    "estimators_on_surveys": field.estimators_on_surveys,
    "first_steps": budgets.first_steps,
    "fragmentation": budgets.fragmentation,
    "host": host.host,
    "operator_memory": field.operator_memory,
    "planner_quality": budgets.planner_quality,
    "planning_cost": costs.planning_cost,
    "promise": budgets.promise,
    "recompute_cost": costs.recompute_cost,
    "same_graph": field.same_graph,
    "sft_8b": training.sft_8b,
    "sft_8b_fixed": training.sft_8b_fixed,
    "solvers": field.solvers,
    "step_cost": costs.step_cost,
    "trainer_sft": costs.trainer_sft,
    "transfers_quality": host.transfers_quality,
}


def page(paths: Iterable[Path], introduction: str = INTRODUCTION, ages: str = "") -> str:
    """A page on these JSON files; without `ages`, the place for them is empty."""
    written = (part for path in sorted(paths) for part in _section(path))
    head = [introduction, f"{AGE_BEGIN}\n{ages}{AGE_END}\n"]
    return "\n".join([*head, *_without_repeated_headings(written)])


def _without_repeated_headings(parts: Iterable[str]) -> Iterator[str]:
    """Files of one kind in a row share a heading."""
    heading = ""
    for part in parts:
        if part == heading:
            continue
        if part.startswith("## "):
            heading = part
        yield part


def _section(path: Path) -> Iterator[str]:
    """A file's tables, and its figure if there is one."""
    result = json.loads(path.read_text())
    yield from WRITERS[result["benchmark"]](result)
    if path.with_suffix(".png").exists():
        yield f"![{path.stem}]({path.stem}.png)\n"


def ages_of(paths: Iterable[Path]) -> str:
    """How old each of these files is, as a table; as git tells now."""
    rows = []
    for path in paths:
        benchmark, commit = oldest_commit(path)
        rows.append([f"`{path.name}`", commit[:7], age(commit, benchmark)])
    return f"\n{table(['file', 'commit', 'the code that it measures'], rows)}\n\n"


def without_ages(text: str) -> str:
    """A page as it is before ages are filled in."""
    before, _, rest = text.partition(AGE_BEGIN)
    return f"{before}{AGE_BEGIN}\n{AGE_END}{rest.partition(AGE_END)[2]}"


def json_files() -> tuple[list[Path], list[Path]]:
    """The newest of each kind, and the others."""
    everything = list(RESULTS.glob("*.json"))
    current = newest(everything)
    return current, sorted(set(everything) - set(current))


def main() -> None:
    current, replaced = json_files()
    ages = ages_of(newest(all_files()))
    (RESULTS / "README.md").write_text(page(current, ages=ages) + "\n", "utf-8")
    (RESULTS / "HISTORY.md").write_text(page(replaced, HISTORY) + "\n", "utf-8")


if __name__ == "__main__":
    main()
