"""All contestants by name; and the compiler's own memory budget, which is one of them."""

from __future__ import annotations

from typing import Any, final

from mimose.bench.arena import Trainee
from mimose.bench.contestant import Contestant, Match, StepNote
from mimose.bench.contestants import (
    Oracle,
    Plain,
    StaticForData,
    StaticForDrawn,
    TorchAll,
    Transformers,
    TransformersEveryN,
)
from mimose.bench.dtr import Dtr, DtrUncapped
from mimose.bench.extras import BenchError
from mimose.bench.ours import (
    GreedyShuttle,
    Ours,
    OursCompiled,
    TwoOptions,
    forget_compiled,
    needs_cuda,
)
from mimose.bench.paper import Paper


@final
class CompileBudget(Contestant):
    """The whole model through `torch.compile` with `activation_memory_budget`.

    The compiler's budget is a share between everything recomputed (0) and everything kept (1): it
    is given the share that the bytes are of the way between the two stars.
    """

    name = "compile-budget"

    @classmethod
    def missing(cls, match: Match) -> str | None:
        return needs_cuda(match)

    def attach(self, trainee: Trainee) -> None:
        from torch._functorch import config

        survey, budget = self.match.survey, self.match.budget_bytes
        assert budget is not None
        low, high = survey.needed_bytes, survey.kept_bytes(survey.largest)
        self._share = min(1.0, max(0.0, (budget - low) / max(1, high - low)))
        self._former = config.activation_memory_budget
        config.activation_memory_budget = self._share
        trainee.model.compile(dynamic=True)  # without it the budget is ignored after 8 shapes

    def step_over(self) -> StepNote:
        return StepNote()

    def detach(self) -> None:
        from torch._functorch import config

        config.activation_memory_budget = self._former
        forget_compiled()

    def spent(self) -> dict[str, Any]:
        return {"activation_memory_budget": self._share}


CONTESTANTS: dict[str, type[Contestant]] = {
    contestant.name: contestant
    for contestant in (
        Plain,
        TorchAll,
        Transformers,
        TransformersEveryN,
        StaticForData,
        StaticForDrawn,
        Paper,
        GreedyShuttle,
        Dtr,
        DtrUncapped,
        TwoOptions,
        Ours,
        Oracle,
        CompileBudget,
        OursCompiled,
    )
}


def contestant_named(name: str) -> type[Contestant]:
    """The contestant of this name."""
    if name.strip() in CONTESTANTS:
        return CONTESTANTS[name.strip()]
    raise BenchError(f"there is no contestant {name!r}; use one of {', '.join(CONTESTANTS)}")
