"""What the operators of a traced forward leave in memory, by class: the paper's Figs. 8 and 9.

Memory that is still in use at the end of a forward is what the backward needs. An estimator that
predicts it from the input's size works because each class of operators grows in a simple way.
"""

from __future__ import annotations

from collections.abc import Mapping

from mimose.comparison.trace import Trace

_OPERATORS = {
    "attention": "scaled_dot_product _scaled_dot_product _flash_attention _efficient_attention",
    "softmax": "softmax _softmax _log_softmax",
    "normalisation": "native_layer_norm native_batch_norm _native_batch_norm cudnn_batch_norm "
    "native_group_norm _fused_rms_norm rsqrt",
    "convolution": "convolution _convolution cudnn_convolution max_pool2d _adaptive_avg_pool2d",
    "matrix product": "mm bmm addmm baddbmm linear _addmm_activation",
    "activation": "gelu relu silu tanh sigmoid",
    "dropout": "native_dropout _fused_dropout bernoulli",
    "embedding": "embedding index index_select gather",
    "elementwise": "add sub mul div pow neg exp clamp where masked_fill rsub eq ne lt le gt ge",
    "copy": "clone copy _to_copy cat stack constant_pad_nd roll repeat upsample empty zeros ones "
    "full arange new_zeros new_empty",
}
"""Operators of each class by how their names begin."""

CLASSES: Mapping[str, tuple[str, ...]] = {
    kind: tuple(names.split()) for kind, names in _OPERATORS.items()
}


def class_of(operator: str) -> str:
    """The class of an operator by its name in a trace.

    >>> [class_of(f"aten.{name}.default") for name in ("addmm", "relu_", "topk")]
    ['matrix product', 'activation', 'other']
    """
    name = operator.split(".")[1] if "." in operator else operator
    for kind, names in CLASSES.items():
        if any(name.rstrip("_") == known or name.startswith(f"{known}_") for known in names):
            return kind
    return "other"


def kept_by_class(forward: Trace) -> dict[str, int]:
    """Bytes that the operators of a forward made and that are in use at its end, by class.

    The trace is one of a forward whose output was kept alive. A storage counts for the operator
    that made it, also if only a view of it is left.
    """
    storages: dict[int, int] = {}
    """The tensor that each tensor shares its storage with."""
    made: dict[int, tuple[str, int]] = {}
    for call in forward.calls:
        for output in call.outputs:
            if output.alias_of is None:
                storages[output.tensor] = output.tensor
                made[output.tensor] = class_of(call.name), output.size_bytes
            else:
                storages[output.tensor] = storages.get(output.alias_of, output.alias_of)
    kept: dict[str, int] = {}
    for storage in {storages[tensor] for tensor in forward.survivors} & made.keys():
        kind, size_bytes = made[storage]
        kept[kind] = kept.get(kind, 0) + size_bytes
    return dict(sorted(kept.items(), key=lambda item: -item[1]))
