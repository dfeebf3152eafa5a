"""A model's use of host memory: its size, the speed of the link, and the resulting stalls."""

from __future__ import annotations

import logging
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

log = logging.getLogger("mimose")

_LONG_FORWARD_NS = 5_000_000
"""A block's forward that takes this long hides copies. Queueing the copies of one block takes the
host about a millisecond. On an H200, where forwards took 2.5 to 4 ms, a run that moved 25 GB took
4 % longer than one that recomputed instead; at 15 ms, steps took 8 % less."""
_ENOUGH_FOR_PLANS = 256 << 20
"""Pinned bytes from which on plans use the host while more memory is being pinned."""
_MOVING = frozenset(option for option in Option if option.moves)


class HostUse:
    """Opens the link to the host when a plan could first use it, and learns its speed."""

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
        """The pinned memory and its copies; None until a plan could use them."""
        self.version = 0
        """Increases when plans should be made again, because the link or the pace changed."""
        self.stalled_seconds = 0.0
        self.pace = DevicePace(Clock(device))
        self._requested_bytes = 0
        """The bytes that plans have requested, while they are being pinned."""
        self._bytes_at_version = 0
        """The bytes that were pinned when plans were last made again because of pinning."""
        self._closed = False

    @property
    def possible(self) -> bool:
        """Whether plans may use the host."""
        return self.limit_bytes > 0

    @property
    def moved_bytes(self) -> int:
        """Bytes moved from the device to the host so far."""
        return 0 if self.memory is None else self.memory.moved_bytes

    @property
    def held_bytes(self) -> int:
        """Host memory that is held for activations."""
        return 0 if self.memory is None else self.memory.arena.held_bytes

    def serves(self, profile: Profile, available_bytes: int) -> bool:
        """Whether a plan for this profile may gain by using the host.

        Plans do not count the time that the host takes to queue copies. So unless blocks are known
        to run long enough to hide it, the host is used only if recomputing everything does not fit.
        """
        if self._device.type != "cuda":
            return True
        share = self.pace.of(profile)
        if share is not None and _hides_copies(profile, share):
            return True
        return not RecomputeAll().plan(profile, available_bytes).fits

    def connected(self, profile: Profile, *, trusted: bool) -> Profile:
        """The profile with the link to the host, and with the times of planned steps."""
        share = self.pace.of(profile) or 1.0
        if share < 1.0 and self._device.type == "cuda":
            profile = profile.at_pace(share)
        return replace(profile, link=self.link(trusted=trusted))

    def wants_time_of(self, size: InputSize, profile: Profile) -> bool:
        """Whether to time the forward of a step of this size that moves nothing.

        In planned steps blocks take no longer than observed. If that is too short to hide copies,
        their pace does not matter.
        """
        possible = self._device.type == "cuda" and self.limit_bytes > 0
        return possible and self.pace.is_new(size) and _hides_copies(profile)

    def link(self, *, trusted: bool) -> Link | None:
        """The link for a plan, opened if need be; None if the plan must not use the host.

        If predictions are not trusted, kept activations must stay on the device, where they can be
        evicted and measured: only the inputs of recomputed blocks may move.
        """
        if self.possible and self.memory is None and not self._closed:
            self._begin()
        link = self.known_link
        if link is None or trusted:
            return link
        return link._replace(options=link.options - {Option.SAVE_ON_HOST})

    @property
    def known_link(self) -> Link | None:
        """The link that plans use now, without opening one; None if they do not use the host."""
        if self.memory is None or not self.possible or not self.speed.known:
            return None
        return Link(self.speed.to_host, self.speed.from_host, self.limit_bytes, self._choices)

    def only_what_is_there(self, link: Link | None) -> Link | None:
        """The link for a plan that uses only the host memory that is pinned already."""
        held = self.held_bytes
        return link._replace(host_bytes=held) if link is not None and held else None

    def begun(self) -> HostMemory | None:
        """The host memory, opened even if no plan has used it yet; None if it must not be used."""
        self.link(trusted=False)
        return self.memory if self.possible else None

    def _begin(self) -> None:
        self.memory = HostMemory(self._device, self.limit_bytes)
        self.version += 1
        if not self.speed.known:
            self.speed.probe(self.memory)
        if not self.speed.known:
            self._stop("the first bytes could not be pinned")

    def exclude(self, option: Option, planned_bytes: int, freed_bytes: int) -> None:
        """Make no more plans with this option: its transfers free too little on the device."""
        if option in self._choices:
            self._choices -= {option}
            self.version += 1
            log.info(
                "plans do without %r from now on: it was to free %s on the device, and freed %s",
                option.value,
                text_of(planned_bytes),
                text_of(freed_bytes),
            )

    def has(self, host_bytes: int) -> bool:
        """Whether this much host memory is pinned. If not, start pinning it in the background."""
        if host_bytes <= self.held_bytes:
            return True
        assert self.memory is not None
        if not self.memory.arena.slow:
            return self.reserve(host_bytes)
        self._requested_bytes = max(self._requested_bytes, min(host_bytes, self.limit_bytes))
        with self._stop_if_refused():
            self.memory.arena.prepare(self._requested_bytes)
        return False

    def reserve(self, host_bytes: int) -> bool:
        """Pin this much host memory, and wait for it; whether that succeeded."""
        if not host_bytes:
            return True
        assert self.memory is not None
        with self._stop_if_refused():
            return self.memory.arena.reserve(host_bytes)
        return False

    @contextmanager
    def _stop_if_refused(self) -> Iterator[None]:
        try:
            yield
        except PinningError as error:
            self._stop(str(error))

    def _stop(self, problem: str) -> None:
        asked, self.limit_bytes, self._requested_bytes = self.limit_bytes, 0, 0
        self.version += 1
        warn(
            f"host memory cannot be used for activations ({problem}); up to {text_of(asked)} were "
            "allowed. Plans do not use it. host_memory=0 avoids this warning; a smaller "
            "host_memory= or a higher limit on locked memory (ulimit -l) may help"
        )

    def read_times(self) -> None:
        """Learn from the copies and the timed forwards of earlier steps."""
        if self.memory is not None:
            times = self.memory.stream.times()
            self.stalled_seconds += times.stalled_seconds
            self.version += self.speed.learn(times)
        self.version += self.pace.read()
        if self._requested_bytes:
            self._follow_pinning()

    def _follow_pinning(self) -> None:
        """Have new plans made when enough host memory is pinned.

        That is all that plans have requested, or twice as much as at the last change.
        """
        complete = self.has(self._requested_bytes)
        if complete:
            self._requested_bytes = 0
        if complete or self.held_bytes >= max(2 * self._bytes_at_version, _ENOUGH_FOR_PLANS):
            self._bytes_at_version = self.held_bytes
            self.version += 1

    def close(self) -> None:
        """Release all host memory."""
        self._closed = True
        if self.memory is not None:
            self.memory.close()


def _hides_copies(profile: Profile, share: float = 1.0) -> bool:
    """Whether blocks hide the time to queue copies, if forwards take this share of the profile's
    times."""
    times = [run.nanoseconds for run in profile.runs if not run.fixed]
    return bool(times) and statistics.median(times) * share >= _LONG_FORWARD_NS
