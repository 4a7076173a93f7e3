"""Sizes for a derived backward pass: the first whose kernels do not spill."""

from __future__ import annotations

from collections.abc import Callable

from flashwright.author.builtin.backward import BackwardTiling, tilings
from flashwright.build.make import spilled
from flashwright.check.check import check
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Failed
from flashwright.lang.nodes import Tree
from flashwright.program.kernels import Kernels


def sized(
    tree: Tree, gpu: Gpu, rewrite: Callable[[Tree], Tree] = lambda tree: tree
) -> tuple[BackwardTiling, Tree]:
    """A tiling and the backward pass with it, rewritten: the first whose kernels do not spill, or
    without a compiler the first that fits. Raises Failed if none does.

    The kernels are compiled for this; a build finds them in the cache.
    """
    why: Failed | None = None
    for tiling, made in tilings(tree, gpu):
        final = rewrite(made)
        why = spilled(Kernels(check(final, gpu).kernels), gpu)
        if why is None:
            return tiling, final
    assert why is not None
    raise why
