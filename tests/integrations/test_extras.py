"""What is not installed is not imported, and asked for by its pip command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from subprocess import PIPE
from typing import NamedTuple

import pytest

from mimose.api.extras import EXTRAS, NEEDED

OTHERS = "transformers accelerate trl peft lightning pytorch_lightning datasets bitsandbytes"


class Done(NamedTuple):
    stdout: str
    stderr: str


Run = Callable[[str], Done]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs code in a Python that has imported torch and nothing else."""
    forks = [sys.executable, str(Path(__file__).with_name("forks.py"))]
    with subprocess.Popen(forks, stdin=PIPE, stdout=PIPE, text=True) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        sent, answers = program.stdin, program.stdout

        def run_code(code: str) -> Done:
            print(json.dumps(code), file=sent, flush=True)
            return Done(*json.loads(answers.readline()))

        yield run_code
        sent.close()


def test_mimose_imports_no_integration_and_nothing_that_one_needs(run: Run) -> None:
    done = run(
        "import sys, mimose, mimose.integrations\n"
        f"print([m for m in {OTHERS!r}.split() if m in sys.modules])\n"
        "print([m for m in sys.modules if m.startswith('mimose.integrations.')])"
    )
    assert done.stdout.split("\n")[:2] == ["[]", "[]"], done.stderr


def test_neither_import_nor_attaching_loads_the_compiler(run: Run) -> None:
    done = run(
        "import sys, torch\n"
        "before = 'torch._dynamo' in sys.modules\n"
        "import mimose\n"
        "model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))\n"
        "mimose.auto_checkpoint(model, '1GiB', blocks=torch.nn.Linear)\n"
        "print(('torch._dynamo' in sys.modules) == before)"
    )
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(
    ("module", "absent", "wanted"),
    [
        ("huggingface", ["transformers"], "'transformers>=5.0'"),
        ("huggingface", ["accelerate"], "'accelerate>=1.10'"),
        ("lightning", ["lightning", "pytorch_lightning"], "'lightning>=2.5'"),
    ],
)
def test_missing_package_is_asked_for_by_its_pip_command(
    run: Run, module: str, absent: list[str], wanted: str
) -> None:
    hidden = "; ".join(f"sys.modules[{name!r}] = None" for name in absent)
    done = run(f"import sys; {hidden}; import mimose.integrations.{module}")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError:")
    command = last.partition(": pip install ")[2]
    assert wanted in command
    assert "mimose" not in command  # which is on no package index


def test_extras_are_those_of_the_project() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    told = {extra: _requirements(packages) for extra, packages in EXTRAS.items()}
    listed = {
        name: {package.partition(";")[0] for package in wanted}  # without the platforms
        for name, wanted in project["optional-dependencies"].items()
    }
    listed["bench"] = (listed["bench"] - {"mimose[cli,hf]"}) | listed["cli"] | listed["hf"]
    del listed["docs"]
    assert told == listed
    assert _requirements(NEEDED) == set(project["dependencies"])


def _requirements(packages: Mapping[str, str]) -> set[str]:
    return {f"{name}>={least}" for name, least in packages.items()}


def test_either_of_lightnings_two_names_is_enough(run: Run) -> None:
    done = run(
        "import sys; sys.modules['lightning'] = None\n"
        "from mimose.integrations.lightning import MimoseCallback\n"
        "print({c.__module__.split('.')[0] for c in MimoseCallback.__mro__})"
    )
    assert "'pytorch_lightning'" in done.stdout, done.stderr
    assert "'lightning'" not in done.stdout
