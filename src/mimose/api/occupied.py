"""Blocks that another handle already controls: a block follows one budget only."""

from __future__ import annotations

import weakref
from typing import NoReturn

from torch import nn

from mimose.errors import ConflictError
from mimose.interception import Block, RootInterceptor
from mimose.training import Engine

attached_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
"""All attached engines. Searching the model is not enough: its blocks may lie inside the blocks of
a handle on a larger model."""


def interceptor_on(model: nn.Module) -> RootInterceptor | None:
    """The interceptor of the handle that is attached to this very model."""
    occupant = model.__dict__.get("_compiled_call_impl")
    return occupant if isinstance(occupant, RootInterceptor) else None


def engines_on_same_blocks(blocks: list[Block], former: RootInterceptor | None) -> list[Engine]:
    """Other engines on exactly these blocks; raise if an engine shares only some of them."""
    own, same = {id(block.module) for block in blocks}, []
    inside = {id(part): block.name for block in blocks for part in block.module.modules()}
    for engine in [e for e in attached_engines if former is None or e is not former.owner]:
        theirs = {id(block) for block in engine.blocks}
        if theirs == own:
            same.append(engine)
            continue
        within = {id(part) for block in engine.blocks for part in block.modules()}
        shared = {inside[key] for key in theirs & inside.keys()}
        shared |= {block.name for block in blocks if id(block.module) in within}
        if shared:
            _refuse_shared(sorted(shared), len(blocks), engine)
    return same


def _refuse_shared(shared: list[str], found: int, other: Engine) -> NoReturn:
    shown = ", ".join(shared[:3]) + (", …" if len(shared) > 3 else "")
    raise ConflictError(
        f"{len(shared)} of the {found} blocks found here ({shown}) already belong to another "
        f"handle, {other!r}: a block can follow only one budget. Attach once, to the whole model; "
        "or detach() the other handle first; or leave these blocks out with exclude="
    )
