"""Pass events to a user's subscriber, whose errors must not end training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mimose.errors import ArgumentError, warn
from mimose.training import EVENTS, Subscriber


class GuardedSubscriber(Subscriber):
    """Passes events on until the subscriber raises an exception; then warns, and stops."""

    def __init__(self, subscriber: Subscriber) -> None:
        if not isinstance(subscriber, Subscriber):
            raise ArgumentError(
                "subscribe() needs an instance of a subclass of mimose.training.Subscriber; got "
                f"{subscriber!r}"
            )
        self._name = type(subscriber).__name__
        self._failed = False
        for name in EVENTS:
            setattr(self, name, self._guarded(name, getattr(subscriber, name)))

    def _guarded(self, name: str, method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            if self._failed:
                return
            try:
                method(*args, **kwargs)
            except Exception as error:
                self._failed = True
                warn(
                    f"{self._name}.{name}() raised {error!r}: this subscriber gets no more events, "
                    "and training goes on"
                )

        return call
