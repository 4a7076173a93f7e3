"""What has to do with whole blocks in a packed batch, for all its sequences at once: the compressed
branch, and the choice of blocks. Blocks are counted in each sequence, by kernels too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from flashwright.author.builtin.mods import Mods
from flashwright.flex.task import Task
from flashwright.generate.selected import PackedWeights
from flashwright.lang.nodes import Compute
from flashwright.lang.parse import parse
from flashwright.serving import arguments, reference
from flashwright.serving.kernels import Wanted
from flashwright.serving.varlen import PackedCall, kernel_tensors
from flashwright.sparse.choose import Own, check_weights, own_columns, pick
from flashwright.sparse.selection import Choice
from flashwright.spec import Batch

_ROOM = 1 << 27
"""Weights that are held at once."""


@dataclass(frozen=True)
class Sequences:
    """The sequences of a packed batch, and their whole blocks."""

    starts: tuple[int, ...]
    """Where they begin, and where the last one ends."""
    block: int
    device: Any

    @cached_property
    def lengths(self) -> list[int]:
        """How many tokens each has."""
        return [last - first for first, last in pairwise(self.starts)]

    @cached_property
    def counts(self) -> list[int]:
        """How many whole blocks each has."""
        return [length // self.block for length in self.lengths]

    @cached_property
    def firsts(self) -> list[int]:
        """The first block of each among those of all, and the number of these."""
        return [0, *accumulate(self.counts)]

    @cached_property
    def bounds(self) -> dict[str, Any]:
        """Where sequences begin among tokens and among blocks, by the names that kernels have."""
        return {"startsq": self.tensor(self.starts), "startsk": self.tensor(self.firsts)}

    @cached_property
    def place(self) -> Any:
        """Where each token stands in its sequence."""
        return torch.arange(self.starts[-1], device=self.device) - self.of_tokens(self.starts[:-1])

    @cached_property
    def tokens(self) -> Any:
        """The tokens of all whole blocks, (blocks, block)."""
        pairs = zip(self.starts[:-1], self.counts, strict=True)
        begins = [first + self.block * torch.arange(count) for first, count in pairs]
        inside = torch.arange(self.block, device=self.device)
        return torch.cat(begins).to(self.device)[:, None] + inside

    def tensor(self, numbers: Any) -> Any:
        """Numbers as kernels take them."""
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def of_tokens(self, numbers: Any) -> Any:
        """A number of each sequence, for each of its tokens."""
        lengths = self.tensor(self.lengths)
        return self.tensor(numbers).repeat_interleave(lengths, output_size=self.starts[-1])

    def in_blocks(self, x: Any) -> Any:
        """The whole blocks of keys or values: (1, blocks, keys of a block, heads, dim)."""
        return x[:, self.tokens]


def compressed(all_of: Sequences, q: Any, k: Any, v: Any, scale: float) -> tuple[Any, Any]:
    """O, (1, tokens, heads, dim), and LSE, (1, heads, tokens), over one key and one value of each
    whole block that ends at the query or before it."""
    block = all_of.block
    ends = (torch.arange(n) * block + block - 1 for n in all_of.counts)
    given = {
        "q": q[0],
        "k": k[0],
        "v": v[0],
        **all_of.bounds,
        "since": torch.cat([*ends]).to(q.device),
    }
    task = arguments.task(given, arguments.settings_of(scale, False, (-1, -1), 0.0))
    sizes = {"q_len": max(all_of.lengths), "kv_len": max(all_of.counts)}
    sizes["batch"] = len(all_of.lengths)
    wanted = Wanted(task, Batch(), _whole_blocks(block))
    check = partial(reference.check, task.spec, given)
    call = PackedCall(wanted, kernel_tensors(given), sizes, check, given, None)
    out, lse = call.run()
    return out[None], lse[None]


@cache
def _whole_blocks(block: int) -> Mods:
    """The mask of what has ended, as a kernel has it: parsed once, not in each call."""
    (mask,) = parse(f"Compute Mask S where kv_idx * {block} + {block} <= q_idx + 1").body
    assert isinstance(mask, Compute)
    return Mods(mask=mask.where)


def blocks(task: Task, all_of: Sequences, choice: Choice, most: int) -> Any:
    """The blocks that all queries read, (1, kv heads, queries, most), -1 where there is none.
    `choice` has what is looked at, with the blocks of all sequences behind each other."""
    return pick(task, _weights(task, all_of, choice), all_of.place // all_of.block, most)


def fits(task: Task, all_of: Sequences) -> bool:
    """Whether the weights of all sequences are few enough to be held at once."""
    program = Own(task, None, program=PackedWeights).order
    tiles = -(-max(all_of.lengths) // program.queries)
    sums = tiles * program.columns * all_of.firsts[-1]
    every = max(sums, all_of.starts[-1] * max(all_of.counts))
    return bool(task.spec.kv_heads * every <= 2 * _ROOM)


def _weights(task: Task, all_of: Sequences, choice: Choice) -> Any:
    """How much groups attend to blocks, as selection.Weigh says."""
    wanted, longest = Own(task, None, program=PackedWeights), max(all_of.lengths)
    queries, device = wanted.order.queries, choice.q.device
    tensors = {
        "q": choice.q[0].transpose(0, 1),
        "k": choice.means[0].transpose(0, 1),
        "lse": choice.lse[0],
        "own": own_columns(wanted.order, longest, device),
        **all_of.bounds,
    }
    width = torch.arange(-(-max(all_of.counts) // 8) * 8, device=device)
    column = all_of.of_tokens(all_of.firsts[:-1])[:, None] + width
    column = column.clamp(max=all_of.firsts[-1] - 1)  # what is behind its blocks no query reads
    place = all_of.place[:, None]

    def sums(found: Mapping[str, Any]) -> Any:
        return found["sums"][:, place // queries, column, place % queries][None]

    most = all_of.lengths.index(longest)
    rows, means = (slice(*x[most : most + 2]) for x in (all_of.starts, all_of.firsts))
    tensors_of = (choice.q[:, rows], choice.means[:, means], choice.lse[..., rows])
    own = Choice(*tensors_of, longest, choice.block, choice.scale)
    look = partial(check_weights, own, slice(0, longest), lambda found: sums(found)[:, :, rows])
    sizes = {"q_len": longest, "kv_len": max(all_of.counts), "heads": choice.q.shape[2]}
    return sums(wanted.run(tensors, {**sizes, "batch": len(all_of.lengths)}, look))
