"""Required and optional packages, their minimum versions, and how to install them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

NEEDED: Mapping[str, str] = {"torch": "2.11", "numpy": "1.26"}
"""The dependencies of the core and their minimum versions."""

_CLI = {"typer": "0.15", "rich": "13.9"}
_HF = {"transformers": "5.0", "accelerate": "1.10"}

EXTRAS: Mapping[str, Mapping[str, str]] = {
    "cli": _CLI,
    "hf": _HF,
    "lightning": {"lightning": "2.5"},
    "bench": {**_CLI, **_HF, "scikit-learn": "1.5", "matplotlib": "3.9", "xgboost-cpu": "3.0"},
    "vision": {"torchvision": "0.26"},
}
"""The packages of each extra in pyproject.toml and their minimum versions."""


def version_of(package: str) -> str | None:
    """The installed version; None if the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_from(extra: str) -> list[str]:
    """The packages of an extra that are not installed."""
    return [package for package in EXTRAS[extra] if version_of(package) is None]


def pip_command(extra: str, *only: str) -> str:
    """The command that installs an extra, or `only` some of its packages.

    It names the packages rather than `mimose[cli]`, because mimose is not on a package index.
    """
    # If none is missing, one of them is too old or broken: name all.
    packages = only or missing_from(extra) or EXTRAS[extra]
    requirements = " ".join(f"'{package}>={EXTRAS[extra][package]}'" for package in packages)
    return f"pip install {requirements} (in a clone: pip install -e '.[{extra}]')"
