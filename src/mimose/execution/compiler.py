"""Keep the compiler away from what autograd calls for each tensor that a block saves."""

from __future__ import annotations

from mimose.execution.autograd import Listener
from mimose.execution.dry_run import DryRunRecorder
from mimose.execution.frame_observer import FrameObserver
from mimose.execution.recompute import Frame
from mimose.execution.saved_kinds import SavedKinds
from mimose.tensors import is_parameter, local_tensor, shape_of, storage_of, version_of


def hide_from_compiler() -> None:
    """Keep the compiler away from what autograd calls for each tensor that a block saves.

    Where a compiled block breaks into several graphs, it would otherwise compile these as well, and
    again for each new shape.
    """
    from torch._dynamo.eval_frame import skip_code  # slow to import; loaded where one compiles

    plain, keeping = Frame(_nothing, (), {}), Frame(_nothing, (), {}, keeping=True)
    observed = Frame(_nothing, (), {}, listener=Listener())
    recomputed = plain.recomputed
    repacker = recomputed.packer(plain.saved, "", complete=True, early_stop=True, check=True)
    packers = (plain._packer(), observed._packer(), repacker)
    keepers = (keeping._keeper([]), observed._keeper([]))
    own = (recomputed.looker_up(""), shape_of, storage_of, local_tensor, version_of, is_parameter)
    methods = (
        FrameObserver.saves,
        SavedKinds.compare,
        DryRunRecorder.pack,
        DryRunRecorder.unpack,
    )
    for function in (*packers, *keepers, *own, *methods):
        skip_code(function.__code__)


def _nothing() -> None:
    return None
