"""Fine-tuning a model of 8 billion parameters with LoRA on cards of 24, 40 and 80 GB.

    python benchmarks/sft_8b.py --out results.json --caps 24GB 40GB 80GB --steps 12
    python benchmarks/sft_8b.py --out fixed.json --fixed 8192 --layers 8

32 layers like Llama 8B's in bf16 with random weights, LoRA on all linear layers, a loss that has
the logits of one chunk at a time, one row without padding a step. Rows have the spread of real
instruction lengths, stretched so that the longest has as many tokens as fit such a card: 8,192 at
24 GB, 32,768 at 40 and 80 GB. The timed rows are one from each of as many equal shares of the
distribution; then one row of the longest length shows who trains it at all, in a time of its own.

All run under the allocator's hard limit at the cap, from the same weights, over the same rows:

- torch-all: every layer through `torch.utils.checkpoint`
- every-n: every n-th layer, with the largest n that fits the longest row; n = 1 is torch-all
- inputs-on-host: every layer recomputed, from an input that waits on the host
- all-on-host: whatever layers save goes to the host, as TRL and torchtune do it
- mimose-two-options: mimose that keeps or recomputes
- mimose: as it comes
- oracle: mimose that knows every cost from the run before, with the least reserve

The same command continues a file. `--fixed` compares rows of one length instead: compiled layers
under mimose and under the compiler's own `activation_memory_budget`, within the same memory.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import gc
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import llama_lora
import mimose
from common import circumstances, parser_of, save
from mimose.bench.batches import LENGTHS
from mimose.bench.circumstances import settle_device
from mimose.bench.contestants import Given
from mimose.bench.progress import Deadline
from mimose.costs import Option, Profile
from mimose.memory import free_host_bytes, meter_for
from mimose.planning import Optimal, Plan, Planner
from mimose.training import spare_bytes
from mimose.units import parse_budget
from offloading import HostHooks, HostTooSmall, Slabs, save_all, save_inputs

TOKENS = {"24GB": 8192, "40GB": 32768, "80GB": 32768}
"""The longest row, by cap."""
TWO_OPTIONS = ("keep", "recompute")
RESERVE = 0.03
"""The least that plans leave free, of the budget."""
HOST_SHARE = 0.8
"""Of the host's memory that all-on-host may take."""

Step = Callable[[int], float]


def rows_like_instructions(steps: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths with the spread of real ones, the middle of so many equal shares, shuffled."""
    with (LENGTHS / "instruct_cl100k.csv").open() as file:
        known = [(int(row["length"]), int(row["count"])) for row in csv.DictReader(file)]
    whole, most = sum(count for _, count in known), max(length for length, _ in known)
    wanted = [whole * (number + 0.5) / steps for number in range(steps)]
    found, passed = [], 0
    for length, count in sorted(known):
        passed += count
        while len(found) < steps and wanted[len(found)] <= passed:
            found.append(round(length * longest / most))
    random.Random(seed).shuffle(found)
    return found


class Course:
    """The model, the rows and the limit: the same for all contestants."""

    def __init__(self, layers: int, longest: int, device: str) -> None:
        self.cuda, self.device = device == "cuda", torch.device(device)
        self.meter = meter_for(self.device)
        self.model = llama_lora.make(layers, device, **({} if self.cuda else llama_lora.SMALL))
        self.longest = longest
        self.cap = 0
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        self._start = [p.detach().clone() for p in self._trained]
        self._words = 32000 if self.cuda else 100
        self._new_optimizer()

    @property
    def layers(self) -> nn.ModuleList:
        layers: nn.ModuleList = self.model.model.layers
        return layers

    def begin(self, cap: int) -> None:
        """From the start, in an emptied device, under the limit."""
        for layer in self.layers:
            if "forward" in vars(layer):
                del layer.forward
        for parameter, value in zip(self._trained, self._start, strict=True):
            parameter.data.copy_(value)
        self._new_optimizer()
        gc.collect()
        self.meter.limit(None)
        self.meter.release_cached()
        self.cap = cap
        self.meter.limit(cap - spare_bytes(cap, self.meter))
        self.meter.reset_peak()

    def _new_optimizer(self) -> None:
        self.optimizer = torch.optim.AdamW(self._trained, 1e-5)

    def row(self, tokens: int, number: int = 0) -> torch.Tensor:
        draw = torch.Generator(self.device)
        draw.manual_seed(number)
        return torch.randint(0, self._words, (1, tokens), device=self.device, generator=draw)

    def step(self, tokens: int, number: int) -> tuple[float, float]:
        """Seconds and loss."""
        row = self.row(tokens, number)
        self.wait()
        began = time.perf_counter()
        loss = self.model(row)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.wait()
        return time.perf_counter() - began, float(loss.detach())

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def clear(self) -> None:
        """A step has failed: nothing of it is left."""
        self.optimizer.zero_grad()
        for state in self.optimizer.state.values():
            if "exp_avg_sq" not in state:
                state.clear()
        gc.collect()


class Runs:
    """The steps of one contestant after another."""

    def __init__(self, course: Course, lengths: list[int], cap: int, host_memory: str) -> None:
        self.course, self.lengths, self.cap = course, lengths, cap
        self.host_memory = host_memory
        self.survey: dict[str, Any] = {}
        self._every = 1
        self._known: dict[str, Any] = {}
        """What mimose had learned when its run was over."""

    def look(self) -> None:
        """What the longest row costs, from a few steps; they also warm the device up."""
        course = self.course
        course.begin(self.cap)
        longest = course.longest
        budget = {"choices": TWO_OPTIONS}
        with mimose.auto_checkpoint(course.model, self.cap, **budget) as handle:
            for tokens in (longest // 8, longest // 3, longest // 2, longest):
                with contextlib.suppress(torch.OutOfMemoryError):
                    course.step(tokens, 0)
                course.clear()
            explanation = handle.explain(course.row(longest))
            self._known = handle.state_dict()
        profile, base = explanation.profile, explanation.base_bytes
        assert profile is not None
        self._every = every_n_that_fits(profile, int(self.cap * (1 - RESERVE)) - base)
        self.survey = {
            "base_bytes": base,
            "saved_bytes_a_token": sum(run.saved for run in profile.runs) / longest,
            "every_n": self._every,
        }

    def run(self, name: str) -> dict[str, Any]:
        """A contestant's run; or why there is none."""
        if name == "every-n" and self._every == 1:
            return {"missing": "n = 1: the same as torch-all"}
        self.course.begin(self.cap)
        with CONTESTANTS[name](self) as after_step:
            result = self._steps(after_step)
        self.course.begin(self.cap)  # also lets go of what the contestant put into layers
        return result

    def _steps(self, after_step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        rows = [self._tried(tokens, number) for number, tokens in enumerate(self.lengths)]
        told = after_step()
        longest = self._tried(self.course.longest, len(self.lengths))
        told = {**told, **after_step()}
        reading = self.course.meter.read()
        return {
            "rows": rows,
            "longest": longest,
            "peak": max(reading.peak, told.get("peak", 0)),
            "held_over_cap": max(reading.peak_held, told.get("held", 0)) / self.cap,
            **told,
        }

    def _tried(self, tokens: int, number: int) -> dict[str, Any]:
        failure = None
        try:
            seconds, loss = self.course.step(tokens, number)
        except torch.OutOfMemoryError:
            failure = "out of memory"
        except HostTooSmall:
            failure = "the host is too small"
        if failure is not None:
            self.course.clear()
            return {"tokens": tokens, "failure": failure}
        return {"tokens": tokens, "seconds": seconds, "loss": loss}

    @contextlib.contextmanager
    def torch_all(self) -> Iterator[Any]:
        checkpointed(self.course.layers, every=1)
        yield dict

    @contextlib.contextmanager
    def every_n(self) -> Iterator[Any]:
        checkpointed(self.course.layers, self._every)
        yield lambda: {"every_n": self._every}

    @contextlib.contextmanager
    def on_host(self, *, inputs: bool) -> Iterator[Any]:
        """The pinned memory for all but the longest row is there before the first step."""
        course = self.course
        slabs = Slabs(int(HOST_SHARE * free_host_bytes()), pinned=course.cuda)
        hooks = HostHooks(slabs, course.model, course.device)
        if not inputs:
            slabs.grow_to(int(max(self.lengths) * self.survey["saved_bytes_a_token"]))
        (save_inputs if inputs else save_all)(course.layers, hooks)
        whole, step_over = course.step, hooks.step_over

        def step(tokens: int, number: int) -> tuple[float, float]:
            try:
                return whole(tokens, number)
            finally:
                step_over()

        course.step = step  # type: ignore[method-assign]
        try:
            yield lambda: {"host_bytes": slabs.taken_bytes}
        finally:
            del course.step

    @contextlib.contextmanager
    def mimose(self, **options: Any) -> Iterator[Any]:
        course, planner = self.course, options.get("planner")
        if "choices" not in options:
            options["host_memory"] = self.host_memory
        handle = mimose.auto_checkpoint(course.model, self.cap, **options)
        with handle:
            if isinstance(planner, LeastReserve):
                planner.handle = handle
                handle.load_state_dict(self._known)
            yield lambda: told_by(handle)
            if planner is None:
                self._known = handle.state_dict()

    def oracle(self) -> Any:
        return self.mimose(planner=LeastReserve(self.cap))


CONTESTANTS: dict[str, Callable[[Runs], Any]] = {
    "torch-all": Runs.torch_all,
    "every-n": Runs.every_n,
    "mimose-two-options": functools.partial(Runs.mimose, choices=TWO_OPTIONS),
    "mimose": Runs.mimose,
    "oracle": Runs.oracle,
    "inputs-on-host": functools.partial(Runs.on_host, inputs=True),
    "all-on-host": functools.partial(Runs.on_host, inputs=False),
}
"""The oracle after mimose, from which it knows everything; the host is filled last."""


class LeastReserve(Planner):
    """The best plan, with no more in reserve than ever has to be."""

    def __init__(self, cap: int) -> None:
        self._least, self._inner = int(cap * RESERVE), Optimal()
        self.handle: mimose.Mimose | None = None

    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        reserve = self.handle.stats().reserve_bytes if self.handle is not None else None
        return self._inner.plan(profile, available_bytes + max(0, (reserve or 0) - self._least))


def told_by(handle: mimose.Mimose) -> dict[str, Any]:
    stats = handle.stats()
    runs = stats.runs_kept + stats.runs_recomputed
    return {
        "held": stats.peak_held_bytes,
        "observed_steps": stats.observed_steps,
        "recomputed": stats.runs_recomputed / runs if runs else None,
        "moved_bytes": stats.moved_bytes,
        "host_bytes": stats.host_bytes_held,
        "stalled_seconds": stats.stalled_seconds,
        "planning_seconds": stats.planning_seconds,
        "reserve_bytes": stats.reserve_bytes,
        "evictions": stats.evictions,
        "plan_of_longest": str(stats.last_plan),
    }


def checkpointed(layers: nn.ModuleList, every: int) -> None:
    for number, layer in enumerate(layers):
        if number % every == 0:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def every_n_that_fits(profile: Profile, available: int) -> int:
    """The largest n with which recomputing each n-th layer fits."""
    for every in range(len(profile.runs), 1, -1):
        choices = [Option.of(number % every == 0) for number in range(len(profile.runs))]
        if Given(choices).plan(profile, available).fits:
            return every
    return 1


def under_cap(
    results: dict[str, Any], cap: str, course: Course, options: Any, deadline: Deadline
) -> bool:
    """Every contestant that the file does not hold yet; whether all are there."""
    lengths = rows_like_instructions(options.steps, course.longest)
    case = results["caps"].setdefault(
        cap, {"lengths": lengths, "longest": course.longest, "runs": {}}
    )
    if case["lengths"] != lengths:
        raise SystemExit(f"{options.out} has other rows at {cap}: repeat its --steps")
    missing = [name for name in options.contestants if name not in case["runs"]]
    if not missing:
        return True
    budget = parse_budget(cap).total_bytes if course.cuda else small_cap(course)
    assert budget is not None
    case["cap_bytes"] = budget
    runs = Runs(course, lengths, budget, "auto" if course.cuda else "1GiB")
    runs.look()
    case["survey"] = runs.survey
    if "oracle" in missing and "mimose" not in missing:
        missing.insert(missing.index("oracle"), "mimose")  # it knows what mimose has learned
    for name in missing:
        expected = max((run.get("wall_seconds", 0.0) for run in case["runs"].values()), default=0.0)
        if not deadline.allows(expected):
            return False
        began = time.monotonic()
        run = runs.run(name)
        case["runs"][name] = {**run, "wall_seconds": time.monotonic() - began}
        save(results, options.out)
        print(cap, name, shown(case["runs"][name]), flush=True)
    return True


def small_cap(course: Course) -> int:
    """For a try on a CPU: between all recomputed and all kept."""
    course.begin(1 << 40)
    course.step(course.longest, 0)
    kept = course.meter.read().peak
    course.begin(1 << 40)
    checkpointed(course.layers, every=1)
    course.step(course.longest, 0)
    least = course.meter.read().peak
    return int(least + 0.4 * (kept - least))


def shown(run: dict[str, Any]) -> str:
    if "missing" in run:
        return str(run["missing"])
    seconds = sum(row.get("seconds", 0.0) for row in run["rows"])
    failed = [row for row in (*run["rows"], run["longest"]) if "failure" in row]
    longest = run["longest"].get("seconds", float("nan"))
    return (
        f"{seconds:.2f} s, longest {longest:.2f} s, {len(failed)} failed, "
        f"{run['held_over_cap']:.3f} of the cap, {run['wall_seconds']:.0f} s in all"
    )


def opened(options: Any, header: dict[str, Any]) -> dict[str, Any]:
    """What the file holds if it was measured by the same code in the same way; or a new one."""
    if not options.out.exists():
        return header
    known: dict[str, Any] = json.loads(options.out.read_text())
    for name in ("commit", "source_tree", "machine", "layers", "torch"):
        if known.get(name) != header[name]:
            raise SystemExit(
                f"{options.out} was measured with {name} {known.get(name)}, and here it is "
                f"{header[name]}: write to another --out"
            )
    return known


def fixed(options: Any, device: str) -> dict[str, Any]:
    """Rows of one length on compiled layers: mimose, and the compiler's budget, in equal memory."""
    from torch._functorch import config

    course = Course(options.layers, options.fixed, device)
    found: dict[str, Any] = {"tokens": options.fixed, "runs": {}}

    def measured(name: str, steps: int) -> dict[str, Any]:
        for number in range(5):
            course.step(options.fixed, number)  # compiles; mimose observes and plans
        course.meter.reset_peak()
        seconds = [course.step(options.fixed, number)[0] for number in range(steps)]
        reading = course.meter.read()
        run = {"seconds": seconds, "peak": reading.peak, "held": reading.peak_held}
        found["runs"][name] = run
        print(name, f"{sorted(seconds)[steps // 2]:.3f} s", f"{run['peak'] / 2**30:.2f} GiB")
        return run

    def compiled() -> None:
        course.begin(1 << 45)
        torch._dynamo.reset()
        for layer in course.layers:
            layer.compile()

    compiled()
    measured("compiled", options.steps)
    for share in options.shares:
        with config.patch(activation_memory_budget=share):
            compiled()
            theirs = measured(f"activation_memory_budget={share:g}", options.steps)
        compiled()
        cap = int(theirs["held"] * 1.005)
        for name, choices in (("mimose-two-options", {"choices": TWO_OPTIONS}), ("mimose", {})):
            with mimose.auto_checkpoint(course.model, cap, enforce=True, **choices) as handle:
                for number in range(10):
                    course.step(options.fixed, number)  # the reserve settles
                run = measured(f"{name} in the memory of {share:g}", options.steps)
                run["plan"], run["cap"] = str(handle.stats().last_plan), cap
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--caps", nargs="+", default=["24GB", "40GB", "80GB"], choices=list(TOKENS))
    parser.add_argument("--steps", type=int, default=12, help="timed rows of each contestant")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument(
        "--contestants", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS)
    )
    parser.add_argument("--time-limit", type=float, help="stop between runs after so many seconds")
    parser.add_argument("--fixed", type=int, help="compare compiled layers on rows of this length")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5])
    options = parser.parse_args()
    deadline = Deadline(options.time_limit)
    device = settle_device(None)
    around = circumstances(options.allow_dirty)
    if options.fixed:
        results = {"benchmark": "sft_8b_fixed", **around, "layers": options.layers}
        save({**results, **fixed(options, device)}, options.out)
        return
    results = opened(
        options, {"benchmark": "sft_8b", **around, "layers": options.layers, "caps": {}}
    )
    course = None
    for cap in options.caps:
        longest = TOKENS[cap] if device == "cuda" else TOKENS[cap] // 64
        if course is None:
            course = Course(options.layers, longest, device)
        course.longest = longest
        if not under_cap(results, cap, course, options, deadline):
            print("stopped at the time limit; the same command continues")
            break
    save(results, options.out)


if __name__ == "__main__":
    main()
