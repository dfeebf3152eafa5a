"""Which modules of a model are blocks, and how their calls are intercepted.

Also what stands in the way: compiled models, other checkpointing, blocks that cannot be recomputed.
Knows neither memory nor plans.
"""

from mimose.interception.attachment import RECOMPUTE_EVERYTHING, Attachment, BlockInterceptor
from mimose.interception.block_names import described, pattern_of
from mimose.interception.blocks import Block, Selector, find_blocks
from mimose.interception.compiled import Tripwire, refuse_compiled, refuse_lazy
from mimose.interception.root import RootInterceptor
from mimose.interception.takeover import refuse_foreign
from mimose.interception.trial import Trials

__all__ = [
    "RECOMPUTE_EVERYTHING",
    "Attachment",
    "Block",
    "BlockInterceptor",
    "RootInterceptor",
    "Selector",
    "Trials",
    "Tripwire",
    "described",
    "find_blocks",
    "pattern_of",
    "refuse_compiled",
    "refuse_foreign",
    "refuse_lazy",
]
