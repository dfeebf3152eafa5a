"""The command `mimose`. Without typer and rich, it says what to install; `doctor` needs neither."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

import mimose
from mimose.api import EXTRAS, pip_command

PURPOSE = "Train PyTorch models under a memory budget: reports, forecasts, demo and diagnosis."
COMMANDS = {
    "report": "Make a page from a recorded run or from benchmark results.",
    "plan": "Predict the cost of other budgets, host memory or lengths, without training.",
    "compare": "Compare published planners on the costs of a recorded run, without training.",
    "trace": "Record the operators of a training step, and simulate DTR on them.",
    "demo": "Train a small encoder four ways and compare them (about a minute on a CPU).",
    "doctor": "Check this machine, and optionally a model, for problems.",
    "bench": "Benchmark training under a memory budget on this machine.",
}
"""One line of help per command."""

INTERRUPTED = 130
"""Exit status after Ctrl-C."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words)
    except KeyboardInterrupt:
        print("\nmimose: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # for instance `mimose report … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(words: list[str]) -> int:
    if words[:1] == ["doctor"]:
        from mimose.cli import doctor

        return doctor.main(words[1:])
    if words[:1] == ["bench"] and importlib.util.find_spec("mimose.bench.command"):
        return _bench(words[1:])
    missing = [name for name in EXTRAS["cli"] if importlib.util.find_spec(name) is None]
    if missing:
        return _without(missing, words)
    from mimose.cli.commands import run

    return run(words)


def _without(missing: list[str], words: list[str]) -> int:
    """Answer --version and --help without typer and rich; else name what to install."""
    if words[:1] == ["--version"]:
        print(f"mimose {mimose.__version__}")
        return 0
    needs = f"{' and '.join(missing)}: {pip_command('cli')}"
    if words[:1] in ([], ["--help"]):
        width = max(map(len, COMMANDS))
        commands = "\n".join(f"  {name:{width}}  {what}" for name, what in COMMANDS.items())
        print(
            f"Usage: mimose [--version] [--help] COMMAND ...\n\n{PURPOSE}\n\nCommands:\n{commands}"
        )
        print(f"\nAll commands except doctor need {needs}")
        return 0
    print(
        f"mimose: this command needs {needs}. `mimose doctor` and `python -m mimose.cli.demo` "
        "do not",
        file=sys.stderr,
    )
    return 2


def _bench(words: list[str]) -> int:
    from mimose.bench.extras import BenchError

    try:
        from mimose.bench.command import app
    except BenchError as error:
        print(f"mimose bench: {error}", file=sys.stderr)
        return 2
    from mimose.cli.user_errors import guarded

    return guarded(app, words, "mimose bench")


if __name__ == "__main__":
    sys.exit(main())
