"""What is not installed is not imported, and asked for by its pip command."""

from __future__ import annotations

import subprocess
import sys

import pytest

EXTRAS = "transformers accelerate trl peft lightning pytorch_lightning datasets bitsandbytes"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_mimose_imports_no_integration_and_nothing_that_one_needs() -> None:
    done = run(
        "import sys, mimose, mimose.integrations\n"
        f"print([m for m in {EXTRAS!r}.split() if m in sys.modules])\n"
        "print([m for m in sys.modules if m.startswith('mimose.integrations.')])"
    )
    assert done.stdout.split("\n")[:2] == ["[]", "[]"], done.stderr


@pytest.mark.parametrize(
    ("module", "absent", "extra"),
    [
        ("huggingface", ["transformers"], "hf"),
        ("huggingface", ["accelerate"], "hf"),
        ("lightning", ["lightning", "pytorch_lightning"], "lightning"),
    ],
)
def test_missing_package_is_asked_for_by_its_pip_command(
    module: str, absent: list[str], extra: str
) -> None:
    hidden = "; ".join(f"sys.modules[{name!r}] = None" for name in absent)
    done = run(f"import sys; {hidden}; import mimose.integrations.{module}")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError:")
    assert last.endswith(f"pip install 'mimose[{extra}]'")


def test_either_of_lightnings_two_names_is_enough() -> None:
    done = run(
        "import sys; sys.modules['lightning'] = None\n"
        "from mimose.integrations.lightning import MimoseCallback\n"
        "print({c.__module__.split('.')[0] for c in MimoseCallback.__mro__})"
    )
    assert "'pytorch_lightning'" in done.stdout, done.stderr
    assert "'lightning'" not in done.stdout
