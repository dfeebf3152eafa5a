"""Find the blocks of a model and intercept their calls.

Also detects conflicts: compiled models, other checkpointing, blocks that cannot be recomputed.
Knows neither memory nor plans.
"""

from mimose.interception.attachment import RECOMPUTE_EVERYTHING, Attachment, BlockInterceptor
from mimose.interception.block_names import describe_blocks, name_pattern
from mimose.interception.blocks import Block, Selector, find_blocks
from mimose.interception.compiled import BypassDetector, refuse_compiled, refuse_lazy
from mimose.interception.directive import KEEP, RECOMPUTE, Directive, Director, Evictor, Mover
from mimose.interception.root import RootInterceptor, RootOwner
from mimose.interception.takeover import refuse_other_checkpointing
from mimose.interception.tried import Tried

__all__ = [
    "KEEP",
    "RECOMPUTE",
    "RECOMPUTE_EVERYTHING",
    "Attachment",
    "Block",
    "BlockInterceptor",
    "BypassDetector",
    "Directive",
    "Director",
    "Evictor",
    "Mover",
    "RootInterceptor",
    "RootOwner",
    "Selector",
    "Tried",
    "describe_blocks",
    "find_blocks",
    "name_pattern",
    "refuse_compiled",
    "refuse_lazy",
    "refuse_other_checkpointing",
]
