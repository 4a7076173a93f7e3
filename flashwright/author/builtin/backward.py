"""Sizes and stages for a derived backward pass, which is written without them.

A block owns BN keys and walks over the queries, BM at a time. On GPUs with wgmma two warpgroups
have 64 keys each, and numbers for each query come through shared memory, copied ahead like Q.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flashwright.author.builtin.complete import ParamChoice
from flashwright.author.builtin.narrow import narrowed
from flashwright.author.builtin.order import ordered
from flashwright.check.check import check, over_budget
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Failed
from flashwright.lang.nodes import (
    Allocate,
    Axis,
    Comment,
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
from flashwright.program.kernels import sections, touched
from flashwright.program.needed import base_name, is_store, needed


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
    early: bool = False
    """Whether dS goes to shared memory before the sum of dV begins."""
    apart: bool = False
    """Whether each gradient of the main kernel has a kernel of its own, which computes the scores
    again: of wide heads not all fit into registers."""

    @property
    def name(self) -> str:
        """Such as `64x128-s2-w8`, or `64x64-s1-w4-apart`."""
        apart = "-apart" if self.apart else ""
        return f"{self.bm}x{self.bn}-s{self.stages}-w{self.warps}{apart}"

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
    BackwardTiling(128, 128, 8, 2, vectors=True, beside=True, early=True),
    BackwardTiling(128, 128, 8, 2, vectors=True, beside=True),
    BackwardTiling(64, 128, 8, 2, vectors=True, beside=True),
    BackwardTiling(64, 128, 8, 2, beside=True),
    BackwardTiling(64, 64, 4, 2, vectors=True, beside=True),
    BackwardTiling(64, 64, 4, 2, beside=True),
    BackwardTiling(64, 64, 8, 2, vectors=True, beside=True),
    BackwardTiling(64, 64, 4, 2, vectors=True, beside=True, apart=True),
)
WITHOUT = (
    BackwardTiling(64, 64, 4, 2),
    BackwardTiling(64, 64, 4, 1),
    BackwardTiling(32, 32, 2, 2),
    BackwardTiling(32, 32, 2, 1),
    BackwardTiling(64, 64, 4, 1, apart=True),
    BackwardTiling(32, 32, 2, 1, apart=True),
    BackwardTiling(16, 16, 1, 1),
    BackwardTiling(16, 16, 1, 1, apart=True),
)
"""From the best to the one that fits everywhere."""


def tilings(tree: Tree, gpu: Gpu) -> Iterator[tuple[BackwardTiling, Tree]]:
    """The backward pass with sizes that fit a GPU, the best first. Raises Failed if none does."""
    found: Failed | None = None
    fits = False
    for tiling in (*(WITH_WGMMA if gpu.wgmma else ()), *WITHOUT):
        sized = with_sizes(tree, tiling)
        errors = over_budget(sized, gpu) or check(sized, gpu).errors
        if not errors:
            fits = True
            yield tiling, sized
        found = found or Failed(*errors)
    if not fits and found is not None:
        raise found


def with_sizes(tree: Tree, tiling: BackwardTiling) -> Tree:
    """The backward pass with these sizes: params, stages, the way of vectors."""
    values = {"BM": tiling.bm, "BN": tiling.bn}
    shared, *kernels = sections(Tree(tuple(_set(stmt, values) for stmt in tree.body)))
    made: list[Statement] = []
    types = {base_name(s.name): s.dtype for s in shared if isinstance(s, Allocate)}
    for kernel in kernels:
        computes = (s for s in statements(kernel) if isinstance(s, Compute))
        if any(isinstance(s, For) and _adds(s) for s in kernel):
            for part in _parts(kernel, tiling.apart):
                made += _main(part, tiling, types)
        elif any(s.operation == "gemm" for s in computes):
            own = replace(tiling, warps=tiling.bm // 16, vectors=False, beside=False)
            made += _main(kernel, own, types)
        else:
            made += (_few_warps(s, tiling.bm // 16) for s in narrowed(kernel, shared))
    return Tree((*_in_fragments(shared, made), *made))


def _in_fragments(shared: Sequence[Statement], kernels: Sequence[Statement]) -> Iterator[Statement]:
    """The declarations, with the sums between kernels in fragments if all copies of them are of
    tiles with whole rows."""
    copies = [c for c in statements(tuple(kernels)) if isinstance(c, Copy)]
    for stmt in shared:
        if isinstance(stmt, Allocate) and stmt.space == "global":
            own = [c for c in copies if any(stmt.name.id in names for names in touched((c,)))]
            width = stmt.shape[-1].size
            whole = all(c.shape and len(c.shape) == 2 and c.shape[1] == width for c in own)
            between = any(c.adds for c in own) and any(c.source == "global" for c in own)
            yield replace(stmt, fragments=True) if whole and between else stmt
        else:
            yield stmt


def _set(stmt: Statement, values: Mapping[str, int]) -> Statement:
    if isinstance(stmt, Param) and stmt.name.id in values:
        return replace(stmt, value=Num(str(values[stmt.name.id])))
    return stmt


def _few_warps(stmt: Statement, most: int) -> Statement:
    """A kernel with tiles of BM rows has 16 of them for each warp at least."""
    if isinstance(stmt, Param) and stmt.name.id == "Warps" and isinstance(stmt.value, Num):
        return replace(stmt, value=Num(str(min(most, int(stmt.value.text)))))
    return stmt


def _adds(loop: For) -> bool:
    """Whether a loop multiplies and adds to global memory, as that of the main kernel does."""
    body = list(statements(loop.body))
    gemm = any(isinstance(s, Compute) and s.operation == "gemm" for s in body)
    return gemm and any(isinstance(s, Copy) and s.adds for s in body)


def _parts(kernel: tuple[Statement, ...], apart: bool) -> Iterator[tuple[Statement, ...]]:
    """The main kernel as one, or as one for the stores of its loop and one for each other store."""
    loops = tuple(s for s in kernel if isinstance(s, For))
    inside = [s for s in statements(loops) if is_store(s)]
    groups = [inside, *([store] for store in kernel if is_store(store))]
    if not apart:
        yield kernel
        return
    title = tuple(itertools.takewhile(lambda s: isinstance(s, Comment), reversed(kernel)))
    for stores in filter(None, groups):
        yield needed(kernel[: len(kernel) - len(title)], stores)
        yield (
            (Comment("Main, for another gradient.", gap=True),) if stores is not groups[-1] else ()
        )
    yield title[::-1]


def _main(
    kernel: Sequence[Statement], tiling: BackwardTiling, types: Mapping[str, Name | None]
) -> Iterator[Statement]:
    """The kernel with the loop: its warps, and the stages of what the loop copies."""
    loops = [s for s in kernel if isinstance(s, For)]
    inside = [s for loop in loops for s in statements(loop.body) if isinstance(s, Copy)]
    allocated = {
        base_name(s.name) for s in kernel if isinstance(s, Allocate) and s.space == "shared"
    }
    staged = [c for c in inside if _staged(c, tiling, allocated)]
    first = next((s for s in kernel if isinstance(s, Copy | For)), None)
    for stmt in kernel:
        if stmt is first:
            yield from (_allocated(c, tiling.stages, types[base_name(c.name)]) for c in staged)
        if isinstance(stmt, Param) and stmt.name.id == "Warps":
            yield replace(stmt, value=Num(str(tiling.warps)))
            if tiling.apart and tiling.beside:  # ptxas serializes the products of split loops here
                yield Param(Name("SplitMasked"), Num("0"))
        elif isinstance(stmt, For):
            loop = ordered(stmt.body, tiling.early) if tiling.beside else stmt.body
            yield replace(stmt, body=tuple(_loop(loop, staged)))
        else:
            yield stmt


def _staged(copy: Copy, tiling: BackwardTiling, allocated: set[str]) -> bool:
    """Whether a copy of the loop gets stages: tiles in shared memory that are not allocated yet,
    and vectors on their way."""
    if copy.source != "global" or copy.shape is None or copy.column is not None:
        return False
    vector = len(copy.shape) == 1 and copy.dest == "register" and tiling.vectors
    new = base_name(copy.target or copy.name) not in allocated
    return (copy.dest == "shared" and new) or vector


def _allocated(copy: Copy, stages: int, dtype: Name | None) -> Allocate:
    assert copy.shape is not None
    shape = tuple(Axis(None, size) for size in copy.shape)
    name = Name(base_name(copy.target or copy.name))
    return Allocate(name, "shared", shape, dtype, None, Num(str(stages)))


def _loop(body: Sequence[Statement], staged: list[Copy]) -> Iterator[Statement]:
    """The loop with its vectors sent through shared memory, and to registers when they are read."""
    waiting: dict[str, Copy] = {}
    for stmt in body:
        if isinstance(stmt, Copy) and stmt in staged and stmt.dest == "register":
            name = base_name(stmt.target or stmt.name)
            waiting[name] = Copy(Name(name), None, None, "shared", "register")
            yield replace(stmt, dest="shared")
            continue
        read = {base_name(e) for e in expressions(stmt) if isinstance(e, Name)}
        yield from (waiting.pop(name) for name in list(waiting) if name in read)
        yield stmt
