"""The report on benchmark results as one HTML file: its text and tables, its figures inside."""

from __future__ import annotations

import base64
import mimetypes
import tempfile
from pathlib import Path
from typing import Any

from mimose.reporting import static_page

_STYLE = """.card h2 { margin-top: 24px; }
.card img { max-width: 100%; }"""


def benchmark_page(file: Path, title: str) -> str:
    """The page; needs what the benchmark's own report needs, and markdown-it (rich brings it)."""
    from mimose.bench.report import write_report

    with tempfile.TemporaryDirectory() as folder:
        written = write_report([file], Path(folder))
        body = _as_html(written.read_text("utf-8"), written.parent)
    return static_page(title, body, _STYLE)


def _as_html(markdown: str, folder: Path) -> str:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown)
    for token in tokens:
        for child in token.children or []:
            if child.type == "image":
                child.attrSet("src", _inside(folder / str(child.attrGet("src"))))
    rendered: Any = parser.renderer.render(tokens, parser.options, {})
    return str(rendered)


def _inside(picture: Path) -> str:
    kind = mimetypes.guess_type(picture.name)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(picture.read_bytes()).decode()}"
