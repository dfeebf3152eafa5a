"""The drawing of a comparison shows every planner, also where several need the same time."""

from __future__ import annotations

import itertools
import re

import pytest

from mimose.comparison import draw
from mimose.comparison.compare import Cell, Row, SizeComparison

NAMES = ("optimal", "greedy", "rotor", "checkmate")


@pytest.fixture
def drawing() -> str:
    """Of planners that all need the same time."""
    rows = tuple(
        Row(
            budget << 20,
            tuple(
                Cell(
                    planner=name,
                    extra_seconds=1 / budget,
                    over_bytes=0,
                    claims_to_fit=True,
                    planning_seconds=0.0,
                )
                for name in NAMES
            ),
        )
        for budget in (1, 2, 4)
    )
    return draw(
        SizeComparison(
            size="8×8",
            blocks=3,
            least_budget_bytes=1 << 20,
            easy_budget_bytes=4 << 20,
            whole_seconds=1.0,
            rows=rows,
        )
    )


def strokes(drawing: str) -> list[tuple[str, float, float]]:
    """The path of each curve, its width, and the gap in its dashes, from the lowest to the top."""
    curves = re.findall(r'<path d="(M[^"]*)" fill="none" ([^>]*)/>', drawing)
    return [
        (
            path,
            float(re.findall(r'stroke-width="([\d.]+)"', attributes)[0]),
            float((re.findall(r'stroke-dasharray="[\d.]+ ([\d.]+)"', attributes) or ["0"])[0]),
        )
        for path, attributes in curves
    ]


def test_each_line_shows_those_that_it_covers(drawing: str) -> None:
    *others, top = strokes(drawing)
    assert len(others) == len(NAMES) - 1
    assert {path for path, _, _ in others} == {top[0]}
    assert all(a[1] > b[1] > top[1] for a, b in itertools.pairwise(others))
    assert [gap > 0 for *_, gap in others] == [False, True, True]
    assert others[1][2] < others[2][2]


def test_optimal_is_on_top(drawing: str) -> None:
    assert re.findall(r'fill="none" stroke="([^"]*)"', drawing)[-1] == "#0b8a7d"


def test_the_legend_is_below_the_chart(drawing: str) -> None:
    places = {text: float(y) for y, text in re.findall(r'<text x=.*? y="(.*?)".*?>(.*?)<', drawing)}
    axis = max(y for text, y in places.items() if "MiB" in text)
    assert all(places[f"{name} (3 of 3 fit)"] > axis for name in NAMES)
