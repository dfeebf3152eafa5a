"""A recording tells the whole run, and never gets in its way."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mimose
import models
from loops import interceptors, task, texts, train
from mimose.costs.input_size import InputSize
from mimose.costs.link import Link
from mimose.costs.options import Option
from mimose.costs.run_cost import RunCost
from mimose.memory import Reading
from mimose.planning import Optimal, Plan
from mimose.reporting import RunningStats, Shortages
from mimose.reporting.outlook import Outlook
from mimose.reporting.page.contents import contents_of
from mimose.reporting.page.markdown import markdown_of
from mimose.reporting.reader import read_recording
from mimose.reporting.recording import Recorder, path_of_rank
from mimose.training import RunStart, StepRecord, StepStart
from parts import Regimes


def test_a_recording_has_a_line_for_every_step(recorded: tuple[Path, mimose.Mimose]) -> None:
    path, handle = recorded
    recording, stats = read_recording(path), handle.stats()
    assert [step.number for step in recording.steps] == list(range(1, stats.steps + 1))
    assert len(recording.planned) == stats.planned_steps
    assert recording.header.blocks == tuple(f"encoder.layers.{i}" for i in range(3))
    assert recording.header.budget_bytes == stats.budget_bytes
    assert recording.header.planner == "optimal"
    last = recording.steps[-1]
    assert last.size == stats.last_size
    assert last.plan == str(stats.last_plan)
    assert last.predicted_bytes == stats.last_predicted_peak_bytes
    assert last.peak_bytes == stats.last_real_peak_bytes
    assert last.reserve_bytes == stats.reserve_bytes
    assert recording.peak_bytes == stats.peak_bytes


def test_knowledge_rebuilt_from_a_recording_predicts_as_the_session_did(
    recorded: tuple[Path, mimose.Mimose], known: Regimes
) -> None:
    recording = read_recording(recorded[0])
    rebuilt = recording.cost_model()
    assert rebuilt.ready
    for step in recording.steps:
        assert rebuilt.predict(step.size) == known.cost_model.predict(step.size)


def test_a_recording_tells_when_planning_began(recorded: tuple[Path, mimose.Mimose]) -> None:
    events = read_recording(recorded[0]).events
    assert [event.kind for event in events] == ["planning"]
    assert 1 < events[0].step < 10


def test_a_recording_may_be_cut_anywhere(
    recorded: tuple[Path, mimose.Mimose], tmp_path: Path
) -> None:
    whole = recorded[0].read_bytes()
    first = whole.index(b"\n")
    steps = [step.number for step in read_recording(recorded[0]).steps]
    cut = tmp_path / "cut.jsonl"
    for at in random.sample(range(first, len(whole)), 40):
        cut.write_bytes(whole[:at])
        numbers = [step.number for step in read_recording(cut).steps]
        assert numbers == steps[: len(numbers)]
        assert len(numbers) >= whole[:at].count(b'\n{"step"') - 1


def test_times_are_those_of_the_observation_of_the_same_kind_of_step(
    recorded: tuple[Path, mimose.Mimose], tmp_path: Path
) -> None:
    lines = recorded[0].read_text().splitlines()
    observed = [json.loads(line) for line in lines if line.startswith('{"observation"')]
    one = observed[-1]["observation"]
    timed, other = copy.deepcopy(one), {**one, "allocates": not one["allocates"]}
    for run in timed["runs"]:
        run[RunCost._fields.index("nanoseconds")] = 999
    more = [{"observation": other, "anew": False}, {"timed": timed, "in": 0}]
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join([*lines, *map(json.dumps, more)]) + "\n")
    *_, first, second = read_recording(path).observations
    assert {run.nanoseconds for run in first.runs} == {999}
    assert 999 not in {run.nanoseconds for run in second.runs}


def test_recorded_training_gives_the_same_losses(tmp_path: Path) -> None:
    losses = []
    for record in (None, tmp_path / "run.jsonl"):
        model, batches, budget = task("encoder")
        with mimose.auto_checkpoint(model, budget, record=record):
            losses.append(train(model, batches[:10]))
    assert losses[0] == losses[1]


def test_a_path_that_cannot_be_written_is_refused_before_the_model_is_touched(
    tmp_path: Path,
) -> None:
    model = models.Encoder()
    with pytest.raises(
        mimose.ArgumentError, match=r"No such file or directory.*existing, writable directory"
    ):
        mimose.auto_checkpoint(model, "64MiB", record=tmp_path / "nowhere" / "run.jsonl")
    assert not interceptors(model)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_second_run_leaves_the_recording_of_the_first_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, batches, budget = task("encoder")
    path = tmp_path / "run.jsonl"
    with mimose.auto_checkpoint(model, budget, record=path) as first:
        train(model, batches[:3])
    before = path.read_bytes()
    with mimose.auto_checkpoint(model, budget, record=path) as second:
        train(model, batches[:4])
    assert first.recording == path
    assert second.recording == tmp_path / "run-2.jsonl"
    assert "recording to" in caplog.text
    assert path.read_bytes() == before
    assert [len(read_recording(h.recording).steps) for h in (first, second)] == [3, 4]
    assert sorted(tmp_path.iterdir()) == [second.recording, path]


def test_a_full_disk_ends_the_recording_but_not_the_training() -> None:
    model, batches, budget = task("encoder")
    with mimose.auto_checkpoint(model, budget) as handle:
        recorder = Recorder("/dev/full")
        handle.subscribe(recorder)
        train(model, batches[:3])
        with pytest.warns(
            mimose.MimoseWarning, match="No space left on device. Training continues"
        ):
            recorder.flush()
        train(model, batches[3:6])
    assert handle.stats().steps == 6


def test_what_was_recorded_is_on_disk_when_python_ends_without_detach(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    code = (
        "import mimose, models\nfrom loops import texts, train\n"
        f"model, path = models.Encoder(), {str(path)!r}\n"
        "handle = mimose.auto_checkpoint(model, '64MiB', record=path)\n"
        "train(model, texts([20, 30, 40]))\n"
    )
    tests = Path(__file__).parent.parent
    paths = os.pathsep.join([str(tests), str(Path(mimose.__file__).parent.parent)])
    environment = {**os.environ, "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert len(read_recording(path).steps) == 3


def test_what_happens_while_a_step_is_opened_is_an_event_of_that_step(tmp_path: Path) -> None:
    model, batches, budget = task("encoder")
    with mimose.auto_checkpoint(model, budget, record=tmp_path / "run.jsonl"):
        train(model, batches[:3])
        model.encoder.layers[0].requires_grad_(False)
        train(model, batches[3:5])
    (event,) = read_recording(tmp_path / "run.jsonl").events
    assert (event.kind, event.step) == ("regime", 4)


def test_a_budget_that_is_too_small_is_an_event(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model = models.Encoder()
    with (
        mimose.auto_checkpoint(model, "2MiB", record=path),
        pytest.warns(mimose.MimoseWarning, match="raise memory_budget"),
    ):
        train(model, texts([100, 100, 100, 100]))
    (event,) = (e for e in read_recording(path).events if e.kind == "budget too small")
    assert "needs" in event.text


def test_files_that_are_no_recordings_are_refused_with_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content, why in [
        ("", "is empty: no step has been written yet"),
        ("step,loss\n1,2\n", "is not a recording: make one with"),
        ('{"recording":{"format":1', "truncated in its first line"),
        (json.dumps({"recording": {"format": 99, "mimose_version": "9"}},
                    separators=(",", ":")), "the version that recorded it"),
        ('{"recording":{"format":1,"colour":2}}', "invalid header"),
    ]:  # fmt: skip
        path.write_text(content)
        with pytest.raises(mimose.ArgumentError, match=why):
            read_recording(path)


def test_lines_that_make_no_sense_are_left_out(
    recorded: tuple[Path, mimose.Mimose], tmp_path: Path
) -> None:
    lines = recorded[0].read_text().splitlines()
    noise = ["", "[]", "7", "null", '{"step":3}', '{"observation":{}}', "\x00\x00", '{"event":1}']
    path = tmp_path / "noisy.jsonl"
    path.write_text("\n".join([lines[0], *noise, *lines[1:], *noise]))
    recording = read_recording(path)
    assert recording.unreadable
    assert replace(recording, unreadable=[]) == read_recording(recorded[0])


@pytest.mark.parametrize(
    "broken",
    [
        '{"step":3,"at":0.1,"size":[4,50],"base":1,"peak":"x","held":null,"ms":1,"planning_us":1}',
        '{"step":3,"at":0.1,"size":[4],"base":1,"peak":1,"held":null,"ms":1,"planning_us":1}',
        '{"step":3,"at":0.1,"size":[4,50],"base":null,"peak":1,"held":1,"ms":1,"planning_us":1}',
        '{"step":3,"plan":"KKx","at":0,"size":[4,50],"base":1,"peak":1,"held":1,"ms":1,'
        '"planning_us":1}',
        '{"observation":{"layout":[["input_ids",2]],"dims":[4,50],"pattern":[[9,0]],"runs":[[]]}}',
        '{"event":"regime","at":"x","step":1,"text":""}',
        "[1]",
        '{"step":3,"at"',
    ],
)
def test_a_broken_line_is_left_out_and_told(
    broken: str, recording_file: Path, tmp_path: Path
) -> None:
    lines = recording_file.read_text().splitlines()
    damaged = tmp_path / "run.jsonl"
    damaged.write_text("\n".join([*lines[:6], broken, *lines[6:]]) + "\n")
    recording = read_recording(damaged)
    assert recording.steps == read_recording(recording_file).steps
    assert recording.unreadable == [7]
    assert recording.remark == "skipped invalid line 7"
    assert contents_of(recording).summary.total_steps == len(recording.steps)


def test_a_header_that_was_tampered_with_is_refused(recording_file: Path, tmp_path: Path) -> None:
    first, *rest = recording_file.read_text().splitlines()
    values = json.loads(first)["recording"]
    for wrong in ({"budget_bytes": "x"}, {"budget_bytes": 0}, {"blocks": 3}):
        damaged = tmp_path / "run.jsonl"
        header = json.dumps({"recording": {**values, **wrong}}, separators=(",", ":"))
        damaged.write_text("\n".join([header, *rest]))
        with pytest.raises(mimose.ArgumentError, match="invalid header in its first line"):
            read_recording(damaged)


def test_each_process_of_a_group_has_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert path_of_rank(tmp_path / "run.jsonl").name == "run.jsonl"
    monkeypatch.setenv("RANK", "3")
    assert path_of_rank(tmp_path / "run.jsonl").name == "run.rank3.jsonl"


def test_a_forked_worker_writes_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run.jsonl")
    recorder.noted("one", "by the parent")
    child = os.fork()
    if child == 0:
        recorder.run_ends()
        os._exit(0)
    os.waitpid(child, 0)
    recorder.run_ends()
    assert (tmp_path / "run.jsonl").read_text().count("\n") == 1


def test_a_resumed_run_records_what_it_knew_before(
    recorded: tuple[Path, mimose.Mimose], tmp_path: Path
) -> None:
    state = json.loads(recorded[0].with_name("state.json").read_text())
    model, batches, budget = task("encoder")
    with mimose.auto_checkpoint(model, budget, record=tmp_path / "run.jsonl") as handle:
        handle.load_state_dict(state)
        train(model, batches[:3])
    resumed = read_recording(tmp_path / "run.jsonl")
    assert resumed.cost_model().ready
    assert len(resumed.planned) >= 2


def test_knowledge_is_of_the_regime_that_the_run_ended_in(tmp_path: Path) -> None:
    model, batches, budget = task("encoder")
    path, known = tmp_path / "run.jsonl", Regimes()
    with mimose.auto_checkpoint(model, budget, record=path) as handle:
        handle.subscribe(known)
        train(model, batches[:12])
        next(model.encoder.layers[0].parameters()).requires_grad_(False)
        train(model, batches[12:])
    recording = read_recording(path)
    assert "regime" in [event.kind for event in recording.events]
    rebuilt = recording.cost_model()
    for step in recording.steps[-5:]:
        assert rebuilt.predict(step.size) == known.cost_model.predict(step.size)


def test_a_recording_tells_the_link_of_its_steps(
    recorded_with_host: tuple[Path, mimose.Mimose],
) -> None:
    recording = read_recording(recorded_with_host[0])
    moving = [step for step in recording.planned if set("Hh") & set(step.plan or "")]
    assert recording.link is not None
    assert recording.link.host_bytes == 1 << 30
    assert len(moving) > 5
    assert all(step.link == recording.link for step in moving)
    assert recording.steps[0].link is None  # nothing is asked of the host before it could help
    assert recorded_with_host[0].read_text().count('{"link":') == 1


def test_recorded_plans_that_move_bytes_are_priced_as_they_were(
    recorded_with_host: tuple[Path, mimose.Mimose],
) -> None:
    recording = read_recording(recorded_with_host[0])
    outlook, priced = Outlook.of(recording), 0
    for step in recording.planned[-20:]:
        profile = outlook.profile(step.size)
        if profile is None or step.predicted_bytes is None or step.plan is None:
            continue
        plan = Plan.of(profile, Option.of_letters(step.plan), 1 << 40)
        assert str(plan) == step.plan
        rise = step.predicted_bytes - step.base_bytes
        assert plan.peak_bytes == pytest.approx(rise, rel=0.02)
        priced += bool(plan.transfers)
    assert priced > 5


def test_a_link_that_changes_is_recorded_again(
    recorded_with_host: tuple[Path, mimose.Mimose], tmp_path: Path
) -> None:
    whole = recorded_with_host[0].read_text().splitlines()
    at = next(n for n, line in enumerate(whole) if line.startswith('{"link":'))
    slower = Link(2.5, 3.5, 1 << 20, frozenset({Option.KEEP, Option.RECOMPUTE}))
    changes = [json.dumps({"link": slower.to_plain()}), whole[-1], '{"link":null}', whole[-1]]
    changed = tmp_path / "run.jsonl"
    changed.write_text("\n".join([*whole, *changes]) + "\n")
    recording = read_recording(changed)
    assert [step.link for step in recording.steps[-2:]] == [slower, None]
    assert recording.steps[-3].link == read_recording(recorded_with_host[0]).link
    assert recording.link is None
    changed.write_text("\n".join([*whole[:at], '{"link":{"to_host":0}}', *whole[at + 1 :]]) + "\n")
    assert read_recording(changed).unreadable == [at + 1]


def test_a_recording_without_a_link_is_planned_without_one(recording_file: Path) -> None:
    recording = read_recording(recording_file)
    profile = Outlook.of(recording).profile(recording.steps[-1].size)
    assert recording.link is None
    assert profile is not None
    assert profile.link is None


def test_a_recording_counts_what_was_done_because_memory_ran_short(tmp_path: Path) -> None:
    counted = Shortages(evictions=3, recoveries=3, retries=1)
    recorder = Recorder(tmp_path / "run.jsonl")
    recorder.run_starts(
        RunStart(
            device=torch.device("cpu"),
            blocks=("a", "b"),
            budget_bytes=100,
            planner=Optimal(),
            collector="ride",
            enforce=True,
            parameter_bytes=1,
            gradient_bytes=1,
        )
    )
    stats = RunningStats()
    size = InputSize((("x", 1),), (4,))
    for evictions in (1, 0, 2):
        start = StepStart(
            size=size, reading=Reading(1, 1, 1, 1), planning_seconds=0.0, reserve_bytes=3, link=None
        )
        record = StepRecord(
            size=size,
            plan=Plan((Option.KEEP, Option.RECOMPUTE), 50, 0.1, fits=True),
            new_plan=True,
            observed=False,
            predicted_peak_bytes=51,
            is_bound=False,
            real_peak_bytes=50,
            peak_bytes=50,
            peak_held_bytes=60,
            reserve_bytes=3,
            evictions=evictions,
        )
        for subscriber in (recorder, stats):
            subscriber.step_opens()
            subscriber.step_starts(start)
            subscriber.memory_ran_out()
            subscriber.step_over(record)
    for subscriber in (recorder, stats):
        subscriber.step_retried()
    recorder.run_ends()
    recording = read_recording(recorder.path)
    assert stats.so_far().shortages == counted
    assert [step.evictions for step in recording.steps] == [1, 0, 2]
    assert (recording.recoveries, recording.retries) == (counted.recoveries, counted.retries)
    page = markdown_of(contents_of(recording), "run")
    assert "kept block runs evicted: 3, recomputed instead of kept: 2; steps retried: 1" in page
