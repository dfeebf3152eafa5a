"""A model's use of host memory: how much there is, how fast it is reached, what came of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from mimose.costs import InputSize, Link, Option, Profile
from mimose.errors import warn
from mimose.memory import Clock, HostMemory, LinkSpeed, PinningError, host_limit
from mimose.planning import RecomputeAll
from mimose.training.device_pace import DevicePace
from mimose.units import text_of

_LONG_RUN = 2_500_000
"""Nanoseconds that a block's forward must take for its copies to be hidden behind others: queueing
them takes the host about a millisecond."""
_WORTH_PLANNING = 256 << 20
"""Host memory from which on plans are made with what is pinned so far."""
_MOVING = frozenset(option for option in Option if option.moves)


class HostUse:
    """Knows the link to the host, as soon as a plan could use it."""

    def __init__(
        self,
        device: torch.device,
        asked_bytes: int | None,
        choices: frozenset[Option],
        speed: LinkSpeed | None = None,
    ) -> None:
        wanted = bool(choices & _MOVING) and asked_bytes != 0
        self.limit_bytes = host_limit(asked_bytes, device) if wanted else 0
        self._device, self._choices = device, choices
        self.speed = speed or LinkSpeed()
        self.memory: HostMemory | None = None
        """The way to the host; None until a plan could use it."""
        self.version = 0
        """Changes with what plans should know of the link."""
        self.stalled_seconds = 0.0
        self.pace = DevicePace(Clock(device))
        self._awaited_bytes = 0
        """What plans would like to have, while it is being pinned."""
        self._known_bytes = 0
        """What was pinned when plans were last told so."""
        self._closed = False

    @property
    def possible(self) -> bool:
        """Whether plans may use the host."""
        return self.limit_bytes > 0

    @property
    def moved_bytes(self) -> int:
        """Bytes that have left the device so far."""
        return 0 if self.memory is None else self.memory.moved_bytes

    @property
    def held_bytes(self) -> int:
        """Host memory that is held for activations."""
        return 0 if self.memory is None else self.memory.arena.held_bytes

    def serves(self, profile: Profile, available_bytes: int) -> bool:
        """Whether a plan for this profile may gain by using the host.

        Queueing the copies of a block takes the host time, which plans do not count, and how long
        blocks really run must be known. Else the host is used only if nothing else fits.
        """
        if self._device.type != "cuda":
            return True
        times, share = (
            [run.nanoseconds for run in profile.runs if not run.fixed],
            self.pace.of(profile),
        )
        if share is not None and times and statistics.median(times) * share >= _LONG_RUN:
            return True
        return not RecomputeAll().plan(profile, available_bytes).fits

    def connected(self, profile: Profile, *, trusted: bool) -> Profile:
        """The profile with the link to the host, and with the times of planned steps."""
        share = self.pace.of(profile) or 1.0
        if share < 1.0 and self._device.type == "cuda":
            profile = profile.at_pace(share)
        return replace(profile, link=self.link(trusted=trusted))

    def wants_time_of(self, size: InputSize) -> bool:
        """Whether to time the forward of a step that begins now, and moves nothing."""
        return self.possible and self._device.type == "cuda" and self.pace.is_new(size)

    def link(self, *, trusted: bool) -> Link | None:
        """The link for a plan; None if it must do without.

        Where predictions are not trusted, kept activations must be there to be evicted, and blocks
        are measured: only the inputs of recomputed blocks may move.
        """
        if self.possible and self.memory is None and not self._closed:
            self._begin()
        link = self.known_link
        if link is None or trusted:
            return link
        return link._replace(options=link.options - {Option.SAVE_ON_HOST})

    @property
    def known_link(self) -> Link | None:
        """The link as plans use it now, without asking for one; None if they do without."""
        if self.memory is None or not self.possible or not self.speed.known:
            return None
        return Link(self.speed.to_host, self.speed.from_host, self.limit_bytes, self._choices)

    def only_what_is_there(self, link: Link | None) -> Link | None:
        """The link for a plan that makes do with the host memory that is pinned by now."""
        held = self.held_bytes
        return link._replace(host_bytes=held) if link is not None and held else None

    def begun(self) -> HostMemory | None:
        """The way to the host, also if no plan has used it yet; None if there is none."""
        self.link(trusted=False)
        return self.memory if self.possible else None

    def _begin(self) -> None:
        self.memory = HostMemory(self._device, self.limit_bytes)
        self.version += 1
        if not self.speed.known:
            self.speed.probe(self.memory)
        if not self.speed.known:
            self._give_up("the first bytes could not be pinned")

    def has(self, host_bytes: int) -> bool:
        """Whether so much host memory is pinned. If not, that begins, and training goes on."""
        if host_bytes <= self.held_bytes:
            return True
        assert self.memory is not None
        if not self.memory.arena.slow:
            return self.reserve(host_bytes)
        self._awaited_bytes = max(self._awaited_bytes, min(host_bytes, self.limit_bytes))
        with self._giving_up_if_refused():
            self.memory.arena.prepare(self._awaited_bytes)
        return False

    def reserve(self, host_bytes: int) -> bool:
        """Have so much host memory ready, and wait for it; whether it is."""
        if not host_bytes:
            return True
        assert self.memory is not None
        with self._giving_up_if_refused():
            return self.memory.arena.reserve(host_bytes)
        return False

    @contextmanager
    def _giving_up_if_refused(self) -> Iterator[None]:
        try:
            yield
        except PinningError as error:
            self._give_up(str(error))

    def _give_up(self, problem: str) -> None:
        asked, self.limit_bytes, self._awaited_bytes = self.limit_bytes, 0, 0
        self.version += 1
        warn(
            f"host memory cannot be used for activations ({problem}); up to {text_of(asked)} were "
            "allowed. Plans do without it. host_memory=0 says so in advance; a smaller "
            "host_memory= or a higher limit on locked memory (ulimit -l) may help"
        )

    def read_times(self) -> None:
        """Read what the copies of earlier steps have shown."""
        if self.memory is not None:
            times = self.memory.stream.times()
            self.stalled_seconds += times.stalled_seconds
            self.version += self.speed.learn(times)
        self.version += self.pace.read()
        if self._awaited_bytes:
            self._follow_pinning()

    def _follow_pinning(self) -> None:
        """Let plans be made anew when there is twice as much host memory as they know of, or all
        that they would like to have."""
        there = self.has(self._awaited_bytes)
        if there:
            self._awaited_bytes = 0
        if there or self.held_bytes >= max(2 * self._known_bytes, _WORTH_PLANNING):
            self._known_bytes = self.held_bytes
            self.version += 1

    def close(self) -> None:
        """Give all host memory back."""
        self._closed = True
        if self.memory is not None:
            self.memory.close()
