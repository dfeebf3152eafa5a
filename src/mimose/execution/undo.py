"""Undo a forward that broke off because of saved-tensor hooks, so that it can run without them.

`torch.func.grad`, `torch.func.vjp` and `torch.autograd.graph.disable_saved_tensors_hooks` raise an
error under such hooks. It can come after the forward has drawn random numbers or changed buffers
and attributes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import disable_saved_tensors_hooks

from mimose.execution.attributes import MODULE_INTERNALS, copy_value, equals_copy
from mimose.execution.buffers import BufferSnapshot
from mimose.execution.temporary_values import ABSENT, put
from mimose.tensors import storage_of, storages_in

_PLAIN = (bool, int, float, str, type(None))


def refuses_hooks(error: BaseException) -> bool:
    """Whether an error comes from code that does not run under saved-tensor hooks."""
    if not isinstance(error, RuntimeError):
        return False
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    name = "" if innermost is None else innermost.tb_frame.f_code.co_name
    return name == disable_saved_tensors_hooks.__name__ or "saved tensor hooks" in str(error)


def put_back_buffers(before: BufferSnapshot, args: Any, kwargs: Any) -> None:
    """Restore the buffers that were changed; in place, unless this would overwrite an argument."""
    given, changed = storages_in((args, kwargs)), set(before.changed())
    for module, name, value in before.values:
        if (module, name) not in changed:
            continue
        now = module._buffers.get(name)
        storage = None if now is None else storage_of(now)
        if storage is not None and storage._cdata in given:
            put(module._buffers, name, value)
        else:
            BufferSnapshot.of([(module, name, value)]).restore()


def put_back_attributes(holder: Any, before: dict[str, tuple[Any, Any]]) -> None:
    """Restore all attributes of a module or object: `before` has each value and a copy of it."""
    for name in {*before, *vars(holder)} - MODULE_INTERNALS:
        value, copy = before.get(name, (ABSENT, ABSENT))
        put(vars(holder), name, value if refill(value, copy) else copy)


def put_back_plain_values(values: Iterable[tuple[Any, str, Any]]) -> bool:
    """Restore numbers and texts in attributes: holder, name and former value of each.

    Returns False if an attribute with a value of another type has changed.
    """
    for holder, name, value in values:
        if equals_copy(vars(holder).get(name, ABSENT), value):
            continue
        if value is not ABSENT and not isinstance(value, _PLAIN):
            return False
        put(vars(holder), name, value)
    return True


def refill(now: Any, copy: Any) -> bool:
    """Give an object the contents of its former copy; whether that is possible in place."""
    if type(now) is not type(copy) and not isinstance(now, torch.Tensor):
        return False
    if equals_copy(now, copy):
        return True
    if isinstance(now, (torch.Tensor, np.ndarray)):
        if now.shape != copy.shape or getattr(now, "requires_grad", False):
            return False
        with torch.no_grad():
            now[...] = copy
        return True
    contents = copy_value(copy)
    if isinstance(now, list):
        now[:] = contents
    elif isinstance(now, (dict, set)):
        now.clear()
        now.update(contents)
    elif isinstance(now, deque):
        now.clear()
        now.extend(contents)
    else:
        return False
    return True
