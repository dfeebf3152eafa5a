"""Statistics, explanations, recordings, what-if forecasts and the report page.

Subscribes to training events; uses neither hooks nor devices. Modules that only the command line
and the benchmark need are imported on first use, to keep `import mimose` fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mimose.reporting.explain import explain_plan
from mimose.reporting.explanation import Explanation
from mimose.reporting.notebook import handle_html
from mimose.reporting.recording import Recorder, refuse_unwritable
from mimose.reporting.running_stats import RunningStats
from mimose.reporting.stats import HostStats, Shortages, Stats

if TYPE_CHECKING:
    from mimose.reporting.outlook import Outlook
    from mimose.reporting.outputs import refuse_file, refuse_folder
    from mimose.reporting.page.contents import contents_of
    from mimose.reporting.page.html import page_of
    from mimose.reporting.page.markdown import markdown_of
    from mimose.reporting.page.static_page import static_page
    from mimose.reporting.questions import Question
    from mimose.reporting.reader import (
        Recording,
        is_recording,
        read_recording,
        refuse_without_steps,
    )
    from mimose.reporting.what_if import Forecast, HostRow, Row

__all__ = [
    "Explanation",
    "Forecast",
    "HostRow",
    "HostStats",
    "Outlook",
    "Question",
    "Recorder",
    "Recording",
    "Row",
    "RunningStats",
    "Shortages",
    "Stats",
    "contents_of",
    "explain_plan",
    "handle_html",
    "is_recording",
    "markdown_of",
    "page_of",
    "read_recording",
    "refuse_file",
    "refuse_folder",
    "refuse_unwritable",
    "refuse_without_steps",
    "static_page",
]

_LAZY = {
    "Forecast": "what_if",
    "HostRow": "what_if",
    "Outlook": "outlook",
    "Question": "questions",
    "Recording": "reader",
    "Row": "what_if",
    "contents_of": "page.contents",
    "is_recording": "reader",
    "markdown_of": "page.markdown",
    "page_of": "page.html",
    "read_recording": "reader",
    "refuse_file": "outputs",
    "refuse_folder": "outputs",
    "refuse_without_steps": "reader",
    "static_page": "page.static_page",
}
"""The module that defines each lazily imported name."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
