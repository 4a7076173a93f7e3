"""The choice of blocks by kernels: how much the groups of queries attend to the mean of each block,
and the blocks that each query reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from flashwright.flex.task import DTYPES, LIMIT, ROWS, Task, WrongKernel
from flashwright.generate.block_lists import HeaviestBlocks, MergedLists
from flashwright.generate.selected import (
    BlockWeights,
    SelectedForward,
    SelectedProgram,
)
from flashwright.serving.kernels import Wanted
from flashwright.sparse import lists
from flashwright.sparse.selection import Choice, heaviest, weights


@dataclass(frozen=True)
class Own(Wanted):
    """A kernel whose program is written here."""

    program: type[SelectedProgram] = SelectedForward

    @cached_property
    def order(self) -> Any:
        """What the store finds or makes."""
        return self.program(self.task.card, self.task.spec)


@dataclass(frozen=True)
class _Heaviest(Wanted):
    """The kernel that chooses by weights."""

    @cached_property
    def order(self) -> HeaviestBlocks:
        """What the store finds or makes."""
        return HeaviestBlocks(self.task.card)


@dataclass(frozen=True)
class _Merged(Wanted):
    """The kernel that merges what queries name."""

    queries: int = 1
    slots: int = 1

    @cached_property
    def order(self) -> MergedLists:
        """What the store finds or makes."""
        return MergedLists(self.task.card, self.task.spec.selected_block, self.queries, self.slots)


def weigh(task: Task, choice: Choice, rows: slice) -> Any:
    """How much groups attend to blocks, by a kernel (selection.Weigh)."""
    wanted, wide = Own(task, None, program=BlockWeights), -(-choice.count // 8) * 8
    program, means = wanted.order, choice.means.transpose(1, 2)
    padded = torch.nn.functional.pad(means, (0, 0, 0, wide - means.shape[2]))
    count, group = rows.stop - rows.start, task.spec.group
    tensors = {
        "q": choice.q[:, rows].transpose(1, 2),
        "k": padded,
        "lse": choice.lse[:, :, rows],
        "own": own_columns(program, count, choice.q.device),
    }
    behind = choice.q.shape[1] - rows.stop

    def sums(found: Mapping[str, Any]) -> Any:
        """(batch, kv heads, queries, blocks)"""
        if group == 1:
            return found["sums"].mT.contiguous()
        tiled = found["sums"][..., : program.queries].mT  # (.., tiles, queries of a tile, blocks)
        return tiled.flatten(2, 3)[:, :, :count].contiguous()

    check = partial(check_weights, choice, rows, sums)
    sizes = {"tokens": choice.keys - behind, "heads": choice.q.shape[2]}
    return sums(wanted.run(tensors, sizes, check))


def check_weights(
    choice: Choice, rows: slice, sums: Callable[[Any], Any], results: Mapping[str, Any]
) -> None:
    """Raise WrongKernel if the first weights are not PyTorch's, in some rows."""
    ours, limit = sums(results), LIMIT[DTYPES[str(choice.q.dtype).removeprefix("torch.")]]
    for row in torch.linspace(0, ours.shape[2] - 1, min(ROWS, ours.shape[2])).long().tolist():
        query = rows.start + row
        right, found = weights(choice, slice(query, query + 1))[:, :, 0], ours[:, :, row]
        whole = choice.means.shape[1]
        off = (found[..., :whole] - right[..., :whole]).abs().amax(-1)
        off = off / right.amax(-1).clamp(min=1e-3)
        if not float(off.max()) < limit:
            raise WrongKernel(
                f"a new kernel is wrong: the weights of blocks of query {query} are "
                f"{float(off.max()):.2g} of the largest from PyTorch's. Please report the shapes"
            )


def own_columns(program: BlockWeights, queries: int, device: Any) -> Any:
    """Which of a tile's queries the rows of the heads of a group belong to, as columns."""
    own = torch.arange(queries, device=device) % program.queries
    of_query = torch.nn.functional.one_hot(own, program.columns).half()
    return of_query[:, None].expand(queries, program.spec.group, program.columns)


def pick(task: Task, weights: Any, own: Any, most: int) -> Any:
    """The blocks that queries read, by a kernel (selection.Pick)."""
    wanted, rows = _Heaviest(task, None), HeaviestBlocks.rows
    far = torch.nn.functional.pad(own, (0, -len(own) % rows)).unflatten(0, (-1, rows)).amax(1)
    tensors = {"weights": weights, "own": own.int(), "far": far.int()}
    check = partial(_check_picked, weights, own)
    sizes = {"slots": most, "heads": task.spec.heads}
    return wanted.run(tensors, sizes, check)["found"].mT


def _check_picked(weights: Any, own: Any, results: Mapping[str, Any]) -> None:
    """Raise WrongKernel if the first blocks are not as heavy as PyTorch's, in some rows."""
    found = results["found"].mT
    for row in torch.linspace(0, len(own) - 1, min(ROWS, len(own))).long().tolist():
        some, ours = weights[:, :, row : row + 1].float(), found[:, :, row : row + 1].long()
        right = heaviest(some, own[row : row + 1], ours.shape[3])
        heavy = [some.gather(3, x.clamp(min=0)).masked_fill(x < 0, -1) for x in (ours, right)]
        twice = (ours[..., :, None] == ours[..., None, :]) & (ours >= 0)[..., None]
        fixed = torch.equal(ours[..., :3], right[..., :3])
        if not fixed or not torch.equal(*heavy) or int(twice.sum()) != int((ours >= 0).sum()):
            text = f"a new kernel is wrong: the blocks of query {row} are not the heaviest"
            raise WrongKernel(f"{text}. Please report the shapes")


def merged(
    task: Task, forward: SelectedForward, blocks: Any, place: Any, first: Any, keys: int
) -> lists.Lists:
    """What each group of neighbouring queries reads of so many keys, as lists.merged has it: by a
    kernel, or by PyTorch where a block is several tiles or queries name too many. The others are
    the arguments of lists.tiles_of."""
    block, queries, slots = task.spec.selected_block, forward.queries, -(-blocks.shape[3] // 8) * 8
    wanted = _Merged(task, None, queries=queries, slots=slots)

    def by_pytorch() -> lists.Lists:
        return lists.merged(lists.tiles_of(blocks, block, forward.keys, place, first), queries)

    if forward.keys != block or not wanted.order.fits(keys):
        return by_pytorch()
    behind = -len(place) % queries
    room = (0, slots - blocks.shape[3], 0, 0, 0, behind)
    named = torch.nn.functional.pad(blocks, room, value=-1).unflatten(1, (-1, queries))
    places = torch.stack(((place - first) // block, first)).int()
    own, begin = torch.nn.functional.pad(places, (0, behind)).unflatten(1, (-1, queries)).mT
    tensors = {
        "blocks": named.permute(0, 3, 2, 1, 4),
        "own": own.contiguous(),
        "first": begin.contiguous(),
    }
    sizes = {"turns": queries * blocks.shape[3], "heads": task.spec.heads}
    sizes |= {"q_len": len(place), "kv_len": keys}
    found = wanted.run(tensors, sizes, partial(_check_merged, by_pytorch))
    return {n: x.mT.contiguous() if x.ndim == 4 else x for n, x in found.items()}


def _check_merged(by_pytorch: Callable[[], lists.Lists], results: Mapping[str, Any]) -> None:
    """Raise WrongKernel if the first lists are not PyTorch's."""
    wanted, turns = by_pytorch(), results["tile"].shape[2]
    listed = torch.arange(turns) < wanted["count"].cpu()[..., None]
    for name, every in wanted.items():
        ours, right = results[name].cpu(), every.cpu()
        if ours.ndim == 4:
            ours, right = ours.mT[listed], right[..., :turns][listed]
        if not torch.equal(ours, right):
            text = f"a new kernel is wrong: `{name}` of the blocks that queries read together"
            raise WrongKernel(f"{text} is not PyTorch's. Please report the shapes")
