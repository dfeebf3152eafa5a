"""Sit on the model itself: see the batch come in and the outputs leave."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from mimose.interception.compiled import refuse_in_compiled_code
from mimose.interception.interceptor import Interceptor, under_transform


class Owner(Protocol):
    """What is told of the model's own calls in training."""

    def forward_begins(self, args: Any, kwargs: Any) -> None: ...
    def forward_returned(self, out: Any) -> None: ...
    def forward_failed(self) -> None: ...
    def detach(self) -> None: ...


class RootInterceptor(Interceptor):
    """Intercepts the calls of the model itself. Trainers that never call it are served all the
    same."""

    __slots__ = ("owner",)

    def __init__(self, model: nn.Module, owner: Owner) -> None:
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
