"""Which backward is running, and whether it retains its graph."""

from __future__ import annotations

from collections.abc import Callable

import torch


def unknown_task() -> int:
    """Fallback for `task_id` where torch cannot identify the running backward."""
    return 0


keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the running backward retains its graph and the saved tensors (`retain_graph=True`)."""

task_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", unknown_task)
"""The id of the running backward; -1 outside a backward."""
