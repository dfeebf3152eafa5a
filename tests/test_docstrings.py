"""Every example in a docstring does what it shows."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest
import torch
from torch import nn

import mimose

MODULES = [
    info.name
    for info in pkgutil.walk_packages(mimose.__path__, "mimose.")
    if not info.name.endswith("__main__")
]


def examples_in(name: str) -> list[doctest.DocTest]:
    module = importlib.import_module(name)
    known = {**vars(module), "torch": torch, "nn": nn, "mimose": mimose}
    found = doctest.DocTestFinder().find(module, extraglobs=known)
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_do_what_they_show(name: str) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in examples_in(name):
        assert runner.run(test).failed == 0, test.name


def test_there_are_examples() -> None:
    assert len([name for name in MODULES if examples_in(name)]) > 4
