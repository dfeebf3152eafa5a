"""Sit on a model's blocks, so that each runs kept or recomputed, as a director says."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from mimose.execution import CacheUse, Guard, are_plain, may_take_cache, watch_backward
from mimose.interception.blocks import Block
from mimose.interception.compiled import refuse_in_compiled_code
from mimose.interception.interceptor import under_transform
from mimose.interception.takeover import Takeover
from mimose.interception.trial import Tried, TriedInterceptor


class Director(Protocol):
    """Decides how blocks run: asked at each training call of a block."""

    def recompute(self, interceptor: BlockInterceptor, args: Any, kwargs: Any) -> bool:
        """Whether this run of the block keeps nothing and recomputes."""

    def ran_out(self, interceptor: BlockInterceptor) -> None:
        """Memory ran out while the block, guarded, was to be kept: it is recomputed instead."""


class BlockInterceptor(TriedInterceptor):
    """Sits on one block and runs it as the director says."""

    __slots__ = ("after", "caches", "director", "guarded", "index", "stack")

    def __init__(
        self,
        block: Block,
        index: int,
        director: Director,
        tried: Tried | None = None,
        caches: CacheUse | None = None,
    ) -> None:
        super().__init__(block, index, Tried() if tried is None else tried)
        self.index = index
        self.stack = block.name.rpartition(".")[0]
        """The name of the list that the block is in."""
        self.director = director
        self.after: Callable[[Any, Any], None] | None = None
        """Called once, with the inputs and the output of the coming run."""
        self.caches = caches if may_take_cache(block.module) else None
        """What is known of the model's caches; None if the block is given none."""
        self.guarded = False
        """Whether the coming run, if it is kept, is near the limit; the director sets it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.module.training or not torch.is_grad_enabled():
            return self.plain(args, kwargs)
        if torch.compiler.is_compiling():
            if torch.compiler.is_exporting():
                return self.plain(args, kwargs)
            refuse_in_compiled_code()
        if under_transform():
            return self.plain(args, kwargs)
        if self.tried.waiting is not None:
            self.tried.waiting.settle()
        bound = False
        if self.caches is not None:
            args, kwargs, bound = self.caches.given(self.index, self.stack, args, kwargs)
        again = self.director.recompute(self, args, kwargs)
        if again and self.trusted is not False:
            out = self._recomputed(args, kwargs)
        elif self.guarded and not bound and self._may_run_twice(args, kwargs):
            out = self._kept_if_it_fits(args, kwargs)
        else:
            out = self.plain(args, kwargs)
        if self.listener is not None:
            watch_backward(self.listener, self.run, (args, kwargs), out)
        if self.after is not None:
            after, self.after = self.after, None
            after((args, kwargs), out)
        return out

    def let_go(self) -> None:
        super().let_go()
        self.after = None

    def _may_run_twice(self, args: Any, kwargs: Any) -> bool:
        """Whether a forward that fails leaves nothing behind, and nobody else takes part in it.

        Other ranks do, and hooks such as FSDP2's.
        """
        alone = not self.speaks_to and not self.module._forward_pre_hooks
        clean = bool(self.trusted) and not self.side_effects
        return alone and clean and are_plain(args, kwargs)

    def _kept_if_it_fits(self, args: Any, kwargs: Any) -> Any:
        guard = Guard(self.changing, args, kwargs)
        try:
            return self.plain(args, kwargs)
        except Exception as error:
            if not guard.can_help(error):
                raise
            guard.rewind(error)
        self.director.ran_out(self)
        return self._recomputed(args, kwargs)

    def _recomputed(self, args: Any, kwargs: Any) -> Any:
        if self.compiled is not None:
            return self.checkpointed(self.compiled, args, kwargs)
        # The block's own forward hooks run once, outside of what is recomputed: only `forward`
        # is, and it is exchanged for the length of this call.
        module = self.module
        place, forward = module.__dict__, module.forward
        former = place.get("forward")

        def restore() -> None:
            if former is None:
                place.pop("forward", None)
            else:
                place["forward"] = former

        def once(*args: Any, **kwargs: Any) -> Any:
            restore()
            return self.checkpointed(forward, args, kwargs)

        place["forward"] = once
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            restore()


class Attachment:
    """A model's blocks with an interceptor on each, until `detach`."""

    def __init__(self, model: nn.Module, blocks: list[Block], director: Director) -> None:
        self.takeover = Takeover(model, blocks)
        self.caches = CacheUse()
        shared = (Tried(), self.caches)
        self.interceptors = [
            BlockInterceptor(block, i, director, *shared) for i, block in enumerate(blocks)
        ]
        self.interceptors[-1].comes_last = True
        self._looks = 0
        # A handle that outlives its model holds none of the model's tensors.
        self._at_the_end = weakref.finalize(
            model, _let_go, list(map(weakref.ref, self.interceptors))
        )
        self._at_the_end.atexit = False
        self.intercept_again()

    def intercept_again(self) -> None:
        """Sit down again where a block was compiled, or otherwise replaced its call, since.

        One tells of all, as a rule; all are looked at now and then.
        """
        self._looks += 1
        if self._looks % 16 < 2 or not self.interceptors[0].taken:
            for interceptor in self.interceptors:
                if interceptor.module_if_alive is not None:  # else it was taken out of the model
                    interceptor.take()

    def detach(self) -> None:
        """The blocks are as before."""
        for interceptor in self.interceptors:
            interceptor.leave()
        self._at_the_end()
        self.takeover.undo()


def _let_go(interceptors: list[weakref.ref[BlockInterceptor]]) -> None:
    for ref in interceptors:
        interceptor = ref()
        if interceptor is not None:
            interceptor.let_go()


class _Everything:
    """The director that recomputes every block."""

    def recompute(self, interceptor: BlockInterceptor, args: Any, kwargs: Any) -> bool:
        return True

    def ran_out(self, interceptor: BlockInterceptor) -> None:
        raise AssertionError("nothing is kept")


RECOMPUTE_EVERYTHING: Director = _Everything()
