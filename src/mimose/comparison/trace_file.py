"""Trace files: JSON lines, one for each event of a `Trace`.

The first line is the header, the last one the number of events between them, so that a truncated
file is noticed:

    {"format": "mimose-trace", "version": 1, "mimose_version": "0.3.0", "device": "cpu"}
    {"constant": 0, "bytes": 4096}
    {"call": "aten.relu.default", "ns": 5120, "in": [0], "out": [{"id": 1, "bytes": 4096}]}
    {"call": "aten.view.default", "ns": 800, "in": [1], "out": [{"id": 2, "alias_of": 1}]}
    {"call": "aten.add_.Tensor", "ns": 900, "in": [2, 0],
     "out": [{"id": 3, "bytes": 4096, "replaces": 2}]}
    {"release": 1}
    {"release": 2}
    {"end": 6}

Each event is in one line; the call above is broken for this page only. Tensors are numbers. `bytes`
is the size of the storage that an output gets; an output with `alias_of` gets none. `replaces`
names the input that the call changed in place. A tensor without a `release` must exist at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import mimose
from mimose.comparison.trace import Call, Constant, Event, Output, Release, Trace, TraceCheck
from mimose.errors import ArgumentError

FORMAT = "mimose-trace"
VERSION = 1
_REMEDY = "Record the step again: mimose trace module:function"
_LARGEST = 1 << 62


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace to a file, replacing it."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "mimose_version": mimose.__version__,
        "device": trace.device,
    }
    lines = [header, *map(_plain, trace.events), {"end": len(trace.events)}]
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _plain(event: Event) -> dict[str, Any]:
    if isinstance(event, Constant):
        return {"constant": event.tensor, "bytes": event.size_bytes}
    if isinstance(event, Release):
        return {"release": event.tensor}
    return {
        "call": event.name,
        "ns": event.nanoseconds,
        "in": list(event.inputs),
        "out": [_plain_output(output) for output in event.outputs],
    }


def _plain_output(output: Output) -> dict[str, int]:
    if output.alias_of is not None:
        return {"id": output.tensor, "alias_of": output.alias_of}
    plain = {"id": output.tensor, "bytes": output.size_bytes}
    return plain if output.replaces is None else {**plain, "replaces": output.replaces}


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace.

    Raises an `ArgumentError` with the number of the line for a file that is damaged, truncated or
    of another version.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    if not lines:
        raise ArgumentError(f"{path} is empty. {_REMEDY}")
    device = _device(lines[0], path)
    return Trace(tuple(_events(lines[1:], path)), device)


def _device(line: str, path: str | os.PathLike[str]) -> str:
    """Check the header; the device that it names."""
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        _refuse(path, 1, f'this is not a trace: the first line lacks "format": "{FORMAT}"')
    if header.get("version") != VERSION:
        raise ArgumentError(
            f"{path}, line 1: version {header.get('version')} of the format, but this mimose "
            f"({mimose.__version__}) reads version {VERSION}: use mimose "
            f"{header.get('mimose_version')}, or record the step again"
        )
    return str(header.get("device"))


def _events(lines: list[str], path: str | os.PathLike[str]) -> Iterator[Event]:
    check, number = TraceCheck(), 1
    for number, line in enumerate(lines, 2):
        values = _parsed(line, path, number)
        if "end" in values:
            _check_end(values["end"], number, len(lines) + 1, path)
            return
        try:
            event = _event(values)
            check.admit(event)
        except (ArgumentError, KeyError, TypeError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            _refuse(path, number, what)
        yield event
    _refuse(path, number, 'the file ends here, without its last line {"end": …}: it is truncated')


def _parsed(line: str, path: str | os.PathLike[str], number: int) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        _refuse(path, number, "this is not JSON")
    if not isinstance(values, dict):
        _refuse(path, number, "this is not a JSON object")
    return values


def _check_end(count: Any, number: int, last: int, path: str | os.PathLike[str]) -> None:
    if number != last:
        _refuse(path, number, f"the trace ends here, but the file has {last} lines")
    if count != number - 2:
        _refuse(path, number, f"the trace has {count} events, but the file has {number - 2}")


def _event(values: dict[str, Any]) -> Event:
    for key, make in _MAKERS.items():
        if key in values:
            return make(values)
    raise TypeError("this is neither a constant, a call, a release nor the end")


def _constant(values: dict[str, Any]) -> Constant:
    return Constant(_number(values, "constant"), _number(values, "bytes"))


def _release(values: dict[str, Any]) -> Release:
    return Release(_number(values, "release"))


def _call(values: dict[str, Any]) -> Call:
    inputs = tuple(_whole(one, "in") for one in _listed(values, "in"))
    outputs = tuple(_output(one) for one in _listed(values, "out"))
    return Call(str(values["call"]), _number(values, "ns"), inputs, outputs)


_MAKERS: dict[str, Callable[[dict[str, Any]], Event]] = {
    "constant": _constant,
    "call": _call,
    "release": _release,
}


def _output(values: Any) -> Output:
    if not isinstance(values, dict):
        raise TypeError(f'"out" has {values!r} instead of an object')
    tensor = _number(values, "id")
    if "alias_of" in values:
        return Output(tensor, 0, alias_of=_number(values, "alias_of"))
    replaces = _number(values, "replaces") if "replaces" in values else None
    return Output(tensor, _number(values, "bytes"), replaces=replaces)


def _listed(values: dict[str, Any], key: str) -> list[Any]:
    if not isinstance(values[key], list):
        raise TypeError(f'"{key}" is {values[key]!r} instead of a list')
    return list(values[key])


def _number(values: dict[str, Any], key: str) -> int:
    return _whole(values[key], key)


def _whole(value: Any, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST:
        raise TypeError(f'"{key}" is {value!r} instead of a whole number from 0')
    return value


def _refuse(path: str | os.PathLike[str], number: int, what: str) -> NoReturn:
    raise ArgumentError(f"{path}, line {number}: {what}. {_REMEDY}") from None
