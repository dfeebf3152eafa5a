"""A one-minute demo: `python -m mimose.cli.demo`, or `mimose demo` for live progress.

Trains a small encoder on batches of varying length in four ways: without checkpointing, with every
block recomputed, with one static plan for the longest batch, and with mimose under the same budget.
Uses a CUDA device if there is one, else the CPU. Prints the time and peak of each way, and writes a
recording and a report of the mimose run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mimose.cli.demo_training import (
    OURS,
    PLAIN,
    STEPS,
    Outcome,
    QuietProgress,
    Result,
    compare,
    demo_device,
    demo_shape,
)
from mimose.errors import ArgumentError
from mimose.reporting import refuse_file
from mimose.units import text_of


def print_outcome(outcome: Outcome) -> None:
    """Print the comparison, the statistics of mimose, and the plan of the longest batch."""
    budget, plain = outcome.budget_bytes, outcome.results[PLAIN]
    print(f"{'':22}{'ms/step':>10}{'× plain':>9}{'peak':>13}   {'budget ' + text_of(budget):16}"
          f"{'recomputed':>11}")  # fmt: skip
    for name, result in outcome.results.items():
        print(_row(name, result, plain, budget))
    print("".join(_untimed_peaks(outcome)), end="")
    same = "identical, bit for bit" if outcome.identical else "NOT identical"
    print(f"\nThe losses of all four are {same}.")
    ours = outcome.results[OURS]
    assert ours.handle is not None
    print(f"\n{ours.handle.stats()}")
    print(f"\nThe plan for the longest batch:\n\n{ours.explanation}")


def _untimed_peaks(outcome: Outcome) -> list[str]:
    """A line for each way whose untimed first steps had a higher peak than the timed ones."""
    return [
        f"{name}: {text_of(result.first_peak_bytes)} in the untimed first steps, in which mimose "
        "tests and observes the blocks\n"
        for name, result in outcome.results.items()
        if result.first_peak_bytes > result.peak_bytes
    ]


def _row(name: str, result: Result, plain: Result, budget: int) -> str:
    """One line of the table."""
    stats = result.handle.stats() if result.handle else None
    runs = stats.runs_kept + stats.runs_recomputed if stats else 0
    share = f"{stats.runs_recomputed / runs:.0%}" if stats and runs else "–"
    milliseconds = 1e3 * result.seconds / len(result.step_seconds)
    highest = max(result.peak_bytes, result.first_peak_bytes)
    verdict = "over the budget" if highest > budget else "fits"
    return (
        f"{name:22}{milliseconds:10.1f}{result.seconds / plain.seconds:9.2f}"
        f"{text_of(result.peak_bytes):>13}   {verdict:16}{share:>10}"
    )


def refuse_page(path: Path) -> None:
    """Raise if the page or its recording cannot be written; called before training."""
    if path.suffix == ".jsonl":
        raise ArgumentError(
            f"--output {path}: the page must end in .html, since the recording is written to .jsonl"
        )
    refuse_file(path, "--output", like="demo.html")
    refuse_file(path.with_suffix(".jsonl"), "the recording", like="demo.jsonl")


def write_page(path: Path, outcome: Outcome) -> Path:
    """Write the report on the mimose run."""
    from mimose.reporting import contents_of, page_of, read_recording

    handle = outcome.results[OURS].handle
    assert handle is not None
    assert handle.recording is not None
    contents = contents_of(read_recording(handle.recording))
    path.write_text(page_of(contents, "mimose: demo"), encoding="utf-8")
    return path.resolve()


def main() -> int:
    """Run the demo without typer and rich."""
    page = Path("mimose-demo.html")
    try:
        refuse_page(page)
    except ArgumentError as error:
        print(f"python -m mimose.cli.demo: {error}", file=sys.stderr)
        return 2
    device = demo_device()
    shape = demo_shape(device)
    print(
        f"Training an encoder of {shape.layers} blocks on {device}, four ways, {STEPS + 1} steps "
        f"each: batches of {shape.batch} texts, padded to 24–{shape.longest} tokens.\n"
    )
    try:
        outcome = compare(QuietProgress(), page.with_suffix(".jsonl"))
        print_outcome(outcome)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    print(f"\nReport on the mimose run: {write_page(page, outcome)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
