"""Models and steps that commands work on: from user code or a transformers configuration."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import mimose
from mimose.api import pip_command
from mimose.errors import ArgumentError

_HUB_TIMEOUT_SECONDS = 5
_MIMOSE = Path(mimose.__file__).parent


def load_model(target: str) -> nn.Module:
    """The model that `module:factory` makes; also `module:Class` or `module:instance`."""
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise ArgumentError(
            f"--model must be module:factory, such as my_project.nets:make; got {target!r}"
        )
    shown = f"--model {target!r}"
    made = _found(module_name, attribute, shown)
    model = made if isinstance(made, nn.Module) else _called(made, shown, "factory")
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"--model {target!r} returned {model!r:.60}. It must return an nn.Module"
        )
    return model


def load_step(target: str) -> Callable[[], object]:
    """The step that `module:function` returns: a function that runs one training step."""
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise ArgumentError(
            f"{target!r} is neither a trace file nor module:function, such as "
            "my_project.train:make_step"
        )
    shown = repr(target)
    step = _called(_found(module_name, attribute, shown), shown, "function")
    if not callable(step):
        raise ArgumentError(
            f"{target!r} returned {step!r:.60}. It must return a function without "
            "arguments that runs one training step, forward and backward"
        )
    return cast("Callable[[], object]", step)


def reason(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}"


def place(error: Exception) -> str:
    """Where the user's code raised an error, in brackets; empty if none of it ran."""
    frame = _own_frame(error)
    if frame is None:
        return ""
    file = Path(frame.filename)
    here = Path.cwd()
    return (
        f" ({file.relative_to(here) if file.is_relative_to(here) else file}, line {frame.lineno})"
    )


def _own_frame(error: Exception) -> traceback.FrameSummary | None:
    """The innermost frame in this folder, or else the first that neither mimose nor imports ran."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((str(_MIMOSE), "<frozen", importlib.__file__))
    ]
    here = [frame for frame in frames if Path(frame.filename).is_relative_to(Path.cwd())]
    return here[-1] if here else next(iter(frames), None)


def _found(module_name: str, attribute: str, shown: str) -> Any:
    """The attribute of the user's module; its own errors are told with their place."""
    try:
        return _imported(module_name, attribute)
    except Exception as error:
        hint = place(error) or ". The module must be importable from this folder"
        hint = "" if isinstance(error, SyntaxError) else hint  # whose message has the place
        raise ArgumentError(f"{shown} failed: {reason(error)}{hint}") from None


def _called(made: Any, shown: str, name: str) -> Any:
    """What the user's function returns; its own errors are told with their place."""
    try:
        return made()
    except Exception as error:
        hint = place(error) or f". The {name} must take no arguments"
        raise ArgumentError(f"{shown} failed: {reason(error)}{hint}") from None


def _imported(module_name: str, attribute: str) -> Any:
    """An attribute of a module that can be imported from the current folder."""
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
        for name in attribute.split("."):
            found = getattr(found, name)
        return found
    finally:
        sys.path.remove(os.getcwd())


def load_config(name: str) -> nn.Module:
    """The model of a transformers configuration, on the meta device."""
    try:
        import transformers
    except ImportError:
        raise ArgumentError(f"--config needs transformers: {pip_command('hf')}") from None
    try:
        config = _config(name)
        make = _architecture(config, transformers) or transformers.AutoModel.from_config
        with torch.device("meta"):
            model: nn.Module = make(config)
    except Exception as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ArgumentError(
            f"--config {name!r} cannot be loaded: {first_line}. Give a folder with a "
            "config.json, or the name of a model on the hub"
        ) from None
    return model.train()


def lacks_head(model: nn.Module) -> bool:
    """Whether the model is not one of the architectures that its configuration names."""
    named = getattr(getattr(model, "config", None), "architectures", None) or ()
    return type(model).__name__ not in named


def _config(name: str) -> Any:
    """Load from a folder or the local cache, else from the hub."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, local_files_only=True)
    except OSError:
        if os.path.exists(name) or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise  # a path, not a name on the hub
        _refuse_unreachable_hub()  # transformers would retry for most of a minute
        return AutoConfig.from_pretrained(name)


def _refuse_unreachable_hub() -> None:
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_SECONDS)
    except Exception as error:
        raise ArgumentError(
            f"there is no such folder, it is not in the local cache, and {constants.ENDPOINT} "
            f"cannot be reached ({error})"
        ) from None


def _architecture(config: Any, transformers: Any) -> Any:
    """The model class, with its head, that the configuration names; None if it names none."""
    names = getattr(config, "architectures", None) or ()
    return next((found for name in names if (found := getattr(transformers, name, None))), None)
