"""Recognise other libraries that offload activations, and name the setting that turns it off.

mimose cannot move, keep or recompute a tensor that another library has moved.
"""

from __future__ import annotations

from torch import nn

from mimose.errors import ConflictError

_BY_HOOKS = {
    "trl.": "TRL's activation offloading: set activation_offloading=False in its config",
    "torchtune.": "torchtune's activation offloading: set enable_activation_offloading=False",
    "torch.autograd.graph.save_on_cpu": "torch's save_on_cpu: take the model out of its block",
    "unsloth": "Unsloth's offloaded checkpointing: set use_gradient_checkpointing=False",
    "axolotl.": "axolotl's activation offloading: set activation_offloading: false",
}
"""What to switch off, by the prefix of the qualified name of the saved-tensor hooks."""

_TRANSFORMERS = "gradient_checkpointing_enable.<locals>.checkpoint_func"


def name_of_hooks(hooks: str) -> str:
    """The owner of saved-tensor hooks with this qualified name, and how to switch them off."""
    for prefix, remedy in _BY_HOOKS.items():
        if hooks.startswith(prefix):
            return remedy
    return f"{hooks}: switch it off"


def refuse_offloaded_checkpointing(name: str, module: nn.Module) -> None:
    """Raise if transformers' own checkpointing of this module moves inputs to the host."""
    if not getattr(module, "gradient_checkpointing", False):
        return
    function = getattr(module, "_gradient_checkpointing_func", None)
    function = getattr(function, "func", function)
    if getattr(function, "__qualname__", "").endswith(_TRANSFORMERS):
        raise ConflictError(
            f"transformers' gradient checkpointing of {name or 'the model'!r} moves activations to "
            "the host (offload=True), for every layer of every batch. mimose decides that itself: "
            "call model.gradient_checkpointing_disable(), or leave offload out, and set "
            "host_memory= if 'auto' is not what you want"
        )
