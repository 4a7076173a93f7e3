"""Whether the lists of a BlockMask say the same as its mask function, looked up at run time.

Our kernels compute the mask function; PyTorch's compiled ones trust the lists: a block that is not
listed is skipped, and one that is listed as full is not masked. `create_block_mask` makes lists
that agree with the function. Others, such as a choice of blocks by `BlockMask.from_kv_blocks`, are
left to PyTorch.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as functional

from flashwright.flex.capture import Function
from flashwright.flex.fallback import over
from flashwright.pytorch.lists import dense

LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
"""The names that a BlockMask has for its lists."""
_ELEMENTS = 1 << 24  # of the mask that are computed at once
_KEPT = 1 << 22  # elements of an input whose content is kept


@dataclass(frozen=True)
class Extent:
    """For which elements a mask is compared with its lists."""

    q_len: int
    kv_len: int
    block: tuple[int, int]
    differs: tuple[bool, bool]
    """Whether the mask may differ within the batch, and from head to head."""


def disagreement(lists: Mapping[str, Any], mask: Function, extent: Extent) -> str:
    """Where a BlockMask's lists say something else than its function; empty if they agree.

    `lists` has the four lists by the names that a BlockMask has for them.
    """
    table = block_table(**lists)
    for axis, name in enumerate(("batch", "heads")):
        if extent.differs[axis] and table.shape[axis] == 1:
            return f"its function depends on the {name}, its lists do not"
    batches, heads = (
        [slice(n, n + 1) for n in range(count)] if differs else [slice(None)]
        for count, differs in zip(table.shape[:2], extent.differs, strict=True)
    )
    rows = max(1, _ELEMENTS // max(1, extent.kv_len) // extent.block[0]) * extent.block[0]
    with torch.no_grad():
        for b, h, first in product(batches, heads, range(0, extent.q_len, rows)):
            place = (b.start or 0, h.start or 0, first, rows)
            found = _differing(table[b, h], mask, extent, place)
            if found:
                return found
    return ""


def block_table(
    kv_num_blocks: Any, kv_indices: Any, full_kv_num_blocks: Any, full_kv_indices: Any
) -> Any:
    """For each pair of blocks: 0 skipped, 1 masked by the function, 2 fully visible."""
    partial = dense(kv_num_blocks, kv_indices)
    if full_kv_num_blocks is None:
        return partial
    return torch.where(dense(full_kv_num_blocks, full_kv_indices) == 1, 2, partial)


def _differing(table: Any, mask: Function, extent: Extent, place: tuple[int, int, int, int]) -> str:
    """A block of some rows that differs from the lists that hold for it, in words."""
    b, h, first, count = place
    device = table.device
    rows = torch.arange(first, min(first + count, extent.q_len), device=device)
    keys = torch.arange(extent.kv_len, device=device)
    batch, head = (torch.tensor([n], device=device) for n in (b, h))
    seen = over(mask, with_score=False)(batch, head, rows, keys)[0, 0]
    some, every = _blocks(seen, extent.block, False), _blocks(seen, extent.block, True)
    top = first // extent.block[0]
    listed = table[:, :, top : top + some.shape[0], : some.shape[1]]
    if listed.shape[2:] != some.shape:
        return f"the lists have {table.shape[2]} x {table.shape[3]} blocks"
    wrong = ((listed == 0) & some) | ((listed == 2) & ~every)
    if not bool(wrong.any()):
        return ""
    found = wrong.nonzero()[0].tolist()
    told = "skip" if int(listed[tuple(found)]) == 0 else "show all of"
    return f"the lists {told} block ({top + found[2]}, {found[3]}), its function does not"


def _blocks(seen: Any, block: tuple[int, int], every: bool) -> Any:
    """For each block of a mask: whether any, or every, element of it is seen."""
    ends = [-n % size for n, size in zip(seen.shape, block, strict=True)]
    padded = functional.pad(seen, (0, ends[1], 0, ends[0]), value=every)
    cut = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    return cut.all(3).all(1) if every else cut.any(3).any(1)


class Seen:
    """Inputs that were looked at before: the same ones need no second look."""

    def __init__(self) -> None:
        self._known: list[_Input] = []

    def same(self, inputs: Sequence[Any]) -> bool:
        """Whether these are the inputs that were kept last, unchanged."""
        return len(inputs) == len(self._known) and all(
            known.same(value) for known, value in zip(self._known, inputs, strict=True)
        )

    def keep(self, inputs: Sequence[Any]) -> None:
        """Remember these inputs."""
        self._known = [_Input(value) for value in inputs]


class _Input:
    """One input: a number, or a tensor with the version and the content that it had."""

    def __init__(self, value: Any) -> None:
        self.value: Any = value
        if isinstance(value, torch.Tensor):
            self.value = weakref.ref(value)
            self.version = _version(value)
            self.content: Any = value.detach().clone() if value.numel() <= _KEPT else None

    def same(self, value: Any) -> bool:
        """Whether a value is this one, unchanged."""
        if not isinstance(self.value, weakref.ref) or not isinstance(value, torch.Tensor):
            return type(value) is type(self.value) and bool(value == self.value)
        itself: bool = self.value() is value
        if itself:
            if self.version is not None:
                return self.version == _version(value)
            if value.is_cuda and torch.cuda.is_current_stream_capturing():
                return True  # a CUDA graph that is captured cannot wait for a comparison
        known = self.content
        if known is None or known.shape != value.shape or known.dtype != value.dtype:
            return False
        return bool(known.device == value.device) and torch.equal(value, known)


def _version(tensor: Any) -> int | None:
    """How often a tensor was written; a tensor of inference mode does not count that."""
    return None if tensor.is_inference() else tensor._version
