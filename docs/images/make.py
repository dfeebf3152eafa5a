"""Make the pictures of the documentation anew: train, report, photograph.

Needs matplotlib, selenium, chromium and chromedriver. From the repository's root:

    OMP_NUM_THREADS=1 python docs/images/make.py
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import torch
from selenium import webdriver

import mimose
from mimose.cli.demo_model import Encoder, Shape, step
from mimose.reporting.page.contents import contents_of
from mimose.reporting.page.html import page_of
from mimose.reporting.page.tradeoff import draw_tradeoff
from mimose.reporting.questions import Question
from mimose.reporting.reader import read_recording

HERE = Path(__file__).parent
SHAPE = Shape(width=64, layers=12, batch=4, longest=256)
PARTS = {
    "within": "#within",
    "sizes-and-blocks": ".pair",
}


def record(path: Path) -> None:
    """A small encoder on the CPU, lengths as text gives them."""
    torch.manual_seed(0)
    model, dice = Encoder(SHAPE).train(), random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    with mimose.auto_checkpoint(model, "60MiB", record=path):
        for _ in range(150):
            length = min(SHAPE.longest, int(24 + dice.expovariate(4 / SHAPE.longest)))
            step(model, optimizer, SHAPE, length, torch.device("cpu"))


def photograph(page: Path) -> None:
    """The whole page in light and dark, and its parts."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("headless", "no-sandbox", "disable-gpu", "no-first-run", "hide-scrollbars",
                 "disable-background-networking", "disable-component-update", "disable-sync",
                 "force-device-scale-factor=1.5",
                 f"user-data-dir={tempfile.mkdtemp()}"):  # fmt: skip
        options.add_argument(f"--{flag}")
    service = webdriver.chrome.service.Service(shutil.which("chromedriver"))
    browser = webdriver.Chrome(options=options, service=service)
    browser.set_window_size(1100, 2300)
    browser.get(page.as_uri())
    choose = "const s = document.getElementById('size'); s.value = Math.round(s.max * 0.8);"
    browser.execute_script(choose + "s.dispatchEvent(new Event('input'))")
    for name, selector in PARTS.items():
        browser.find_element("css selector", selector).screenshot(str(HERE / f"{name}.png"))
    for theme in ("light", "dark"):
        browser.execute_script(f"document.documentElement.dataset.theme = '{theme}'")
        browser.find_element("css selector", "body").screenshot(str(HERE / f"report-{theme}.png"))
    browser.quit()


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    recording, page = folder / "run.jsonl", folder / "run.html"
    record(recording)
    page.write_text(page_of(contents_of(read_recording(recording)), "run"), encoding="utf-8")
    photograph(page)
    question = Question.about(recording, None)
    draw_tradeoff(question, question.weights(None, samples=False), HERE / "tradeoff.png")


if __name__ == "__main__":
    main()
