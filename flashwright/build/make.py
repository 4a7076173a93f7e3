"""A checked program to a compiled kernel: translate, compile, and spare registers if need be."""

from __future__ import annotations

from flashwright.build.compile import Built, build
from flashwright.build.toolchain import Toolchain
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Failed
from flashwright.lower.report import SPARING
from flashwright.lower.translate import Translation, translate
from flashwright.program.program import Program


def make(
    program: Program,
    gpu: Gpu,
    *,
    first: Translation | None = None,
    real: str | None = None,
    tl: str = "",
    toolchain: Toolchain | None = None,
) -> tuple[Translation, Built]:
    """The fast translation; where ptxas spills with it, the one that needs fewer registers.

    `first` is the fast one, where it has been made already. How many registers a kernel takes only
    ptxas knows, and at the edge it depends on trifles.
    """

    def compiled(made: Translation) -> tuple[Translation, Built]:
        arch = made.plan.arch
        return made, build(made.source, arch, real=real, map=made.map, tl=tl, toolchain=toolchain)

    try:
        return compiled(first or translate(program, gpu))
    except Failed as failed:
        if any(d.code != "FW823" for d in failed.diagnostics):
            raise
        why = failed.diagnostics[0].message
    made = translate(program, gpu, sparing=True)
    if made.report is not None:
        text = f"the sparing translation is taken: with the other one {why}"
        help = "smaller tiles or more warps leave more registers"
        made.report.remark(SPARING, text, None, help)
    return compiled(made)
