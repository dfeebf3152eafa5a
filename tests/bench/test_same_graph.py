"""From recorded graphs to the page that compares all planners on them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mimose.bench.arena import Arena, Conditions
from mimose.bench.workloads import TASKS
from mimose.comparison import planners_of_the_field

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*-same_graph.json"))

sys.path.insert(0, str(ROOT / "benchmarks"))

import field_page  # noqa: E402
import record_graphs  # noqa: E402
import same_graph  # noqa: E402


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """BERT in miniature, recorded and compared."""
    folder, graph = tmp_path_factory.mktemp("graphs"), record_graphs.GRAPHS["BERT-base"]
    arena = Arena(TASKS[graph.task], Conditions(device="cpu", steps=2, small=True))
    recorded = record_graphs.recorded("BERT-base", arena, graph.shapes(small=True), folder)
    recorded = json.loads(json.dumps(recorded))
    planners, _ = planners_of_the_field(5.0)
    sizes = [same_graph.compared(folder, recorded, size, planners) for size in recorded["sizes"]]
    around = {"machine": "a machine", "torch": "2", "commit": "0" * 40, "date": "today"}
    return {
        **around,
        "planned": around,
        "small": True,
        "time_limit_seconds": 5.0,
        "link": same_graph.LINK.to_plain(),
        "graphs": {"BERT-base": {**recorded, "sizes": sizes}},
    }


def cells(size: dict[str, Any], planner: str) -> list[dict[str, Any]]:
    return [cell for row in size["rows"] for cell in row["cells"] if cell["planner"] == planner]


def test_trace_and_timeline_agree_on_the_peak_of_the_step(result: dict[str, Any]) -> None:
    for size in result["graphs"]["BERT-base"]["sizes"]:
        trace = size["trace"]
        assert trace["peak_bytes"] == pytest.approx(trace["timeline_peak_bytes"], rel=0.01)


def test_plans_fit_from_the_floor_on_and_never_below(result: dict[str, Any]) -> None:
    for size in result["graphs"]["BERT-base"]["sizes"]:
        optimal = cells(size, "optimal")
        assert [cell["over_bytes"] == 0 for cell in optimal] == [False] + [True] * 7
        least, found = size["least_budget_bytes"], size["fits_from_bytes"]["optimal"]["bytes"]
        assert 0.8 * least < found <= least * 1.001


def test_host_memory_never_makes_a_plan_slower(result: dict[str, Any]) -> None:
    for size in result["graphs"]["BERT-base"]["sizes"]:
        pairs = zip(cells(size, "optimal"), cells(size, "optimal+host"), strict=True)
        for without, within in list(pairs)[1:]:
            assert within["extra_seconds"] <= without["extra_seconds"]


def test_dtr_recomputes_nothing_where_everything_fits(result: dict[str, Any]) -> None:
    for size in result["graphs"]["BERT-base"]["sizes"]:
        dtr = cells(size, "dtr")
        assert dtr[-1]["extra_seconds"] <= 0.01 * size["plain_seconds"]
        assert dtr[1]["extra_seconds"] > dtr[-1]["extra_seconds"]


def test_the_page_has_a_table_and_a_drawing_for_each_size(
    result: dict[str, Any], tmp_path: Path
) -> None:
    page = tmp_path / "field.md"
    page.write_text(f"before\n{field_page.BEGIN}\nold\n{field_page.END}\nafter\n", "utf-8")
    field_page.write(result, page)
    text = page.read_text("utf-8")
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert text.count("\n| planning |") == 2
    for number in range(2):
        assert f"images/field-bert-base-{number}.svg" in text
        drawing = tmp_path / "images" / f"field-bert-base-{number}.svg"
        assert drawing.read_text("utf-8").startswith("<svg")


def test_a_planner_that_exceeds_some_budgets_above_its_least_is_found_out() -> None:
    found = same_graph.scanned(lambda bytes_: bytes_ > 400 and not 600 < bytes_ <= 700, 1000)
    assert found == {"bytes": 402, "exceeds_above": pytest.approx(40 / 240)}
    assert same_graph.scanned(lambda _: False, 1000) is None


def test_a_solver_that_ran_out_of_time_shows_its_bound() -> None:
    cell = {"over_bytes": 0, "claims_to_fit": True, "extra_seconds": 0.2, "timed_out": True}
    assert field_page.cell_text({**cell, "bound_seconds": 0.1}, 1.0) == "1.200 ≥ 1.100"
    assert field_page.cell_text({**cell, "bound_seconds": None}, 1.0) == "1.200"


@pytest.mark.parametrize("path", RESULTS[-1:], ids=lambda path: path.name)
def test_the_page_in_docs_comes_of_the_raw_files(path: Path) -> None:
    text = field_page.PAGE.read_text("utf-8")
    written = text.partition(field_page.BEGIN)[2].partition(field_page.END)[0]
    assert written.strip() == "\n\n".join(field_page.sections(json.loads(path.read_text())))
