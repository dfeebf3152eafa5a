"""The report on benchmark results as one HTML file: its text and tables, its figures inside."""

from __future__ import annotations

import base64
import html
import mimetypes
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}
.card {{ overflow-x: auto; }}
.card :is(th, td) {{ overflow-wrap: normal; }}
.card h2 {{ margin-top: 24px; }}
.card img {{ max-width: 100%; }}
</style>
</head>
<body><main class="card">
{body}
</main></body>
</html>
"""


def benchmark_page(file: Path, title: str) -> str:
    """The page; needs what the benchmark's own report needs, and markdown-it (rich brings it)."""
    from mimose.bench.report import write_report

    with tempfile.TemporaryDirectory() as folder:
        written = write_report([file], Path(folder))
        body = _as_html(written.read_text("utf-8"), written.parent)
    style = resources.files("mimose.reporting.page").joinpath("page.css").read_text("utf-8")
    return _PAGE.format(title=html.escape(title), style=style, body=body)


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
