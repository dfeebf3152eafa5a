"""All planners on one recording: a table, a page, and clear refusals."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from mimose.cli.main import main
from mimose.comparison import (
    Call,
    Comparison,
    Constant,
    Event,
    Output,
    Release,
    Trace,
    compare,
    draw,
    page_of_comparison,
    write_trace,
)
from mimose.comparison.compare import Cell
from mimose.comparison.tables import cell_text
from mimose.comparison.tables import cells as cells_of
from mimose.costs import Option, peak
from mimose.errors import ArgumentError
from mimose.reporting import Outlook, read_recording

PLANNERS = ["optimal", "greedy", "greedy_literal", "sublinear", "rotor", "checkmate"]


@pytest.fixture(scope="module")
def comparison(recording_file: Path) -> Comparison:
    return compare(recording_file)


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    pytest.importorskip("typer", reason="the command line is an extra")
    status = main(["compare", *(str(word) for word in words)])
    out, err = capsys.readouterr()
    return status, out, err


def test_every_planner_is_asked_for_every_budget(comparison: Comparison) -> None:
    (size,) = comparison.sizes
    assert len(size.rows) > 3
    for row in size.rows:
        assert [cell.planner for cell in row.cells] == PLANNERS


def test_optimal_always_fits_from_the_floor_on_and_costs_nothing_in_the_end(
    comparison: Comparison,
) -> None:
    (size,) = comparison.sizes
    assert all(row.cells[0].fits for row in size.rows)
    assert size.rows[0].budget_bytes == size.least_budget_bytes
    assert size.rows[-1].cells[0].extra_seconds == 0
    assert 0 < size.rows[0].cells[0].extra_seconds <= size.whole_seconds


def test_checkmate_is_not_slower_than_the_best_plan(comparison: Comparison) -> None:
    for row in comparison.sizes[0].rows:
        optimal, checkmate = row.cells[0], row.cells[-1]
        if checkmate.fits:
            assert checkmate.extra_seconds <= optimal.extra_seconds * 1.001


def traced_step(path: Path, rise_bytes: int) -> Path:
    """A step that keeps four tensors until its backward, of so many bytes in all."""
    events: list[Event] = [Constant(0, 64)]
    events += [Call("forward", 1000, (k,), (Output(k + 1, rise_bytes // 4),)) for k in range(4)]
    events.append(Call("loss", 10, (4,), (Output(14, 8),)))
    for k in range(4, 0, -1):
        events += [Call("backward", 2000, (k, k + 10), (Output(k + 9, 8),)), Release(k)]
    write_trace(Trace(tuple(events)), path)
    return path


@pytest.fixture
def trace_file(recording_file: Path, tmp_path: Path) -> Path:
    """A trace that peaks about where the largest recorded step does with everything kept."""
    outlook = Outlook.of(read_recording(recording_file))
    profiles = [outlook.profile(step.size) for step in read_recording(recording_file).steps]
    known = [profile for profile in profiles if profile is not None]
    rises = [peak(one, [Option.KEEP] * len(one.runs)) + (one.prelude or 0) for one in known]
    return traced_step(tmp_path / "trace.jsonl", int(0.99 * max(rises)))


def test_a_trace_of_another_step_is_refused_with_both_sizes(
    recording_file: Path, tmp_path: Path
) -> None:
    small = traced_step(tmp_path / "small.jsonl", 1 << 10)
    with pytest.raises(ArgumentError, match=r"not a trace of this step: it rises by 1\.\d+ KiB"):
        compare(recording_file, trace=small)


def test_dtr_is_simulated_on_a_trace_beside_the_planners(
    recording_file: Path, trace_file: Path
) -> None:
    (size,) = compare(recording_file, trace=trace_file).sizes
    cells = [row.cells[-1] for row in size.rows]
    assert {cell.planner for cell in cells} == {"dtr"}
    assert cells[-1].fits
    assert cells[-1].extra_seconds == 0
    assert cells_of(size)[-1][-1] == "in step"  # it plans nothing in advance


def test_a_trace_belongs_to_one_size(recording_file: Path, trace_file: Path) -> None:
    with pytest.raises(ArgumentError, match="give one --size"):
        compare(recording_file, ["8x20", "8x30"], trace=trace_file)


def test_a_trace_that_is_none_is_said_in_one_line(
    recording_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = said(capsys, recording_file, "--trace", recording_file)
    assert status == 2
    assert not out
    assert "trace" in err
    assert err.count("\n") == 1


def test_cell_says_whether_it_fits_exceeds_or_found_nothing() -> None:
    assert cell_text(Cell("rotor", 0.5, 0, True, 0.1), 1.0) == "50.0%"
    assert cell_text(Cell("greedy", 0.5, 2 << 20, True, 0.1), 1.0) == "over 2.00 MiB"
    assert cell_text(Cell("rotor", 0.5, 2 << 20, False, 0.1), 1.0) == "–"
    timed_out = Cell("checkmate", 0.5, 0, True, 9.0, bound_seconds=0.4, timed_out=True)
    assert cell_text(timed_out, 1.0) == "50.0% ≥ 40.0%"


def test_without_scipy_the_others_are_compared(
    recording_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "scipy" else find(name)
    )
    found = compare(recording_file)
    assert [cell.planner for cell in found.sizes[0].rows[0].cells] == PLANNERS[:-1]
    assert "pip install" in found.remarks[0]


def test_sizes_are_found_by_shape_and_by_length(recording_file: Path) -> None:
    size = read_recording(recording_file).steps[-1].size
    shape = "x".join(map(str, size.dims))
    found = compare(recording_file, [shape, str(size.dims[-1])])
    assert [one.size for one in found.sizes] == [str(size)]


def test_page_is_one_file_with_its_drawing_and_all_planners(comparison: Comparison) -> None:
    page = page_of_comparison(comparison, "a <b>")
    assert "<title>a &lt;b&gt;</title>" in page
    assert draw(comparison.sizes[0]) in page
    assert all(f"<th>{name}</th>" in page for name in PLANNERS)


def test_command_prints_a_table_and_writes_a_page(
    capsys: pytest.CaptureFixture[str], recording_file: Path, tmp_path: Path
) -> None:
    status, out, err = said(capsys, recording_file, "-o", tmp_path / "field.md")
    assert status == 0
    assert "checkmate" in out
    assert f"wrote {tmp_path / 'field.md'}" in err
    assert "](field-0.svg)" in (tmp_path / "field.md").read_text("utf-8")
    assert (tmp_path / "field-0.svg").read_text("utf-8").startswith("<svg")


def test_command_prints_json(capsys: pytest.CaptureFixture[str], recording_file: Path) -> None:
    status, out, _ = said(capsys, recording_file, "--json")
    assert status == 0
    assert json.loads(out)["sizes"][0]["rows"][0]["cells"][0]["planner"] == "optimal"


def test_budget_below_the_floor_is_remarked_on(recording_file: Path) -> None:
    (size,) = compare(recording_file).sizes
    found = compare(recording_file, budgets=[int(0.8 * size.least_budget_bytes)])
    assert not found.sizes[0].rows[0].cells[0].fits
    assert "is too little for any plan with one choice per block" in found.remarks[-1]


def test_budget_that_leaves_nothing_is_refused(recording_file: Path) -> None:
    with pytest.raises(ArgumentError, match="leaves nothing for a step"):
        compare(recording_file, budgets=[1000])


REFUSED = {
    "unknown size": (["--size", "7x7x7"], "not among the recorded sizes"),
    "no such budget": (["--budget", "much"], "not a memory size"),
    "percentage": (["--budget", "50%"], "needs a device"),
    "output format": (["-o", "page.pdf"], "must end in .html or .md"),
    "output folder": (["-o", "no/such/folder/page.md"], "there is no folder"),
    "time limit": (["--time-limit", "0"], "give a positive number"),
    "no time limit": (["--time-limit", "nan"], "give a positive number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_command_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], recording_file: Path, case: str
) -> None:
    words, problem = REFUSED[case]
    status, out, err = said(capsys, recording_file, *words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert problem in err


def test_damaged_recordings_are_refused_or_remarked_on(
    capsys: pytest.CaptureFixture[str], recording_file: Path, tmp_path: Path
) -> None:
    lines = recording_file.read_text("utf-8").splitlines()
    damaged = tmp_path / "run.jsonl"
    for text in ("", lines[0][:40], lines[0] + "\n", "no recording\n"):
        damaged.write_text(text, encoding="utf-8")
        status, out, err = said(capsys, damaged)
        assert (status, out, err.count("\n")) == (2, "", 1)
    damaged.write_text("\n".join([lines[0], "rubbish", *lines[1:]]) + "\n", encoding="utf-8")
    status, out, _ = said(capsys, damaged)
    assert status == 0
    assert "skipped invalid line 2" in " ".join(out.split())
