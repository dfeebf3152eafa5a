"""A program that imports torch once and then runs each piece of code it is sent in its own fork.

Importing torch takes seconds, and each fork begins as a Python that has imported nothing else.
Pieces of code come as JSON strings, one a line; what each prints goes back as [stdout, stderr].
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from typing import IO

import torch  # noqa: F401


def main() -> None:
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if child == 0:
                _run(json.loads(line), out, err)
            os.waitpid(child, 0)
            print(json.dumps([_all_of(out), _all_of(err)]), flush=True)


def _run(code: str, out: IO[str], err: IO[str]) -> None:
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    try:
        exec(code, {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _all_of(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


if __name__ == "__main__":
    main()
