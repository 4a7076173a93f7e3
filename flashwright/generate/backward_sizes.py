"""Sizes for a derived backward pass: the first whose kernels do not spill."""

from __future__ import annotations

from flashwright.author.builtin.backward import BackwardTiling, tilings
from flashwright.build import toolchain
from flashwright.build.make import make, step_programs
from flashwright.check.check import check
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Failed
from flashwright.lang.nodes import Tree
from flashwright.program.kernels import Kernels


def sized(tree: Tree, gpu: Gpu) -> tuple[BackwardTiling, Tree]:
    """A tiling and the backward pass with it: the first whose kernels do not spill, or without a
    compiler the first that fits. Raises Failed if none does.

    The kernels are compiled for this; a build finds them in the cache.
    """
    spilled: Failed | None = None
    for tiling, made in tilings(tree, gpu):
        if not toolchain.has_nvcc():
            return tiling, made
        try:
            for text, program in step_programs(Kernels(check(made, gpu).kernels), gpu).values():
                make(program, gpu, tl=text)
        except Failed as failed:
            if any(d.code not in ("FW823", "FW824") for d in failed.diagnostics):
                raise
            spilled = failed
            continue
        return tiling, made
    assert spilled is not None
    raise spilled
