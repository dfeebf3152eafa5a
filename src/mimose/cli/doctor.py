"""`mimose doctor`: find problems and name their remedies. Needs only the core dependencies."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import NoReturn

from torch import nn

from mimose.cli.findings import PROBLEM, Finding, as_text
from mimose.cli.machine_checks import check_budget, check_machine
from mimose.cli.model_checks import HEADLESS, check_model
from mimose.cli.model_sources import lacks_head, load_config, load_model
from mimose.errors import ArgumentError, MimoseError
from mimose.units import typed_budget

_EXAMPLES = """examples:
  mimose doctor
  mimose doctor --budget 80%
  mimose doctor --model my_project.models:make_model --budget 6GiB
  mimose doctor --model my_project.models:make_model --blocks 'encoder.*' --exclude encoder.0
  mimose doctor --config bert-base-uncased
  mimose doctor --json

exit status: 0 without problems, 1 if there are problems to fix, 2 for an invalid argument"""


def examine(
    model: nn.Module | None = None,
    budget: str | None = None,
    *,
    blocks: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
) -> list[Finding]:
    """Check this machine, a budget and a model."""
    parsed = None if budget is None else typed_budget(budget)
    found, budget_bytes = list(check_machine()), None
    if parsed is not None:
        budget_bytes, finding = check_budget(parsed)
        found.append(finding)
    if model is not None:
        found += check_model(model, budget_bytes, blocks, exclude)
    return found


def main(arguments: Sequence[str] | None = None, program: str = "mimose doctor") -> int:
    """Print the findings and return the exit status."""
    try:
        options = _parser(program).parse_args(arguments)
        if not (options.model or options.config) and (options.blocks or options.exclude):
            raise ArgumentError("--blocks and --exclude need a model: add --model or --config")
        model = load_model(options.model) if options.model else None
        model = load_config(options.config) if options.config else model
        found = examine(model, options.budget, blocks=options.blocks, exclude=options.exclude)
        if model is not None and options.config and lacks_head(model):
            found.append(HEADLESS)
    except MimoseError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    print(json.dumps([asdict(f) for f in found], indent=2) if options.json else as_text(found))
    return 1 if any(finding.kind == PROBLEM for finding in found) else 0


class _Parser(argparse.ArgumentParser):
    """Reports an invalid argument in one line, as the other commands do."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = unknown.split()[0].partition("=")[0]
            known = [option for action in self._actions for option in action.option_strings]
            near = difflib.get_close_matches(word, known)
            possible = f" (Possible options: {', '.join(near)})" if near else ""
            kind = "option" if word.startswith("-") else "argument"
            message = f"No such {kind}: {word}{possible}"
        raise ArgumentError(f"{message}. Try: {self.prog} --help")


def _parser(program: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program,
        description="Check this machine, and optionally a model, for problems.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--model", metavar="MODULE:FACTORY", help="a function that returns your model"
    )
    which.add_argument("--config", metavar="NAME", help="a transformers configuration")
    parser.add_argument("--budget", metavar="SIZE", help='a budget to check, such as "6GiB"')
    parser.add_argument(
        "--blocks", metavar="GLOB", action="append", help="blocks= of auto_checkpoint; repeatable"
    )
    parser.add_argument(
        "--exclude", metavar="GLOB", action="append", help="exclude= of auto_checkpoint; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main(program="python -m mimose.cli.doctor"))
