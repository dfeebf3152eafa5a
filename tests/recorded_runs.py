"""One recorded run for all tests of what people see, and a browser where there is one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mimose
from loops import task, train
from mimose.costs.options import Option
from mimose.costs.timeline import Profile
from mimose.planning import Plan, Planner
from parts import Regimes

FLAGS = [
    "headless",
    "no-sandbox",
    "disable-gpu",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "disable-dev-shm-usage",
    "window-size=1200,1000",
]


@pytest.fixture(scope="session")
def known() -> Regimes:
    """What the run that is `recorded` has learned."""
    return Regimes()


@pytest.fixture(scope="session")
def recorded(
    tmp_path_factory: pytest.TempPathFactory, known: Regimes
) -> tuple[Path, mimose.Mimose]:
    """A recording, and the handle that wrote it; beside it, in state.json, what it had learned."""
    path = tmp_path_factory.mktemp("recorded") / "run.jsonl"
    model, batches, budget = task("encoder")
    with mimose.auto_checkpoint(model, budget, record=path) as handle:
        handle.subscribe(known)
        train(model, batches)
        path.with_name("state.json").write_text(json.dumps(handle.state_dict()))
    return path, handle


@pytest.fixture(scope="session")
def recording_file(recorded: tuple[Path, mimose.Mimose]) -> Path:
    return recorded[0]


class FirstThatFits(Planner):
    """Of a few plans for three blocks, the laxest that fits, whatever its time."""

    def plan(self, profile: Profile, available_bytes: int) -> Plan:
        for letters in ("KKK", "HKK", "HrK", "rhK"):
            plan = Plan.of(profile, Option.of_letters(letters), available_bytes)
            if plan.fits:
                break
        return plan


@pytest.fixture(scope="session")
def recorded_with_host(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, mimose.Mimose]:
    """The same with host memory, whose plans for long inputs move bytes."""
    path = tmp_path_factory.mktemp("recorded") / "run.jsonl"
    model, batches, budget = task("encoder", share=0.3)
    with mimose.auto_checkpoint(
        model, budget, host_memory="1GiB", planner=FirstThatFits(), record=path
    ) as handle:
        train(model, batches * 2)
    return path, handle


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium without a window."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in FLAGS:
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.chrome.service.Service(driver)
    running = webdriver.Chrome(options=options, service=service)
    yield running
    running.quit()
