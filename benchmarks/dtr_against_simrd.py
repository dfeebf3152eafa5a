"""Does our DTR do what the authors' simulator does? Both, on the operator logs of the authors.

    git clone https://github.com/uwsampl/dtr-prototype && (cd dtr-prototype/simrd && unzip logs.zip)
    PYTHONPATH=src python benchmarks/dtr_against_simrd.py --simrd dtr-prototype/simrd --out out.json

Their code has no licence, so it is neither copied nor imported here: `run_simrd.py` runs it in a
process of its own. Both simulators get the same budgets in bytes. A run of theirs that does not end
in `--seconds` (for all budgets of a log and a heuristic, largest first) is left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import run_simrd
from common import circumstances, parser_of, save
from mimose.comparison import (
    HEURISTICS,
    Call,
    Constant,
    Event,
    Output,
    Release,
    Trace,
    simulate,
)

SHARES = (0.9, 0.7, 0.5, 0.4, 0.3)
NAMES = {
    "h_DTR^eq": "DTREqClass",
    "h_LRU": "LRU",
    "h_size": "LargestStorage",
    "h_MSPS": "MSPS",
    "h_DTR": "DTR",
}
"""Our heuristics and the authors' names of them; the fastest first."""
OVERHEAD_LIMIT = 2.0
"""As in the authors' experiments."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--simrd", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--logs", nargs="*", help="beginnings of the logs' names; by default all")
    options = parser.parse_args()
    results = {"benchmark": "dtr_against_simrd", **circumstances(options.allow_dirty)}
    results |= {"seconds_limit": options.seconds, "overhead_limit": OVERHEAD_LIMIT, "logs": {}}
    for path in sorted((options.simrd / "logs").glob("*.log")):
        name = path.name.partition("-")[0]
        if not options.logs or name.startswith(tuple(options.logs)):
            results["logs"][name] = both_on(path, options.simrd, options.seconds)
            save(results, options.out)


def both_on(path: Path, simrd: Path, seconds: float) -> dict[str, Any]:
    """One log, under each heuristic."""
    trace = read_log(path)
    runs = {}
    for ours, theirs in NAMES.items():
        rows = authors_runs(path, simrd, theirs, seconds)
        runs[ours] = [{"simrd": row, "mimose": our_run(trace, ours, row)} for row in rows]
        print(path.name[:12], ours, len(rows), file=sys.stderr)
    return {
        "file": path.name,
        "calls": len(trace.calls),
        "base_nanoseconds": trace.nanoseconds,
        "peak_bytes": trace.peak_bytes,
        "constant_bytes": trace.constant_bytes,
        "runs": runs,
    }


def authors_runs(path: Path, simrd: Path, heuristic: str, seconds: float) -> list[dict[str, Any]]:
    """Their outcomes, of those budgets that they finished in time."""
    script = [sys.executable, run_simrd.__file__]
    words = [simrd, path, heuristic, OVERHEAD_LIMIT, *SHARES]
    running = subprocess.Popen(
        [*script, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        out, _ = running.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        running.kill()
        out, _ = running.communicate()
    return [json.loads(line) for line in out.splitlines()]


def our_run(trace: Trace, heuristic: str, theirs: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    outcome = simulate(
        trace, theirs["budget_bytes"], HEURISTICS[heuristic], overhead_limit=OVERHEAD_LIMIT
    )
    return {
        "overhead": outcome.overhead,
        "failure": None if outcome.failure is None else outcome.failure.value,
        "peak_bytes": outcome.peak_bytes,
        "evictions": outcome.evictions,
        "recomputed_calls": outcome.recomputed_calls,
        "accesses": outcome.accesses,
        "seconds": time.perf_counter() - began,
    }


def read_log(path: Path) -> Trace:
    """The trace in a log: what follows its START annotation."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    start = next(i for i, line in enumerate(lines) if line.get("ANNOTATION") == "START")
    reader = _LogReader()
    for line in lines[start + 1 :]:
        reader.read(line)
    return Trace(tuple(reader.events()), device="cuda")


class _LogReader:
    """Names of a log are references to tensors: several may name one, and a name may move on.

    Sizes and aliases of a call's results follow it in lines of their own. So a call is put together
    when its results are complete.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._tensor: dict[str, int] = {}
        self._references: list[int] = []
        self._size_bytes: list[int] = []
        self._pending: dict[str, Any] | None = None
        self._outputs: list[Output] = []

    def events(self) -> list[Event]:
        return self._events

    def read(self, line: dict[str, Any]) -> None:
        getattr(self, f"_{line['INSTRUCTION'].lower()}")(line)

    def _annotate(self, line: dict[str, Any]) -> None:
        pass

    def _constant(self, line: dict[str, Any]) -> None:
        self._pending = line

    def _call(self, line: dict[str, Any]) -> None:
        self._pending = line

    def _memory(self, line: dict[str, Any]) -> None:
        tensor, size_bytes = self._new(line["NAME"], int(line["MEMORY"])), int(line["MEMORY"])
        assert self._pending is not None
        if self._pending["INSTRUCTION"] == "CONSTANT":
            self._events.append(Constant(tensor, size_bytes))
        else:
            self._outputs.append(Output(tensor, size_bytes))

    def _alias(self, line: dict[str, Any]) -> None:
        call, which = self._pending, int(line["ALIAS"])
        assert call is not None
        if which != -1:
            shared = self._tensor[call["ARGS"][which]]
            tensor = self._outputs[-1].tensor
            self._outputs[-1] = Output(tensor, 0, alias_of=shared)
            self._size_bytes[tensor] = self._size_bytes[shared]
        if len(self._outputs) == len(call["RESULT"]):
            self._append(call, tuple(self._tensor[name] for name in call["ARGS"]))

    def _append(self, line: dict[str, Any], inputs: tuple[int, ...]) -> None:
        self._events.append(Call(line["NAME"], int(line["TIME"]), inputs, tuple(self._outputs)))
        self._outputs = []

    def _mutate(self, line: dict[str, Any]) -> None:
        """Copy on write: the name moves on to a new tensor of the size of the old storage."""
        names = [line["ARGS"][which] for which in line["MUTATE"]]
        old = [self._tensor[name] for name in names]
        inputs = tuple(self._tensor[name] for name in line["ARGS"])
        for name, replaced in zip(names, old, strict=True):
            size_bytes = self._size_bytes[replaced]
            self._outputs.append(Output(self._new(name, size_bytes), size_bytes, None, replaced))
        self._append(line, inputs)
        for replaced in old:
            self._drop(replaced)

    def _copy(self, line: dict[str, Any]) -> None:
        self._tensor[line["DST"]] = self._tensor[line["SRC"]]
        self._references[self._tensor[line["SRC"]]] += 1

    def _copy_from(self, line: dict[str, Any]) -> None:
        old = self._tensor[line["DST"]]
        self._copy(line)
        self._drop(old)

    def _release(self, line: dict[str, Any]) -> None:
        if line["NAME"] in self._tensor:  # the log also drops what it made before its START
            self._drop(self._tensor[line["NAME"]])

    def _new(self, name: str, size_bytes: int) -> int:
        self._tensor[name] = len(self._references)
        self._references.append(1)
        self._size_bytes.append(size_bytes)
        return self._tensor[name]

    def _drop(self, tensor: int) -> None:
        self._references[tensor] -= 1
        if self._references[tensor] == 0:
            self._events.append(Release(tensor))


if __name__ == "__main__":
    main()
