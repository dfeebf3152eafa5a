"""Find the blocks of a model: the modules that may be recomputed as a whole.

The search uses the model's structure, not the names of model classes. Blocks are the children of
lists (`ModuleList`, `Sequential`) of repeated parts, at any depth: encoder layers, the bottlenecks
of each stage, both stacks of an encoder-decoder. Modules of the same kind outside these lists are
blocks too, like the first and the middle part of a UNet. Blocks are returned in order of
registration, which is the order of execution in almost every model.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from mimose.errors import BlocksError

Selector = str | type[nn.Module] | nn.Module | Callable[[str, nn.Module], bool]
"""A name or glob (`encoder.layer.*`), a class, a module, or a predicate of name and module."""


_Test = Callable[[nn.Module], bool]


@dataclass(frozen=True, slots=True)
class Block:
    """A module that may be recomputed as a whole, with its name in the model."""

    name: str
    module: nn.Module


def find_blocks(
    model: nn.Module,
    *,
    blocks: Selector | Iterable[Selector] | None = None,
    exclude: Selector | Iterable[Selector] | None = None,
) -> list[Block]:
    """The blocks of `model`, found by its structure or selected by `blocks`, without `exclude`.

    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), num_layers=3)
    >>> [block.name for block in find_blocks(encoder, exclude="*.0")]
    ['layers.1', 'layers.2']
    """
    if blocks is None:
        found = _by_structure(model)
        if not found:
            raise BlocksError(_nothing_found(model))
    else:
        found = _select(model, blocks, "blocks")
        if not found:
            raise BlocksError("blocks=[] selects no block: name some, or omit blocks=")
        _refuse_nesting(found)
        _refuse_whole_model(found, blocks)
        _refuse_lists(found)
    return found if exclude is None else _without(found, model, exclude)


def _without(
    found: list[Block], model: nn.Module, exclude: Selector | Iterable[Selector]
) -> list[Block]:
    """The blocks that `exclude` matches neither directly nor by a module that contains them."""
    selected = _select(model, exclude, "exclude")
    excluded = {id(inner) for outer in selected for inner in outer.module.modules()}
    left = [block for block in found if id(block.module) not in excluded]
    if not left:
        raise BlocksError(f"exclude={exclude!r} excludes every block: exclude fewer modules")
    if len(left) == len(found):
        raise BlocksError(
            f"exclude={exclude!r} matches {_listed(selected)}, but no block and no module that "
            f"contains one. The blocks are {_listed(found)}"
        )
    return left


def _listed(blocks: list[Block]) -> str:
    names = [repr(block.name) for block in blocks[:3]]
    return ", ".join(names) + (f" and {len(blocks) - 3} more" if len(blocks) > 3 else "")


def _nothing_found(model: nn.Module) -> str:
    """What mimose looks for, and a selection: of this model if it has a list of single layers."""
    lists = (n for n, m in model.named_modules() if n and _is_list(m) and len(_layers(m)) > 1)
    return (
        f"no blocks found in {type(model).__name__}: mimose looks for a ModuleList or Sequential "
        "of repeated modules that have submodules, or a Sequential with at least two layers that "
        f'have parameters. Name the modules to plan for: blocks="{next(lists, "encoder.layer")}.*" '
        "or blocks=MyLayer"
    )


def _by_structure(model: nn.Module) -> list[Block]:
    for is_stack in (_has_repeated_parts, _has_one_part, _has_different_layers):
        found = list(_blocks_below("", model, is_stack))
        if found:
            if is_stack is _has_different_layers and len(_sequentials(model)) > 1:
                return _sequentials(model)  # recomputing single layers frees almost nothing
            kinds = {type(block.module) for block in found}
            found = _without_repeats(_blocks_below("", model, _or_with_part_of(is_stack, kinds)))
            single = is_stack is _has_different_layers
            return found if single else _with_same_kind_outside_lists(model, found)
    return []


def _with_same_kind_outside_lists(model: nn.Module, found: list[Block]) -> list[Block]:
    """Add modules outside lists of the same kind as blocks: a UNet's first and middle part."""
    counts = Counter(_kind(block.module) for block in found)
    kinds = {kind for kind, count in counts.items() if count > 1}
    names = {id(block.module): block.name for block in found}
    inside = {id(module) for block in found for module in block.module.modules()}
    for name, module in model.named_modules():
        if id(module) not in inside and _kind(module) in kinds:
            parts = [part for part in module.modules() if part is not module]
            if not any(id(part) in names or _kind(part) in kinds for part in parts):
                names[id(module)] = name
    return [Block(names[id(m)], m) for m in model.modules() if id(m) in names]


def _kind(module: nn.Module) -> tuple[type, ...]:
    """The class; for a Sequential also the classes of its children."""
    if isinstance(module, nn.Sequential):
        return (type(module), *map(type, module.children()))
    return (type(module),)


def _sequentials(model: nn.Module) -> list[Block]:
    """The Sequentials with several layers, each as one block."""
    modules = ((name, m) for name, m in model.named_modules() if name)
    return _without_repeats(Block(n, m) for n, m in modules if _has_different_layers(m))


def _or_with_part_of(is_stack: _Test, kinds: set[type]) -> _Test:
    """Also accept a list with a part of one of these classes, e.g. a stage with one bottleneck."""

    def test(module: nn.Module) -> bool:
        return is_stack(module) or (
            _is_list(module) and any(type(part) in kinds for _, part in _parts(module))
        )

    return test


def _blocks_below(name: str, module: nn.Module, is_stack: _Test) -> Iterator[Block]:
    if is_stack(module):
        if not _holds_stages(module):
            for child_name, child in _parts(module) or _layers(module):
                yield Block(f"{name}{child_name}", child)
            return
        is_stack = _has_large_parts
    for child_name, child in module.named_children():
        yield from _blocks_below(f"{name}{child_name}.", child, is_stack)


def _parts(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children that have parameters and submodules."""
    return [(n, c) for n, c in _layers(module) if next(c.children(), None) is not None]


def _layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children that have parameters."""
    return [(n, c) for n, c in module.named_children() if next(c.parameters(), None) is not None]


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def _has_repeated_parts(module: nn.Module) -> bool:
    if not _is_list(module):
        return False
    parts = [part for _, part in _parts(module)]
    classes = Counter(map(type, parts))
    return any(count > 1 for count in classes.values()) or _have_similar_calls(module, parts)


def _have_similar_calls(module: nn.Module, parts: list[nn.Module]) -> bool:
    """Whether parts of different classes are large and look as if called in one loop.

    For example a layer with linear and one with full attention: they share the first argument and
    at least half of all arguments.
    """
    if not isinstance(module, nn.ModuleList) or len(parts) < 2 or any(map(_is_list, parts)):
        return False
    calls = [tuple(inspect.signature(part.forward).parameters) for part in parts]
    common, all_names = set(calls[0]).intersection(*calls), set().union(*calls)
    alike = len({call[:1] for call in calls}) == 1 and 2 * len(common) >= len(all_names) > 0
    return alike and all(_count_layers(part) >= 4 for part in parts)


def _has_one_part(module: nn.Module) -> bool:
    return _is_list(module) and len(list(module.children())) == 1 and bool(_parts(module))


def _has_different_layers(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and len(_layers(module)) > 1


def _has_large_parts(module: nn.Module) -> bool:
    """Whether this is a list with parts larger than, for example, a convolution and its norm."""
    return _is_list(module) and any(_count_layers(part) >= 4 for _, part in _parts(module))


def _count_layers(module: nn.Module) -> int:
    """The number of layers, including frozen BatchNorms, which have only buffers."""
    return sum(bool(m._parameters or m._buffers) for m in module.modules())


def _holds_stages(module: nn.Module) -> bool:
    """Whether the children contain the blocks, rather than being the blocks.

    Every stage of a Swin or a ResNet contains a list of large parts, and no two stages have the
    same shapes. Layers may contain such lists too (experts), but several layers have one shape.
    """
    children = [child for _, child in _parts(module)]
    if children and all(isinstance(child, nn.ModuleList) for child in children):
        return True  # a ModuleList cannot be called
    if not all(any(_is_stage_list(m) for m in child.modules()) for child in children):
        return False
    return len({_shapes(child) for child in children}) == len(children) > 0


def _is_stage_list(module: nn.Module) -> bool:
    """Whether this is a list of large parts of one class, unlike a layer's attention and MLP."""
    kinds = Counter(type(part) for _, part in _parts(module)) if _is_list(module) else Counter()
    alike = kinds.total() == 1 or any(count > 1 for count in kinds.values())
    return alike and _has_large_parts(module)


def _shapes(module: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(p.shape)) for name, p in module.named_parameters())


def _without_repeats(found: Iterable[Block]) -> list[Block]:
    """Each module once, even if it is registered twice."""
    first: dict[int, Block] = {}
    for block in found:
        first.setdefault(id(block.module), block)
    return list(first.values())


def _select(
    model: nn.Module, selectors: Selector | Iterable[Selector], argument: str
) -> list[Block]:
    if isinstance(selectors, (str, nn.Module)) or not isinstance(selectors, Iterable):
        selectors = [selectors]
    chosen: set[int] = set()
    modules = list(model.named_modules())
    for selector in selectors:
        if not (
            isinstance(selector, (str, nn.Module)) or callable(selector)
        ):  # classes are callable too
            raise BlocksError(
                f"{argument}={selector!r} is not a selector: give a name or glob, a class, a "
                "module, a function of name and module, or several of these"
            )
        if not isinstance(selector, (str, nn.Module, type)):
            _refuse_signature(selector, argument)
        if selector == "":
            raise BlocksError(
                f"{argument}='' is empty: give a module's name or a glob, such as 'encoder.layer.*'"
            )
        hits = [id(module) for name, module in modules if _matches(selector, name, module)]
        if isinstance(selector, str):
            hits = _outermost(hits, modules)
        if not hits:
            raise BlocksError(_no_match(selector, argument, [name for name, _ in modules]))
        chosen.update(hits)
    return [Block(name, module) for name, module in modules if id(module) in chosen]


def _refuse_signature(predicate: Callable[..., bool], argument: str) -> None:
    try:
        inspect.signature(predicate).bind("", nn.Module())
    except TypeError:
        raise BlocksError(
            f"{argument}= is a function that does not accept (name, module): write "
            f"{argument}=lambda name, module: …"
        ) from None
    except ValueError:  # a callable without a signature
        return


def _outermost(hits: list[int], modules: list[tuple[str, nn.Module]]) -> list[int]:
    """The matches of a glob that lie in no other match. Needed since `*` also matches dots."""
    chosen = set(hits)
    inside = {
        id(inner)
        for _, module in modules
        if id(module) in chosen
        for inner in module.modules()
        if inner is not module
    }
    return [hit for hit in hits if hit not in inside]


def _matches(selector: Selector, name: str, module: nn.Module) -> bool:
    if isinstance(selector, str):
        return name == selector or fnmatchcase(name, selector)
    if isinstance(selector, nn.Module):
        return module is selector
    if isinstance(selector, type):
        return isinstance(module, selector)
    return bool(selector(name, module))


def _no_match(selector: Selector, argument: str, names: list[str]) -> str:
    """A glob stands for the members of a list, so that the names of a deep model are few."""
    shown = selector if isinstance(selector, str) else getattr(selector, "__name__", repr(selector))
    globs = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names if name))
    close = get_close_matches(selector, globs, 1) if isinstance(selector, str) else []
    listed = ", ".join(globs[:12]) + (f" and {len(globs) - 12} more" if globs[12:] else "")
    return f"{argument}={shown!r} matches no module of the model: " + (
        f"did you mean {close[0]!r}? Its modules are {listed}"
        if close
        else f"its modules are {listed}"
    )


def _refuse_lists(blocks: list[Block]) -> None:
    for block in blocks:
        if isinstance(block.module, (nn.ModuleList, nn.ModuleDict)):
            raise BlocksError(
                f"block {block.name!r} is a {type(block.module).__name__}, which is never called: "
                f'select its children, blocks="{block.name}.*"'
            )


def _refuse_whole_model(found: list[Block], blocks: Selector | Iterable[Selector]) -> None:
    if any(block.name == "" for block in found):
        raise BlocksError(
            f"blocks={blocks!r:.60} selects the whole model: name the modules that repeat, such as "
            "'layers.*'"
        )


def _refuse_nesting(blocks: list[Block]) -> None:
    for outer in blocks:
        inside = {id(module) for module in outer.module.modules()} - {id(outer.module)}
        for inner in blocks:
            if id(inner.module) in inside:
                raise BlocksError(
                    f"block {inner.name!r} lies inside block {outer.name or 'the model'!r}: "
                    "blocks must not be nested; select one of the two (exclude= the other)"
                )
