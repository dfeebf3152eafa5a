"""What is found out before anything is timed, and the budgets that come of it."""

from __future__ import annotations

import json

import pytest
from bench_parts import arena, limits_of, surveyed

from mimose.bench.budgets import Asked, floor_bytes, too_small
from mimose.bench.extras import BenchError
from mimose.bench.survey import Survey


@pytest.mark.parametrize("task", ["QA-Bert", "T5-base", "ResNet-50", "ViT"])
def test_plain_peaks_are_known_without_training_plainly(task: str) -> None:
    known = surveyed(task)
    with arena(task).trainee() as trainee:
        trainee.step(arena(task).shapes[0], 0)
        for number, shape in enumerate(arena(task).shapes[-4:]):
            elsewhere = trainee.meter.read().in_use - known.base_bytes  # what other tests hold
            trainee.meter.reset_peak()
            trainee.step(shape, number)
            predicted = elsewhere + known.kept_bytes(arena(task).size_of(shape))
            assert predicted == pytest.approx(trainee.meter.read().peak, rel=0.02)


def test_the_measured_peak_of_recomputing_everything_is_the_timelines() -> None:
    known = surveyed("QA-Bert")
    assert known.recomputed_bytes(known.largest) == pytest.approx(known.needed_bytes, rel=0.01)


def test_recomputing_the_last_block_alone_buys_next_to_nothing() -> None:
    known = surveyed("QA-Bert")
    kept, (first, *_, last) = known.kept_bytes(known.largest), known.single_block_bytes
    assert last == pytest.approx(kept, rel=0.01)
    assert first < 0.9 * kept


def test_a_survey_survives_its_way_through_a_file() -> None:
    known = surveyed("QA-Bert")
    again = Survey.from_plain(json.loads(json.dumps(known.to_plain())))
    assert again == known
    assert again.plan(known.largest, floor_bytes(known)) == known.plan(
        known.largest, floor_bytes(known)
    )


def test_a_budget_is_tight_by_the_steps_that_plain_training_would_exceed_it_on() -> None:
    known, its_arena = surveyed("QA-Bert"), arena("QA-Bert")
    peaks = [known.kept_bytes(its_arena.size_of(shape)) for shape in its_arena.shapes]
    for limit, percent in zip(limits_of("QA-Bert", Asked(tight=(20, 50))), (20, 50), strict=True):
        assert sum(peak > limit.total_bytes for peak in peaks) == percent * len(peaks) // 100


def test_between_the_stars_lies_between_the_two_peaks() -> None:
    known = surveyed("QA-Bert")
    (limit,) = limits_of("QA-Bert", Asked(between=(0.5,)))
    middle = (known.needed_bytes + known.kept_bytes(known.largest)) / 2
    assert limit.total_bytes == pytest.approx(middle, rel=1e-6)


def test_no_budget_is_below_the_floor_and_that_is_said() -> None:
    floor = floor_bytes(surveyed("QA-Bert"))
    (limit,) = limits_of("QA-Bert", Asked(between=(0.0,), tight=(100,)))
    assert limit.total_bytes == floor == int(1.05 * surveyed("QA-Bert").needed_bytes)
    assert limit.at_floor
    assert "the floor" in str(limit)


def test_bytes_below_the_floor_are_refused_with_what_is_needed() -> None:
    with pytest.raises(BenchError, match=r"budget 2MiB is below the floor of QA-Bert.* Raise --b"):
        too_small(surveyed("QA-Bert"), Asked(total=("2MiB",)))


def test_of_several_budgets_those_below_the_floor_are_left_out() -> None:
    asked = Asked(total=("2MiB", "1GiB"))
    assert too_small(surveyed("QA-Bert"), asked) == ["2MiB"]
    assert [limit.label for limit in limits_of("QA-Bert", asked)] == ["1GiB"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"total": ("lots",)}, "is not a memory size"),
        ({"total": ("80%",)}, "a percentage or auto needs a device"),
        ({"total": ("6",)}, r'--budget 6 means 6 bytes.*"6GiB"'),
        ({"between": (1.5,)}, "from 0"),
        ({"tight": (150,)}, "from 0 to 100"),
    ],
)
def test_budgets_that_cannot_be_are_refused(asked: dict[str, tuple[object]], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        Asked(**asked)  # type: ignore[arg-type]


def test_equal_blocks_take_the_same_time_for_an_oracle() -> None:
    known = surveyed("QA-Bert")
    times = {run.nanoseconds for run in known.profile(known.largest).runs}
    assert len(times) == 1
