"""How much is measured when nothing is said, with `--quick`, and with `--full`."""

from __future__ import annotations

from dataclasses import dataclass

from mimose.bench.extras import BenchError
from mimose.bench.lineup import CONTESTANTS
from mimose.bench.workloads import PAPER_TASKS, TASKS

LEG = 10
"""Steps after which the next contestant takes over, where there is a device to share."""

_USUAL = (
    *("plain", "torch-all", "static", "static-drawn"),
    *("paper", "greedy+shuttle", "dtr", "mimose-two-options", "mimose", "oracle"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Defaults for what the command line leaves open."""

    tasks: tuple[str, ...]
    contestants: tuple[str, ...]
    tight: tuple[float, ...]
    steps: int
    rounds: int


QUICK = Preset(tasks=("QA-Bert", "SFT-Llama"), contestants=_USUAL, tight=(50,), steps=40, rounds=1)
USUAL = Preset(
    tasks=(*PAPER_TASKS, "SFT-Llama", "T5-base"),
    contestants=(*_USUAL, "hf", "hf-every-n"),
    tight=(10, 50, 90),
    steps=100,
    rounds=3,
)
FULL = Preset(
    tasks=tuple(TASKS), contestants=tuple(CONTESTANTS), tight=(10, 50, 90), steps=300, rounds=5
)


def chosen(*, quick: bool, full: bool) -> Preset:
    """The preset that the command line asks for."""
    if quick and full:
        raise BenchError("--quick and --full exclude each other")
    return QUICK if quick else FULL if full else USUAL
