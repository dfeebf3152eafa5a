"""Messages to the user: in the log, as warnings, and in the recording."""

from __future__ import annotations

import logging

import torch

from mimose.costs import InputSize, Option, Profile, peak
from mimose.errors import warn
from mimose.memory import ALLOCATOR_SETTINGS
from mimose.planning import Plan
from mimose.training.events import Events
from mimose.training.setting import Setting
from mimose.units import Budget, text_of

log = logging.getLogger("mimose")

_LITTLE = 0.1
"""If recomputing saves less than this share of a step's memory, other blocks may save more."""


def _hint_at_other_blocks(plan: Plan, profile: Profile | None) -> str:
    """A hint to select other blocks, if recomputing saves less than `_LITTLE`; else empty."""
    if profile is None:
        return ""
    all_kept = peak(profile, [Option.KEEP] * len(plan.choices))
    saved = all_kept - plan.peak_bytes
    if saved >= _LITTLE * all_kept:
        return ""
    return (
        f". Recomputing saves only {text_of(max(0, saved))} of the {text_of(all_kept)} that this "
        "step needs with all blocks kept: the rest lies outside of the blocks, or comes back with "
        "each recompute. Smaller or other blocks may save more: select them with blocks="
    )


class Notifications:
    """Reports the important events of a run."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._warned_too_little = False
        self._reported_over_budget = False

    def attached(self, model: str, blocks: str, budget: Budget, device: torch.device) -> None:
        """mimose was attached to a model."""
        log.info("mimose is attached to %s: %s, budget %s, on %s", model, blocks, budget, device)

    def planning_begins(
        self, setting: Setting, blocks: int, observed_steps: int, allocator_left: str | None
    ) -> None:
        """Sizes that were never observed can be predicted from now on."""
        self._events.noted("planning", f"{observed_steps} steps were observed")
        log.info(
            "mimose plans from now on: %d blocks, %d steps observed, budget %s, reserve %s",
            blocks,
            observed_steps,
            text_of(setting.budget_bytes),
            text_of(setting.reserve.bytes),
        )
        if setting.meter.fragments and allocator_left is not None:
            warn(
                "batches vary in size, but PyTorch's CUDA allocator does not use expandable "
                f"segments, and mimose has not changed it because {allocator_left}. Fragmentation "
                f"wastes memory, so {text_of(setting.reserve.bytes)} of the budget stay free. Add "
                f"{ALLOCATOR_SETTINGS} to your setting, or remove it and let mimose configure it"
            )

    def tell_if_too_little(
        self,
        setting: Setting,
        size: InputSize,
        plan: Plan,
        in_use_bytes: int,
        profile: Profile | None = None,
    ) -> None:
        """Warn once, if even this plan does not fit."""
        if self._warned_too_little or plan.fits:  # it may fit thanks to earlier peaks
            return
        # A plan that exceeds only the margin for noise usually fits after all. The present reserve
        # may be larger than its minimum because little has been learned.
        if plan.peak_bytes <= setting.budget_bytes - setting.reserve.minimum_bytes - in_use_bytes:
            return
        self._warned_too_little = True
        if in_use_bytes >= setting.budget_bytes - setting.reserve.minimum_bytes:
            self._warn_that_none_fits(setting, in_use_bytes)
            return
        how = "under this plan" if plan.kept else "with every block recomputed"
        needed = in_use_bytes + plan.peak_bytes
        missing = needed - (setting.budget_bytes - setting.reserve.minimum_bytes)
        message = (
            f"input {size} needs {text_of(needed)} {how}, {text_of(missing)} more than the budget "
            f"of {text_of(setting.budget_bytes)} leaves after its reserve of "
            f"{text_of(setting.reserve.minimum_bytes)}: raise memory_budget or shorten the batch"
            f"{_hint_at_other_blocks(plan, profile)}. Training continues"
        )
        self._events.noted("budget too small", message)
        warn(message)

    def _warn_that_none_fits(self, setting: Setting, in_use_bytes: int) -> None:
        message = (
            f"{text_of(in_use_bytes)} are in use before the first block runs (parameters, "
            f"optimizer state, the batch), but the budget is {text_of(setting.budget_bytes)}: no "
            "plan can help. Raise memory_budget. Training continues with every block recomputed"
        )
        self._events.noted("budget too small", message)
        warn(message)

    def changed(self, what: str) -> None:
        """The learned costs are no longer valid, and are observed again."""
        log.info("mimose: %s", what)
        self._events.noted("regime", what)

    def ran_out(self, size: InputSize | None, why: str, what_now: str) -> None:
        """A step ran out of memory."""
        log.warning("mimose: memory ran out at input %s; %s", size, what_now)
        self._events.noted("recovery", why)

    def lost(self, size: InputSize) -> None:
        """A step ran out of memory and was not retried."""
        log.warning(
            "mimose: the last step, with input %s, ran out of memory and is lost. "
            "handle.retry(step, batch) runs such a step again under a stricter plan",
            size,
        )
        self._events.noted("lost step", f"input {size} ran out of memory")

    def over_budget(self, size: InputSize, peak_bytes: int, budget_bytes: int) -> None:
        """An observed step exceeded the budget. Reported once."""
        if self._reported_over_budget:
            return
        self._reported_over_budget = True
        message = (
            f"input {size} took {text_of(peak_bytes)} in an observed step, and the budget is "
            f"{text_of(budget_bytes)}. The first steps run before the model's costs are known, "
            "and try each kind of block by running it twice. enforce=True makes the budget a hard "
            "limit in these steps, too"
        )
        log.warning("mimose: %s", message)
        self._events.noted("over budget", message)

    def recomputed_instead(self, block: str) -> None:
        """A block ran out of memory in its forward, and is recomputed instead of kept."""
        self._events.noted("recovery", f"block {block} ran out of memory and is recomputed")
