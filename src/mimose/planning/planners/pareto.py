"""Find the cheapest choices that fit, in one scan over the runs.

A prefix is a choice of options for the first runs. All that later runs depend on is the bytes that
a prefix holds, and less is never worse. So only the Pareto front of prefixes matters: those that no
other prefix beats in both held bytes and time. A prefix that cannot be completed within the
available bytes is dropped. A prefix after which all other runs can be kept is complete, and its
time bounds the others.

The result is exact up to 4,096 prefixes in the front, which even 96 different blocks do not exceed;
beyond that its time is within 0.5 % of the best.

Under autocast, runs hold slightly less in the forwards than in the backwards. Prefixes have both
numbers, and both are checked against the available bytes. But prefixes are compared by the bytes
held in the backwards alone, which is exact only if the casts of all blocks are equal.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mimose.costs import Option, Profile

_FEW = 24
"""Up to this many prefixes, lists are faster than arrays."""

_MANY = 4096
"""Above this number of prefixes, those with almost the same time are thinned out."""

NO_BOUND = 1 << 62

_THINNING = 0.005
"""The most time that thinning may cost in a whole scan, as a fraction of the best time so far."""


class Choice(NamedTuple):
    """One option of a run: the numbers that the scan needs."""

    forward_need: int
    """Peak of its forward, without the bytes held by earlier runs."""
    backward_need: int
    """Peak of its backward, without the bytes held by earlier runs."""
    forward_held: int
    backward_held: int
    time: int
    option: Option


Menu = list[Choice]
_Limit = tuple[int, int]
"""The most bytes that earlier runs may hold in the forwards, and in the backwards."""


@dataclass(slots=True)
class _Front:
    """The Pareto front of prefixes of one length, sorted by rising held bytes and falling time.

    Each attribute is a list, or an array if the front is long, with one element for each prefix.
    """

    held: Any
    """Bytes held in the backwards."""
    in_forward: Any
    """Bytes held in the forwards."""
    time: Any
    parent: Any
    """The index, in the front before, of the prefix without its last choice."""
    chosen: Any
    """The index of its last choice in the menu."""


def may_use(profile: Profile, option: Option) -> bool:
    """Whether plans may choose this option; an input on the host also needs RECOMPUTE."""
    if option is Option.KEEP or profile.link is None:
        return not option.moves
    allowed = profile.link.options
    return option in allowed and (Option.RECOMPUTE in allowed or not option.recomputes)


def menus_of(profile: Profile) -> list[Menu]:
    """The options of each run that move nothing, so that their costs depend on this run only."""
    base, menus = 0, []
    for run in profile.runs:
        base += run.boundary
        menus.append(
            [
                Choice(
                    base + cost.forward_peak,
                    base + cost.backward_peak,
                    cost.forward_held,
                    cost.backward_held,
                    cost.nanoseconds,
                    cost.option,
                )
                for cost in run.menu
                if profile.link is None or may_use(profile, cost.option)
            ]
        )
    return menus


def cheapest(
    menus: list[Menu], profile: Profile, available: int, below: int = NO_BOUND
) -> tuple[Option, ...] | None:
    """The choices from these menus that fit and take the least time.

    None if no choices fit that take less than `below`. Of the profile, only the head and the tail
    are used.
    """
    if profile.tail > available:
        return None
    keep_limits = _limits_to_keep_rest(menus, profile, available)
    if min(keep_limits[0]) >= 0:
        return tuple(menu[0].option for menu in menus)
    beginning = _shortest_beginning(menus, available, keep_limits)
    if beginning is not None and _is_least_time(menus, profile.head, available, beginning):
        return tuple(menu[-1 if k < beginning else 0].option for k, menu in enumerate(menus))
    finish_limits = _limits_to_finish(menus, profile, available)
    fronts = [_Front([0], [0], [0], [0], [0])]
    best_time, best_at = below, (-1, -1)
    if beginning is not None:  # just above the time of a plan that fits
        best_time = min(below, sum(menu[-1].time for menu in menus[:beginning]) + 1)
    for k in range(len(menus) + 1):
        front = fronts[k]
        done = _cheapest_within(front, keep_limits[k])
        if done >= 0 and front.time[done] < best_time:
            best_time, best_at = int(front.time[done]), (k, done)
        if k < len(menus):
            slack = best_time * _THINNING / len(menus) if best_time < NO_BOUND else 0.0
            extend = _extend_few if len(front.held) <= _FEW else _extend_many
            fronts.append(
                extend(front, done + 1, menus[k], available, finish_limits[k + 1], best_time, slack)
            )
    return None if best_at[0] < 0 else _choices(menus, fronts, best_at)


def _shortest_beginning(menus: list[Menu], available: int, keep_limits: list[_Limit]) -> int | None:
    """The least k such that the plan fits which recomputes the first k runs and keeps the others.

    None if no such plan fits.
    """
    for k, menu in enumerate(menus):
        if min(keep_limits[k]) >= 0:
            return k
        last = menu[-1]
        if max(last.forward_need, last.backward_need) > available or last.backward_held > 0:
            return None
    return len(menus) if min(keep_limits[-1]) >= 0 else None


def _is_least_time(menus: list[Menu], head: int, available: int, beginning: int) -> bool:
    """Whether recomputing the first `beginning` runs is provably the plan with the least time.

    That is so if all recomputes take the same time and no plan with one recompute less fits. It
    usually holds for equal blocks, and is fast to show: whichever runs are recomputed, too many
    bytes are held after the last forward, or in the backward of the last run.
    """
    choosable = [menu for menu in menus if len(menu) > 1]
    if any(len(menu) > 2 for menu in choosable) or len({menu[-1].time for menu in choosable}) > 1:
        return False
    fewer = sum(len(menu) > 1 for menu in menus[:beginning]) - 1
    if fewer < 0:
        return True
    held = sorted((menu[0].forward_held for menu in choosable), reverse=True)
    if sum(held[fewer:]) + head > available:
        return True
    held = sorted((menu[0].backward_held for menu in choosable), reverse=True)
    kept, recomputed = choosable[-1]
    held.remove(kept.backward_held)
    if sum(held[fewer:]) + kept.backward_need <= available:
        return False
    return not fewer or sum(held[fewer - 1 :]) + recomputed.backward_need > available


def _limits_to_keep_rest(menus: list[Menu], profile: Profile, available: int) -> list[_Limit]:
    """The most bytes that the runs before each run may hold so that the rest can be kept."""
    limit = available - profile.head_forward, available - profile.head_backward
    limits = [limit]
    for menu in reversed(menus):
        limit = _before(menu[0], limit, available)
        limits.append(limit)
    return limits[::-1]


def _limits_to_finish(menus: list[Menu], profile: Profile, available: int) -> list[_Limit]:
    """The most bytes that the runs before each run may hold so that some completion fits."""
    forward, backward = available - profile.head_forward, available - profile.head_backward
    limits = [(forward, backward)]
    for menu in reversed(menus):
        after_forward, after_backward = forward, backward
        forward = backward = -NO_BOUND
        for choice in menu:  # as `_before`, without its calls: a search does this often
            forward_need, backward_need, forward_held, backward_held, _, _ = choice
            limit = min(available - forward_need, after_forward - forward_held)
            if limit > forward:
                forward = limit
            limit = min(available - backward_need, after_backward - backward_held)
            if limit > backward:
                backward = limit
        limits.append((forward, backward))
    return limits[::-1]


def _before(choice: Choice, after: _Limit, available: int) -> _Limit:
    """The most bytes that the runs before a run may hold if it makes this choice."""
    return (
        min(available - choice.forward_need, after[0] - choice.forward_held),
        min(available - choice.backward_need, after[1] - choice.backward_held),
    )


def _cheapest_within(front: _Front, limit: _Limit) -> int:
    """The index of the cheapest prefix that holds at most `limit`; -1 if there is none."""
    at = bisect_right(front.held, limit[1]) - 1
    while at >= 0 and front.in_forward[at] > limit[0]:
        at -= 1
    return at


def _extend_few(
    front: _Front, first: int, menu: Menu, available: int, limit: _Limit, bound: int, _slack: float
) -> _Front:
    """The front of all prefixes from index `first` on, extended by one run; for short fronts.

    `limit` is what a prefix may hold after this run, `bound` what its time must stay below.
    """
    prefixes = []
    for chosen, choice in enumerate(menu):
        most_in_forward, most = _before(choice, limit, available)
        for i in range(first, len(front.held)):
            held, time, in_forward = front.held[i], front.time[i] + choice.time, front.in_forward[i]
            if held <= most and in_forward <= most_in_forward and time < bound:
                held, in_forward = held + choice.backward_held, in_forward + choice.forward_held
                prefixes.append((held, time, chosen, i, in_forward))
    prefixes.sort()
    out = _Front([], [], [], [], [])
    least = bound
    for held, time, chosen, parent, in_forward in prefixes:
        if time < least:
            least = time
            out.held.append(held)
            out.in_forward.append(in_forward)
            out.time.append(time)
            out.parent.append(parent)
            out.chosen.append(chosen)
    return out


def _extend_many(
    front: _Front, first: int, menu: Menu, available: int, limit: _Limit, bound: int, slack: float
) -> _Front:
    """The same for long fronts; prefixes whose times are in the same `slack` are thinned out."""
    held = np.asarray(front.held, np.int64)[first:]
    in_forward = np.asarray(front.in_forward, np.int64)[first:]
    time = np.asarray(front.time, np.int64)[first:]
    parents = []
    for choice in menu:
        most_in_forward, most = _before(choice, limit, available)
        fits = (held <= most) & (in_forward <= most_in_forward) & (time + choice.time < bound)
        parents.append(np.flatnonzero(fits))
    chosen = np.repeat(np.arange(len(menu)), list(map(len, parents)))
    parent = np.concatenate(parents)
    more_in_forward = np.array([choice.forward_held for choice in menu])
    more = np.array([choice.backward_held for choice in menu])
    more_time = np.array([choice.time for choice in menu])
    all_held, all_time = held[parent] + more[chosen], time[parent] + more_time[chosen]
    order = np.argsort(all_held, kind="stable")  # stable merges sorted stretches
    ordered = all_time[order]
    least_before = np.minimum.accumulate(np.concatenate([[bound], ordered[:-1]]))
    order = order[ordered < least_before]
    if slack and len(order) > _MANY:
        # Of prefixes in the same slice of time, keep the one that holds the fewest bytes.
        slices = (all_time[order] / slack).astype(np.int64)
        order = order[np.concatenate([[True], slices[1:] != slices[:-1]])]
    parent, chosen = parent[order], chosen[order]
    return _Front(
        all_held[order],
        in_forward[parent] + more_in_forward[chosen],
        all_time[order],
        parent + first,
        chosen,
    )


def _choices(menus: list[Menu], fronts: list[_Front], at: tuple[int, int]) -> tuple[Option, ...]:
    """The choices of the prefix at (length, index), with all later runs kept."""
    length, index = at
    choices = [menu[0].option for menu in menus]
    for k in range(length, 0, -1):
        choices[k - 1] = menus[k - 1][int(fronts[k].chosen[index])].option
        index = int(fronts[k].parent[index])
    return tuple(choices)
