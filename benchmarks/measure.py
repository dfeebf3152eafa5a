"""Measure again what is out of date, as much as fits into a time.

    python benchmarks/measure.py                                   # what is out of date
    python benchmarks/measure.py --into folder --seconds 540       # measures it, in this order
    python benchmarks/measure.py promise host --into folder        # only these

Each measurement runs in a process of its own with an empty environment, and writes a file that is
named as those in `benchmarks/results`. One that can go on where it stopped (`promise`, `sft_8b`,
all of `mimose bench`) gets the time that is left, and goes on in the newest file of its kind if the
code has not changed. Any other begins only if its time is left. `before_after.py` is not among
them, because it needs another version of mimose.

Without a repository, as on a machine that has only a copy of the files, nothing tells what is out
of date: name the measurements there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from mimose.bench.source import source
from raw_files import age, latest, oldest_commit

SPARE_SECONDS = 15
"""For a process to come to its end after its time limit."""
PASSED_ON = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH")
PASSED_ON = (*PASSED_ON, "MIMOSE_COMMIT", "MIMOSE_TREE", "GIT_DIR", "CUDA_VISIBLE_DEVICES")
"""The environment of a measurement: where things lie, and nothing that changes how they run."""


class Measurement(NamedTuple):
    """One file in `benchmarks/results`, and the command that writes it."""

    command: str
    """A script beside this one, or `bench` for `mimose bench`, with its options."""
    seconds: int
    """How long it takes on an H200, about. If it can go on: how long a part should be at least."""
    goes_on: bool = False
    """Whether it takes `--time-limit`, and goes on in the file that it finds."""

    def arguments(self, out: Path, seconds: float) -> list[str]:
        """The command line that writes to `out` within these seconds."""
        script, *options = self.command.split()
        bench = script == "bench"
        start = ["-m", "mimose", "bench"] if bench else [str(Path(__file__).parent / script)]
        limited = self.goes_on and seconds < float("inf")
        limit = ["--time-limit", str(int(seconds - SPARE_SECONDS))] if limited else []
        return [sys.executable, *start, *options, "--out", str(out), *limit]


_PAPER = "--tasks MC-Roberta,QA-XLNet,QA-Bert,TC-Bert"
_VISION = "--tasks Swin-T,ResNet-50,ViT,Faster-RCNN"
_FEW = "--contestants plain,paper,mimose,oracle"
_LINEUP = "plain,torch-all,static,static-drawn,paper,greedy+shuttle,dtr,mimose-two-options"
_ALL = f"--contestants {_LINEUP},mimose,oracle"

MEASUREMENTS = {
    # What mimose is for: the budget holds, little is lost.
    "content_evicting": Measurement("content.py --outlier --evictable", 90),
    "content_moe": Measurement("content.py --cases moe --steps 500", 150),
    "content_rows": Measurement("content.py --cases rows --steps 500", 150),
    "content_detector": Measurement("content.py --cases detector --steps 500", 300),
    "content_passes": Measurement("content.py --passes", 120),
    "planner_quality_check": Measurement("planner_quality.py --tight 50 --steps 100", 240),
    "planner_quality_autocast": Measurement(
        "planner_quality.py --tasks TC-Bert --tight 50 --steps 100 --autocast", 80
    ),
    "first_steps": Measurement("first_steps.py", 240),
    "promise": Measurement("promise.py", 120, goes_on=True),
    "allocator": Measurement("allocator.py", 500),
    # The host.
    "host": Measurement("host.py", 240),
    "host_mixed": Measurement("host.py --shares --mixed 50", 90),
    "host_flat": Measurement("host.py --shares --flat 2000", 400),
    "host_floor_16": Measurement("host.py --shares --floor 0.76 0.82 1", 60),
    "host_floor_32": Measurement("host.py --layers 32 --shares --floor 0.65 0.7 1", 90),
    "sft_8b": Measurement("sft_8b.py", 120, goes_on=True),
    "sft_8b_fixed": Measurement("sft_8b.py --fixed 8192 --layers 8", 120),
    # Whole runs against peers.
    "bench": Measurement(
        f"bench {_PAPER} {_ALL} --steps 500 --rounds 3 --no-tables", 120, goes_on=True
    ),
    "bench-long": Measurement(
        f"bench {_PAPER} {_FEW} --steps 2000 --rounds 1 --no-tables", 120, goes_on=True
    ),
    "bench-scale8": Measurement(
        f"bench {_PAPER} {_ALL} --steps 100 --rounds 1 --scale 8 --no-tables", 120, goes_on=True
    ),
    "bench-budgets": Measurement(
        f"bench {_PAPER} {_ALL} --budget 4GB,5GB,6GB,7GB,8GB --steps 100 --rounds 1 --no-tables",
        120,
        goes_on=True,
    ),
    "bench-vision": Measurement(
        f"bench {_VISION} {_ALL} --steps 100 --rounds 1 --no-tables", 120, goes_on=True
    ),
    # What single things cost.
    "step_cost": Measurement("step_cost.py", 80),
    "recompute_cost": Measurement("recompute_cost.py", 120),
    "trainer_sft": Measurement("trainer_sft.py", 120),
    "convergence": Measurement("convergence.py", 90),
    "operator_memory": Measurement("operator_memory.py", 40),
    "fragmentation": Measurement("fragmentation.py", 60),
}
"""By kind of file, the most telling first."""


def device_name() -> str:
    """The device in a file's name: `h200` for an NVIDIA H200."""
    return torch.cuda.get_device_name().split()[-1].lower() if torch.cuda.is_available() else "cpu"


def state(name: str, device: str) -> str:
    """How old the newest result is."""
    path = latest(f"{device}-{name}")
    if path is None:
        return "never measured"
    benchmark, commit = oldest_commit(path)
    return age(commit, benchmark)


def out_of_date(device: str) -> list[str]:
    """The measurements whose newest result is not of the code of today, or may go on."""
    return [
        name
        for name, measurement in MEASUREMENTS.items()
        if measurement.goes_on or state(name, device) != "current"
    ]


def start_of(name: str, folder: Path, device: str) -> Path:
    """The file to write; with what was measured so far, if that was the same code."""
    kind = ".jsonl" if name.startswith("bench") else ".json"
    out = folder / f"{datetime.date.today().isoformat()}-{device}-{name}{kind}"
    known = latest(f"{device}-{name}")
    if MEASUREMENTS[name].goes_on and not out.exists() and known is not None:
        if trees_in(known) <= {source(allow_dirty=True).tree}:
            shutil.copyfile(known, out)
    return out


def trees_in(path: Path) -> set[str]:
    """Git's hashes of the package that the runs in a file were measured with."""
    text = path.read_text()
    entries = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else []
    runs = [entry for entry in entries if entry["kind"] == "run"] or [json.loads(text)]
    return {str(run.get("source_tree", "unknown")) for run in runs}


def measure(names: Sequence[str], folder: Path, seconds: float, device: str) -> bool:
    """Run these measurements until the time is over; whether none failed."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    deadline, all_well = time.monotonic() + seconds, True
    for name in names:
        measurement, left = MEASUREMENTS[name], deadline - time.monotonic()
        if left < measurement.seconds:
            print(f"{name}: left out, {left:.0f} s are left of {measurement.seconds}", flush=True)
            continue
        command = measurement.arguments(start_of(name, folder, device), left)
        began = time.monotonic()
        try:
            done = subprocess.run(command, env=environment, timeout=left, check=False)
            how = "done" if done.returncode == 0 else f"failed with {done.returncode}"
        except subprocess.TimeoutExpired:
            how = "stopped, its time was over"
        all_well &= how == "done"
        print(f"{name}: {how} after {time.monotonic() - began:.0f} s", flush=True)
    return all_well


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MEASUREMENTS)}")
    parser.add_argument("--into", type=Path, help="the folder for the files")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time for all")
    parser.add_argument("--device", help="list what is out of date for this one, such as h200")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - MEASUREMENTS.keys())
    if unknown:
        parser.error(f"{', '.join(unknown)}: no such measurement; use {', '.join(MEASUREMENTS)}")
    device = options.device or device_name()
    names = options.names or out_of_date(device)
    if options.into is None:
        for name in names:
            print(f"{name:26} {state(name, device):20} {MEASUREMENTS[name].seconds:4} s")
    elif not measure(names, options.into, options.seconds, device):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
