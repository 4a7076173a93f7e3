"""Programs for sequences of any lengths: the author's, rewritten, with the first sizes whose
kernels do not spill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashwright.author.builtin.author import Written, write_code
from flashwright.author.builtin.choose import HEADROOMS, NothingFits
from flashwright.author.builtin.mods import Mods
from flashwright.author.builtin.splits import rows_for
from flashwright.build.make import spilled
from flashwright.check.check import check
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Failed
from flashwright.lang.nodes import Tree
from flashwright.lang.parse import parse
from flashwright.program.kernels import Kernels
from flashwright.rewrite.sequenced import sequenced
from flashwright.spec import AttentionSpec, Batch

_USUAL_KEYS = 2048
"""Of a sequence: the tiling is the best one for so many. For longer ones it costs little."""
_STEP = 64
"""Keys of a step, where queries are few."""


def batch_of_few(queries: int, group: int, v_dim: int, page: int | None = None) -> Batch:
    """The sequences of the kernel that serves so many queries a sequence: as many as fill its
    tiles, of keys in a cache or in pages."""
    most = max(1, rows_for(queries * group, v_dim) // group)
    return Batch(queries=False, lengths=True, page=page, decode=most)


@dataclass(frozen=True)
class Rewritten:
    """A program for sequences of any lengths, and the one it is made of."""

    rectangular: Written
    """The author's, for rectangular batches, with one tiling."""
    tree: Tree


def rewritten(
    sketch: str,
    spec: AttentionSpec,
    gpu: Gpu,
    mods: Mods | None = None,
    headrooms: Sequence[int | None] = HEADROOMS,
    may_spill: bool = False,
) -> Rewritten:
    """The author's program for a spec's sequences: the first whose kernels do not spill, with more
    and more registers left free; without a compiler the first. Raises NothingFits if no tiling
    fits the GPU, Failed if it cannot be rewritten."""
    why: Failed | None = None
    for headroom in headrooms:
        try:
            whole = rectangular(sketch, spec, gpu, mods, headroom)
        except NothingFits:
            if why is None:
                raise
            break
        made = Rewritten(whole, sequenced(parse(whole.code), spec))
        verdict = check(made.tree, gpu)
        if verdict.errors:
            raise Failed(*verdict.errors)
        why = None if may_spill else spilled(Kernels(verdict.kernels), gpu)
        if why is None:
            return made
    assert why is not None
    raise why


def rectangular(
    sketch: str,
    spec: AttentionSpec,
    gpu: Gpu,
    mods: Mods | None = None,
    headroom: int | None = None,
) -> Written:
    """The author's program for rectangular batches, with one tiling: `sequenced` makes of it what
    the spec asks for. Raises NothingFits."""
    few = None
    if spec.decode is not None:
        behind = 2 * _STEP
        if not gpu.tma and spec.page is not None and spec.page % _STEP == 0:
            behind = spec.page  # one of whole steps is one place for threads that copy
        behind = _STEP if mods is not None else behind  # a mask's own reads take registers
        few = rows_for(spec.decode * spec.group, spec.value_dim), behind
    return write_code(sketch, spec.each, gpu, mods, headroom, few, _USUAL_KEYS)
