"""Tensors of whole numbers that functions of FlexAttention read, as kernels take them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from flashwright.flex.narrow import narrowed  # noqa: E402


def test_whole_numbers_are_converted_once_until_they_change() -> None:
    documents = torch.arange(6)
    first = narrowed(documents)
    assert first.dtype == torch.int32
    assert narrowed(documents) is first
    documents[0] = 7
    assert narrowed(documents).tolist() == [7, 1, 2, 3, 4, 5]


def test_what_kernels_take_stays_as_it_is() -> None:
    for tensor in (torch.zeros(3), torch.zeros(3, dtype=torch.int32)):
        assert narrowed(tensor) is tensor
    with torch.inference_mode():
        assert narrowed(torch.ones(2, dtype=torch.bool)).tolist() == [1, 1]


def test_what_inference_mode_converts_is_not_kept_for_training() -> None:
    documents = torch.arange(6)
    with torch.inference_mode():
        assert narrowed(documents).is_inference()
    assert not narrowed(documents).is_inference()
