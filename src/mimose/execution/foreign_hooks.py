"""Which saved-tensor hooks of others would see a tensor that is saved now."""

from __future__ import annotations

from mimose.execution.autograd import top_hooks
from mimose.execution.recompute import Frame


def foreign_hooks() -> str:
    """The other hooks that would see a tensor saved now; empty if none, or if a block's own."""
    hooks = top_hooks()
    if hooks is None:
        return ""
    if hooks[0].__module__.startswith("mimose."):
        frame = getattr(hooks[1], "__self__", None)
        by_hand = isinstance(frame, Frame) and not frame.name
        return "mimose.checkpoint" if by_hand else ""
    return f"{hooks[0].__module__}.{hooks[0].__qualname__}"
