"""Runs training steps: plans each one, executes and measures it, learns from it, retries it.

Connects all packages below it. Events go to subscribers, which this package does not import.
"""

from mimose.training.collector import Collector
from mimose.training.engine import Engine
from mimose.training.events import (
    EVENTS,
    LaterBackward,
    RunStart,
    StepRecord,
    StepStart,
    Subscriber,
)
from mimose.training.host_use import HostUse
from mimose.training.options import Options
from mimose.training.ranks import Agreement
from mimose.training.retry import retry_step
from mimose.training.scheduler import Scheduler
from mimose.training.setting import Setting, spare_bytes
from mimose.training.shuttle import Shuttle

__all__ = [
    "EVENTS",
    "Agreement",
    "Collector",
    "Engine",
    "HostUse",
    "LaterBackward",
    "Options",
    "RunStart",
    "Scheduler",
    "Setting",
    "Shuttle",
    "StepRecord",
    "StepStart",
    "Subscriber",
    "retry_step",
    "spare_bytes",
]
