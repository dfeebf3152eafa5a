"""Figures: what is drawn over what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bench_parts import STEPS, arena, half_tight, surveyed, trained
from matplotlib.figure import Figure

from mimose.bench.analysis import Sheet
from mimose.bench.figures import lengths, unused
from mimose.bench.records import Record, Results
from mimose.costs import InputSize


def sheet_of(task: str, *contestants: str) -> Sheet:
    results = Results(Path("x"), {"conditions": {"scale": 1, "steps": STEPS, "small": True}})
    results.surveys[task], budget = surveyed(task), half_tight(task)
    results.limits[task] = [{"label": "tight 50", "total_bytes": budget, "at_floor": False}]
    for name in contestants:
        run = trained(name, task)
        record = Record(task=task, budget_bytes=budget, contestant=name, round=0, run=run)
        results.records[record.key] = record
    return Sheet(results)


def test_memory_is_drawn_over_the_input_even_if_another_tensor_comes_first() -> None:
    sheet = sheet_of("QA-Bert", "plain")
    known = surveyed("QA-Bert")

    def reordered(size: InputSize) -> InputSize:
        rows, length, *_ = size.dims
        return InputSize((("end_positions", 1), ("input_ids", 2)), (rows, rows, length))

    sheet.results.surveys["QA-Bert"] = replace(
        known,
        largest=reordered(known.largest),
        observations=tuple(
            replace(seen, profile=replace(seen.profile, size=reordered(seen.size)))
            for seen in known.observations
        ),
    )
    figure = Figure()
    lengths(sheet, "QA-Bert", figure.add_subplot())
    _, peaks = figure.axes
    drawn = {int(x) for line in peaks.lines for x in line.get_xdata()}
    assert drawn == {seen.size.dims[1] for seen in known.full_batches}


@pytest.mark.parametrize(("task", "sizes"), [("ViT", 2), ("QA-Bert", 1)])
def test_images_are_drawn_over_their_area_and_texts_over_their_length(
    task: str, sizes: int
) -> None:
    sheet, axis = sheet_of(task, "mimose"), Figure().add_subplot()
    unused(sheet, task, axis)
    (line,) = axis.lines
    shapes = [shape.lengths for shape in arena(task).shapes]
    expected = [s[0] * s[1] / 1e6 if sizes == 2 else s[0] for s in shapes]
    assert list(line.get_xdata()) == expected
    budget = half_tight(task)
    peaks = trained("mimose", task).steps.peak_bytes
    assert list(line.get_ydata()) == [(budget - peak) / 2**30 for peak in peaks]
