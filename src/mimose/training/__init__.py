"""One step's life: opened, decided, carried out, observed, learned from; retried if it failed.

Joins all of the above. What happens is told to subscribers; who they are is not known here.
"""

from mimose.training.collector import RecomputeCollector
from mimose.training.engine import Engine
from mimose.training.events import LaterBackward, RunStart, StepRecord, StepStart, Subscriber
from mimose.training.retry import retry_step
from mimose.training.scheduler import Scheduler
from mimose.training.setting import Setting, spare_bytes
from mimose.training.shuttle import Shuttle
from mimose.training.steps import ObservedStep, PlannedStep

__all__ = [
    "Engine",
    "LaterBackward",
    "ObservedStep",
    "PlannedStep",
    "RecomputeCollector",
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
