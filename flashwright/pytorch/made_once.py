"""What is made of tensors, and kept until one of them changes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary


class MadeOnce:
    """A function of a tensor and of others beside it, called once for the same ones.

    What it gave is kept as long as the first tensor is, and made anew if one of them was changed in
    place. It is always made anew of fake tensors, of inference tensors, which do not say whether
    they were changed, and in inference mode, whose tensors autograd does not take later.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._known: Any = WeakTensorKeyDictionary()

    def __call__(self, first: Any, others: Sequence[Any] = ()) -> Any:
        """What the function gives for them."""
        if _passing(first, *others):
            return self._make(first, *others)
        versions = [t._version for t in (first, *others)]
        known = self._known.get(first)
        same = known is not None and len(known[0]) == len(others)
        if not same or not all(map(operator.is_, known[0], others)) or known[1] != versions:
            known = self._known[first] = (others, versions, self._make(first, *others))
        return known[2]


def _passing(*tensors: Any) -> bool:
    if torch.is_inference_mode_enabled():
        return True
    return any(t.is_inference() or isinstance(t, FakeTensor) for t in tensors)
