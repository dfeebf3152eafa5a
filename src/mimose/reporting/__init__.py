"""What people see of a run: statistics, explanations, recordings, what-if answers, the page.

Subscribes to what training tells. Touches neither hooks nor devices.
"""

from mimose.reporting.notebook import handle_html
from mimose.reporting.outlook import Outlook
from mimose.reporting.outputs import refuse_file, refuse_folder
from mimose.reporting.page.contents import contents_of
from mimose.reporting.page.html import page_of
from mimose.reporting.page.markdown import markdown_of
from mimose.reporting.questions import Question
from mimose.reporting.reader import Recording, is_recording, read_recording
from mimose.reporting.recording import Recorder, refuse_unwritable
from mimose.reporting.report import Explanation, Floor, Stats, explain_plan
from mimose.reporting.what_if import Forecast, Row

__all__ = [
    "Explanation",
    "Floor",
    "Forecast",
    "Outlook",
    "Question",
    "Recorder",
    "Recording",
    "Row",
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
]
