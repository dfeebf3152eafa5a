"""A run on disk: `auto_checkpoint(..., record="run.jsonl")` writes it, `reader.py` reads it.

One JSON object a line. The first tells what the run is; then, as they happen:

    {"step":12,"at":3.21,"size":[8,123],"plan":"KKrr","base":…,"predicted":…,"peak":…,"held":…,
     "ms":112.3,"again_ms":9.1,"planning_us":41,"reserve":…}     a step; without a plan: observed;
                                                                 "at_most" for "predicted": a bound
    {"layout":1,"of":[["input_ids",2]]}                          a kind of input not met before
    {"observation":{…},"anew":false}                             what the session has learned
    {"timed":{…},"in":0}                                         the same once more, its times known
    {"regime":0,"is":"…"}                                        what holds from here on is this
    {"event":"recovery","at":3.21,"step":12,"text":"…"}          what people should know

A step's line is made in a few microseconds and written together with others, so up to two seconds
are lost when a process is killed. A file may end anywhere: a line that was cut is left out.
"""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import os
import re
import time
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch

from mimose.costs import Layout, StepObservation
from mimose.errors import ArgumentError, warn
from mimose.estimation import CostModel
from mimose.training import RunStart, StepRecord, StepStart, Subscriber

log = logging.getLogger("mimose")

FORMAT = 1
_LINES, _SECONDS = 64, 2.0
"""A write comes after so many lines or so many seconds, whichever is first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a run is, in its first line."""

    format: int = FORMAT
    mimose_version: str
    torch_version: str
    device: str
    device_name: str
    began: str
    blocks: tuple[str, ...]
    budget_bytes: int
    planner: str
    collector: str
    enforce: bool
    parameter_bytes: int
    gradient_bytes: int

    @classmethod
    def of(cls, run: RunStart) -> Header:
        """The header of a run that begins now."""
        kind = type(
            getattr(run.planner, "inner", run.planner)
        )  # of somebody's own: that one's name
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__)
        on_gpu = run.device.type == "cuda"
        return cls(
            mimose_version=importlib.import_module("mimose").__version__,
            torch_version=torch.__version__,
            device=str(run.device),
            device_name=torch.cuda.get_device_name(run.device) if on_gpu else "CPU",
            began=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            blocks=run.blocks,
            budget_bytes=run.budget_bytes,
            planner=words.lower(),
            collector=run.collector,
            enforce=run.enforce,
            parameter_bytes=run.parameter_bytes,
            gradient_bytes=run.gradient_bytes,
        )

    @property
    def line(self) -> str:
        numbers = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({"recording": numbers}, separators=(",", ":"))


class Recorder(Subscriber):
    """Writes a run's lines; cheap enough for every step, and never in the way of training."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        wanted = own_path(Path(path))
        self.path = unused_path(wanted)
        if self.path != wanted:
            log.warning("mimose: %s exists, so this run is recorded to %s", wanted, self.path)
        self._sink = _Sink(_opened(self.path))
        self._close = weakref.finalize(self, self._sink.close)
        self._began = self._opened_at = time.perf_counter()
        self._step = 0
        self._base = 0
        self._planning_us = 0.0
        self._reserve: int | None = None
        self._layouts: dict[Layout, str] = {}
        self._regimes: dict[Hashable, int] = {}

    def run_starts(self, run: RunStart) -> None:
        self._sink.put(Header.of(run).line)

    def step_opens(self) -> None:
        self._step += 1

    def step_starts(self, step: StepStart) -> None:
        self._opened_at = time.perf_counter()
        self._base = step.reading.in_use
        self._planning_us = step.planning_seconds * 1e6

    def step_over(self, record: StepRecord) -> None:
        now, size, plan = time.perf_counter(), record.size, record.plan
        layout = self._layouts.get(size.layout)
        if layout is None:
            layout = self._new_layout(size.layout)
        planned, held = "", None
        if plan is not None:
            held = record.peak_held_bytes
            planned = (
                f'"plan":"{plan}","{"at_most" if record.is_bound else "predicted"}":'
                f"{self._base + plan.peak_bytes},"
                f'"again_ms":{plan.recompute_seconds * 1e3:.4g},'
            )
        if record.reserve_bytes != self._reserve:
            self._reserve = record.reserve_bytes
            planned += f'"reserve":{record.reserve_bytes},'
        self._sink.put(
            f'{{"step":{self._step},"at":{self._opened_at - self._began:.4f},'
            f'"size":[{",".join(map(str, size.dims))}],{layout}{planned}"base":{self._base},'
            f'"peak":{_number(record.real_peak_bytes)},"held":{_number(held)},'
            f'"ms":{(now - self._opened_at) * 1e3:.2f},"planning_us":{self._planning_us:.0f}}}'
        )

    def learned(self, observation: StepObservation, *, anew: bool) -> None:
        """The session knows more than before, or nothing but this; it can be rebuilt from that."""
        self._learned(observation.to_plain(), anew)

    def timed(self, observation: StepObservation, regime: Hashable) -> None:
        """The times of what was learned before, in this regime, are known now."""
        self._put({"timed": observation.to_plain(), "in": self._regimes.get(regime, 0)})

    def regime_entered(self, regime: Hashable, cost_model: CostModel) -> None:
        """From here on steps run in this regime, of which so much is known already."""
        index = self._regimes.get(regime)
        if index is not None:  # a GAN's steps go back and forth between two
            self._sink.put(f'{{"regime":{index}}}')
            return
        self._regimes[regime] = len(self._regimes)
        self._put({"regime": self._regimes[regime], "is": str(regime)})
        for plain in cost_model.to_plain()["observations"]:
            self._learned(plain, anew=False)

    def _learned(self, plain: dict[str, Any], anew: bool) -> None:
        self._put({"observation": plain, "anew": anew})

    def noted(self, kind: str, text: str) -> None:
        """Something that people should know has happened."""
        at = round(time.perf_counter() - self._began, 4)
        self._put({"event": kind, "at": at, "step": self._step, "text": text})

    def flush(self) -> None:
        """Write what was put so far."""
        self._sink.flush()

    def run_ends(self) -> None:
        """Write the rest. Also done when the recorder is gone or Python ends."""
        self._close()

    def _put(self, line: dict[str, Any]) -> None:
        self._sink.put(json.dumps(line, separators=(",", ":")))

    def _new_layout(self, layout: Layout) -> str:
        index = len(self._layouts)
        self._put({"layout": index, "of": layout})
        self._layouts[layout] = f'"layout":{index},' if index else ""
        return self._layouts[layout]


class _Sink:
    """Lines on their way to a file. When the disk is full it says so once, and drops the rest."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: BinaryIO | None = file
        self._lines: list[str] = []
        self._written_at = time.monotonic()
        self._process = os.getpid()

    def put(self, line: str) -> None:
        self._lines.append(line)
        if len(self._lines) >= _LINES or time.monotonic() - self._written_at > _SECONDS:
            self.flush()

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        self._written_at = time.monotonic()
        if self._file is None or not lines or os.getpid() != self._process:  # a forked worker
            return
        try:
            self._file.write(("\n".join(lines) + "\n").encode())
        except OSError as error:
            warn(f"recording to {self._file.name} ends here: {error}. Training goes on")
            self._abandon()

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._abandon()

    def _abandon(self) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None


def _number(value: int | None) -> str:
    return "null" if value is None else str(value)


def own_path(path: Path) -> Path:
    """The path itself; of several processes that train together, all but the first add a rank."""
    rank = int(os.environ.get("RANK", "0") or 0)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path


def unused_path(path: Path) -> Path:
    """The path itself or, if a run or anything else is recorded there, the next free number's.

    >>> unused_path(Path("no-such-run.jsonl")).name
    'no-such-run.jsonl'
    """
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    return next(free for free in itertools.chain([path], names) if _is_unused(free))


def _is_unused(path: Path) -> bool:
    """Whether there is no file, an empty one, or a device like /dev/null."""
    return not path.exists() or path.is_dir() or path.stat().st_size == 0


def refuse_unwritable(path: str | os.PathLike[str]) -> None:
    """Refuse a path that cannot be recorded to, and leave what is there as it is."""
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f'record={path!r} is no path: give a file\'s, record="run.jsonl"')
    _opened(unused_path(own_path(Path(path))), "ab").close()


def _opened(path: Path, mode: Literal["ab", "wb"] = "wb") -> BinaryIO:
    try:
        return path.open(mode, buffering=0)
    except OSError as error:
        raise ArgumentError(
            f"record={str(path)!r} cannot be written: {error.strerror or error}. Give a file in a "
            "directory that exists and that you may write to"
        ) from None
