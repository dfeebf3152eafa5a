"""How much of what the allocator holds is lost between tensors, and what a small reserve costs.

    python benchmarks/fragmentation.py --out results.json --task QA-XLNet --budget 5.56

mimose trains under a hard cap, and once it knows what blocks cost, plans leave the same reserve
free throughout. After some forwards, and whenever
memory runs out, the allocator is asked for a snapshot: bytes in free ranges count as lost where
they fill no whole page, since only whole pages can be given back and used elsewhere.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

import mimose
from common import circumstances, parser_of, save
from mimose.bench.circumstances import settle_device
from mimose.costs import Profile
from mimose.planning import Optimal, Plan, Planner
from planner_quality import Bench
from tasks import TASKS

_LOOK_EVERY = 4


class PinnedReserve(Planner):
    """The best plan that leaves this much of the budget free, whatever reserve mimose has learned.

    It is given what the learned reserve leaves: the difference between the two is added.
    """

    def __init__(self, reserve_bytes: int) -> None:
        self._bytes = reserve_bytes
        self.handle: mimose.Mimose | None = None

    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        learned = None if self.handle is None else self.handle.stats().reserve_bytes
        more = 0 if learned is None else learned - self._bytes
        return Optimal().plan(profile, available_bytes + more)


def measured(task: str, budget: int, share: float, steps: int) -> dict[str, Any]:
    """One run: what failed, and what was lost when."""
    bench = Bench(TASKS[task], "cuda", steps, autocast=False)
    model, optimizer = bench.fresh()
    retries = bench.meter.read().retries
    failures: list[dict[str, Any]] = []
    now: dict[str, Any] = {}

    def failing(_device: int, wanted: int, *_: Any) -> None:
        failures.append({**now, "wanted": wanted, "unusable": bench.meter.lost_bytes()})

    torch._C._cuda_attach_out_of_memory_observer(failing)
    planner = PinnedReserve(int(share * budget))
    planner.handle = handle = mimose.auto_checkpoint(model, budget, enforce=True, planner=planner)
    failed, after_forward = [], []
    for number, length in enumerate(bench.lengths):
        batch = bench.task.batch(length, "cuda")
        now = {"step": number, "length": length, "where": "forward"}
        try:
            loss = model(**batch).loss
            if number % _LOOK_EVERY == 0:
                after_forward.append({"length": length, "unusable": bench.meter.lost_bytes()})
            now["where"] = "backward"
            loss.backward()
        except torch.OutOfMemoryError:
            failed.append([number, length, now["where"]])
        loss = None
        gc.collect()
        optimizer.step()
        optimizer.zero_grad()
    handle.detach()
    return {
        "task": task,
        "budget": budget,
        "reserve_share": share,
        "page_bytes": bench.meter.page_bytes,
        "steps": steps,
        "failed": failed,
        "rescued": handle.stats().recoveries,
        "retries": bench.meter.read().retries - retries,
        "after_forward": after_forward,
        "at_failure": failures,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--task", default="QA-XLNet")
    parser.add_argument("--budget", type=float, default=5.56, help="GiB")
    parser.add_argument("--reserve", type=float, default=0.03, help="a share of the budget")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    if settle_device(None) != "cuda":
        raise SystemExit("fragments are CUDA's: this needs a GPU")
    around = circumstances(options.allow_dirty)
    budget = int(options.budget * 2**30)
    run = measured(options.task, budget, options.reserve, options.steps)
    save({"benchmark": "fragmentation", **around, "runs": [run]}, options.out)


if __name__ == "__main__":
    main()
