"""The memory model of the papers: a chain of stages, each with a few numbers.

Static planners see a model as a chain. A stage has an input, activations that it may save, and
temporary peaks; a gradient flows back. The bytes in use are those of the live inputs, plus those of
the saved activations, plus in the backwards one gradient, plus the temporary peak of what runs.

Against the timeline this leaves out what blocks share: outputs that are saved twice, inputs that a
kept block frees, casts of weights, and memory that falls from one block to the next. A chain can be
turned back into a profile, so one evaluator serves both models.
"""

from __future__ import annotations

from dataclasses import dataclass

from mimose.comparison.evaluation import evaluate
from mimose.comparison.schedules import Schedule
from mimose.costs import InputSize, Option, Profile, RunCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one block costs in the papers' models."""

    input_bytes: int
    saved_bytes: int
    """Its activations, beyond its input."""
    forward_peak_bytes: int
    """Peak of a forward that saves nothing, above its start; its output included."""
    saving_peak_bytes: int
    """The same for a forward that saves its activations."""
    gradient_bytes: int
    """In use while its backward is next."""
    backward_peak_bytes: int
    """Peak of its backward, above its input, its activations and the gradient."""
    nanoseconds: int
    fixed: bool
    """Whether it cannot be recomputed."""

    @classmethod
    def of(cls, run: RunCost) -> Stage:
        keep, last = run.menu[0], run.menu[-1]
        gradient = 0 if run.fixed else max(0, run.backward_entry)
        kept = keep.backward_peak - keep.backward_held - gradient
        return cls(
            input_bytes=max(0, run.boundary),
            saved_bytes=keep.backward_held,
            forward_peak_bytes=last.forward_peak,
            saving_peak_bytes=keep.forward_peak,
            gradient_bytes=gradient,
            backward_peak_bytes=max(0, kept),
            nanoseconds=run.nanoseconds,
            fixed=run.fixed,
        )

    def as_run(self) -> RunCost:
        """A run whose timeline is that of this stage."""
        return RunCost(
            boundary=self.input_bytes,
            forward_peak=self.forward_peak_bytes,
            backward_entry=self.gradient_bytes,
            saved=self.saved_bytes,
            recompute_peak=self.saving_peak_bytes,
            backward_peak=self.backward_peak_bytes,
            output_saved=0,
            droppable_input=0,
            nanoseconds=self.nanoseconds,
            fixed=self.fixed,
        )


@dataclass(frozen=True, slots=True)
class Chain:
    """The stages of a step, and its head."""

    size: InputSize
    stages: tuple[Stage, ...]
    head_bytes: int
    """Peak between the last forward and the first backward, above all inputs."""

    @classmethod
    def of(cls, profile: Profile) -> Chain:
        """What the papers' models see of a profile."""
        inputs = sum(run.boundary for run in profile.runs)
        stages = tuple(map(Stage.of, profile.runs))
        return cls(profile.size, stages, max(0, profile.head - inputs))

    def as_profile(self) -> Profile:
        """The profile whose timeline is this model."""
        head = self.head_bytes + sum(stage.input_bytes for stage in self.stages)
        return Profile(self.size, tuple(stage.as_run() for stage in self.stages), head, head)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A planner's schedule, with its peak by the papers' model and by the timeline."""

    schedule: Schedule
    """Empty if the planner found none."""
    model_peak_bytes: int
    """The peak by the papers' model."""
    peak_bytes: int
    """The peak by the timeline."""
    extra_seconds: float
    claims_to_fit: bool
    """Whether the peak by the papers' model is within the available bytes."""
    fits: bool
    """Whether the peak by the timeline is within the available bytes."""
    bound_seconds: float | None = None
    """A proven lower bound of the extra time of schedules of the planner's form, if it has one."""
    timed_out: bool = False
    """Whether the planner hit its time limit."""

    @classmethod
    def of(
        cls,
        profile: Profile,
        schedule: Schedule,
        available_bytes: int,
        bound_seconds: float | None = None,
        timed_out: bool = False,
    ) -> Outcome:
        """Evaluate a schedule both ways."""
        model = evaluate(Chain.of(profile).as_profile(), schedule)
        real = evaluate(profile, schedule)
        return cls(
            schedule=schedule,
            model_peak_bytes=model.peak_bytes,
            peak_bytes=real.peak_bytes,
            extra_seconds=real.extra_nanoseconds / 1e9,
            claims_to_fit=model.peak_bytes <= available_bytes,
            fits=real.peak_bytes <= available_bytes,
            bound_seconds=bound_seconds,
            timed_out=timed_out,
        )


def strictest(profile: Profile) -> tuple[Option, ...]:
    """Recompute every run that can be: what a planner falls back to if nothing fits."""
    return tuple(Option.KEEP if run.fixed else Option.RECOMPUTE for run in profile.runs)
