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
        _host,
    ):
        yield from source()


def _host() -> Iterator[Claim]:
    """What host memory buys."""
    result = _loaded("2026-11-18-h200-host")
    cases = [result["shares"]["budgets"][share]["over_plain"] for share in ("0.76", "0.5", "0.24")]
    ours, two = (
        ", ".join(f"{case[name][-1]:.2f}" for case in cases)
        for name in ("all options", "two options")
    )
    yield Claim(
        README,
        f"| {result['layers']} layers like Llama 8B's with LoRA, rows of {result['tokens']:,} "
        "tokens, room for 76, 50 and 24 % of what a step takes with everything kept | "
        f"{ours} of the time of plain training; without the host {two} | {result['commit'][:7]} |",
    )
    floors = [_loaded(f"2026-11-18-h200-host_floor_{layers}") for layers in (16, 32)]
    for floor in floors:
        lost = [run["lost"] for run in floor["floor"]["tried"].values()]
        assert lost == [5, 0]
    yield Claim(
        PAGE,
        f"With {floors[0]['layers']} and {floors[1]['layers']} layers, mimose trains from the "
        "first step on in 0.82 and 0.70 of the memory that recomputing everything needs",
    )
    mixed = _loaded("2026-11-18-h200-host_mixed")["mixed"]
    first, second = (mixed["runs"][name][-1] for name in ("two options", "all options"))
    ratio = sum(second["seconds"]) / sum(first["seconds"])
    yield Claim(
        PAGE,
        f"a whole run of {len(mixed['lengths'])} steps took {ratio:.2f} of the time of the two "
        f"options, with {second['planning_seconds']:.2f} s for deciding and pinning",
    )
    waits = result["shares"]["budgets"]["0.24"]["runs"]["all options"][-1]
    yield Claim(PAGE, f"the device waited {waits['stalled_seconds']:.2f} s in {10 + 4} steps")


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
    exceeded = between((100 * case["plain_exceeds"] for case in ours.values()), ".0f")
    yield Claim(
        README,
        f"| {len(ours)} models for text, images and speech, {steps} steps each under a hard limit; "
        f"plain training exceeds these budgets on {exceeded} % of the steps | no out-of-memory in "
        f"{steps * len(ours):,} steps, at most {held:.3f} of the budget held | "
        f"{result['commit'][:7]} |",
    )
    yield Claim(
        PAGE,
        f"(`allocator.py`, commit {result['commit'][:7]}). {len(ours)} models of different kinds "
        f"ran for {steps} steps each",
    )
    yield Claim(
        PAGE,
        f"No step of {steps * len(ours):,} ran out of memory, at most {held:.3f} of the budget was "
        f"held, and the reserve at the end was {reserves} %.",
    )
    most = 100 * left["wav2vec2"]["most_reserve_share"]
    yield Claim(
        PAGE,
        f"the reserve rose to {larger} % on {len(left) - len(failing)} of {len(left)} models. On "
        f"the sixth, wav2vec2, memory ran out in {lost['wav2vec2']} of {steps} steps although the "
        f"reserve grew to {most:.0f} %.",
    )


def _planning() -> Iterator[Claim]:
    """Plans on real lengths, under a hard cap."""
    plain, autocast = (
        _loaded(f"2026-11-16-h200-planner_quality{kind}") for kind in ("", "_autocast")
    )
    yield Claim(PAGE, f"(`planner_quality.py`, commit {plain['commit']})")
    yield Claim(PAGE, _half_tight(plain))
    runs, cast = (
        [(task, run) for task, of in result["tasks"].items() for run in of["runs"].values()]
        for result in (plain, autocast)
    )
    summaries = [run["summary"] for _, run in runs + cast]
    assert not any(s["out_of_memory"] for s in summaries)
    under = max(prediction_errors(run)[0] for _, run in runs + cast)
    over, over_cast = (max(prediction_errors(run)[1] for _, run in of) for of in (runs, cast))
    yield Claim(PAGE, f"All {len(summaries)} runs together have budgets")
    words = (
        f"Predicted peaks were at most {under:.2%} below the real ones, and on average at most "
        f"{over:.1%} above them ({over_cast:.1%} under autocast). Recompute time was at most "
        f"{max(s['recompute_over_oracle'] for s in summaries):.3f} times the oracle's, and at most "
        f"{max(s['could_keep_more'] for s in summaries):.1%} of the steps of a run"
    )
    yield Claim(PAGE, words.replace("%", " %"))
    cached, new = (
        [s[name]["median"] for s in summaries if s[name]]
        for name in ("cached_plan_us", "new_plan_us")
    )
    yield Claim(
        PAGE,
        f"a plan from the cache took {between(cached, '.0f', ' to ')} µs and a new plan "
        f"{between([us / 1e3 for us in new], '.2f', ' to ')} ms",
    )
    shares: dict[str, list[float]] = {"SFT-Llama": [], "QA-XLNet": [], "": []}
    for task, run in runs:
        shares["QA-XLNet" if task == "QA-XLNet" else ""].append(100 * _reserve(run))
        if task == "SFT-Llama":
            shares[task].append(100 * _reserve(run))
    held = between(shares["QA-XLNet"])
    yield Claim(
        PAGE,
        f"The reserve at the end was {between(shares[''])} % of the budget, "
        f"{between(100 * _reserve(run) for _, run in cast)} % under autocast and {held} % for "
        "XLNet",
    )
    first, second, third = shares["SFT-Llama"]
    yield Claim(PAGE, f"the reserve came to {first:.1f}, {second:.1f} and {third:.1f} %")
    yield Claim(PAGE, f"and {held.replace('–', ' to ')} % by this one, 3 % is too little")


def _reserve(run: dict[str, Any]) -> float:
    return float(run["summary"]["reserve_share"])


def _half_tight(result: dict[str, Any]) -> str:
    """The table of budgets that plain training exceeds on half of the steps."""
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
    result = _loaded("2026-11-16-h200-first_steps")
    runs = result["runs"]
    assert not any(run["failed"] for run in runs)
    yield Claim(
        PAGE,
        f"(`first_steps.py`, commit {result['commit']}). {len(runs)} short runs of three of these "
        f"tasks took their lengths in random order: no step of {sum(r['steps'] for r in runs):,} "
        "ran out of memory",
    )


def _promise() -> Iterator[Claim]:
    """Thousands of steps under a hard cap."""
    promise = _loaded("2026-11-15-h200-promise")
    cases = promise["cases"]
    assert not any(case["lost"] for case in cases.values())
    assert sum(case["recoveries"] for case in cases.values()) == 1
    surprising = sum(cases[name]["steps"] for name in ("regimes", "rows", "detector"))
    most = max(case["held_over_budget"] for case in cases.values())
    yield Claim(
        PAGE,
        f"(`promise.py`, commit {promise['commit']}). {sum(c['steps'] for c in cases.values()):,} "
        f"steps ran under a hard limit with `handle.retry`, {surprising:,} of them in runs with "
        "surprises",
    )
    yield Claim(PAGE, f"one recovery was needed, and at most {most:.4f} of the budget was held")


def _fragments() -> Iterator[Claim]:
    """What is lost between tensors, with a reserve that is pinned."""
    fragments = _loaded("2026-11-15-h200-fragmentation")
    pinned = [run for run in fragments["runs"] if run["reserve_share"] == 0.03]
    xlnet = [run for run in pinned if run["task"] == "QA-XLNet"]
    others = [run for run in pinned if run["task"] != "QA-XLNet"]
    holes = [100 * at["unusable"] / run["budget"] for run in xlnet for at in run["at_failure"]]
    yield Claim(PAGE, f"(`fragmentation.py`, commit {fragments['commit']})")
    yield Claim(
        PAGE,
        f"memory ran out in {_failed(xlnet)} steps of XLNet, while "
        f"{between(holes, '.1f', ' to ')} % of the budget lay in holes that filled no page. On the "
        f"other tasks it ran out in {_failed(others)} steps",
    )
    seen = [100 * at["unusable"] / run["budget"] for run in xlnet for at in run["after_forward"]]
    yield Claim(HOW_IT_WORKS, f"between {between(seen, '.0f', ' and ')} % of the budget for XLNet")


def _failed(runs: list[dict[str, Any]]) -> str:
    return f"{sum(len(run['failed']) for run in runs)} of {sum(run['steps'] for run in runs)}"


def _small_costs() -> Iterator[Claim]:
    """What a kept step, a recompute and a kept block cost."""
    step = _loaded("2026-11-16-h200-step_cost")
    added, plain = step["added_seconds"]["mimose"], step["plain_seconds"]["median"]
    cost, whole = f"{1e3 * added['median']:.2f} ms", f"a step of {1e3 * plain:.1f} ms"
    quartiles = f"{1e3 * added['q1']:.2f} and {1e3 * added['q3']:.2f} ms"
    commit = step["commit"]
    yield Claim(README, f"{cost} of {whole} | {commit} |")
    yield Claim(
        PAGE,
        f"mimose adds {cost} to {whole} with BERT-base (median; the quartiles are {quartiles}; "
        f"`step_cost.py`, commit {commit})",
    )
    yield Claim(LIMITS, f"{cost} to {whole} with BERT-base on an H200 (commit {commit})")

    recompute = _loaded("2026-11-15-h200-recompute_cost")
    cases = recompute["cases"]
    small, large = (cases[f"BERT-base {n}"]["added_ratio"] for n in ("32×30", "96×448"))
    kept = recompute["kept_block"]["microseconds"]["median"]
    yield Claim(
        PAGE,
        f"(`recompute_cost.py`, commit {recompute['commit']}). With every block recomputed, mimose "
        f"adds {small:.2f} of the time that torch's checkpoint adds where launches are the limit "
        f"(BERT-base 32×30), and {large:.2f} of it where arithmetic is the limit (96×448). A kept "
        f"block costs {kept:.1f} µs",
    )


def _trainer() -> Iterator[Claim]:
    """A run through transformers' Trainer."""
    sft = _loaded("2026-11-15-h200-trainer_sft")
    theirs, plainly = (sft["summary"][f"mimose_over_{name}"] for name in ("checkpointing", "plain"))
    held = max(run["held"] for run in sft["runs"]["plain"]) / 2**30
    assert sft["summary"]["largest_loss_difference"]["mimose"] == 0
    steps, budget = len(sft["runs"]["plain"][0]["losses"]), sft["budget"] / 2**30
    faster = f"{theirs[0]:.2f} and {theirs[1]:.2f} of the time of `gradient_checkpointing=True`"
    slower = f"{plainly[0]:.2f} and {plainly[1]:.2f} of"
    yield Claim(
        README,
        f"two rounds of {steps} steps | {faster}, {slower} that of plain training, which holds "
        f"{held:.1f} GiB where mimose stays within {budget:.2f} GiB | {sft['commit']} |",
    )
    yield Claim(PAGE, f"(`trainer_sft.py`, commit {sft['commit']}). {steps} steps of an SFT-like")
    yield Claim(
        PAGE,
        f"took {faster} in two rounds, and {slower} the time of plain training. Plain training "
        f"held {held:.1f} GiB; mimose stayed within {budget:.2f} GiB. The logged losses are the "
        "same",
    )


def main() -> None:
    import claims_of_bench

    made = [(claim, claim.is_made) for claim in (*claims(), *claims_of_bench.claims())]
    for claim, is_made in made:
        print(f"{'' if is_made else 'NOT MADE '}{claim.page}: {claim.words}\n")
    sys.exit(not all(is_made for _, is_made in made))


if __name__ == "__main__":
    main()
