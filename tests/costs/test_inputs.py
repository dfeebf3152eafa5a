"""The input size is read from the shapes of all tensors among the arguments."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chains import steady
from mimose.costs.input_size import InputSize
from mimose.errors import ArgumentError
from mimose.tensors.batch_size import argument_names, custom_input_size, input_size


def tensor(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def size(*dims: int, name: str = "0") -> InputSize:
    return InputSize(((name, len(dims)),), dims)


pairs = st.integers(1, 4).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 20), min_size=n, max_size=n).map(tuple)] * 2)
)


def test_size_of_positional_and_keyword_tensors() -> None:
    found = input_size((tensor(8, 128),), {"mask": tensor(8, 1, 128, 128)})
    assert found == InputSize((("0", 2), ("mask", 4)), (8, 128, 8, 1, 128, 128))


def test_size_of_nested_tensors() -> None:
    found = input_size(
        ([tensor(8, 3), (tensor(8),)],), {"batch": {"ids": tensor(8, 5), "more": [tensor(2)]}}
    )
    assert found == InputSize(
        (("0.0", 2), ("0.1.0", 1), ("batch.ids", 2), ("batch.more.0", 1)), (8, 3, 8, 8, 5, 2)
    )


def test_values_other_than_tensors_have_no_size() -> None:
    found = input_size((tensor(8, 3), None, 7, "text"), {"flag": True, "scale": 0.5})
    assert found == size(8, 3)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {"ids": tensor(8, 3)}), ((tensor(8, 3, 1),), {}), ((None, tensor(8, 3)), {})],
    ids=["by keyword", "more dimensions", "another place"],
)
def test_layout_distinguishes_calls_with_other_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert input_size(args, kwargs).layout != input_size((tensor(8, 3),), {}).layout


def test_layout_does_not_depend_on_the_dimensions() -> None:
    a, b = (input_size((tensor(*shape),), {"mask": tensor(*shape)}) for shape in ((8, 3), (4, 5)))
    assert a.layout == b.layout
    assert a != b


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, [None]), {"a": {"b": "c"}})])
def test_forward_without_tensors_raises_an_error_with_the_remedy(args: Any, kwargs: Any) -> None:
    with pytest.raises(ArgumentError, match=r"no tensors.*input_size=lambda"):
        input_size(args, kwargs)
    assert input_size(args, kwargs, may_be_empty=True) == InputSize((), ())


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_passes_without_tensors_count_among_several(empty: int) -> None:
    passes = [size(8, 3), size(8, 4), size(8, 5)]
    passes[empty] = InputSize((), ())
    whole = passes[0].followed_by(passes[1]).followed_by(passes[2])
    assert list(whole.passes) == passes
    assert whole.with_pass(empty, InputSize((), ())) == whole
    assert whole.with_pass(empty, size(8, 3)) is None


# Text


def test_text_of_no_tensors_says_so() -> None:
    assert str(InputSize((), ())) == "without tensors"


def test_text_shows_each_shape_once() -> None:
    found = input_size((tensor(32, 128), tensor(32, 128), tensor(32, 64)), {})
    assert str(found) == "32×128, 32×64"


def test_text_omits_vectors_if_there_are_matrices() -> None:
    assert str(input_size((tensor(32, 128), tensor(32)), {})) == "32×128"


def test_text_of_vectors_alone_shows_their_dimensions() -> None:
    assert str(size(32)) == "32"


def test_text_shows_three_shapes_at_most() -> None:
    found = input_size(tuple(tensor(8, n) for n in range(5)), {})
    assert str(found) == "8×0, 8×1, 8×2"


# Order


def test_size_is_below_another_if_no_dimension_is_larger() -> None:
    assert size(8, 128) <= size(8, 128)
    assert size(4, 128) <= size(8, 130)
    assert not size(4, 131) <= size(8, 130)


def test_sizes_of_different_layouts_cannot_be_compared() -> None:
    assert not size(1, 1) <= size(8, 8, name="ids")
    assert not size(1) <= size(8, 8)


@steady
@given(pairs)
def test_joined_is_the_smallest_size_that_covers_both(both: tuple[Any, Any]) -> None:
    a, b = size(*both[0]), size(*both[1])
    joined = a.joined(b)
    assert a <= joined
    assert b <= joined
    assert all(d in either for d, either in zip(joined.dims, zip(*both, strict=True), strict=True))


# A user's own input_size=


@pytest.mark.parametrize(
    ("measure", "numbers"), [(7, (7,)), (0, (0,)), ((8, 128), (8, 128)), ([3], (3,))]
)
def test_custom_input_size_is_one_number_or_several(measure: Any, numbers: Any) -> None:
    found = custom_input_size(lambda: measure, (), {})
    assert found == InputSize((("input_size", len(numbers)),), numbers)


def test_custom_input_size_gets_the_arguments_of_the_forward() -> None:
    found = custom_input_size(
        lambda ids, *, mask: (*ids.shape, len(mask)), (tensor(8, 3),), {"mask": "ab"}
    )
    assert found.dims == (8, 3, 2)


@pytest.mark.parametrize("measure", [(), (8, -1), -1, (8, 1.5), 1.5, None, "8", (8, None)])
def test_custom_input_size_must_be_whole_numbers(measure: Any) -> None:
    with pytest.raises(ArgumentError) as error:
        custom_input_size(lambda: measure, (), {})
    assert f"input_size= returned {measure!r}" in str(error.value)
    assert "lambda input_ids" in str(error.value)


def test_error_in_a_custom_input_size_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        custom_input_size(lambda: 1 // 0, (), {})


def test_size_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        size(8, 3).dims = (9, 3)  # type: ignore[misc]


def test_sizes_have_no_order_but_that_of_their_dimensions() -> None:
    assert not size(8, 3) <= size(9, 2)
    with pytest.raises(TypeError):
        sorted([size(8, 3), size(9, 2)])


def forward(src: torch.Tensor, tgt: torch.Tensor, *, mask: torch.Tensor | None = None) -> None: ...


def test_arguments_by_position_and_by_name_are_the_same() -> None:
    names, src, tgt, mask = argument_names(forward), *map(torch.zeros, [(2, 3), (2, 4), (5,)])
    assert names == ("src", "tgt")
    by_position = input_size((src, tgt), {"mask": mask}, names)
    assert by_position == input_size((src,), {"mask": mask, "tgt": tgt}, names)
    assert by_position == input_size((), {"tgt": tgt, "mask": mask, "src": src}, names)
    assert by_position.dims == (2, 3, 2, 4, 5)


def test_arguments_without_names_have_their_position() -> None:
    assert input_size((torch.zeros(2), torch.zeros(3)), {}, ("x",)).layout == (("x", 1), ("1", 1))
    assert argument_names(lambda *args, **kwargs: None) == ()
    assert argument_names(print) is not None


def test_tensors_without_dimensions_have_no_size() -> None:
    batch = {"input_ids": torch.zeros(2, 3), "num_items_in_batch": torch.tensor(17)}
    assert input_size((), batch) == input_size((), {"input_ids": batch["input_ids"]})


def test_custom_input_size_with_other_arguments_raises_an_error() -> None:
    with pytest.raises(ArgumentError, match="cannot be called with the forward's arguments"):
        custom_input_size(lambda: 3, (torch.zeros(2),), {})


@given(pairs)
def test_sizes_compare_by_every_dimension(both: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    one, other = size(*both[0]), size(*both[1])
    assert (one <= other) == all(a <= b for a, b in zip(*both, strict=True))
    assert (other >= one) == (one <= other)
    for compare in (operator.lt, operator.gt):
        with pytest.raises(TypeError, match="compare them by <="):
            compare(one, other)
