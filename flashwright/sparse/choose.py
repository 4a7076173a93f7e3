"""The choice of blocks by kernels: how much the groups of queries attend to the mean of each block,
and the blocks that each query reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from flashwright.flex.task import DTYPES, LIMIT, ROWS, Task, WrongKernel
from flashwright.generate.selected import (
    BlockWeights,
    HeaviestBlocks,
    SelectedForward,
    SelectedProgram,
)
from flashwright.serving.kernels import Wanted
from flashwright.sparse.selection import Choice, heaviest, weights


@dataclass(frozen=True)
class Own(Wanted):
    """A kernel whose program is written here."""

    program: type[SelectedProgram] = SelectedForward

    @cached_property
    def order(self) -> Any:
        """What the store finds or makes."""
        return self.program(self.task.card, self.task.spec)


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
    wanted = Own(task, None, program=HeaviestBlocks)
    rows = wanted.order.rows
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
