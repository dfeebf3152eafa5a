"""Packages know those above them in the list, and no others; privately, they know themselves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import mimose
import models

ROOT = Path(mimose.__file__).parent
LAYERS = [
    "costs",
    "estimation",
    "planning",
    "tensors",
    "memory",
    "execution",
    "interception",
    "training",
    "reporting",
    "api",
    "comparison",
    "integrations",
    "bench",
    "cli",
]
"""From the ground up. `errors` and `units` lie below all of them."""
AT_THE_TOP = {"__init__.py", "__main__.py", "errors.py", "units.py", "py.typed"}
WITHOUT_TORCH = ("costs", "estimation", "planning")
RUN_BY_PEOPLE = ("integrations", "bench", "cli")


class Import(NamedTuple):
    """One import of something of mimose's: at the top of a file, in a function, or for types."""

    file: str
    package: str
    module: str
    names: tuple[str, ...]

    @property
    def target(self) -> str:
        return self.module.split(".")[1] if "." in self.module else ""

    @property
    def crosses(self) -> bool:
        return self.package != self.target and self.target in LAYERS


def imports() -> Iterator[Import]:
    for path in sorted(ROOT.rglob("*.py")):
        file = path.relative_to(ROOT)
        package = file.parts[0] if len(file.parts) > 1 else ""
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mimose":
                names = tuple(alias.name for alias in node.names)
                yield Import(str(file), package, str(node.module), names)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.startswith("mimose."):
                        yield Import(str(file), package, alias.name, ())


IMPORTS = list(imports())


def test_only_what_belongs_to_all_lies_at_the_top() -> None:
    files = {path.name for path in ROOT.iterdir() if path.is_file()}
    assert files <= AT_THE_TOP
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "_"}
    assert folders == set(LAYERS)


def test_every_package_imports_only_from_those_above_it() -> None:
    wrong = [
        one
        for one in IMPORTS
        if one.package in LAYERS
        and one.target in LAYERS
        and LAYERS.index(one.target) > LAYERS.index(one.package)
    ]
    assert wrong == []


def test_what_lies_at_the_top_knows_only_what_users_call() -> None:
    seen = {(one.file, one.target) for one in IMPORTS if not one.package and one.target in LAYERS}
    assert seen == {("__init__.py", "api"), ("__main__.py", "cli")}


def test_packages_meet_in_what_their_init_names() -> None:
    deep = [
        one
        for one in IMPORTS
        if one.crosses
        and one.target not in RUN_BY_PEOPLE
        and one.module.count(".") > 1
        and one.module not in DRAWN_LATE
    ]
    assert deep == []


DRAWN_LATE = ("mimose.reporting.page.picture", "mimose.reporting.page.tradeoff")
"""These need matplotlib, so the package does not load them."""


def test_no_private_name_is_imported_from_another_package() -> None:
    private = [one for one in IMPORTS if one.crosses and any(n.startswith("_") for n in one.names)]
    assert private == []


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_arithmetic_needs_no_torch(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            assert not [name for name in modules if name.split(".")[0] == "torch"], path


@pytest.mark.parametrize("package", LAYERS)
def test_every_package_says_what_it_is_for(package: str) -> None:
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    assert len(ast.get_docstring(tree) or "") > 60


TESTS = Path(__file__).parent
INSIDE = {TESTS / "training", TESTS / "test_layers.py", TESTS / "bench" / "test_bench_seams.py"}
"""Tests of the engine itself, and those that quote what others must not do."""


def private_names() -> set[str]:
    """What a handle keeps to itself."""
    with mimose.auto_checkpoint(models.Encoder(), "1GiB") as handle:
        names = {*vars(handle), *vars(type(handle))}
    return {name for name in names if re.fullmatch("_[a-z][a-z_]*[a-z]", name)}


def reads_inside(source: str, private: set[str]) -> list[str]:
    """Where a source, or a program that it quotes, uses what a handle keeps to itself."""
    found = re.findall(rf"\b(\w+)\.({'|'.join(private)})\b", source)
    found += re.findall(rf"[gs]etattr\((\w+), [\"']({'|'.join(private)})[\"']", source)
    return [f"{of}.{name}" for of, name in found if of not in ("self", "cls")]


def test_tests_of_other_packages_use_what_a_handle_offers() -> None:
    private = private_names()
    assert {"_engine", "_stats", "_recorder"} <= private
    wrong = {
        str(path.relative_to(TESTS)): found
        for path in sorted(TESTS.rglob("*.py"))
        if not INSIDE.intersection([path, *path.parents])
        and (found := reads_inside(path.read_text("utf-8"), private))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    "source",
    [
        "handle._engine.scheduler",
        "self.handle._stats.peak_bytes = 0",
        "first._recorder.flush()",
        'PROGRAM = """print(handle._engine)"""',
        "getattr(handle, '_engine')",
    ],
)
def test_reading_what_a_handle_keeps_to_itself_would_be_found(source: str) -> None:
    assert reads_inside(source, private_names())
    assert not reads_inside("self._stats = handle.stats()", private_names())
