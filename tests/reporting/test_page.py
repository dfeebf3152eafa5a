"""A report shows the run as it was, and nothing that a model is called can break it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import mimose
import models
from loops import texts, train
from mimose.bench.page import _as_html
from mimose.reporting.page.contents import Contents, contents_of, thinned
from mimose.reporting.page.html import as_data, page_of
from mimose.reporting.page.markdown import markdown_of
from mimose.reporting.page.picture import draw
from mimose.reporting.reader import read_recording
from mimose.units import text_of

EVIL = "</script><img src=x onerror=alert(1)>|&\u2028$x$"


@pytest.fixture(scope="module")
def contents(recording_file: Path) -> Contents:
    return contents_of(read_recording(recording_file))


def data_in(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="run">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    values: dict[str, object] = json.loads(found[1])
    return values


def test_the_plans_shown_are_those_that_the_run_had(
    contents: Contents, recording_file: Path
) -> None:
    shown = {size.label: size for size in contents.sizes}
    compared = 0
    for step in read_recording(recording_file).planned[5:]:
        size = shown[str(step.size)]
        assert size.plan == step.plan
        assert step.peak_bytes is not None
        assert abs(size.plan_peak_bytes - step.peak_bytes) < 0.02 * step.peak_bytes
        compared += 1
    assert compared > 10


def test_the_plan_lies_between_all_recomputed_and_all_kept(contents: Contents) -> None:
    assert any("r" in size.plan for size in contents.sizes)
    assert any("r" not in size.plan for size in contents.sizes)
    for size in contents.sizes:
        assert size.recomputed_peak_bytes <= size.plan_peak_bytes <= size.kept_peak_bytes
        highest = {name: max(m[3] for m in moments) for name, moments in size.curves.items()}
        assert highest["plan"] == size.plan_peak_bytes
        assert highest["kept"] == size.kept_peak_bytes
        assert highest["recomputed"] == size.recomputed_peak_bytes


def test_mimose_recomputes_less_than_a_static_plan_and_that_less_than_everything(
    contents: Contents,
) -> None:
    time = contents.time
    assert time is not None
    assert 0 < time.chosen_seconds < time.static_seconds < time.everything_seconds


def test_time_is_counted_by_the_final_estimates_alone(
    contents: Contents, recording_file: Path
) -> None:
    recording = read_recording(recording_file)
    steps = [replace(step, recompute_milliseconds=1e6) for step in recording.steps]
    assert contents_of(replace(recording, steps=steps)).time == contents.time


def test_plans_that_recompute_everything_take_as_long_as_everything(recording_file: Path) -> None:
    recording = read_recording(recording_file)
    steps = [
        step if step.plan is None else replace(step, plan="r" * len(step.plan))
        for step in recording.steps
    ]
    time = contents_of(replace(recording, steps=steps)).time
    assert time is not None
    assert time.chosen_seconds == pytest.approx(time.everything_seconds)


def test_report_and_statistics_agree_on_the_time_spent_recomputing(
    contents: Contents, recorded: tuple[Path, mimose.Mimose]
) -> None:
    assert 0 < contents.summary.recompute_share < 0.5
    assert contents.summary.recompute_share == pytest.approx(
        recorded[1].stats().recompute_share, rel=0.1
    )


def test_the_page_is_whole_and_asks_nobody_for_anything(contents: Contents) -> None:
    page = page_of(contents, "run")
    assert not re.findall(r"\{\{(title|style|script|data)\}\}", page)
    assert data_in(page)["total_steps"] == contents.summary.total_steps

    class Links(HTMLParser):
        outside: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            for name, value in attrs:
                if name in ("src", "href", "action") and value not in (None, "data:,"):
                    self.outside.append(f"{tag} {value}")

    parser = Links()
    parser.feed(page)
    assert parser.outside == []
    assert "default-src 'none'" in page
    assert not re.findall(r"url\(|@import|fetch\(|XMLHttp", page)


def test_names_stay_text_in_every_format(contents: Contents) -> None:
    named = replace(
        contents,
        runs=(EVIL, *contents.runs[1:]),
        events=({"step": 1, "at": 0.0, "kind": EVIL, "text": EVIL},),
    )
    page = page_of(named, EVIL)
    assert "<img" not in page
    assert page.count("</script>") == 2
    assert data_in(page)["runs"][0] == EVIL  # type: ignore[index]
    text = markdown_of(named, EVIL)
    assert "<img" not in text
    assert "onerror=alert(1)>\\|&" in text


def test_data_for_a_script_element_holds_no_markup() -> None:
    values = ["</script>", "<!--", "<script", "a & b"]
    assert not set("<>&") & set(as_data(values))
    assert json.loads(as_data(values)) == values


def test_markdown_has_a_row_for_every_size(contents: Contents) -> None:
    text = markdown_of(contents, "run")
    assert f"{contents.summary.total_steps} steps" in text
    largest = contents.sizes[-1]
    assert f"| {largest.label} | {largest.steps} | `{largest.plan}` |" in text


def test_the_picture_is_drawn_whatever_blocks_are_called(
    contents: Contents, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    draw(replace(contents, runs=("$x_{", *contents.runs[1:])), tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_has_not_planned_yet_has_a_page(recording_file: Path, tmp_path: Path) -> None:
    lines = recording_file.read_text().splitlines()
    first_steps = [line for line in lines if not line.startswith('{"observation"')][:5]
    (tmp_path / "young.jsonl").write_text("\n".join(first_steps))
    young = contents_of(read_recording(tmp_path / "young.jsonl"))
    assert young.sizes == ()
    assert young.time is None
    assert data_in(page_of(young, "young"))["sizes"] == []
    assert "observed" in markdown_of(young, "young")


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Contents:
    """A run that has observed one size, and kept all of a smaller one."""
    path = tmp_path_factory.mktemp("bounded") / "run.jsonl"
    model, (long, *_, short) = models.Encoder(), texts([90, 30])
    with mimose.auto_checkpoint(model, "6GiB", record=path), pytest.MonkeyPatch.context() as patch:
        train(model, [long] * 3)
        patch.setattr(
            mimose.estimation.cost_model, "_ENOUGH", 0
        )  # no more observing of small sizes
        train(model, [short] * 3)
    return contents_of(read_recording(path))


def test_bounds_are_shown_as_bounds_and_under_their_own_size(bounded: Contents) -> None:
    assert [size.label for size in bounded.sizes] == ["4×30", "4×90"]
    assert [size.at_most_as for size in bounded.sizes] == ["4×90", None]
    assert bounded.steps["predicted"][-3:] == [None] * 3
    assert bounded.summary.mean_excess is not None
    assert bounded.summary.mean_excess < 0.02
    text = markdown_of(bounded, "run")
    assert re.search(r"\| 4×30 \| 3 \| `KKK` \| ≤ [\d.]+ MiB \(measured at 4×90\)", text)
    assert data_in(page_of(bounded, "run"))["sizes"][0]["at_most_as"] == "4×90"  # type: ignore[index]


def test_time_is_not_told_of_sizes_that_only_have_a_bound(bounded: Contents) -> None:
    assert bounded.time is not None
    assert bounded.time.steps == 1


def test_a_run_over_its_budget_is_said_to_be(recording_file: Path) -> None:
    recording = read_recording(recording_file)
    highest = sorted(step.peak_bytes or 0 for step in recording.planned)
    tight = replace(recording.header, budget_bytes=highest[-3])
    contents = contents_of(replace(recording, header=tight))
    assert contents.summary.steps_over == sum(peak > highest[-3] for peak in highest) > 0
    text = markdown_of(contents, "run")
    assert (
        f"{contents.summary.steps_over} of {len(highest)} planned steps went over the budget"
        in text
    )
    assert "stay under the budget" not in page_of(contents, "run")
    within = contents_of(recording)
    assert within.summary.steps_over == 0
    assert "over the budget" not in markdown_of(within, "run")


def test_the_peak_of_an_observed_step_is_not_said_of_planned_ones(recording_file: Path) -> None:
    recording = read_recording(recording_file)
    highest = max(step.peak_bytes or 0 for step in recording.planned)
    first, *others = recording.steps
    assert first.plan is None
    contents = contents_of(
        replace(
            recording,
            header=replace(recording.header, budget_bytes=highest - (1 << 20)),
            steps=[replace(first, peak_bytes=2 * highest), *others],
        )
    )
    assert contents.summary.planned_peak_bytes == highest
    assert contents.summary.peak_bytes == 2 * highest
    assert f"by 1.00 MiB, to {text_of(highest)}" in markdown_of(contents, "run")


def test_steps_that_evicted_are_events_in_order_of_time(recording_file: Path) -> None:
    recording = read_recording(recording_file)
    steps = [replace(step, evictions=step.number % 2) for step in recording.steps]
    events = contents_of(replace(recording, steps=steps[:8])).events
    assert [e["step"] for e in events if e["kind"] == "eviction"] == [1, 3, 5, 7]
    assert [e["at"] for e in events] == sorted(e["at"] for e in events)
    assert "| 3 | eviction | 1 kept run evicted" in markdown_of(
        contents_of(replace(recording, steps=steps)), "run"
    )


def test_of_many_steps_that_evicted_the_later_ones_are_counted(recording_file: Path) -> None:
    recording = read_recording(recording_file)
    steps = [replace(recording.steps[0], number=n, evictions=3) for n in range(1, 31)]
    events = contents_of(replace(recording, steps=steps)).events
    evictions = [e for e in events if e["kind"] == "eviction"]
    assert len(evictions) == 20
    assert evictions[-1]["text"].endswith("; runs were evicted in 10 later steps too")


def test_figures_of_a_benchmark_are_inside_its_page(tmp_path: Path) -> None:
    pytest.importorskip("markdown_it")
    (tmp_path / "time.png").write_bytes(b"\x89PNG")
    page = _as_html("| a |\n| --- |\n| <i>b</i> |\n\n![time](time.png)\n", tmp_path)
    assert "<td>&lt;i&gt;b&lt;/i&gt;</td>" in page
    assert 'src="data:image/png;base64,iVBORw=="' in page


def test_one_of_a_thing_is_told_in_the_singular(recording_file: Path) -> None:
    recording = read_recording(recording_file)
    one = replace(recording, steps=[recording.planned[-1]])
    text = markdown_of(contents_of(one), "run")
    assert "- 1 step in" in text
    assert "Total of 1 planned step," in text


def test_a_long_run_is_thinned_to_its_highest_steps(recording_file: Path) -> None:
    steps = read_recording(recording_file).steps
    few = thinned(steps, most=5)
    assert len(few) == 5
    assert max(s.peak_bytes or 0 for s in few) == max(s.peak_bytes or 0 for s in steps)
    assert [s.number for s in few] == sorted(s.number for s in few)


def test_pages_show_what_moves_to_the_host(
    recorded_with_host: tuple[Path, mimose.Mimose], tmp_path: Path
) -> None:
    recording = read_recording(recorded_with_host[0])
    contents = contents_of(recording)
    recorded = {str(step.size): step.plan for step in recording.planned if step.has_own_plan}
    moving = [size for size in contents.sizes if size.moved_bytes]
    assert {letter for size in contents.sizes for letter in size.plan} == set("KHrh")
    assert all(recorded[size.label] == size.plan for size in moving)
    for size in moving:
        assert sum(copy.bytes for copy in size.copies if copy.to_host) == size.moved_bytes
        assert max(level for *_, level in size.curves["plan"]) == size.plan_peak_bytes
    told = markdown_of(contents, "run")
    assert "| to the host | waiting, ms |" in told
    assert "H: saved on the host, h: recomputed, with its input on the host." in told
    draw(contents, tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 10_000


def test_pages_of_runs_without_the_host_do_not_speak_of_it(contents: Contents) -> None:
    assert not any(size.moved_bytes or size.copies for size in contents.sizes)
    assert "host" not in markdown_of(contents, "run")
