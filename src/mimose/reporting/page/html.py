"""A report as one self-contained HTML file: no network, no server, no libraries."""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from typing import Any

from mimose.reporting.page.contents import Contents


def page_of(contents: Contents, title: str) -> str:
    """The complete page. Names from the model are embedded as data and displayed as text."""
    parts = {
        "title": html.escape(title),
        "style": _read("page.css"),
        "script": _read("plot.js") + _read("page.js"),
        "data": as_data(_packed(contents)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("template.html"))


def as_data(values: Any) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _packed(contents: Contents) -> dict[str, Any]:
    """Plain values, with curves as columns, because they are most of the page."""
    values = contents.to_plain()
    for size in values["sizes"]:
        size["curves"] = {
            name: {
                "phase": "".join(phase[0] for phase, *_ in moments),
                "run": [run for _, run, *_ in moments],
                "ms": [round(seconds * 1e3, 4) for *_, seconds, _ in moments],
                "bytes": [level for *_, level in moments],
            }
            for name, moments in size["curves"].items()
        }
        size["copies"] = {
            "run": [run for run, *_ in size["copies"]],
            "away": [int(to_host) for _, to_host, *_ in size["copies"]],
            "ms": [[round(1e3 * at, 4) for at in (begin, end)]
                   for *_, begin, end, _ in size["copies"]],
            "bytes": [moved for *_, moved in size["copies"]],
        }  # fmt: skip
    return values


def _read(name: str) -> str:
    return resources.files("mimose.reporting.page").joinpath(name).read_text(encoding="utf-8")
