"""The plan that needs the least memory."""

from __future__ import annotations

from mimose.costs import Option, Profile
from mimose.planning.plan import Plan


def strictest(profile: Profile, available_bytes: int) -> Plan:
    """Every run recomputed; if that does not fit and there is a link, also with inputs on the host.

    The inputs of the first runs move, because they would stay on the device the longest: as few as
    needed, or as many as the host can hold if nothing fits. As the last resort, this plan uses
    recomputing even if `Link.options` excludes it.
    """
    plan = _moving(profile, 0, available_bytes)
    if plan.fits or profile.link is None:
        return plan
    movable = [k for k, run in enumerate(profile.runs) if run.recomputed_from_host()]
    if not movable or Option.RECOMPUTE_FROM_HOST not in profile.link.options:
        return plan
    too_few, enough = 0, movable[-1] + 2  # bisection
    while too_few + 1 < enough:
        middle = (too_few + enough) // 2
        fewer = _moving(profile, middle, available_bytes)
        if fewer.fits or fewer.host_bytes > profile.link.host_bytes:
            enough = middle
        else:
            too_few = middle
    tried = [plan, *(_moving(profile, n, available_bytes) for n in (too_few, enough))]
    possible = [plan for plan in tried if plan.host_bytes <= profile.link.host_bytes]
    return min(possible, key=lambda plan: (not plan.fits, plan.peak_bytes))


def _moving(profile: Profile, inputs: int, available_bytes: int) -> Plan:
    """All runs recomputed, with the inputs of the first `inputs` runs on the host."""
    choices = [Option.RECOMPUTE_FROM_HOST] * inputs + [Option.RECOMPUTE] * len(profile.runs)
    options = [
        Option.KEEP if run.fixed else option
        for run, option in zip(profile.runs, choices, strict=False)
    ]
    return Plan.of(profile, options, available_bytes)
