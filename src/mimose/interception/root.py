"""Intercept calls of the model itself, to observe each batch and each output."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from mimose.interception.compiled import refuse_in_compiled_code
from mimose.interception.interceptor import Interceptor, under_transform


class RootOwner(Protocol):
    """Receives the training calls of the model."""

    def forward_begins(self, args: Any, kwargs: Any) -> None: ...
    def forward_returned(self, out: Any) -> None: ...
    def forward_failed(self) -> None: ...
    def detach(self) -> None: ...


class RootInterceptor(Interceptor):
    """Intercepts training calls of the model. mimose also works if no trainer calls the model."""

    __slots__ = ("owner",)

    def __init__(self, model: nn.Module, owner: RootOwner) -> None:
        super().__init__(model)
        self.owner = owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.module.training or not torch.is_grad_enabled():
            return self.plain(args, kwargs)
        if torch.compiler.is_compiling():
            if torch.compiler.is_exporting():
                return self.plain(args, kwargs)
            refuse_in_compiled_code()
        if under_transform():
            return self.plain(args, kwargs)
        self.owner.forward_begins(args, kwargs)
        try:
            out = self.plain(args, kwargs)
        except BaseException:
            self.owner.forward_failed()
            raise
        self.owner.forward_returned(out)
        return out
