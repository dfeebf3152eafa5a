"""Every figure that README.md, BENCHMARKS.md and docs/ give in a sentence, from the raw results.

    PYTHONPATH=src python benchmarks/claims.py

Prints each claim with the page it belongs to, and whether the page says just that. A test asks the
same, so no figure in prose can differ from its file.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tables import prediction_errors, table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"

README, PAGE, LIMITS = "README.md", "BENCHMARKS.md", "docs/limits.md"
HOW_IT_WORKS = "docs/how-it-works.md"


class Claim(NamedTuple):
    """Words that a page must contain."""

    page: str
    words: str

    @property
    def is_made(self) -> bool:
        return " ".join(self.words.split()) in _words_of(self.page)


@functools.cache
def _words_of(page: str) -> str:
    return " ".join((ROOT / page).read_text("utf-8").split())


def _loaded(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def between(values: Iterable[float], form: str = ".1f", joint: str = "–") -> str:
    """The smallest and the largest."""
    known = list(values)
    return f"{min(known):{form}}{joint}{max(known):{form}}"


def claims() -> Iterator[Claim]:
    """All that rest on the scripts' results."""
    for source in (
        _allocator,
        _planning,
        _first_steps,
        _promise,
        _fragments,
        _small_costs,
        _trainer,
    ):
        yield from source()


def _allocator() -> Iterator[Claim]:
    """Budgets under an untouched environment, with the allocator set up and left alone."""
    result = _loaded("2026-11-17-h200-allocator")
    ours, left = result["auto"], result["leave"]
    lost = {name: len(case["out_of_memory"]) for name, case in left.items()}
    steps, failing = result["steps"], [name for name, number in lost.items() if number]
    assert not any(case["out_of_memory"] for case in ours.values())
    assert failing == ["wav2vec2"]
    reserves = between(100 * case["reserve_share"] for case in ours.values())
    larger = between(
        (100 * case["most_reserve_share"] for name, case in left.items() if name not in failing),
        ".0f",
    )
    held = max(case["held_over_budget"] for case in ours.values())
    yield Claim(
        README,
        f"{len(ours)} models of different kinds, {steps} steps each in a process of its own, "
        f"started with an empty environment (commit {result['commit'][:7]}): no out-of-memory in "
        f"{steps * len(ours):,} steps, at most {held:.3f} of the budget held, and a reserve of "
        f"{reserves} % at the end.",
    )
    yield Claim(
        README,
        f'With `allocator="leave"`, PyTorch\'s own settings, the reserve came to {larger} % on '
        f"{len(left) - len(failing)} of {len(left)} of them, and on wav2vec2 memory ran out in "
        f"{lost['wav2vec2']} of {steps} steps whatever the reserve.",
    )


def _planning() -> Iterator[Claim]:
    """Plans on real lengths, under a hard cap."""
    plain, autocast = (
        _loaded(f"2026-11-16-h200-planner_quality{kind}") for kind in ("", "_autocast")
    )
    yield Claim(README, f"(commit {plain['commit']}):")
    yield Claim(README, _half_tight(plain))
    runs, cast = (
        [(task, run) for task, of in result["tasks"].items() for run in of["runs"].values()]
        for result in (plain, autocast)
    )
    summaries = [run["summary"] for _, run in runs + cast]
    assert not any(s["out_of_memory"] for s in summaries)
    under = max(prediction_errors(run)[0] for _, run in runs + cast)
    over, over_cast = (max(prediction_errors(run)[1] for _, run in of) for of in (runs, cast))
    yield Claim(README, f"Over all {len(summaries)} runs")
    yield Claim(
        README,
        f"no out-of-memory, predicted peaks under the real ones by {under:.2%} at worst and "
        "over by "
        f"{over:.1%} on average at most ({over_cast:.1%} under autocast), recompute time at most "
        f"{max(s['recompute_over_oracle'] for s in summaries):.3f} times the oracle's, and "
        f"{max(s['could_keep_more'] for s in summaries):.1%} of the steps at most".replace(
            "%", " %"
        ),
    )
    cached, new = (
        [s[name]["median"] for s in summaries if s[name]]
        for name in ("cached_plan_us", "new_plan_us")
    )
    yield Claim(
        README,
        f"a plan from the cache takes {between(cached, '.0f', ' to ')} µs, and a new one "
        f"{between([us / 1e3 for us in new], '.2f', ' to ')} ms",
    )
    shares: dict[str, list[float]] = {"SFT-Llama": [], "QA-XLNet": [], "": []}
    for task, run in runs:
        shares["QA-XLNet" if task == "QA-XLNet" else ""].append(100 * _reserve(run))
        if task == "SFT-Llama":
            shares[task].append(100 * _reserve(run))
    held = between(shares["QA-XLNet"])
    yield Claim(
        README,
        f"The reserve came to {between(shares[''])} % of the budgets, to "
        f"{between(100 * _reserve(run) for _, run in cast)} % under autocast and to {held} % for "
        "XLNet",
    )
    first, second, third = shares["SFT-Llama"]
    yield Claim(PAGE, f"the reserve came to {first:.1f}, {second:.1f} and {third:.1f} %")
    yield Claim(PAGE, f"and {held.replace('–', ' to ')} % by this one, 3 % is too little")


def _reserve(run: dict[str, Any]) -> float:
    return float(run["summary"]["reserve_share"])


def _half_tight(result: dict[str, Any]) -> str:
    """README's table."""
    header = ["task", "budget, GiB", "out of memory", "most held / budget", "reserve"]
    header += ["recompute time / oracle's", "peak under-predicted, worst", "over-predicted, mean"]
    rows = []
    for task, of in result["tasks"].items():
        run = of["runs"]["50"]
        summary, (under, over) = run["summary"], prediction_errors(run)
        rows.append(
            [
                task,
                f"{run['budget'] / 2**30:.2f}",
                str(summary["out_of_memory"]),
                f"{summary['held_over_budget']:.4f}",
                f"{summary['reserve_share']:.1%}",
                f"{summary['recompute_over_oracle']:.3f}",
                f"{under:.3%}",
                f"{over:.2%}",
            ]
        )
    return table(header, rows)


def _first_steps() -> Iterator[Claim]:
    """Short runs, while little is known."""
    runs = _loaded("2026-11-16-h200-first_steps")["runs"]
    assert not any(run["failed"] for run in runs)
    steps = sum(run["steps"] for run in runs)
    yield Claim(README, f"In {len(runs)} short runs of three of these tasks in random order,")
    yield Claim(README, f"{steps:,} steps: no out-of-memory either")


def _promise() -> Iterator[Claim]:
    """Thousands of steps under a hard cap."""
    promise = _loaded("2026-11-15-h200-promise")
    cases = promise["cases"]
    assert not any(case["lost"] for case in cases.values())
    assert sum(case["recoveries"] for case in cases.values()) == 1
    surprising = sum(cases[name]["steps"] for name in ("regimes", "rows", "detector"))
    yield Claim(README, f"{sum(c['steps'] for c in cases.values()):,} steps under a hard cap")
    yield Claim(README, f"{surprising:,} of them in runs with surprises")
    most = max(case["held_over_budget"] for case in cases.values())
    yield Claim(
        README,
        f"none lost, one recovery, and never more than {most:.4f} of the budget held (commit "
        f"{promise['commit']})",
    )


def _fragments() -> Iterator[Claim]:
    """What is lost between tensors, with a reserve that is pinned."""
    fragments = _loaded("2026-11-15-h200-fragmentation")
    pinned = [run for run in fragments["runs"] if run["reserve_share"] == 0.03]
    xlnet = [run for run in pinned if run["task"] == "QA-XLNet"]
    others = [run for run in pinned if run["task"] != "QA-XLNet"]
    holes = [100 * at["unusable"] / run["budget"] for run in xlnet for at in run["at_failure"]]
    yield Claim(
        README,
        f"memory ran out in {_failed(xlnet)} steps of XLNet, with "
        f"{between(holes, '.1f', ' to ')} % "
        f"of the budget in holes that filled no page, and in {_failed(others)} of the others "
        f"(commit {fragments['commit']})",
    )
    seen = [100 * at["unusable"] / run["budget"] for run in xlnet for at in run["after_forward"]]
    yield Claim(HOW_IT_WORKS, f"between {between(seen, '.0f', ' and ')} % of the budget for XLNet")


def _failed(runs: list[dict[str, Any]]) -> str:
    return f"{sum(len(run['failed']) for run in runs)} of {sum(run['steps'] for run in runs)}"


def _small_costs() -> Iterator[Claim]:
    """What a kept step, a recompute and a kept block cost."""
    step = _loaded("2026-11-16-h200-step_cost")
    added, plain = step["added_seconds"]["mimose"], step["plain_seconds"]["median"]
    cost = f"{1e3 * added['median']:.2f} ms of a step of {1e3 * plain:.1f} ms with BERT-base"
    quartiles = f"{1e3 * added['q1']:.2f} and {1e3 * added['q3']:.2f} ms; commit {step['commit']}"
    yield Claim(README, cost)
    yield Claim(README, f"the quartiles are {quartiles}")
    yield Claim(LIMITS, f"{cost} on an H200 at commit {step['commit']}")

    recompute = _loaded("2026-11-15-h200-recompute_cost")
    cases = recompute["cases"]
    small, large = (cases[f"BERT-base {n}"]["added_ratio"] for n in ("32×30", "96×448"))
    kept = recompute["kept_block"]["microseconds"]["median"]
    yield Claim(README, f"(BERT-base 32×30): adds {small:.2f} of what torch's checkpoint adds")
    yield Claim(
        README,
        f"(96×448): {large:.2f}. A kept block costs {kept:.1f} µs (commit {recompute['commit']})",
    )


def _trainer() -> Iterator[Claim]:
    """A run through transformers' Trainer."""
    sft = _loaded("2026-11-15-h200-trainer_sft")
    theirs, plainly = (sft["summary"][f"mimose_over_{name}"] for name in ("checkpointing", "plain"))
    held = max(run["held"] for run in sft["runs"]["plain"]) / 2**30
    assert sft["summary"]["largest_loss_difference"]["mimose"] == 0
    yield Claim(
        README,
        f"{theirs[0]:.2f} and {theirs[1]:.2f} of the time of `gradient_checkpointing=True` in two "
        f"rounds, {plainly[0]:.2f} and {plainly[1]:.2f} of plain training, which holds {held:.1f} "
        f"GiB where mimose stays within {sft['budget'] / 2**30:.2f}; the logged losses are "
        "the same "
        f"(commit {sft['commit']})",
    )


def main() -> None:
    import claims_of_bench

    made = [(claim, claim.is_made) for claim in (*claims(), *claims_of_bench.claims())]
    for claim, is_made in made:
        print(f"{'' if is_made else 'NOT MADE '}{claim.page}: {claim.words}\n")
    sys.exit(not all(is_made for _, is_made in made))


if __name__ == "__main__":
    main()
