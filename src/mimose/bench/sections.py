"""The page on results files, section by section: what counts first, goals last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mimose.bench import paper_tables, summary
from mimose.bench.analysis import Sheet
from mimose.bench.estimator_tables import by_samples, estimators
from mimose.bench.goals import goals
from mimose.bench.lineup import CONTESTANTS
from mimose.bench.markdown import table
from mimose.bench.tables import breakdown, overhead, papers_numbers, plans, ratios, times
from mimose.units import text_of

_RATIOS = """\
The time of mimose over that of the other, whole runs, observing and planning included; below 1
mimose is faster. Medians over rounds, the lowest and highest round in brackets. Where somebody ran
out of memory, the steps that both finished. `static` plans for the longest batch of the data; the
last mean leaves out tasks on which such a batch was never drawn. `static-drawn` plans for the
longest batch of the run. †: the plan does not fit the budget even with everything recomputed; such
cells are in no mean."""
_HOW_TO_READ = f"""\
- Figures hold for the commits that are named; `git diff COMMIT -- src/mimose` shows what has
  changed since. In files without `source_tree` the commit was typed in by hand and not checked.
- *Against the others*. {_RATIOS}
- *Plans beside the paper's*: blocks recomputed in a step, on average over the steps that both had
  planned.
- *What deciding costs*, in iterations of the oracle. Collector: observed steps beyond what the
  oracle took for them; estimator: fitting, and predicting in files that have `predict_seconds`;
  planner: all else from a step's first block to its plan. Host time counts in full, also where the
  device was busy meanwhile. The whole difference holds the machine's noise as well. Parts in 1,000
  steps are extrapolated:
  observing once, decisions by how many steps and sizes there are. Last column: how much longer a
  planned step took, on average, where the oracle recomputed as many blocks: reading memory, opening
  and closing the step, deciding, and noise.
- *Where the time goes*: seconds of a whole run of mimose. Recomputing as its estimator accounts for
  it, observing beyond plain training, deciding on the host; the rest is what remains.
- *Estimators* (the paper's Table 3): of the peak above the step's start with everything kept, and
  of what each layer saves, at sizes that were not among the samples; the smallest and the largest
  size always were. The others have a model for the peak and one for each layer; mimose learns all
  quantities at once."""


def page(sheets: Sequence[Sheet], figures: Iterable[str] = ()) -> Iterator[str]:
    """Everything, one paragraph each: time and memory first, then the details, goals last."""
    yield "## Time and memory"
    yield summary.HOW_TO_READ
    for sheet in sheets:
        yield f"### {_title(sheet)}"
        yield _circumstances(sheet)
        yield summary.as_markdown(sheet)
    yield "## How to read the other tables"
    yield f"{_HOW_TO_READ}\n{paper_tables.HOW_TO_READ}"
    for sheet in sheets:
        yield f"## {_title(sheet)}"
        yield from _details(sheet)
    yield from figures
    yield from _closing(sheets)


def short_page(sheets: Sequence[Sheet]) -> Iterator[str]:
    """What a page that has much else to say takes over: mimose against the others, goals."""
    yield _RATIOS
    for sheet in sheets:
        yield f"### {_title(sheet)}"
        yield _circumstances(sheet)
        yield ratios(sheet)
    yield from _closing(sheets)


def _closing(sheets: Sequence[Sheet]) -> Iterator[str]:
    yield "## Goals, and the paper's numbers"
    yield table(["", "goal", "here", ""], goals(sheets))
    yield papers_numbers(sheets)


def _details(sheet: Sheet) -> Iterator[str]:
    yield "### Against the others"
    yield ratios(sheet)
    yield "### Everybody"
    yield times(sheet)
    yield from _absent(sheet)
    yield from _section("Plans beside the paper's", plans(sheet))
    yield from _section("What deciding costs", overhead(sheet))
    yield from _section("Where the time goes", breakdown(sheet))
    for title, text in paper_tables.sections(sheet):
        yield from _section(title, text)
    if sheet.results.estimators:
        yield from _section("Estimators", estimators(sheet.results.estimators))
        yield "Mean error of the peak by the number of samples, averaged over the tasks:"
        yield by_samples(sheet.results.estimators)


def _section(title: str, text: str | None) -> Iterator[str]:
    if text is not None:
        yield f"### {title}"
        yield text


def _title(sheet: Sheet) -> str:
    conditions = sheet.results.conditions
    parts = [f"Scale {sheet.scale}"]
    parts += [conditions[name] for name in ("precision", "attention") if conditions[name]]
    small = ", small models" if conditions["small"] else ""
    return f"{', '.join(parts)}{small}: {', '.join(sheet.tasks)}"


def _circumstances(sheet: Sheet) -> str:
    header, conditions = sheet.results.header, sheet.results.conditions
    commits = sorted({str(record.code) for record in sheet.results.records.values()})
    memory = {True: "expandable segments on", False: "expandable segments off", None: ""}
    allocator = memory[header["expandable_segments"]]
    if header.get("page_bytes") is not None:
        allocator += f" (pages of {text_of(header['page_bytes'])})"
    counted = (
        "On a CPU memory is counted by a dispatch mode, which slows every contestant down alike. "
        if conditions["device"] == "cpu"
        else ""
    )
    leg = conditions.get("leg")
    turns = f"; contestants take turns of {leg} steps, each in its own process" if leg else ""
    return (
        f"{header['machine']}, torch {header['torch']}, transformers {header['transformers']}, "
        f"Python {header['python']}, {allocator and allocator + ', '}mimose "
        f"{header['mimose']}, commit {', '.join(commits)}, {header['date']}. "
        f"{conditions['steps']} steps a run, AdamW{turns}. {counted}All contestants but "
        f"{' and '.join(_uncapped(sheet))} run under the allocator's hard limit."
    )


def _uncapped(sheet: Sheet) -> list[str]:
    """Plain training, and others without a limit that ran."""
    ran = {"plain", *(record.contestant for record in sheet.results.records.values())}
    return [name for name, kind in CONTESTANTS.items() if name in ran and not kind.capped]


def _absent(sheet: Sheet) -> Iterator[str]:
    reasons = sheet.missing()
    if reasons:
        yield "Not run:"
        yield "\n".join(f"- {who} on {task}: {why}" for (who, task), why in reasons.items())
