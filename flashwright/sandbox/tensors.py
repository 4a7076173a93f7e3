"""Conversion of tensors between NumPy and PyTorch by their bits, as NumPy lacks some types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwright.build.arrays import NAMES
from flashwright.semantics.interpret import NUMPY_DTYPES

Array = NDArray[Any]

_INTEGERS = {1: "uint8", 2: "int16", 4: "int32"}  # by bytes
DTYPES: Mapping[str, np.dtype[Any]] = {n: np.dtype(t) for n, t in NUMPY_DTYPES.items()}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: Any) -> str:
    """Our name of a NumPy or PyTorch type, or its own name if we have none."""
    text = str(dtype).removeprefix("torch.")
    ours = {name: short for short, name in NAMES.items()}
    if text in ours:
        return ours[text]
    try:
        return _NAMES.get(np.dtype(dtype), text)
    except TypeError:
        return text


def to_torch(array: Array, dtype: str, device: str = "cuda") -> Any:
    """A NumPy array as a tensor of one of our element types."""
    import torch

    exact = np.array(array, DTYPES[dtype], order="C")
    bits = exact.view(_INTEGERS[exact.dtype.itemsize])
    return torch.from_numpy(bits).view(getattr(torch, NAMES[dtype])).to(device)


def bits(array: Array) -> Array:
    """The same memory as integers, to compare NaN with NaN."""
    flat: Array = np.ascontiguousarray(array)
    return flat.view(_INTEGERS[flat.dtype.itemsize]) if flat.size else flat.astype(np.int32)


def torch_dtype(dtype: str) -> Any:
    """PyTorch's type for ours."""
    import torch

    return getattr(torch, NAMES[dtype])
