"""What mimose needs and can use, in which versions, and what to type where something is missing."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

NEEDED: Mapping[str, str] = {"torch": "2.11", "numpy": "1.26"}
"""What the core depends on, with the least version of each."""

_CLI = {"typer": "0.15", "rich": "13.9"}
_HF = {"transformers": "5.0", "accelerate": "1.10"}

EXTRAS: Mapping[str, Mapping[str, str]] = {
    "cli": _CLI,
    "hf": _HF,
    "lightning": {"lightning": "2.5"},
    "bench": {**_CLI, **_HF, "scikit-learn": "1.5", "matplotlib": "3.9"},
}
"""The packages of each extra in pyproject.toml, with the least version of each."""


def version_of(package: str) -> str | None:
    """The version that is installed; None if none is."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_from(extra: str) -> list[str]:
    """The packages of an extra that are not installed."""
    return [package for package in EXTRAS[extra] if version_of(package) is None]


def pip_command(extra: str, *only: str) -> str:
    """What to type for the packages of an extra, or for only some of them.

    It names the packages themselves, which works wherever mimose came from: `mimose[cli]` does not,
    since mimose is on no package index.
    """
    # Where all are there, one of them is too old or broken.
    packages = only or missing_from(extra) or EXTRAS[extra]
    wanted = " ".join(f"'{package}>={EXTRAS[extra][package]}'" for package in packages)
    return f"pip install {wanted} (in a clone: pip install -e '.[{extra}]')"
