"""What mimose set out to reach, and whether these results show it."""

from __future__ import annotations

from collections.abc import Sequence

from mimose.bench.analysis import Sheet, Spread
from mimose.bench.time_spent import mean

_MEANS = {
    1: (
        *(("torch-all", 0.60), ("static", 0.83), ("static-drawn", 0.86)),
        *(("paper", 0.90), ("oracle", 1.02)),
    ),
    8: (("torch-all", 0.85), ("paper", 0.97), ("oracle", 1.02)),
}
"""By scale: the mean time over another's, on the paper's tasks."""
_NEVER_SLOWER = {1: ("greedy+shuttle",), 8: ("static", "greedy+shuttle")}
_ITERATIONS = 2.0


def goals(sheets: Sequence[Sheet]) -> list[list[str]]:
    """A row a goal: what, the goal, what was measured, whether it is reached."""
    rows = []
    for sheet in fullest(sheets):
        where = f"scale {sheet.scale}, paper's tasks"
        for rival, most in _MEANS.get(sheet.scale, ()):
            found = mean(ratio.median for ratio in _ratios(sheet, rival))
            rows.append(_row(f"{where}: mean time / {rival}'s", most, found))
            left_out = left_out_of_static(sheet)
            if rival == "static" and left_out:
                found = mean(ratio.median for ratio in _ratios(sheet, rival, left_out))
                what = f"{where}: the same without {', '.join(left_out)}"
                rows.append(_row(what, most, found))
        for rival in _NEVER_SLOWER.get(sheet.scale, ()):
            worst = max((ratio.median for ratio in _ratios(sheet, rival)), default=None)
            rows.append(_row(f"{where}: highest time / {rival}'s", 1.0, worst))
        spent = [
            each.in_thousand_steps
            for task, budget in sheet.cells_of_paper
            for each in sheet.overhead(task, budget, "mimose")
        ]
        rows.append(
            _row(f"{where}: iterations beyond the oracle in 1,000", _ITERATIONS, mean(spent))
        )
        rows.append(_failures(sheet, where))
    return rows


def fullest(sheets: Sequence[Sheet]) -> list[Sheet]:
    """Of each scale the one in which most of the paper's tasks and budgets were run, if any was."""
    best: dict[int, Sheet] = {}
    for sheet in sheets:
        known = best.get(sheet.scale)
        if len(sheet.cells_of_paper) > (len(known.cells_of_paper) if known else 0):
            best[sheet.scale] = sheet
    return [best[scale] for scale in sorted(best)]


def _row(what: str, most: float, found: float | None) -> list[str]:
    if found is None:
        return [what, f"at most {most:g}", "–", "not measured"]
    return [what, f"at most {most:g}", f"{found:.3f}", "reached" if found <= most else "missed"]


def _failures(sheet: Sheet, where: str) -> list[str]:
    ours, papers = (
        sum(sheet.out_of_memory(task, budget, name) for task, budget in sheet.cells_of_paper)
        for name in ("mimose", "greedy+shuttle")
    )
    met = "reached" if not ours else "missed"
    return [f"{where}: steps out of memory", "0", f"{ours} (greedy+shuttle: {papers})", met]


def left_out_of_static(sheet: Sheet) -> list[str]:
    """The paper's tasks on which `static` planned for a longer batch than any that was drawn."""
    tasks = list(dict.fromkeys(task for task, _ in sheet.cells_of_paper))
    return [task for task in tasks if task not in sheet.without_longer_data(tasks)]


def _ratios(sheet: Sheet, rival: str, left_out: Sequence[str] = ()) -> list[Spread]:
    cells = [cell for cell in sheet.cells_of_paper if cell[0] not in left_out]
    found = (sheet.ratio(*cell, "mimose", rival) for cell in cells if sheet.fits(*cell, rival))
    return [ratio for ratio in found if ratio is not None]
