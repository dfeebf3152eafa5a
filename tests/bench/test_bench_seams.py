"""The benchmark measures by what training tells, and leaves its insides alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_parts import arena

from mimose.bench.measuring import Observer, TimedPlanner
from mimose.costs import Option
from mimose.planning import Optimal

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "src/mimose/bench").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
PUBLIC_BY_CUSTOM = {"_replace", "_make", "_asdict", "_fields"}
"""What a named tuple offers."""
ENGINE_PARTS = {"handle", "engine", "scheduler", "setting", "cost_model", "events", "observer"}
"""Names that such objects have in the benchmark."""
OPEN_PACKAGES = ("mimose.bench", "mimose.integrations", "mimose.cli")
"""Whose modules may be imported one by one: no package below knows them."""


def intrusions(source: str) -> list[str]:
    """What a file does that it should leave to the library, with line numbers."""
    tree = ast.parse(source)
    of_mimose = set(names_of_mimose(tree))
    found = [(node, why) for node in ast.walk(tree) for why in reasons(node, of_mimose)]
    return [f"line {getattr(node, 'lineno', 0)}: {why}" for node, why in found]


def names_of_mimose(tree: ast.AST) -> Iterator[str]:
    """Names that a file has imported from mimose."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mimose":
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "mimose":
                    yield alias.asname or "mimose"


def reasons(node: ast.AST, of_mimose: set[str]) -> Iterator[str]:
    match node:
        case ast.Attribute(attr=name) if is_private(name) and not is_own(node.value):
            yield f"reads {ast.unparse(node)}"
        case ast.Attribute(ctx=ast.Store() | ast.Del()) if is_of_engine(node.value, of_mimose):
            yield f"writes {ast.unparse(node)}"
        case ast.Subscript(ctx=ast.Store() | ast.Del(), value=value) if is_namespace(value):
            yield f"writes {ast.unparse(node)}"
        case ast.Call(func=ast.Name(id="setattr" | "delattr")):
            yield f"calls {ast.unparse(node)}"
        case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]):
            if is_private(name) and not is_own(value):
                yield f"reads {ast.unparse(node)}"
        case ast.ImportFrom(module=str(module)):
            yield from import_reasons(module, [alias.name for alias in node.names])
        case ast.Import():
            for alias in node.names:
                yield from import_reasons(alias.name, [])


def import_reasons(module: str, names: list[str]) -> Iterator[str]:
    if module.startswith("unittest.mock") or (module == "unittest" and "mock" in names):
        yield "imports unittest.mock"
    of_mimose, inside = module.split(".")[0] == "mimose", module.startswith(OPEN_PACKAGES)
    if of_mimose and not inside and module.count(".") > 1:
        yield f"imports {module}, which is private to its package"
    if of_mimose and any(map(is_private, names)):
        yield f"imports private names from {module}"


def is_private(name: str) -> bool:
    if name == "__dict__":
        return True
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC_BY_CUSTOM


def is_own(value: ast.AST) -> bool:
    """Whether a private name of this belongs to the file itself, or to torch."""
    if isinstance(value, ast.Name) and value.id in ("self", "cls"):
        return True
    if isinstance(value, ast.Call):
        return ast.unparse(value) == "super()"
    return chain(value)[:1] == ["torch"]


def is_of_engine(value: ast.AST, of_mimose: set[str]) -> bool:
    """Whether this is an object of the engine's, or something imported from mimose."""
    names = [name.lstrip("_") for name in chain(value)]
    return bool(ENGINE_PARTS.intersection(names)) or bool(names and names[0] in of_mimose)


def is_namespace(value: ast.AST) -> bool:
    """Whether this is `vars(…)` or `….__dict__`."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "vars"
    return isinstance(value, ast.Attribute) and value.attr == "__dict__"


def chain(value: ast.AST) -> list[str]:
    """`a.b.c` as a list of names; empty if it begins with anything but a name."""
    names: list[str] = []
    while isinstance(value, ast.Attribute):
        names.insert(0, value.attr)
        value = value.value
    return [value.id, *names] if isinstance(value, ast.Name) else []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_benchmark_leaves_the_insides_of_training_alone(path: Path) -> None:
    assert intrusions(path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "handle._engine",
        "self.handle._engine.setting",
        "getattr(handle, '_stats')",
        "vars(engine)['learn'] = None",
        "scheduler.__dict__['plan'] = None",
        "setattr(engine, 'direct', None)",
        "handle.stats = None",
        "self._handle.budget_bytes = 3",
        "del engine.events",
        "import mimose\nmimose.training.setting.reserve_for = None",
        "from mimose.planning import Optimal\nOptimal.plan = None",
        "from mimose.training.scheduler import Scheduler",
        "from mimose.training import _private",
        "from unittest.mock import patch",
        "from unittest import mock",
        "import unittest.mock",
    ],
)
def test_reaching_into_training_would_be_found(source: str) -> None:
    assert intrusions(source)


@pytest.mark.parametrize(
    "source",
    [
        "self._plan = cls._other",
        "super()._settle()",
        "torch.cuda.memory._snapshot()",
        "reading._replace(in_use=0)",
        "type(error).__name__",
        "module.forward = checkpointed",
        "self._handle = attached",
        "from mimose.training import Engine",
        "from mimose.bench.survey import Survey",
    ],
)
def test_what_is_anybodys_to_use_is_left_in_peace(source: str) -> None:
    assert intrusions(source) == []


def test_an_observer_sees_every_step_but_the_first_and_leaves_the_model_as_it_was() -> None:
    with arena("QA-Bert").trainee() as trainee:
        observer = Observer(trainee.model)
        sizes = []
        for number, shape in enumerate(arena("QA-Bert").shapes[:3]):
            trainee.step(shape, number)
            assert observer.record is not None
            assert observer.record.plan is None
            seen = observer.observation()
            assert (seen is None) == (number == 0)
            if seen is not None:
                sizes.append(seen.size)
        observer.detach()
        trainee.step(arena("QA-Bert").shapes[3], 3)
        assert observer.start is not None
        assert sizes == [arena("QA-Bert").size_of(s) for s in arena("QA-Bert").shapes[1:3]]
        assert observer.start.size == sizes[-1]


def test_a_timed_planner_plans_as_the_one_inside_it() -> None:
    with arena("QA-Bert").trainee() as trainee:
        observer = Observer(trainee.model)
        for number, shape in enumerate(arena("QA-Bert").shapes[:2]):
            trainee.step(shape, number)
        seen = observer.observation()
        observer.detach()
    assert seen is not None
    planner = TimedPlanner(Optimal())
    assert planner.plan(seen.profile, 0) == Optimal().plan(seen.profile, 0)
    assert planner.plan(seen.profile, 1 << 40).count(Option.RECOMPUTE) == 0
    assert planner.count == 2
    assert planner.seconds > 0
