"""Run a command, and report errors that its user can correct in one line on stderr."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

import typer

from mimose.cli.main import INTERRUPTED
from mimose.errors import MimoseError


def guarded(commands: typer.Typer, words: Sequence[str], program: str) -> int:
    """Run one of these commands; report user errors in one line on stderr."""
    try:
        status = commands(args=list(words), prog_name=program, standalone_mode=False)
    except (MimoseError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        return _refused(program, _message(error))
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        if not hasattr(error, "format_message"):  # not a click error
            raise
        if not error.format_message():  # without arguments click has printed the help
            return 0
        text = _plain(error.format_message(), words)
        text += "" if text.endswith((".", "?")) else "."
        context = getattr(error, "ctx", None)
        return _refused(
            program, f"{text} Try: {context.command_path if context else program} --help"
        )
    if status == INTERRUPTED:  # newer versions of click turn Ctrl-C into an exit
        raise KeyboardInterrupt
    return status if isinstance(status, int) else 0


_INVALID = re.compile(r"Invalid value for '([^']+)'[^:]*: (?:Value error, )?(.*)", re.DOTALL)
_PROBLEMS = {
    r"Input should be greater than or equal to (\S+)": r"give at least \1",
    r"\S+ is not in the range x>=(\d+)\.?": r"give at least \1",
    r"Input should be a valid integer.*": "give a whole number",
    r"Input should be a valid number.*": "give a number",
}
"""What typer says of an option's value, and what to type instead."""


def _plain(text: str, words: Sequence[str]) -> str:
    """The message of the command line's parser, in the words of this one."""
    invalid = _INVALID.fullmatch(text)
    if invalid is None:
        return text.removeprefix("Value error, ")
    option, problem = invalid[1], invalid[2]
    for pattern, remedy in _PROBLEMS.items():
        if (found := re.fullmatch(pattern, problem)) is not None:
            return f"{option} {_given(option, words)}: {found.expand(remedy)}"
    return f"Invalid value for '{option}': {problem}"


def _given(option: str, words: Sequence[str]) -> str:
    """The value that was typed for an option."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return ""


def _refused(program: str, message: str) -> int:
    print(f"{program}: {message}", file=sys.stderr)
    return 2


def _message(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    problem = (error.strerror or str(error) or "cannot be used").lower()
    return problem if error.filename is None else f"{error.filename}: {problem}"
