"""Two processes that train together over gloo, and a clock that ends them if they hang."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_COLLECTIVE_SECONDS = 20
"""How long one rank waits for the other in a collective before torch raises."""
_TASK_SECONDS = 90
"""How long a task may take before it counts as hung."""

Task = Callable[..., Any]


class Pair:
    """Two ranks of one gloo group that run what they are given, until `close`.

    They stay up between tasks: starting them is what takes time. After a task that failed or hung
    they are ended, and the next task gets a fresh pair.
    """

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, task: Task, *args: Any) -> list[Any]:
        """What `task(rank, *args)` returns on each rank; it must be importable by name."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((task, args))
        answers = [self._answer(task, rank) for rank in (0, 1)]
        problems = [problem for _, problem in answers if problem]
        if problems:
            self.close()
            raise AssertionError("\n".join(problems))
        return [value for value, _ in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        meeting_place = os.path.join(tempfile.mkdtemp(), "store")
        for rank in (0, 1):
            mine, its = context.Pipe()
            process = context.Process(target=_serve, args=(rank, meeting_place, its), daemon=True)
            process.start()
            its.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def _answer(self, task: Task, rank: int) -> tuple[Any, str]:
        name = f"{task.__name__} on rank {rank}"
        try:
            if not self._pipes[rank].poll(_TASK_SECONDS):
                return None, f"{name}: no answer in {_TASK_SECONDS} s, it hangs"
            value, problem = self._pipes[rank].recv()
        except EOFError:
            return None, f"{name}: the process died"
        return value, f"{name}:\n{problem}" if problem else ""


def _serve(rank: int, meeting_place: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("error", category=_mimose_warning())
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(meeting_place, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=_COLLECTIVE_SECONDS),
    )
    while True:
        try:
            task, args = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        gc.collect()
        gc.freeze()  # what lives on (modules, mostly) is not looked through again
        try:
            pipe.send((task(rank, *args), ""))
        except BaseException:
            pipe.send((None, traceback.format_exc()))


def _mimose_warning() -> type[Warning]:
    from mimose.errors import MimoseWarning

    return MimoseWarning
