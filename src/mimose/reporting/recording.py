"""Write a recording: `auto_checkpoint(..., record="run.jsonl")`. `reader.py` reads it.

One JSON object per line. The first is the header; the others follow in order of time:

    {"step":12,"at":3.21,"size":[8,123],"plan":"KKrr","base":…,"predicted":…,"peak":…,"held":…,
     "ms":112.3,"again_ms":9.1,"planning_us":41,"reserve":…}     a step; see below
    {"layout":1,"of":[["input_ids",2]]}                          new input tensors (names, ranks)
    {"observation":{…},"anew":false}                             an observation; "anew" drops others
    {"timed":{…},"in":0}                                         the times of an observation
    {"regime":0,"is":"…"}                                        the regime of the lines that follow
    {"link":{…}}                                                 the link of the steps that follow
    {"event":"recovery","at":3.21,"step":12,"text":"…"}          an event

A step with only an upper bound has "at_most" instead of "predicted". An observed step has
"observed" instead of "plan", with the same letters, or neither if everything was recomputed. The
link to host memory is recorded when it is first known and when it changes; null if it was given up.

Formatting a step takes a few microseconds. Lines are written in batches, so a killed process loses
up to two seconds of them. The reader skips a truncated last line.
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

from mimose.costs import Layout, Link, StepObservation
from mimose.errors import ArgumentError, warn
from mimose.estimation import CostModel
from mimose.training import RunStart, StepRecord, StepStart, Subscriber

log = logging.getLogger("mimose")

FORMAT = 3
READABLE = (1, 2, FORMAT)
"""Formats that `reader.py` reads. Each is the format of the observations in it; plans use the
letters H and h from format 3 on."""
_FLUSH_LINES, _FLUSH_SECONDS = 64, 2.0
"""Write after this many lines or seconds, whichever comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line of a recording."""

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
        """The header of a run that starts now."""
        planner = type(getattr(run.planner, "inner", run.planner)).__name__  # inner: user-defined
        on_gpu = run.device.type == "cuda"
        return cls(
            mimose_version=importlib.import_module("mimose").__version__,
            torch_version=torch.__version__,
            device=str(run.device),
            device_name=torch.cuda.get_device_name(run.device) if on_gpu else "CPU",
            began=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            blocks=run.blocks,
            budget_bytes=run.budget_bytes,
            planner=re.sub(r"(?<=[a-z])(?=[A-Z])", "_", planner).lower(),
            collector=run.collector,
            enforce=run.enforce,
            parameter_bytes=run.parameter_bytes,
            gradient_bytes=run.gradient_bytes,
        )

    @property
    def line(self) -> str:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({"recording": fields}, separators=(",", ":"))


class Recorder(Subscriber):
    """Writes the lines of a run. It is cheap enough for every step and never stops training."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        wanted = path_of_rank(Path(path))
        self.path = unused_path(wanted)
        if self.path != wanted:
            log.warning("mimose: %s exists, recording to %s instead", wanted, self.path)
        self._writer = _LineWriter(_opened(self.path))
        self._close = weakref.finalize(self, self._writer.close)
        self._began_at = self._step_began_at = time.perf_counter()
        self._step = 0
        self._base = 0
        self._planning_us = 0.0
        self._reserve: int | None = None
        self._link: Link | None = None
        self._layouts: dict[Layout, str] = {}
        self._regimes: dict[Hashable, int] = {}

    def run_starts(self, run: RunStart) -> None:
        self._writer.put(Header.of(run).line)

    def step_opens(self) -> None:
        self._step += 1

    def step_starts(self, step: StepStart) -> None:
        self._step_began_at = time.perf_counter()
        self._base = step.reading.in_use
        self._planning_us = step.planning_seconds * 1e6
        if step.link != self._link:
            self._link = step.link
            self._put({"link": None if step.link is None else step.link.to_plain()})

    def step_over(self, record: StepRecord) -> None:
        now, size, plan = time.perf_counter(), record.size, record.plan
        layout = self._layouts.get(size.layout)
        if layout is None:
            layout = self._new_layout(size.layout)
        planned, held = "", None
        if plan is not None and record.observed:
            planned = f'"observed":"{plan}","again_ms":{plan.extra_seconds * 1e3:.4g},'
        elif plan is not None:
            held = record.peak_held_bytes
            planned = (
                f'"plan":"{plan}","{"at_most" if record.is_bound else "predicted"}":'
                f"{self._base + plan.peak_bytes},"
                f'"again_ms":{plan.extra_seconds * 1e3:.4g},'
            )
        if record.evictions:
            planned += f'"evicted":{record.evictions},'
        if record.reserve_bytes != self._reserve:
            self._reserve = record.reserve_bytes
            planned += f'"reserve":{record.reserve_bytes},'
        self._writer.put(
            f'{{"step":{self._step},"at":{self._step_began_at - self._began_at:.4f},'
            f'"size":[{",".join(map(str, size.dims))}],{layout}{planned}"base":{self._base},'
            f'"peak":{_number(record.real_peak_bytes)},"held":{_number(held)},'
            f'"ms":{(now - self._step_began_at) * 1e3:.2f},"planning_us":{self._planning_us:.0f}}}'
        )

    def learned(self, observation: StepObservation, *, anew: bool, seconds: float) -> None:
        self._put_observation(observation.to_plain(), anew)

    def timed(self, observation: StepObservation, regime: Hashable) -> None:
        self._put({"timed": observation.to_plain(), "in": self._regimes.get(regime, 0)})

    def regime_entered(self, regime: Hashable, cost_model: CostModel) -> None:
        """Record the new regime with the observations that its cost model already has."""
        index = self._regimes.get(regime)
        if index is not None:  # for instance the steps of a GAN alternate between two regimes
            self._writer.put(f'{{"regime":{index}}}')
            return
        self._regimes[regime] = len(self._regimes)
        self._put({"regime": self._regimes[regime], "is": str(regime)})
        for plain in cost_model.to_plain()["observations"]:
            self._put_observation(plain, anew=False)

    def _put_observation(self, plain: dict[str, Any], anew: bool) -> None:
        self._put({"observation": plain, "anew": anew})

    def memory_ran_out(self) -> None:
        self._put({"ran_out": self._step})

    def step_retried(self) -> None:
        self._put({"retried": self._step})

    def noted(self, kind: str, text: str) -> None:
        at = round(time.perf_counter() - self._began_at, 4)
        self._put({"event": kind, "at": at, "step": self._step, "text": text})

    def flush(self) -> None:
        """Write the buffered lines."""
        self._writer.flush()

    def run_ends(self) -> None:
        """Flush and close. Also happens when the recorder is collected or Python exits."""
        self._close()

    def _put(self, line: dict[str, Any]) -> None:
        self._writer.put(json.dumps(line, separators=(",", ":")))

    def _new_layout(self, layout: Layout) -> str:
        index = len(self._layouts)
        self._put({"layout": index, "of": layout})
        self._layouts[layout] = f'"layout":{index},' if index else ""
        return self._layouts[layout]


class _LineWriter:
    """Buffers lines for a file. If a write fails, it warns once and drops this and later lines."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: BinaryIO | None = file
        self._lines: list[str] = []
        self._written_at = time.monotonic()
        self._process = os.getpid()

    def put(self, line: str) -> None:
        self._lines.append(line)
        waited = time.monotonic() - self._written_at
        if len(self._lines) >= _FLUSH_LINES or waited > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        self._written_at = time.monotonic()
        forked = os.getpid() != self._process  # for instance a DataLoader worker
        if self._file is None or not lines or forked:
            return
        try:
            self._file.write(("\n".join(lines) + "\n").encode())
        except OSError as error:
            warn(f"recording to {self._file.name} stopped: {error}. Training continues")
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


def path_of_rank(path: Path) -> Path:
    """The path for this rank: ranks other than 0 add their number to the name."""
    rank = int(os.environ.get("RANK", "0") or 0)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path


def unused_path(path: Path) -> Path:
    """The path or, if that file is not empty, the same name with the next free number.

    >>> unused_path(Path("no-such-run.jsonl")).name
    'no-such-run.jsonl'
    """
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    return next(free for free in itertools.chain([path], names) if _is_unused(free))


def _is_unused(path: Path) -> bool:
    """Whether the file is missing or empty; also true for devices such as /dev/null."""
    return not path.exists() or path.is_dir() or path.stat().st_size == 0


def refuse_unwritable(path: str | os.PathLike[str]) -> None:
    """Raise if `record=` is not a writable path; does not change an existing file."""
    if not isinstance(path, (str, os.PathLike)) or path == "":
        raise ArgumentError(f"record= must be a file path such as 'run.jsonl'; got {path!r}")
    _opened(unused_path(path_of_rank(Path(path))), "ab").close()


def _opened(path: Path, mode: Literal["ab", "wb"] = "wb") -> BinaryIO:
    try:
        return path.open(mode, buffering=0)
    except OSError as error:
        raise ArgumentError(
            f"record={str(path)!r} cannot be written: {error.strerror or error}. Give a file in an "
            "existing, writable directory"
        ) from None
