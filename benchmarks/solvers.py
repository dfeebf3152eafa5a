"""How long the planners of other papers take, and how near to the best their plans are proven.

    python benchmarks/solvers.py --out results.json --seconds 60

Rotor and Checkmate on chains of blocks like a language model's, all equal or all different, at
three budgets between everything recomputed and everything kept. Checkmate stops at the limit; the
gap is what its plan takes beyond its proven bound, as a share of the step's time.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

from common import circumstances, parser_of, save
from mimose.comparison import Checkmate, Rotor
from mimose.costs import Profile
from mimose.planning import KeepAll, RecomputeAll
from transfers_quality import long_chain, step_nanoseconds

BLOCKS = (8, 12, 24, 48)
SHARES = (0.2, 0.5, 0.8)
"""How much of the way from all recomputed to all kept is available."""


def solved(profile: Profile, available: int, seconds: float) -> dict[str, Any]:
    began = time.perf_counter()
    by_rotor = Rotor().schedule(profile, available)
    between = time.perf_counter()
    by_checkmate = Checkmate(seconds).schedule(profile, available)
    ended = time.perf_counter()
    bound, step = by_checkmate.bound_seconds, step_nanoseconds(profile) / 1e9
    gap = None if bound is None else max(0.0, by_checkmate.extra_seconds - bound) / step
    return {
        "rotor_seconds": between - began,
        "rotor_extra": by_rotor.extra_seconds / step,
        "checkmate_seconds": ended - between,
        "checkmate_extra": by_checkmate.extra_seconds / step,
        "checkmate_gap": gap,
        "timed_out": by_checkmate.timed_out,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="the limit for Checkmate")
    options = parser.parse_args()
    results: dict[str, Any] = {
        "benchmark": "solvers",
        **circumstances(options.allow_dirty),
        "seconds_limit": options.seconds,
        "rows": [],
    }
    for blocks in BLOCKS:
        for kind, draw in (("equal", None), ("different", random.Random(blocks))):
            profile = replace(long_chain(blocks, draw), link=None)
            least, most = (p.plan(profile, 0).peak_bytes for p in (RecomputeAll(), KeepAll()))
            for share in SHARES:
                row = solved(profile, int(least + share * (most - least)), options.seconds)
                results["rows"].append({"blocks": blocks, "kind": kind, "share": share, **row})
                print(results["rows"][-1], flush=True)
                save(results, options.out)


if __name__ == "__main__":
    main()
