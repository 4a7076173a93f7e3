"""Sizes and stages for a derived backward pass, which is written without them.

A block owns BN keys and walks over the queries, BM at a time. On GPUs with wgmma two warpgroups
have 64 keys each, and numbers for each query come through shared memory, copied ahead like Q.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flashwright.author.builtin.complete import ParamChoice
from flashwright.author.builtin.order import ordered
from flashwright.check.check import check
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Failed
from flashwright.lang.nodes import (
    Allocate,
    Axis,
    Compute,
    Copy,
    For,
    Name,
    Num,
    Param,
    Statement,
    Tree,
    expressions,
    statements,
)
from flashwright.program.kernels import sections
from flashwright.program.vocabulary import split


@dataclass(frozen=True)
class BackwardTiling:
    """The sizes of a backward pass: queries per step, keys per block, warps, stages of a step's
    tiles."""

    bm: int
    bn: int
    warps: int
    stages: int
    vectors: bool = False
    """Whether numbers for each query come through shared memory."""
    beside: bool = False
    """Whether products run beside other work, so that their order matters."""

    @property
    def name(self) -> str:
        """Such as `64x128-s2-w8`."""
        return f"{self.bm}x{self.bn}-s{self.stages}-w{self.warps}"

    @property
    def choices(self) -> tuple[ParamChoice, ...]:
        """The sizes with their reasons."""
        chosen = "the first of the known tilings that fits the GPU"
        return (
            ParamChoice("BM", str(self.bm), f"queries of a step; {chosen}"),
            ParamChoice("BN", str(self.bn), f"keys that a block owns; {chosen}"),
            ParamChoice("Warps", str(self.warps), "16 keys for each warp"),
            ParamChoice("stages", str(self.stages), "of what the loop over the queries copies"),
        )


WITH_WGMMA = (
    BackwardTiling(128, 128, 8, 2, vectors=True, beside=True),
    BackwardTiling(64, 128, 8, 2, vectors=True, beside=True),
    BackwardTiling(64, 128, 8, 2, beside=True),
    BackwardTiling(64, 64, 4, 2, vectors=True, beside=True),
    BackwardTiling(64, 64, 4, 2, beside=True),
)
WITHOUT = (
    BackwardTiling(64, 64, 4, 2),
    BackwardTiling(64, 64, 4, 1),
    BackwardTiling(32, 32, 2, 2),
    BackwardTiling(32, 32, 2, 1),
    BackwardTiling(16, 16, 1, 1),
)
"""From the best to the one that fits everywhere."""


def tilings(tree: Tree, gpu: Gpu) -> Iterator[tuple[BackwardTiling, Tree]]:
    """The backward pass with sizes that fit a GPU, the best first. Raises Failed if none does."""
    found: Failed | None = None
    fits = False
    for tiling in (*(WITH_WGMMA if gpu.wgmma else ()), *WITHOUT):
        sized = with_sizes(tree, tiling)
        verdict = check(sized, gpu)
        if verdict.ok:
            fits = True
            yield tiling, sized
        found = found or Failed(*verdict.errors)
    if not fits and found is not None:
        raise found


def with_sizes(tree: Tree, tiling: BackwardTiling) -> Tree:
    """The backward pass with these sizes: params, stages, the way of vectors."""
    values = {"BM": tiling.bm, "BN": tiling.bn}
    shared, *kernels = sections(Tree(tuple(_set(stmt, values) for stmt in tree.body)))
    made = _in_fragments(shared, kernels) if tiling.beside else list(shared)
    types = {_base(s.name): s.dtype for s in shared if isinstance(s, Allocate)}
    for kernel in kernels:
        computes = (s for s in statements(kernel) if isinstance(s, Compute))
        if any(s.operation == "gemm" for s in computes):
            made += _main(kernel, tiling, types)
        else:
            made += [_few_warps(stmt, tiling.bm // 16) for stmt in kernel]
    return Tree(tuple(made))


def _in_fragments(
    shared: Sequence[Statement], kernels: Sequence[Sequence[Statement]]
) -> list[Statement]:
    """The declarations, with the sums between kernels in fragments if they are tiles of rows."""
    copies = [c for k in kernels for c in statements(k) if isinstance(c, Copy)]
    tiled = {_base(c.target or c.name) for c in copies if c.adds and c.shape and len(c.shape) == 2}
    read = {_base(c.name) for c in copies if c.source == "global"}
    return [
        replace(s, fragments=True)
        if isinstance(s, Allocate) and s.space == "global" and s.name.id in tiled & read
        else s
        for s in shared
    ]


def _set(stmt: Statement, values: Mapping[str, int]) -> Statement:
    if isinstance(stmt, Param) and stmt.name.id in values:
        return replace(stmt, value=Num(str(values[stmt.name.id])))
    return stmt


def _few_warps(stmt: Statement, most: int) -> Statement:
    """A kernel with tiles of BM rows has 16 of them for each warp at least."""
    if isinstance(stmt, Param) and stmt.name.id == "Warps" and isinstance(stmt.value, Num):
        return replace(stmt, value=Num(str(min(most, int(stmt.value.text)))))
    return stmt


def _main(
    kernel: Sequence[Statement], tiling: BackwardTiling, types: Mapping[str, Name | None]
) -> Iterator[Statement]:
    """The kernel with the loop: its warps, and the stages of what the loop copies."""
    loops = [s for s in kernel if isinstance(s, For)]
    inside = [s for loop in loops for s in statements(loop.body) if isinstance(s, Copy)]
    staged = [c for c in inside if _staged(c, tiling)]
    first = next(s for s in kernel if isinstance(s, Copy | For))
    for stmt in kernel:
        if stmt is first:
            yield from (_allocated(c, tiling.stages, types[_base(c.name)]) for c in staged)
        if isinstance(stmt, Param) and stmt.name.id == "Warps":
            yield replace(stmt, value=Num(str(tiling.warps)))
        elif isinstance(stmt, For):
            loop = ordered(stmt.body) if tiling.beside else stmt.body
            yield replace(stmt, body=tuple(_loop(loop, staged)))
        else:
            yield stmt


def _staged(copy: Copy, tiling: BackwardTiling) -> bool:
    """Whether a copy of the loop gets stages: tiles in shared memory, and vectors on their way."""
    if copy.source != "global" or copy.shape is None or copy.column is not None:
        return False
    vector = len(copy.shape) == 1 and copy.dest == "register" and tiling.vectors
    return copy.dest == "shared" or vector


def _allocated(copy: Copy, stages: int, dtype: Name | None) -> Allocate:
    assert copy.shape is not None
    shape = tuple(Axis(None, size) for size in copy.shape)
    name = Name(_base(copy.target or copy.name))
    return Allocate(name, "shared", shape, dtype, None, Num(str(stages)))


def _loop(body: Sequence[Statement], staged: list[Copy]) -> Iterator[Statement]:
    """The loop with its vectors sent through shared memory, and to registers when they are read."""
    waiting: dict[str, Copy] = {}
    for stmt in body:
        if isinstance(stmt, Copy) and stmt in staged and stmt.dest == "register":
            name = _base(stmt.target or stmt.name)
            waiting[name] = Copy(Name(name), None, None, "shared", "register")
            yield replace(stmt, dest="shared")
            continue
        read = {_base(e) for e in expressions(stmt) if isinstance(e, Name)}
        yield from (waiting.pop(name) for name in list(waiting) if name in read)
        yield stmt


def _base(name: Name) -> str:
    return split(name.id)[0]
