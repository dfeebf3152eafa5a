"""A page without a script: text, tables and pictures in the style of the report."""

from __future__ import annotations

import html
from importlib import resources

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
{more_style}
</style>
</head>
<body><main class="card">
{body}
</main></body>
</html>
"""


def static_page(title: str, body: str, more_style: str = "") -> str:
    """One HTML file around this body, which is HTML already."""
    style = resources.files("mimose.reporting.page").joinpath("page.css").read_text("utf-8")
    return _PAGE.format(title=html.escape(title), style=style, more_style=more_style, body=body)
