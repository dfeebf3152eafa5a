"""`mimose doctor`: is everything as it should be, and if not, what mends it.

Needs nothing but the core. Looks at versions, the device, the allocator's settings, and, if it is
told of a model, at the blocks that would be found and at the memory that no plan can save.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

import mimose
from mimose.api import (
    EXTRAS,
    NEEDED,
    auto_checkpoint,
    missing_from,
    pip_command,
    switched_off,
    version_of,
)
from mimose.cli.model_sources import lacks_head, load_config, load_model
from mimose.errors import ArgumentError, MimoseError
from mimose.interception import described, find_blocks
from mimose.memory import (
    ALLOCATOR_SETTINGS,
    VARIABLES,
    Meter,
    meter_for,
    page_bytes_in,
    why_left_alone,
)
from mimose.units import Budget, text_of, typed_budget

OK, NOTE, PROBLEM = "ok", "note", "problem"

_USES = {
    "cli": "`mimose report` and `mimose plan`",
    "hf": "transformers' Trainer",
    "lightning": "Lightning's Trainer",
    "bench": "`mimose bench`, and pictures of reports,",
}
"""What the packages of each extra are for."""
_EXAMPLES = """examples:
  mimose doctor
  mimose doctor --budget 80%
  mimose doctor --model my_project.models:make_model --budget 6GiB
  mimose doctor --model my_project.models:make_model --blocks 'encoder.*' --exclude encoder.0
  mimose doctor --config bert-base-uncased
  mimose doctor --json

exit status: 0 if nothing is in the way, 1 if something must be mended, 2 for a wrong argument"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    kind: str
    """`ok`, `note` (worth knowing) or `problem` (will not work)."""
    what: str
    remedy: str = ""


def examine(
    model: nn.Module | None = None,
    budget: str | None = None,
    *,
    blocks: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
) -> list[Finding]:
    """Everything that can be said of this machine, and of a model on it."""
    asked = None if budget is None else typed_budget(budget)
    found = [*_versions(), *_extras(), *_device(), *_environment()]
    total = None
    if asked is not None:
        total, finding = _budget(asked)
        found.append(finding)
    if model is not None:
        found += _model(model, total, blocks, exclude)
    return found


def _versions() -> Iterator[Finding]:
    yield Finding(OK, f"Python {platform.python_version()}, mimose {mimose.__version__}")
    for name, least in NEEDED.items():
        yield _package(name, least, needed=True)
    for name, least in {n: v for extra in EXTRAS.values() for n, v in extra.items()}.items():
        if version_of(name) is not None:
            yield _package(name, least, needed=False)


def _package(name: str, least: str, *, needed: bool) -> Finding:
    version = version_of(name) or "0"
    if _numbers(version) >= _numbers(least):
        return Finding(OK, f"{name} {version}")
    kind = PROBLEM if needed else NOTE
    return Finding(
        kind, f"{name} {version} is older than {least}", f"pip install -U '{name}>={least}'"
    )


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.partition("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)


def _extras() -> Iterator[Finding]:
    """What is not installed, and what it would be for."""
    told: set[str] = set()
    if version_of("pytorch-lightning") is not None:
        told.add("lightning")  # its other name
    for extra, use in _USES.items():
        missing = [name for name in missing_from(extra) if name not in told]
        told.update(missing)
        if missing:
            what = f"{' and '.join(missing)} not installed: {use} would need that"
            yield Finding(NOTE, what, pip_command(extra, *missing))


def _device() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding(
            NOTE,
            "no CUDA device: training on the CPU works, and a budget means the same there, but "
            "counting memory costs some time",
            "use a machine with an NVIDIA GPU and a CUDA build of torch for real runs",
        )
        return
    for index in range(torch.cuda.device_count()):
        meter = meter_for(torch.device("cuda", index))
        free, total = meter.free_bytes(), meter.device_bytes
        name = torch.cuda.get_device_name(index)
        yield Finding(OK, f"cuda:{index}: {name}, {text_of(free)} of {text_of(total)} free")
        if free < total // 2:
            yield Finding(
                NOTE,
                f"others use more than half of cuda:{index}",
                'a budget of "auto" takes what is free; look with nvidia-smi for who uses the rest',
            )
        if index == 0:
            yield _allocator(meter)


def _allocator(meter: Meter) -> Finding:
    if not meter.fragments:
        smaller = page_bytes_in(ALLOCATOR_SETTINGS) < meter.page_bytes
        return Finding(
            OK,
            f"expandable segments are on, in pages of {text_of(meter.page_bytes)}",
            f"{ALLOCATOR_SETTINGS} leaves less unused" if smaller else "",
        )
    reason = why_left_alone()
    if reason is None:
        return Finding(
            OK, f"attaching sets PyTorch's allocator up for varying sizes ({ALLOCATOR_SETTINGS})"
        )
    return Finding(
        NOTE,
        "PyTorch's allocator works without expandable segments, and mimose leaves it alone because "
        f"{reason}: batches of varying size leave fragments, and plans leave more memory free",
        f"configure it with {ALLOCATOR_SETTINGS}, or not at all",
    )


def _budget(asked: Budget) -> tuple[int, Finding]:
    """The budget in bytes, and whether the device has as many."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    meter = meter_for(device)
    total, free, own = meter.device_bytes, meter.free_bytes(), meter.read().held
    meter.close()
    number = asked.in_bytes(device_bytes=total, free_bytes=free, own_bytes=own)
    said = f"a budget of {text_of(number)} on {device}, which has {text_of(total)}"
    if number > total:
        return number, Finding(PROBLEM, f"{said}: more than there is", 'say "80%", or "auto"')
    if number > free + own:
        free_now = f"{text_of(free)} of it free now"
        return number, Finding(NOTE, f"{said}, {free_now}", "look for who uses the rest")
    return number, Finding(OK, said)


def _environment() -> Iterator[Finding]:
    if switched_off():
        yield Finding(PROBLEM, "MIMOSE_DISABLE is set: mimose does nothing", "unset MIMOSE_DISABLE")
    for name in VARIABLES:
        setting = os.environ.get(name)
        if not setting:
            continue
        yield Finding(OK, f"{name}={setting}")
        if "backend:cudaMallocAsync" in setting:
            yield Finding(
                PROBLEM,
                "the cudaMallocAsync allocator does not tell what is lost between tensors: plans "
                "leave more memory free",
                f"take backend:cudaMallocAsync out of {name}",
            )


def _model(
    model: nn.Module,
    budget_bytes: int | None,
    select: Sequence[str] | None,
    exclude: Sequence[str] | None,
) -> Iterator[Finding]:
    try:
        blocks = find_blocks(model, blocks=select, exclude=exclude)
        budget = "auto" if budget_bytes is None else budget_bytes
        auto_checkpoint(model, budget, blocks=select, exclude=exclude, allocator="leave").detach()
    except MimoseError as error:
        what, _, remedy = str(error).partition(": ")
        yield Finding(PROBLEM, what, remedy)
        return
    yield Finding(OK, f"in {type(model).__name__}: {described(blocks)}")
    inside = _distinct_bytes(p for block in blocks for p in block.module.parameters())
    whole = _distinct_bytes(model.parameters())
    if whole and inside < whole // 4:
        yield Finding(
            NOTE,
            f"the blocks hold {inside / whole:.0%} of the parameters, so much may go on outside "
            "of them",
            'name others with blocks="…" if these are not the parts that repeat',
        )
    yield from _floor(model, budget_bytes)
    if not model.training:
        yield Finding(
            NOTE, "the model is in eval mode, where nothing is recomputed", "model.train()"
        )


def _floor(model: nn.Module, budget_bytes: int | None) -> Iterator[Finding]:
    """What no plan can save: parameters, gradients, optimizer state."""
    weights = _distinct_bytes(model.parameters())
    trained = _distinct_bytes(p for p in model.parameters() if p.requires_grad)
    floor = weights + 3 * trained
    if not trained:
        yield Finding(PROBLEM, "no parameter requires a gradient", "model.requires_grad_(True)")
    said = (
        f"parameters {text_of(weights)}, gradients {text_of(trained)}, AdamW's state "
        f"{text_of(2 * trained)}: {text_of(floor)} before any activation"
    )
    if budget_bytes is not None and floor >= budget_bytes:
        yield Finding(
            PROBLEM,
            f"{said}, and the budget is {text_of(budget_bytes)}: no plan can help",
            "raise the budget, train fewer parameters (LoRA), or use an optimizer with less state",
        )
    else:
        yield Finding(OK, said)


def _distinct_bytes(parameters: Iterator[nn.Parameter]) -> int:
    return sum({id(p): p.nbytes for p in parameters}.values())


_HEADLESS = Finding(
    NOTE,
    "the configuration names no architecture of transformers', so the model is looked at without "
    "the head that training would add",
    'add "architectures": ["…ForSequenceClassification"], say, to its config.json, or use --model',
)


def main(arguments: Sequence[str] | None = None, program: str = "mimose doctor") -> int:
    """Print what was found; the exit status."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Look at this machine, and at a model, and say what should be mended.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="MODULE:FACTORY", help="what makes your model")
    which.add_argument("--config", metavar="NAME", help="a transformers configuration")
    parser.add_argument("--budget", metavar="SIZE", help='e.g. "6GiB": is it enough?')
    parser.add_argument(
        "--blocks", metavar="GLOB", action="append", help="as blocks= of auto_checkpoint; repeat it"
    )
    parser.add_argument("--exclude", metavar="GLOB", action="append", help="as exclude=, likewise")
    parser.add_argument("--json", action="store_true", help="for machines")
    asked = parser.parse_args(arguments)
    try:
        if not (asked.model or asked.config) and (asked.blocks or asked.exclude):
            raise ArgumentError("--blocks and --exclude are about a model: add --model or --config")
        model = load_model(asked.model) if asked.model else None
        model = load_config(asked.config) if asked.config else model
        found = examine(model, asked.budget, blocks=asked.blocks, exclude=asked.exclude)
        if model is not None and asked.config and lacks_head(model):
            found.append(_HEADLESS)
    except MimoseError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    print(json.dumps([asdict(f) for f in found], indent=2) if asked.json else as_text(found))
    return 1 if any(finding.kind == PROBLEM for finding in found) else 0


def as_text(found: Sequence[Finding]) -> str:
    """For people."""
    marks = {OK: "  ok   ", NOTE: "  note ", PROBLEM: "PROBLEM"}
    lines = []
    for finding in found:
        lines.append(f"{marks[finding.kind]}  {finding.what}")
        if finding.remedy:
            lines.append(f"         → {finding.remedy}")
    problems = sum(finding.kind == PROBLEM for finding in found)
    last = "nothing is in the way" if not problems else f"{problems} to mend"
    return "\n".join([*lines, "", last])


if __name__ == "__main__":
    sys.exit(main(program="python -m mimose.cli.doctor"))
