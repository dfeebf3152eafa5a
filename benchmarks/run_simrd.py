"""Runs the DTR authors' simulator on one of their logs; prints a line of JSON for each budget.

    python benchmarks/run_simrd.py SIMRD LOG HEURISTIC LIMIT SHARE...

SIMRD is the folder `simrd` of a clone of `uwsampl/dtr-prototype`, which is not part of mimose; it
needs attrs. As in the authors' experiments, budgets are shares of the peak of an unlimited run
under their first runtime, constants included, and a run stops when recomputing takes more than
LIMIT - 1 times the base time.
"""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any


def main(simrd: str, log: str, heuristic: str, limit: float, shares: list[float]) -> None:
    sys.path.insert(0, simrd)
    sys.setrecursionlimit(100_000)  # it recomputes by recursion
    from simrd.heuristic import HEURISTICS, Heuristic
    from simrd.parse import parse_file
    from simrd.runtime import RuntimeV1, RuntimeV2EagerOptimized

    with open(log) as file:
        program = parse_file(file, start=True).get_closure()
    unlimited = RuntimeV1(math.inf, Heuristic())
    program(unlimited)
    peak, base = (unlimited.telemetry.summary[key] for key in ("max_memory", "model_compute"))
    for share in shares:
        budget = int(peak * share)
        runtime = RuntimeV2EagerOptimized(
            budget, HEURISTICS[heuristic](), remat_limit=base * (limit - 1)
        )
        began = time.perf_counter()
        failure = failure_of(program, runtime)
        result = {
            "share": share,
            "budget_bytes": budget,
            "overhead": runtime.clock / base,
            "failure": failure,
            "peak_bytes": runtime.telemetry.summary["max_memory"],
            "accesses": runtime.telemetry.summary["heuristic_access_count"],
            "seconds": time.perf_counter() - began,
        }
        print(json.dumps(result), flush=True)


def failure_of(program: Any, runtime: Any) -> str | None:
    try:
        program(runtime)
    except MemoryError:
        return "out of memory"
    except RuntimeError:
        if runtime.remat_exceeded:
            return "thrashing"
        raise
    return None


if __name__ == "__main__":
    _, simrd, log, heuristic, limit, *shares = sys.argv
    main(simrd, log, heuristic, float(limit), list(map(float, shares)))
