"""For the API pages: examples in docstrings become code, wherever in a docstring they stand."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"(?:^>>> .*\n?)(?:^(?!\s*$).*\n?)*", re.MULTILINE)


class Doctests(Extension):
    """Puts a fence around each run of `>>>` lines."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = _EXAMPLE.sub(lambda m: f"```pycon\n{m[0].rstrip()}\n```\n", text)
