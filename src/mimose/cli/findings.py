"""The findings of `mimose doctor`, and their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    kind: str
    """`ok`, `note` (worth knowing) or `problem` (must be fixed)."""
    what: str
    remedy: str = ""


def as_text(found: Sequence[Finding]) -> str:
    """The findings, one per line, with their remedies."""
    marks = {OK: "  ok   ", NOTE: "  note ", PROBLEM: "PROBLEM"}
    lines = []
    for finding in found:
        lines.append(f"{marks[finding.kind]}  {finding.what}")
        if finding.remedy:
            lines.append(f"         → {finding.remedy}")
    problems = sum(finding.kind == PROBLEM for finding in found)
    summary = (
        f"{problems} problem{'s' if problems > 1 else ''} to fix" if problems else "no problems"
    )
    return "\n".join([*lines, "", summary])
