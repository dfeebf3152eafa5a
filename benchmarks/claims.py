"""Every figure that a page gives in a sentence of its own, from the raw results.

    PYTHONPATH=src python benchmarks/claims.py

Tables and paragraphs of README.md and BENCHMARKS.md are written from the files (`pages.py`).
Elsewhere, a figure that was measured is a claim: words that its page must contain. This prints each
claim, and whether the page says just that. A test asks the same, and whether a sentence that names
a commit has figures that no claim has.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from measured import between
from raw_files import ROOT, loaded

LIMITS, HOW_IT_WORKS = "docs/limits.md", "docs/how-it-works.md"


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


def claims() -> Iterator[Claim]:
    """All of them."""
    for source in (_kept, _holes, _transfers):
        yield from source()


def _kept() -> Iterator[Claim]:
    step = loaded("h200-step_cost")
    assert step is not None
    added, plain = step["added_seconds"]["mimose"]["median"], step["plain_seconds"]["median"]
    yield Claim(
        LIMITS,
        f"{1e3 * added:.2f} ms to a step of {1e3 * plain:.1f} ms with BERT-base on an H200 (commit "
        f"{step['commit'][:7]})",
    )


def _holes() -> Iterator[Claim]:
    """What is lost between tensors, with a reserve that is pinned."""
    result = loaded("h200-fragmentation")
    assert result is not None
    xlnet = [
        run for run in result["runs"] if run["task"] == "QA-XLNet" and run["reserve_share"] == 0.03
    ]
    seen = [100 * at["unusable"] / run["budget"] for run in xlnet for at in run["after_forward"]]
    yield Claim(HOW_IT_WORKS, f"between {between(seen, '.0f', ' and ')} % of the budget for XLNet")
    assert any(run["failed"] for run in xlnet)
    pages = {run.get("page_bytes", 20 << 20) >> 20 for run in xlnet}
    yield Claim(
        HOW_IT_WORKS,
        f"With only 3 % in reserve, and pages of {between(pages, '.0f')} MiB, XLNet ran out of "
        f"memory (`benchmarks/results/README.md`, commit {result['commit'][:7]})",
    )


def _transfers() -> Iterator[Claim]:
    """Plans of four options, against the best of all."""
    result = loaded("cpu-transfers_quality")
    assert result is not None
    equal, different = (
        [row for name, row in result["quality"].items() if kind in name]
        for kind in ("equal", "different")
    )
    plans = sum(row["plans"] for row in equal)
    assert not any(row["largest"] > 1e-9 for row in equal)
    blocks = between((int(name.split()[0]) for name in result["quality"]), ".0f", " to ")
    medians = {
        int(re.findall(r"\d+", name)[0]): row
        for name, row in result["planning_ms"].items()
        if "different" in name
    }
    many_longer = sum(row["over_2_percent"] for row in different) or "none"
    worst = 100 * max(row["largest"] for row in different)
    yield Claim(
        HOW_IT_WORKS,
        f"On drawn costs of {blocks} blocks, plans were compared with the best of all plans of "
        f"four options. For equal layers all {plans:,} were as fast. Of {plans:,} for blocks that "
        f"all differ, {many_longer} made steps more than 2 % longer; the worst {worst:.1f} %. "
        f"Finding a plan for 32 different blocks takes about {medians[32]['median']:.0f} ms, for "
        f"96 up to "
        f"{medians[96]['slowest']:.0f} ms (`benchmarks/results/README.md`, commit "
        f"{result['commit'][:7]})",
    )
    short = result["quality_of_short_steps"].values()
    yield Claim(
        HOW_IT_WORKS,
        f"for steps of 100 ms, {sum(row['over_2_percent'] for row in short)} of "
        f"{sum(row['plans'] for row in short):,} plans took more than 2 % longer than the best",
    )


def paragraphs(page: str) -> Iterator[str]:
    """The paragraphs of a page that were written by hand."""
    text = (ROOT / page).read_text("utf-8")
    text = re.sub(r"<!-- ([\w ]+): begin -->.*?<!-- \1: end -->", "", text, flags=re.S)
    for paragraph in re.sub(r"```.*?```", "", text, flags=re.S).split("\n\n"):
        yield " ".join(paragraph.split())


COMMIT = r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7}\b"
_FIGURE = re.compile(r"(?<![\w.`])\d[\d,.]*(?=\s*(?:%|ms|µs|s|GiB|MiB|times|of the time)\b|\s*%)")


def unclaimed(page: str) -> list[str]:
    """Figures in sentences beside a commit that are in no claim."""
    claimed = " ".join(claim.words for claim in claims() if claim.page == page)
    return [
        f"{figure}: {sentence}"
        for paragraph in paragraphs(page)
        for sentence in _said_to_be_measured(paragraph)
        for figure in _FIGURE.findall(sentence)
        if figure not in claimed
    ]


def _said_to_be_measured(paragraph: str) -> Iterator[str]:
    """Sentences that name a commit or the device, and the sentence before each."""
    sentences = re.split(r"(?<=[.:]) (?=[A-Z*])", paragraph)
    for before, sentence in zip(["", *sentences], sentences, strict=False):
        if re.search(COMMIT, sentence) or "H200" in sentence:
            yield f"{before} {sentence}"


def main() -> None:
    made = [(claim, claim.is_made) for claim in claims()]
    for claim, is_made in made:
        print(f"{'' if is_made else 'NOT MADE '}{claim.page}: {claim.words}\n")
    sys.exit(not all(is_made for _, is_made in made))


if __name__ == "__main__":
    main()
