"""Intercept the calls of a model's blocks and run them as a director decides."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mimose.costs import Option
from mimose.execution import (
    BeforeForward,
    CacheUse,
    are_plain,
    holds_cache,
    may_take_cache,
    next_node,
    watch_backward,
    with_graph,
)
from mimose.interception.blocks import Block
from mimose.interception.cached_weights import KEPT_WHILE_CACHED, finds_cached_weights
from mimose.interception.compiled import refuse_in_compiled_code
from mimose.interception.directive import KEEP, RECOMPUTE, Directive, Director
from mimose.interception.interceptor import under_transform
from mimose.interception.takeover import Takeover
from mimose.interception.trial import TriedInterceptor, recomputed_instead
from mimose.interception.tried import Tried


class BlockInterceptor(TriedInterceptor):
    """Intercepts the calls of one block and runs them as the director decides."""

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
        """The name of the module that contains the block, usually a list."""
        self.director = director
        self.caches = caches if may_take_cache(block.module) else None
        """How the model uses caches; None if the block takes none."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        own_call: Callable[..., Any] = self.compiled or module._call_impl
        if not module.training or not torch.is_grad_enabled():
            return own_call(*args, **kwargs)
        if torch.compiler.is_compiling():
            if torch.compiler.is_exporting():
                return own_call(*args, **kwargs)
            refuse_in_compiled_code()
        if under_transform():
            return own_call(*args, **kwargs)
        if self.tried.running is not None:  # one run of a block has one plan
            self.tried.running.calls(module)
            return own_call(*args, **kwargs)
        if self.tried.waiting is not None:
            self.tried.waiting.settle()
        bound = False
        if self.caches is not None and holds_cache(args, kwargs):
            args, kwargs, bound = self.caches.arguments_for(self.index, self.stack, args, kwargs)
        directive = self.director.direct(self.index, args, kwargs)
        if directive is KEEP and not self.calls_blocks:  # the most frequent case
            return own_call(*args, **kwargs)
        listener = directive.listener
        measures = listener is not None and listener.measures
        source = with_graph((args, kwargs)) if measures else None
        out = self._run(directive, args, kwargs, may_fail=not bound)
        if listener is not None and measures:
            watch_backward(listener, directive.run, source, out)
        if directive.after is not None:
            directive.after((args, kwargs), out)
        return out

    def _run(self, directive: Directive, args: Any, kwargs: Any, *, may_fail: bool) -> Any:
        if self.trusted is False:
            return self.plain(args, kwargs)
        if finds_cached_weights(self.module):
            self.tried.tell_once(self, KEPT_WHILE_CACHED)
            return self.plain(args, kwargs)
        option = directive.option
        if option is Option.SAVE_ON_HOST and directive.mover is not None:
            return self._run_guarded(directive, args, kwargs, may_fail=may_fail)
        plainly = directive.plainly or (directive.listener is None and directive.evictor is None)
        if option is Option.KEEP and plainly:
            if directive.guarded and may_fail and self._may_run_twice(args, kwargs):
                return self._run_guarded(directive, args, kwargs, may_fail=True)
            # Only a frame can undo side effects, and run a forward again without its pre-hooks.
            if not (directive.plainly and may_fail and self.trusted) or self.collective_ranks:
                return self.plain(args, kwargs)
        return self._run_checkpointed(directive, args, kwargs, may_fail=may_fail)

    def _run_guarded(self, directive: Directive, args: Any, kwargs: Any, *, may_fail: bool) -> Any:
        """Run the block without a frame.

        Once more, recomputed, if it is guarded and memory runs out; and without saved-tensor hooks
        if it refuses them.
        """
        before = None
        if self._may_run_twice(args, kwargs):
            before = BeforeForward.of_call(self.changing, args, kwargs)
        run = self.plain
        if directive.option is not Option.KEEP and directive.mover is not None:
            run = functools.partial(directive.mover.run_saving_on_host, self._plain_call)
        fallback = directive if directive.guarded else None
        out, broken_off = self._attempt(
            run, args, kwargs, before, may_fail=may_fail, directive=fallback
        )
        if broken_off is None:
            return out
        args, kwargs = broken_off.args, broken_off.kwargs
        if not broken_off.out_of_memory:
            return self.plain(args, kwargs)
        self.memory_ran_out()
        return self._run_checkpointed(recomputed_instead(directive), args, kwargs, may_fail=False)

    def plain(self, args: Any, kwargs: Any) -> Any:
        """Call the block without mimose, and the blocks that it calls."""
        if not self.calls_blocks or self.trusted is False:
            return super().plain(args, kwargs)
        return self.tried.running_in(self, super().plain)(args, kwargs)

    def _plain_call(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(args, kwargs)

    def _may_run_twice(self, args: Any, kwargs: Any) -> bool:
        """Whether a failed forward can be run again.

        It must leave no side effects, and no other rank may take part in it. Other ranks take part
        if the block issues collectives or has forward pre-hooks such as FSDP2's.
        """
        clean = bool(self.trusted) and not self.side_effects
        return self.runs_alone and clean and are_plain(args, kwargs)

    @property
    def runs_alone(self) -> bool:
        """Whether no other rank takes part in a forward of the block, as far as is known."""
        return not self.collective_ranks and not self.module._forward_pre_hooks

    @property
    def forward(self) -> Callable[..., Any]:
        """Runs the block's forward, with blocks that it calls as a part of it, and without its own
        hooks unless they are compiled into it."""
        return self.tried.running_in(self, self.compiled or self.module.forward)

    @property
    def copies_caches(self) -> bool:
        return self.caches is not None

    def memory_ran_out(self) -> None:
        self.director.ran_out(self.index)

    def _run_checkpointed(
        self, directive: Directive, args: Any, kwargs: Any, *, may_fail: bool
    ) -> Any:
        """Run the block in a frame that keeps its activations or rebuilds them.

        Only the block's `forward` is recomputed, so it is replaced during this call. The block's
        own forward hooks lie outside the recompute and run once.
        """
        if self.compiled is not None:
            compiled = self.tried.running_in(self, self.compiled)
            return self.checkpointed(directive, compiled, args, kwargs, may_fail=may_fail)
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
            return self.checkpointed(
                directive, self.tried.running_in(self, forward), args, kwargs, may_fail=may_fail
            )

        place["forward"] = once
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            restore()


class Attachment:
    """Installs an interceptor on each block of a model, until `detach`."""

    def __init__(self, model: nn.Module, blocks: list[Block], director: Director) -> None:
        self.takeover = Takeover(model, blocks)
        self.caches = CacheUse()
        self.tried = Tried()
        shared = (self.tried, self.caches)
        self.interceptors = [
            BlockInterceptor(block, i, director, *shared) for i, block in enumerate(blocks)
        ]
        self.interceptors[-1].comes_last = True
        self._checks = 0
        # A handle that outlives its model must not hold the model's tensors.
        self._finalizer = weakref.finalize(
            model, _release_all, list(map(weakref.ref, self.interceptors))
        )
        self._finalizer.atexit = False
        self.intercept_again()

    def forward_begins(self) -> None:
        """The model was called: install missing interceptors, and note where its graph begins."""
        self.intercept_again()
        self.tried.first_node = next_node()
        for detector in self.tried.with_large:
            detector.note_earlier()

    def intercept_again(self) -> None:
        """Install interceptors again on blocks that were compiled, or whose call was replaced.

        Such a change usually affects the first block too, so only that one is checked each time.
        The others are checked if it has changed, and in two of every 16 calls.
        """
        self._checks += 1
        if self._checks % 16 < 2 or not self.interceptors[0].installed:
            for interceptor in self.interceptors:
                if interceptor.module_if_alive is not None:  # None: removed from the model
                    interceptor.install()

    def detach(self) -> None:
        """Restore the blocks, and the checkpointing of the model itself."""
        for interceptor in self.interceptors:
            interceptor.remove()
        self._finalizer()
        self.takeover.undo()


def _release_all(interceptors: list[weakref.ref[BlockInterceptor]]) -> None:
    for ref in interceptors:
        interceptor = ref()
        if interceptor is not None:
            interceptor.let_go()


class _RecomputeEverything:
    """The director that recomputes every block."""

    def direct(self, block: int, args: Any, kwargs: Any) -> Directive:
        return RECOMPUTE

    def ran_out(self, block: int) -> None:
        raise AssertionError("nothing is kept")


RECOMPUTE_EVERYTHING: Director = _RecomputeEverything()
