"""How fast block masks are, beside compiled FlexAttention, in one run on a GPU.

`python -m tests.gpu.block_speed`: 16 heads, 128 wide, bf16, 8k and 32k tokens, forward, backward:
packed documents, a window, a prefix, a dilated window, and a random tenth of the blocks. Both are
given the same BlockMask, and compared before they are timed. Then our times for 32k tokens and more
or fewer random blocks, which should grow with the number of blocks.
"""

from __future__ import annotations

from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import flashwright
from tests.gpu.backward_speed import Call, line, mean, times

HEADS, WIDTH, BLOCK = 16, 128, 128
LENGTHS = (8192, 32768)
SHARES = (0.025, 0.05, 0.1, 0.2, 0.4)
"""Of all blocks, chosen at random."""


def dense_blocks(listed: Any) -> BlockMask:
    """A mask of whole blocks, from a matrix that says which are read."""
    order = listed.int().argsort(dim=-1, descending=True, stable=True).int()[None, None]
    count = listed.sum(-1).int()[None, None]
    return BlockMask.from_kv_blocks(torch.zeros_like(count), order, count, order, BLOCK_SIZE=BLOCK)


def random_blocks(length: int, share: float) -> BlockMask:
    """Each query block reads its own block, and others."""
    torch.manual_seed(0)
    count = length // BLOCK
    drawn = torch.rand(count, count, device="cuda") < share
    return dense_blocks(drawn | torch.eye(count, dtype=torch.bool, device="cuda"))


def masks(length: int) -> dict[str, Any]:
    """Functions of a mask, by name."""
    torch.manual_seed(length)
    ends = torch.randperm(length - 1, device="cuda")[:15].sort().values
    document = torch.searchsorted(ends, torch.arange(length, device="cuda"))
    return {
        "documents": lambda b, h, q, kv: (kv <= q) & (document[q] == document[kv]),
        "window": lambda b, h, q, kv: (kv <= q) & (q - kv < 1024),
        "prefix": lambda b, h, q, kv: (kv <= q) | (kv < length // 4),
        "dilated": lambda b, h, q, kv: (kv <= q) & (q - kv < 4096) & ((q - kv) % 4 == 0),
    }


KINDS = (*masks(8), "random") if torch.cuda.is_available() else ()


def block_mask(kind: str, length: int) -> BlockMask:
    if kind == "random":
        return random_blocks(length, 0.1)
    function = masks(length)[kind]
    return create_block_mask(function, None, None, length, length, "cuda", _compile=True)


def calls(by: Any, tensors: list[Any], mask: BlockMask) -> tuple[Call, Call]:
    """Forward, and backward. Each has been called."""
    *given, grad = tensors
    out = by(*given, block_mask=mask)
    backward = partial(torch.autograd.grad, out, given, grad, retain_graph=True)
    backward()

    def forward() -> Any:
        with torch.no_grad():
            return (by(*given, block_mask=mask),)

    forward()
    return forward, backward


def tensors_of(length: int) -> list[Any]:
    """Q, K, V and dO."""
    torch.manual_seed(0)
    shape = (1, HEADS, length, WIDTH)
    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


def compared(kind: str, length: int, start: Any, turn: Any, found: Any) -> None:
    """One cell. The first calls are at the same time as those of other cells, then the times."""
    pairs: tuple[Any, ...] = ()
    blocks = 0
    try:
        tensors, mask = tensors_of(length), block_mask(kind, length)
        whole = mask.full_kv_num_blocks
        blocks = int(mask.kv_num_blocks.sum() + (0 if whole is None else whole.sum()))
        compiled = torch.compile(flex_attention, dynamic=False)
        ours, theirs = (calls(by, tensors, mask) for by in (flashwright.flex_attention, compiled))
        pairs = tuple(zip(("forward", "backward"), ours, theirs, strict=True))
    except Exception as error:
        print(f"{kind} {length}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    torch.cuda.synchronize()
    start.wait()
    with turn:
        for way, mine, other in pairs:
            name = f"{kind}, {length}, {blocks} blocks, {way}"
            found.append((way, line(f"{name:46}", mine, other)))


def compare() -> None:
    """All kinds of masks."""
    spawn = get_context("spawn")
    cells = [(kind, length) for length in LENGTHS for kind in KINDS]
    start, turn = spawn.Barrier(len(cells)), spawn.Lock()
    found = spawn.Manager().list()
    args = (start, turn, found)
    running = [spawn.Process(target=compared, args=(*cell, *args)) for cell in cells]
    for process in running:
        process.start()
    for process in running:
        process.join()
    for way in ("forward", "backward"):
        ratios = [ratio for name, ratio in found if name == way]
        if ratios:
            print(f"{way}: {mean(ratios)}", flush=True)


def growth() -> None:
    """Milliseconds of our kernels, and microseconds for each block and head, by the number of
    blocks."""
    tensors = tensors_of(LENGTHS[-1])
    for share in SHARES:
        mask = random_blocks(LENGTHS[-1], share)
        taken = [times(call)[0] for call in calls(flashwright.flex_attention, tensors, mask)]
        blocks = int(mask.full_kv_num_blocks.sum())
        told = "   ".join(f"{ms:8.3f} ms, {1e3 * ms / (blocks * HEADS):.4f} us" for ms in taken)
        print(f"{blocks:6} blocks: {told}", flush=True)


if __name__ == "__main__":
    compare()
    growth()
