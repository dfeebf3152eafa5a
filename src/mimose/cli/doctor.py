"""`mimose doctor`: find problems and name their remedies. Needs only the core dependencies.

Checks versions, the device and the allocator's settings and, for a given model, its blocks and the
memory that no plan can save.
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
from mimose.interception import describe_blocks, find_blocks
from mimose.memory import (
    ALLOCATOR_SETTINGS,
    ALLOCATOR_VARIABLES,
    Meter,
    meter_for,
    page_bytes_in,
    reason_not_to_configure,
)
from mimose.units import Budget, text_of, typed_budget

OK, NOTE, PROBLEM = "ok", "note", "problem"

_NEEDED_FOR = {
    "cli": "`mimose report` and `mimose plan`",
    "hf": "transformers' Trainer",
    "lightning": "Lightning's Trainer",
    "bench": "`mimose bench` and pictures of reports",
}
"""The features that need each extra."""
_EXAMPLES = """examples:
  mimose doctor
  mimose doctor --budget 80%
  mimose doctor --model my_project.models:make_model --budget 6GiB
  mimose doctor --model my_project.models:make_model --blocks 'encoder.*' --exclude encoder.0
  mimose doctor --config bert-base-uncased
  mimose doctor --json

exit status: 0 without problems, 1 if there are problems to fix, 2 for an invalid argument"""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    kind: str
    """`ok`, `note` (worth knowing) or `problem` (must be fixed)."""
    what: str
    remedy: str = ""


def examine(
    model: nn.Module | None = None,
    budget: str | None = None,
    *,
    blocks: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
) -> list[Finding]:
    """Check this machine, a budget and a model."""
    parsed = None if budget is None else typed_budget(budget)
    found = [*_versions(), *_extras(), *_device(), *_environment()]
    total = None
    if parsed is not None:
        total, finding = _budget(parsed)
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
    """Optional packages that are not installed; each is reported once."""
    reported: set[str] = set()
    if version_of("pytorch-lightning") is not None:
        reported.add("lightning")  # the same library under its other name
    for extra, feature in _NEEDED_FOR.items():
        missing = [name for name in missing_from(extra) if name not in reported]
        reported.update(missing)
        if missing:
            what = f"{' and '.join(missing)} not installed; needed for {feature}"
            yield Finding(NOTE, what, pip_command(extra, *missing))


def _device() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding(
            NOTE,
            "no CUDA device: budgets also work on the CPU, but counting memory slows training",
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
                f"other processes use more than half of cuda:{index}",
                'nvidia-smi lists them; a budget of "auto" uses only the free memory',
            )
        if index == 0:
            yield _allocator(meter)


def _allocator(meter: Meter) -> Finding:
    if not meter.fragments:
        smaller = page_bytes_in(ALLOCATOR_SETTINGS) < meter.page_bytes
        return Finding(
            OK,
            f"expandable segments are on, in pages of {text_of(meter.page_bytes)}",
            f"{ALLOCATOR_SETTINGS} wastes less memory" if smaller else "",
        )
    reason = reason_not_to_configure()
    if reason is None:
        return Finding(OK, f"attaching will configure PyTorch's allocator ({ALLOCATOR_SETTINGS})")
    return Finding(
        NOTE,
        "PyTorch's allocator does not use expandable segments, and mimose does not change that "
        f"because {reason}: batches of varying size fragment its memory, so plans must leave more "
        "free",
        f"configure the allocator with {ALLOCATOR_SETTINGS}, or do not configure it",
    )


def _budget(budget: Budget) -> tuple[int, Finding]:
    """The budget in bytes, and whether the device has enough memory for it."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    meter = meter_for(device)
    total, free, own = meter.device_bytes, meter.free_bytes(), meter.read().held
    meter.close()
    number = budget.in_bytes(device_bytes=total, free_bytes=free, own_bytes=own)
    what = f"a budget of {text_of(number)} on {device}, which has {text_of(total)}"
    if number > total:
        return number, Finding(PROBLEM, f"{what}: too large", 'use "80%" or "auto"')
    if number > free + own:
        what += f", of which only {text_of(free)} are free"
        return number, Finding(NOTE, what, "stop other processes on the device, or use less")
    return number, Finding(OK, what)


def _environment() -> Iterator[Finding]:
    if switched_off():
        yield Finding(PROBLEM, "MIMOSE_DISABLE is set: mimose does nothing", "unset MIMOSE_DISABLE")
    for name in ALLOCATOR_VARIABLES:
        setting = os.environ.get(name)
        if not setting:
            continue
        yield Finding(OK, f"{name}={setting}")
        if "backend:cudaMallocAsync" in setting:
            yield Finding(
                PROBLEM,
                "the cudaMallocAsync allocator does not report fragmentation: plans must leave "
                "more memory free",
                f"remove backend:cudaMallocAsync from {name}",
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
    yield Finding(OK, f"in {type(model).__name__}: {describe_blocks(blocks)}")
    inside = _distinct_bytes(p for block in blocks for p in block.module.parameters())
    whole = _distinct_bytes(model.parameters())
    if whole and inside < whole // 4:
        yield Finding(
            NOTE,
            f"the blocks hold only {inside / whole:.0%} of the parameters: much memory may be used "
            "outside of them",
            'choose other blocks with blocks="…" if these are not the repeated layers',
        )
    yield from _floor(model, budget_bytes)
    if not model.training:
        yield Finding(
            NOTE, "the model is in eval mode, where nothing is recomputed", "model.train()"
        )


def _floor(model: nn.Module, budget_bytes: int | None) -> Iterator[Finding]:
    """Memory that no plan can save: parameters, gradients, optimizer state."""
    weights = _distinct_bytes(model.parameters())
    trained = _distinct_bytes(p for p in model.parameters() if p.requires_grad)
    floor = weights + 3 * trained
    if not trained:
        yield Finding(PROBLEM, "no parameter requires a gradient", "model.requires_grad_(True)")
    what = (
        f"parameters {text_of(weights)}, gradients {text_of(trained)}, AdamW state "
        f"{text_of(2 * trained)}: {text_of(floor)} without activations"
    )
    if budget_bytes is not None and floor >= budget_bytes:
        yield Finding(
            PROBLEM,
            f"{what}, but the budget is {text_of(budget_bytes)}: no plan can help",
            "raise the budget, train fewer parameters (LoRA), or use an optimizer with less state",
        )
    else:
        yield Finding(OK, what)


def _distinct_bytes(parameters: Iterator[nn.Parameter]) -> int:
    return sum({id(p): p.nbytes for p in parameters}.values())


_HEADLESS = Finding(
    NOTE,
    "the configuration names no transformers architecture: the model was checked without the head "
    "that training adds",
    'add "architectures": ["…ForSequenceClassification"] to config.json, or use --model',
)


def main(arguments: Sequence[str] | None = None, program: str = "mimose doctor") -> int:
    """Print the findings and return the exit status."""
    parser = argparse.ArgumentParser(
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
    parser.add_argument("--exclude", metavar="GLOB", action="append", help="exclude=; repeatable")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        if not (options.model or options.config) and (options.blocks or options.exclude):
            raise ArgumentError("--blocks and --exclude need a model: add --model or --config")
        model = load_model(options.model) if options.model else None
        model = load_config(options.config) if options.config else model
        found = examine(model, options.budget, blocks=options.blocks, exclude=options.exclude)
        if model is not None and options.config and lacks_head(model):
            found.append(_HEADLESS)
    except MimoseError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    print(json.dumps([asdict(f) for f in found], indent=2) if options.json else as_text(found))
    return 1 if any(finding.kind == PROBLEM for finding in found) else 0


def as_text(found: Sequence[Finding]) -> str:
    """The findings, one per line, with their remedies."""
    marks = {OK: "  ok   ", NOTE: "  note ", PROBLEM: "PROBLEM"}
    lines = []
    for finding in found:
        lines.append(f"{marks[finding.kind]}  {finding.what}")
        if finding.remedy:
            lines.append(f"         → {finding.remedy}")
    problems = sum(finding.kind == PROBLEM for finding in found)
    summary = (
        f"{problems} problem{'s' if problems > 1 else ''} to fix" if problems else "no problems"
    )
    return "\n".join([*lines, "", summary])


if __name__ == "__main__":
    sys.exit(main(program="python -m mimose.cli.doctor"))
