"""The page in a real browser: it draws, its controls work, and it complains of nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mimose
from mimose.reporting.page.contents import Contents, contents_of
from mimose.reporting.page.html import page_of
from mimose.reporting.reader import read_recording
from mimose.units import text_of

CSS = "css selector"


@pytest.fixture(scope="module")
def contents(recording_file: Path) -> Contents:
    return contents_of(read_recording(recording_file))


def opened(browser: Any, contents: Contents, folder: Path) -> Any:
    page = folder / "run.html"
    page.write_text(page_of(contents, "run"), encoding="utf-8")
    browser.get(page.as_uri())
    return browser


def count(browser: Any, selector: str) -> int:
    return len(browser.find_elements(CSS, selector))


def words(browser: Any, selector: str) -> str:
    text: str = browser.find_element(CSS, selector).text
    return text


def slide(browser: Any, index: int) -> None:
    browser.execute_script(
        "const s = document.getElementById('size'); s.value = arguments[0];"
        "s.dispatchEvent(new Event('input'))",
        index,
    )


def no_complaints(browser: Any) -> bool:
    return browser.get_log("browser") == []


def test_every_chart_is_drawn(browser: Any, contents: Contents, tmp_path: Path) -> None:
    opened(browser, contents, tmp_path)
    for chart in ("steps", "within", "sizes", "map", "time"):
        assert count(browser, f"#{chart}-chart svg") == 1, chart
    assert count(browser, "#map-chart rect.cell") == len(contents.sizes) * len(contents.runs)
    assert count(browser, "#steps-chart line.budget") == 1
    assert text_of(contents.summary.peak_bytes) in words(browser, "#summary")
    assert f"{contents.summary.total_steps}" in words(browser, "#summary")
    assert no_complaints(browser)


def test_all_marks_of_the_steps_are_in_the_legend(
    browser: Any, contents: Contents, tmp_path: Path
) -> None:
    opened(browser, contents, tmp_path)
    assert "in use at the start of the step" in words(browser, "#steps-legend")
    assert count(browser, "#steps-chart path.event") == 0
    assert "event" not in words(browser, "#steps-legend")
    event = {"step": 3, "at": 0.1, "kind": "recovery", "text": "memory ran out"}
    opened(browser, replace(contents, events=(event,)), tmp_path)
    assert count(browser, "#steps-chart path.event") == 1
    assert "event, listed below" in words(browser, "#steps-legend")


def test_evictions_are_marked_at_their_steps(
    browser: Any, recording_file: Path, tmp_path: Path
) -> None:
    from selenium.webdriver import ActionChains

    recording = read_recording(recording_file)
    *others, last = recording.steps
    evicting = replace(recording, steps=[*others, replace(last, evictions=2)])
    opened(browser, contents_of(evicting), tmp_path)
    assert count(browser, "#steps-chart path.eviction") == 1
    assert count(browser, "#steps-chart path.event") == 0
    assert "kept runs evicted" in words(browser, "#steps-legend")
    assert "2 kept runs evicted because memory ran short" in words(browser, "#events")
    mark = browser.find_element(CSS, "#steps-chart path.eviction")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", mark)
    ActionChains(browser).move_to_element(mark).perform()
    assert "2 kept runs evicted" in words(browser, "#tip")


def test_choosing_a_size_shows_its_own_plan(
    browser: Any, contents: Contents, tmp_path: Path
) -> None:
    opened(browser, contents, tmp_path)
    for index in (0, len(contents.sizes) // 2, len(contents.sizes) - 1):
        slide(browser, index)
        size = contents.sizes[index]
        assert words(browser, "#size-label") == size.label
        said = words(browser, "#within-text")
        assert text_of(size.kept_peak_bytes) in said
        assert text_of(size.plan_peak_bytes) in said
        assert f"recomputes {size.plan.count('r')} of {len(size.plan)} blocks" in said
    assert no_complaints(browser)


def test_clicking_the_map_chooses_a_size(browser: Any, contents: Contents, tmp_path: Path) -> None:
    opened(browser, contents, tmp_path)
    before = words(browser, "#size-label")
    browser.execute_script(
        "const c = document.querySelector('#map-chart rect.cell'), r = c.getBoundingClientRect();"
        "c.dispatchEvent(new MouseEvent('click', {bubbles: true, clientX: r.x + r.width / 2,"
        " clientY: r.y + r.height / 2}))"
    )
    assert before == contents.sizes[-1].label
    assert words(browser, "#size-label") == contents.sizes[0].label


def test_hovering_over_a_step_tells_about_it(
    browser: Any, contents: Contents, tmp_path: Path
) -> None:
    opened(browser, contents, tmp_path)
    from selenium.webdriver import ActionChains

    chart = browser.find_element(CSS, "#steps-chart svg")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
    ActionChains(browser).move_to_element_with_offset(chart, 100, 0).perform()
    tip = words(browser, "#tip")
    assert tip.startswith("step ")
    assert "real peak" in tip


def test_the_theme_can_be_switched(browser: Any, contents: Contents, tmp_path: Path) -> None:
    opened(browser, contents, tmp_path)
    ground = "return getComputedStyle(document.body).backgroundColor"
    before = browser.execute_script(ground)
    browser.find_element(CSS, "#theme").click()
    assert browser.execute_script(ground) != before
    browser.find_element(CSS, "#theme").click()
    assert browser.execute_script(ground) == before


def test_what_a_model_is_called_is_never_run(
    browser: Any, contents: Contents, tmp_path: Path
) -> None:
    evil = "</script><script>document.title='taken'</script><img src=x onerror=document.title='t'>"
    named = replace(
        contents,
        runs=(evil, *contents.runs[1:]),
        events=({"step": 1, "at": 0.0, "kind": evil, "text": evil},),
    )
    opened(browser, named, tmp_path)
    assert browser.title == "run"
    assert count(browser, "img") == 0
    assert evil in words(browser, "#events")


def test_a_run_that_has_not_planned_yet_says_so(
    browser: Any, contents: Contents, tmp_path: Path
) -> None:
    opened(browser, replace(contents, sizes=(), time=None, events=()), tmp_path)
    assert "Nothing is planned yet" in words(browser, "#unknown")
    assert words(browser, "#no-events").startswith("None")
    assert count(browser, "#steps-chart svg") == 1
    assert no_complaints(browser)


@pytest.fixture
def narrow_browser(browser: Any) -> Iterator[Any]:
    """The browser with a page as wide as on a phone, which is narrower than windows can be."""
    size = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield browser
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_only_size_has_dots_instead_of_lines(
    browser: Any, contents: Contents, tmp_path: Path
) -> None:
    opened(browser, replace(contents, sizes=contents.sizes[-1:]), tmp_path)
    paths = [
        path.get_attribute("d") for path in browser.find_elements(CSS, "#sizes-chart svg path")
    ]
    assert len(paths) == 4
    assert all(path.endswith("h0") for path in paths)


def test_a_narrow_window_needs_no_sideways_scrolling(
    narrow_browser: Any, contents: Contents, tmp_path: Path
) -> None:
    opened(narrow_browser, contents, tmp_path)
    narrow_browser.execute_script("document.getElementById('blocks-card').open = true")
    wide, name = narrow_browser.execute_script(
        "const root = document.documentElement;"
        "return [root.scrollWidth - root.clientWidth,"
        " document.querySelector('#blocks tbody td').offsetWidth]"
    )
    assert wide <= 0
    assert name > 100


def test_labels_of_a_narrow_page_stay_on_their_cards(
    narrow_browser: Any, contents: Contents, tmp_path: Path
) -> None:
    opened(narrow_browser, contents, tmp_path)
    outside = narrow_browser.execute_script(
        "const right = (node) => node.getBoundingClientRect().right;"
        "return [...document.querySelectorAll('.card svg text')]"
        ".filter((text) => right(text) > right(text.closest('.card'))).map((t) => t.textContent)"
    )
    assert outside == []


def test_peaks_that_nobody_saw_leave_predictions_and_what_was_held(
    browser: Any, contents: Contents, tmp_path: Path
) -> None:
    unseen = [None if plan else peak for peak, plan in zip(
        contents.steps["peak"], contents.steps["plan"], strict=True)]  # fmt: skip
    opened(browser, replace(contents, steps={**contents.steps, "peak": unseen}), tmp_path)
    assert "held by the allocator" in words(browser, "#steps-legend")
    assert browser.find_element(CSS, "#steps-chart path.peaks").get_attribute("d") == ""
    assert no_complaints(browser)


def test_forwards_that_will_be_repeated_are_empty_boxes(
    browser: Any, contents: Contents, tmp_path: Path
) -> None:
    opened(browser, contents, tmp_path)
    for index, size in enumerate(contents.sizes):
        slide(browser, index)
        assert count(browser, "#within-chart .hollow") == size.plan.count("r")
        assert ("forward: to be recomputed" in words(browser, "#strip-legend")) == (
            "r" in size.plan
        )


def test_planned_steps_are_told_of_with_their_own_peak(
    browser: Any, contents: Contents, tmp_path: Path
) -> None:
    budget = contents.summary.budget_bytes
    summary = replace(
        contents.summary,
        steps_over=2,
        planned_peak_bytes=budget + (2 << 20),
        peak_bytes=budget + (9 << 20),
    )
    opened(browser, replace(contents, summary=summary), tmp_path)
    said = words(browser, "#steps-text")
    assert f"the highest of them by 2.00 MiB, to {text_of(budget + (2 << 20))}." in said
    assert f"An observed step went higher, to {text_of(budget + (9 << 20))}." in said


def test_no_saving_is_negative(browser: Any, contents: Contents, tmp_path: Path) -> None:
    assert contents.time is not None
    opened(browser, contents, tmp_path)
    assert "of recomputing avoided" in words(browser, "#summary")
    longer = replace(contents.time, chosen_seconds=20.0, everything_seconds=10.0)
    opened(browser, replace(contents, time=longer), tmp_path)
    assert "to recompute everything would take 10.00 s" in words(browser, "#summary")
    assert "-10" not in words(browser, "#summary")


def test_one_of_a_thing_is_told_in_the_singular(
    browser: Any, contents: Contents, tmp_path: Path
) -> None:
    assert contents.time is not None
    only = replace(
        contents,
        sizes=contents.sizes[:1],
        summary=replace(contents.summary, total_steps=1, observed_steps=0),
        time=replace(contents.time, steps=1),
    )
    opened(browser, only, tmp_path)
    browser.execute_script("document.getElementById('blocks-card').open = true")
    assert "step in" in words(browser, "#summary")
    assert "Over 1 planned step," in words(browser, "#time-text")
    assert "kept at (of 1 size)" in words(browser, "#blocks")


def test_the_link_s_traffic_is_drawn_below_the_blocks(
    browser: Any, recorded_with_host: tuple[Path, mimose.Mimose], tmp_path: Path
) -> None:
    contents = contents_of(read_recording(recorded_with_host[0]))
    opened(browser, contents, tmp_path)
    for index, size in enumerate(contents.sizes):
        slide(browser, index)
        assert count(browser, "#within-chart rect.copy") == len(size.copies)
        assert ("to the host and back" in words(browser, "#within-text")) == bool(size.copies)
    assert "saved on the host" in words(browser, "#map-legend")
    assert "recomputed, input on the host" in words(browser, "#map-legend")
    assert no_complaints(browser)
