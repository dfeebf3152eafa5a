"""`mimose doctor`: is everything as it should be, and if not, what mends it.

Needs nothing but the core. Looks at versions, the device, the allocator's settings, and, if it is
told of a model, at the blocks that would be found and at the memory that no plan can save.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

import mimose
from mimose.allocator import ALLOCATOR_SETTINGS, VARIABLES, page_bytes_in, why_left_alone
from mimose.blocks import Block, find_blocks
from mimose.budget import text_of, typed_budget
from mimose.errors import ArgumentError, MimoseError
from mimose.memory import Meter, meter_for
from mimose.session import auto_checkpoint
from mimose.switch import switched_off

OK, NOTE, PROBLEM = "ok", "note", "problem"

_LEAST = {"torch": "2.11", "numpy": "1.26"}
_OPTIONAL = {
    "typer": "0.15",
    "rich": "13.9",
    "matplotlib": "3.9",
    "transformers": "5.0",
    "accelerate": "1.10",
    "lightning": "2.5",
}
_EXAMPLES = """examples:
  mimose doctor
  mimose doctor --model my_project.models:make_model --budget 6GiB
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


def examine(model: nn.Module | None = None, budget: str | None = None) -> list[Finding]:
    """Everything that can be said of this machine, and of a model on it."""
    found = [*_versions(), *_device(), *_environment()]
    if budget is not None:
        typed_budget(budget)
    if model is not None:
        found += _model(model, budget)
    return found


def _versions() -> Iterator[Finding]:
    yield Finding(OK, f"Python {platform.python_version()}, mimose {mimose.__version__}")
    for name, least in _LEAST.items():
        yield _package(name, least, needed=True)
    for name, least in _OPTIONAL.items():
        if _version(name) is not None:
            yield _package(name, least, needed=False)


def _package(name: str, least: str, *, needed: bool) -> Finding:
    version = _version(name) or "0"
    if _numbers(version) >= _numbers(least):
        return Finding(OK, f"{name} {version}")
    kind = PROBLEM if needed else NOTE
    return Finding(
        kind, f"{name} {version} is older than {least}", f"pip install -U '{name}>={least}'"
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.partition("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)


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


def _model(model: nn.Module, budget: str | None) -> Iterator[Finding]:
    try:
        blocks = find_blocks(model)
        auto_checkpoint(model, budget or "auto").detach()
    except MimoseError as error:
        what, _, remedy = str(error).partition(": ")
        yield Finding(PROBLEM, what, remedy)
        return
    yield Finding(OK, f"{len(blocks)} blocks in {type(model).__name__}: {_listed(blocks)}")
    inside = _distinct_bytes(p for block in blocks for p in block.module.parameters())
    whole = _distinct_bytes(model.parameters())
    if whole and inside < whole // 4:
        yield Finding(
            NOTE,
            f"the blocks hold {inside / whole:.0%} of the parameters, so much may go on outside "
            "of them",
            'name others with blocks="…" if these are not the parts that repeat',
        )
    yield from _floor(model, budget)
    if not model.training:
        yield Finding(
            NOTE, "the model is in eval mode, where nothing is recomputed", "model.train()"
        )


def _floor(model: nn.Module, budget: str | None) -> Iterator[Finding]:
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
    total = None if budget is None else typed_budget(budget).total_bytes
    if total is not None and floor >= total:
        yield Finding(
            PROBLEM,
            f"{said}, and the budget is {text_of(total)}: no plan can help",
            "raise the budget, train fewer parameters (LoRA), or use an optimizer with less state",
        )
    else:
        yield Finding(OK, said)


def _distinct_bytes(parameters: Iterator[nn.Parameter]) -> int:
    return sum({id(p): p.nbytes for p in parameters}.values())


def _listed(blocks: Sequence[Block]) -> str:
    names = [f"{block.name} ({type(block.module).__name__})" for block in blocks]
    return ", ".join(names if len(names) <= 4 else [*names[:2], "…", names[-1]])


def load_model(target: str) -> nn.Module:
    """The model that `module:factory` makes; also `module:Class` or `module:instance`."""
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise ArgumentError(f"--model {target!r}: write module:factory, e.g. my_project.nets:make")
    sys.path.insert(0, os.getcwd())
    try:
        made = importlib.import_module(module_name)
        for name in attribute.split("."):
            made = getattr(made, name)
        model = made if isinstance(made, nn.Module) else made()  # type: ignore[operator]
    except Exception as error:
        raise ArgumentError(
            f"--model {target!r} cannot be made: {type(error).__name__}: {error}. It must be "
            "importable from here and need no arguments"
        ) from None
    finally:
        sys.path.remove(os.getcwd())
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"--model {target!r} gives a {type(model).__name__}, not a nn.Module")
    return model


def load_config(name: str) -> nn.Module:
    """The model of a transformers configuration, without weights and without memory."""
    try:
        from transformers import AutoConfig, AutoModel
    except ImportError:
        raise ArgumentError("--config needs transformers: pip install 'mimose[hf]'") from None
    try:
        config = AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            model: nn.Module = AutoModel.from_config(config)  # type: ignore[no-untyped-call]
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ArgumentError(
            f"--config {name!r} cannot be read: {reason}. Give a folder with a config.json, or a "
            "name on the hub"
        ) from None
    return model.train()


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
    parser.add_argument("--json", action="store_true", help="for machines")
    asked = parser.parse_args(arguments)
    try:
        model = load_model(asked.model) if asked.model else None
        model = load_config(asked.config) if asked.config else model
        found = examine(model, asked.budget)
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
    sys.exit(main(program="python -m mimose.doctor"))
