"""Run a command, and report errors that its user can correct in one line on stderr."""

from __future__ import annotations

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
        text = error.format_message().removeprefix("Value error, ")
        text += "" if text.endswith((".", "?")) else "."
        context = getattr(error, "ctx", None)
        return _refused(
            program, f"{text} Try: {context.command_path if context else program} --help"
        )
    if status == INTERRUPTED:  # newer versions of click turn Ctrl-C into an exit
        raise KeyboardInterrupt
    return status if isinstance(status, int) else 0


def _refused(program: str, message: str) -> int:
    print(f"{program}: {message}", file=sys.stderr)
    return 2


def _message(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    problem = (error.strerror or str(error) or "cannot be used").lower()
    return problem if error.filename is None else f"{error.filename}: {problem}"
