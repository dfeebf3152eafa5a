"""Which backward is running, and whether its graph stays."""

from __future__ import annotations

from collections.abc import Callable

import torch


def unknown_task() -> int:
    """Stands in where torch cannot tell which backward is running."""
    return 0


def unknown_graph() -> bool:
    """Stands in where torch cannot tell whether a graph outlives the running backward."""
    return False


keeps_graph: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", unknown_graph
)
"""Whether the graph, with all that it has saved, outlives the running backward."""

task_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", unknown_task)
"""Which backward is running; -1 if none is."""
