"""Intercept the calls of a model's blocks, so that each runs as a director says."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mimose.costs import Option
from mimose.execution import (
    CacheUse,
    Guard,
    are_plain,
    holds_cache,
    may_take_cache,
    watch_backward,
)
from mimose.interception.blocks import Block
from mimose.interception.compiled import refuse_in_compiled_code
from mimose.interception.directive import KEEP, RECOMPUTE, Directive, Director
from mimose.interception.interceptor import under_transform
from mimose.interception.takeover import Takeover
from mimose.interception.trial import TriedInterceptor
from mimose.interception.tried import Tried


class BlockInterceptor(TriedInterceptor):
    """Intercepts the calls of one block and runs them as the director says."""

    __slots__ = ("caches", "director", "index", "stack")

    def __init__(
        self,
        block: Block,
        index: int,
        director: Director,
        tried: Tried | None = None,
        caches: CacheUse | None = None,
    ) -> None:
        super().__init__(block, Tried() if tried is None else tried)
        self.index = index
        self.stack = block.name.rpartition(".")[0]
        """The name of the list that the block is in."""
        self.director = director
        self.caches = caches if may_take_cache(block.module) else None
        """How the model uses caches; None if the block takes none."""

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
        if self.caches is not None and holds_cache(args, kwargs):
            args, kwargs, bound = self.caches.arguments_for(self.index, self.stack, args, kwargs)
        directive = self.director.direct(self.index, args, kwargs)
        if directive is KEEP:  # as most calls are, in most steps
            return self.plain(args, kwargs)
        out = self._run(directive, args, kwargs, may_fail=not bound)
        if directive.listener is not None and directive.listener.measures:
            watch_backward(directive.listener, directive.run, (args, kwargs), out)
        if directive.after is not None:
            directive.after((args, kwargs), out)
        return out

    def _run(self, directive: Directive, args: Any, kwargs: Any, *, may_fail: bool) -> Any:
        if self.trusted is False:
            return self.plain(args, kwargs)
        option, evictor = directive.option, directive.evictor
        call: Callable[..., Any] = self._through_forward
        fallback = evictor is not None or option is Option.KEEP
        if option is Option.SAVE_ON_HOST and directive.mover is not None:
            call, fallback = self._saving_on_host, directive.guarded
        elif option is Option.KEEP and directive.listener is None and evictor is None:
            if not directive.guarded:
                return self.plain(args, kwargs)
            call = self._plainly
        if fallback and may_fail and self._may_run_twice(args, kwargs):
            return self._again_if_it_fails(call, directive, args, kwargs)
        return call(directive, args, kwargs)

    def _saving_on_host(self, directive: Directive, args: Any, kwargs: Any) -> Any:
        assert directive.mover is not None
        return directive.mover.run_saving_on_host(self._plain_call, args, kwargs)

    def _plain_call(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(args, kwargs)

    def _plainly(self, _: Directive, args: Any, kwargs: Any) -> Any:
        return self.plain(args, kwargs)

    def _may_run_twice(self, args: Any, kwargs: Any) -> bool:
        """Whether a forward that fails leaves nothing behind, and other ranks take no part in it.

        They do where the block issues collectives, and where hooks such as FSDP2's run before it.
        """
        alone = not self.collective_ranks and not self.module._forward_pre_hooks
        clean = bool(self.trusted) and not self.side_effects
        return alone and clean and are_plain(args, kwargs)

    def _again_if_it_fails(
        self, call: Callable[..., Any], directive: Directive, args: Any, kwargs: Any
    ) -> Any:
        """If memory runs out, evict what can be, and run once more without keeping anything."""
        guard = Guard(self.changing, args, kwargs)
        try:
            return call(directive, args, kwargs)
        except Exception as error:
            if not guard.can_help(error):
                raise
            freed = directive.evictor is not None and directive.evictor.make_room()
            if not freed and directive.option.recomputes:
                raise  # it would fail in the same way again
            guard.rewind(error)
        self.director.ran_out(self.index)
        return self._through_forward(
            replace(directive, option=Option.RECOMPUTE, evictor=None), args, kwargs
        )

    def _through_forward(self, directive: Directive, args: Any, kwargs: Any) -> Any:
        """Run the block in a frame that holds its activations, or rebuilds them.

        The block's own forward hooks run once, outside of what is recomputed: only `forward` is,
        and it is exchanged for the length of this call.
        """
        if self.compiled is not None:
            return self.checkpointed(directive, self.compiled, args, kwargs)
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
            return self.checkpointed(directive, forward, args, kwargs)

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
        """Install interceptors again on blocks that were compiled, or had their call replaced.

        As a rule the first block tells for all; every block is checked now and then.
        """
        self._looks += 1
        if self._looks % 16 < 2 or not self.interceptors[0].installed:
            for interceptor in self.interceptors:
                if interceptor.module_if_alive is not None:  # else it was taken out of the model
                    interceptor.install()

    def detach(self) -> None:
        """The blocks are as before."""
        for interceptor in self.interceptors:
            interceptor.remove()
        self._at_the_end()
        self.takeover.undo()


def _let_go(interceptors: list[weakref.ref[BlockInterceptor]]) -> None:
    for ref in interceptors:
        interceptor = ref()
        if interceptor is not None:
            interceptor.let_go()


class _Everything:
    """The director that recomputes every block."""

    def direct(self, block: int, args: Any, kwargs: Any) -> Directive:
        return RECOMPUTE

    def ran_out(self, block: int) -> None:
        raise AssertionError("nothing is kept")


RECOMPUTE_EVERYTHING: Director = _Everything()
