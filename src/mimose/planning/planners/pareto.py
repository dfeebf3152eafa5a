"""The cheapest choices that fit, found in one scan over the runs.

Later runs feel a single number of earlier choices, the bytes held so far, and less is never worse;
so of all prefixes only those matter that no other prefix beats in both held bytes and time (a
Pareto front). A prefix that cannot be completed is dropped; one from which all the rest can take
their first choice is completed at once, and bounds the others.

The time is exact while the front stays under some thousands of prefixes, as it does even for 96
blocks that all differ; past that, within 0.5 % of exact. Under autocast runs hold a little less in
the forwards than in the backwards. Prefixes carry both numbers and are checked against both, but
compared by the latter alone: exact where the casts of blocks are equal.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mimose.costs import Option, Profile

_FEW = 24
"""Up to this many prefixes plain lists are faster than arrays."""

_MANY = 4096
"""Beyond this many prefixes, those that differ by next to nothing in time are thinned out."""

NO_BOUND = 1 << 62

_THINNING = 0.005
"""The share of the best known time that thinning may cost over the whole scan."""


class Choice(NamedTuple):
    """One option of a run, as far as it matters here."""

    forward_need: int
    """Bytes in its forward, beyond those held by earlier runs."""
    backward_need: int
    forward_held: int
    backward_held: int
    time: int
    option: Option


Menu = list[Choice]
_Limit = tuple[int, int]
"""The most that may be held, in the forwards and in the backwards."""


@dataclass(slots=True)
class _Front:
    """Prefixes that no other beats, by rising held bytes and falling time, with their parents.

    Five lists, or five arrays where they are long.
    """

    held: Any
    """In the backwards."""
    in_forward: Any
    spent: Any
    parent: Any
    chosen: Any
    """The index in the menu of the choice that was made last."""


def may_use(profile: Profile, option: Option) -> bool:
    """Whether plans may choose this option: an input on the host needs a recompute."""
    if option is Option.KEEP or profile.link is None:
        return not option.moves
    allowed = profile.link.options
    return option in allowed and (Option.RECOMPUTE in allowed or not option.recomputes)


def menus_of(profile: Profile) -> list[Menu]:
    """The options of each run whose costs are local: those that move nothing."""
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
    """The choices that fit and take the least time; None if nothing fits that takes less than
    `below`. Of the profile, the menus stand for the runs."""
    if profile.tail > available:
        return None
    can_keep_all = _limits_of_keeping_all(menus, profile, available)
    if min(can_keep_all[0]) >= 0:
        return tuple(menu[0].option for menu in menus)
    beginning = _shortest_beginning(menus, available, can_keep_all)
    if beginning is not None and _nothing_less_fits(menus, profile.head, available, beginning):
        return tuple(menu[-1 if k < beginning else 0].option for k, menu in enumerate(menus))
    can_finish = _limits_of_finishing(menus, profile, available)
    fronts = [_Front([0], [0], [0], [0], [0])]
    best_time, best_at = below, (-1, -1)
    if beginning is not None:  # a little over the time of a plan that fits
        best_time = min(below, sum(menu[-1].time for menu in menus[:beginning]) + 1)
    for k in range(len(menus) + 1):
        front = fronts[k]
        done = _cheapest_within(front, can_keep_all[k])
        if done >= 0 and front.spent[done] < best_time:
            best_time, best_at = int(front.spent[done]), (k, done)
        if k < len(menus):
            slack = best_time * _THINNING / len(menus) if best_time < NO_BOUND else 0.0
            extend = _extend_few if len(front.held) <= _FEW else _extend_many
            fronts.append(
                extend(front, done + 1, menus[k], available, can_finish[k + 1], best_time, slack)
            )
    return None if best_at[0] < 0 else _choices(menus, fronts, best_at)


def _shortest_beginning(
    menus: list[Menu], available: int, can_keep_all: list[_Limit]
) -> int | None:
    """How many runs at least must be at their strictest from the first on so that the rest can be
    kept; None if nothing of this simple kind fits."""
    for k, menu in enumerate(menus):
        if min(can_keep_all[k]) >= 0:
            return k
        last = menu[-1]
        if max(last.forward_need, last.backward_need) > available or last.backward_held > 0:
            return None
    return len(menus) if min(can_keep_all[-1]) >= 0 else None


def _nothing_less_fits(menus: list[Menu], head: int, available: int, beginning: int) -> bool:
    """Whether no plan that recomputes one run less fits, where all take the same time.

    Of equal blocks the shortest beginning is the best plan, as a rule, and that is quickly shown:
    whatever else is recomputed, so much is held in the end, or when the last run's backward comes.
    """
    moving = [menu for menu in menus if len(menu) > 1]
    if any(len(menu) > 2 for menu in moving) or len({menu[-1].time for menu in moving}) > 1:
        return False
    less = sum(len(menu) > 1 for menu in menus[:beginning]) - 1
    if less < 0:
        return True
    held = sorted((menu[0].forward_held for menu in moving), reverse=True)
    if sum(held[less:]) + head > available:
        return True
    held = sorted((menu[0].backward_held for menu in moving), reverse=True)
    kept, recomputed = moving[-1]
    held.remove(kept.backward_held)
    if sum(held[less:]) + kept.backward_need <= available:
        return False
    return not less or sum(held[less - 1 :]) + recomputed.backward_need > available


def _limits_of_keeping_all(menus: list[Menu], profile: Profile, available: int) -> list[_Limit]:
    """The most bytes that may be held before each run so that all the rest can be kept."""
    limit = available - profile.head_forward, available - profile.head_backward
    limits = [limit]
    for menu in reversed(menus):
        limit = _before(menu[0], limit, available)
        limits.append(limit)
    return limits[::-1]


def _limits_of_finishing(menus: list[Menu], profile: Profile, available: int) -> list[_Limit]:
    """The most bytes that may be held before each run so that the rest can be completed at all."""
    limit = available - profile.head_forward, available - profile.head_backward
    limits = [limit]
    for menu in reversed(menus):
        each = [_before(choice, limit, available) for choice in menu]
        limit = max(most for most, _ in each), max(most for _, most in each)
        limits.append(limit)
    return limits[::-1]


def _before(choice: Choice, after: _Limit, available: int) -> _Limit:
    """The most that may be held before a run that makes this choice."""
    return (
        min(available - choice.forward_need, after[0] - choice.forward_held),
        min(available - choice.backward_need, after[1] - choice.backward_held),
    )


def _cheapest_within(front: _Front, limit: _Limit) -> int:
    """The index of the cheapest prefix that holds no more than `limit`; -1 if there is none."""
    at = bisect_right(front.held, limit[1]) - 1
    while at >= 0 and front.in_forward[at] > limit[0]:
        at -= 1
    return at


def _extend_few(
    front: _Front, first: int, menu: Menu, available: int, cap: _Limit, bound: int, _slack: float
) -> _Front:
    states = []
    for at, choice in enumerate(menu):
        most_in_forward, most = _before(choice, cap, available)
        _, _, more_in_forward, more, time, _ = choice
        for i in range(first, len(front.held)):
            held, spent, in_forward = front.held[i], front.spent[i] + time, front.in_forward[i]
            if held <= most and in_forward <= most_in_forward and spent < bound:
                states.append((held + more, spent, at, i, in_forward + more_in_forward))
    states.sort()
    out = _Front([], [], [], [], [])
    lowest = bound
    for held, spent, at, parent, in_forward in states:
        if spent < lowest:
            lowest = spent
            out.held.append(held)
            out.in_forward.append(in_forward)
            out.spent.append(spent)
            out.parent.append(parent)
            out.chosen.append(at)
    return out


def _extend_many(
    front: _Front, first: int, menu: Menu, available: int, cap: _Limit, bound: int, slack: float
) -> _Front:
    held = np.asarray(front.held, np.int64)[first:]
    in_forward = np.asarray(front.in_forward, np.int64)[first:]
    spent = np.asarray(front.spent, np.int64)[first:]
    parents = []
    for choice in menu:
        most_in_forward, most = _before(choice, cap, available)
        fits = (held <= most) & (in_forward <= most_in_forward) & (spent + choice.time < bound)
        parents.append(np.flatnonzero(fits))
    chosen = np.repeat(np.arange(len(menu)), [len(each) for each in parents])
    parent = np.concatenate(parents)
    _, _, more_in_forward, more, time, _ = (np.array(column) for column in zip(*menu, strict=True))
    all_held, all_spent = held[parent] + more[chosen], spent[parent] + time[chosen]
    order = np.argsort(all_held, kind="stable")  # sorted stretches: a merge
    ordered = all_spent[order]
    lowest = np.minimum.accumulate(np.concatenate([[bound], ordered[:-1]]))
    order = order[ordered < lowest]
    if slack and len(order) > _MANY:
        # Of prefixes in one slice of time, the one that holds least stands for all.
        cells = (all_spent[order] / slack).astype(np.int64)
        order = order[np.concatenate([[True], cells[1:] != cells[:-1]])]
    parent, chosen = parent[order], chosen[order]
    return _Front(
        all_held[order],
        in_forward[parent] + more_in_forward[chosen],
        all_spent[order],
        parent + first,
        chosen,
    )


def _choices(menus: list[Menu], fronts: list[_Front], at: tuple[int, int]) -> tuple[Option, ...]:
    """The path back from the best prefix; what follows it is kept."""
    level, index = at
    choices = [menu[0].option for menu in menus]
    for k in range(level, 0, -1):
        choices[k - 1] = menus[k - 1][int(fronts[k].chosen[index])].option
        index = int(fronts[k].parent[index])
    return tuple(choices)
