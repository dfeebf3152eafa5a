"""The command `mimose`. What needs no extra works without one; the rest says what to install."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence

_NEEDED = ("typer", "rich")
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status (what the console script hands to the shell)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words)
    except KeyboardInterrupt:
        print("\nmimose: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough: `mimose report … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(words: list[str]) -> int:
    if words[:1] == ["doctor"]:
        from mimose import doctor

        return doctor.main(words[1:])
    if words[:1] == ["bench"] and importlib.util.find_spec("mimose.bench.command"):
        return _bench(words[1:])
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"mimose: this needs {' and '.join(missing)}: pip install 'mimose[cli]' "
            "(`mimose doctor` and `python -m mimose.demo` work without)",
            file=sys.stderr,
        )
        return 2
    from mimose.commands import run

    return run(words)


def _bench(words: list[str]) -> int:
    from mimose.bench.extras import BenchError

    try:
        from mimose.bench.command import app
    except BenchError as error:
        print(f"mimose bench: {error}", file=sys.stderr)
        return 2
    from mimose.commands import guarded

    return guarded(app, words, "mimose bench")


if __name__ == "__main__":
    sys.exit(main())
