"""A checked program to a compiled kernel: translate, compile, retry with fewer registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from flashwright.build import blame
from flashwright.build.compile import Built, build
from flashwright.build.steps import Steps
from flashwright.build.toolchain import Toolchain, has_nvcc
from flashwright.check.check import checked_program
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.lower.report import SPARING
from flashwright.lower.translate import Translation, translate
from flashwright.program.kernels import Kernels
from flashwright.program.program import Program

ADVICE = "smaller tiles or more warps leave more registers"


@dataclass(frozen=True)
class _Attempt:
    """A translation and its build."""

    made: Translation
    built: Built

    @property
    def bounds(self) -> str:
        """The register limit in words, if our `__launch_bounds__` sets one."""
        report = self.made.report
        if report is None or report.dealt:
            return ""
        sparing = "sparing, " if report.sparing else ""
        blocks = "1 block" if report.blocks == 1 else f"{report.blocks} blocks"
        return f"{sparing}{blocks} an SM, at most {report.registers} registers"


def make(
    program: Program,
    gpu: Gpu,
    *,
    first: Translation | None = None,
    real: str | None = None,
    tl: str = "",
    toolchain: Toolchain | None = None,
    allow_spills: int = 0,
) -> tuple[Translation, Built]:
    """The fastest translation that compiles without spills. Raises Failed with FW823 if all spill.

    Only ptxas knows how many registers a kernel needs. If the fast translation spills, fewer blocks
    per SM leave it more registers; the sparing translation, which needs fewer, comes last.
    `allow_spills` accepts the translation that spills least, up to that many bytes. `first` is the
    fast translation, if the caller has it already.
    """
    tried: list[_Attempt] = []
    for made in _translations(program, gpu, first or translate(program, gpu)):
        arch = made.plan.arch
        how = partial(build, made.source, arch, real=real, map=made.map, tl=tl)
        built = how(toolchain=toolchain, may_spill=True)
        if not built.spills:
            return _noted(made, tried), built
        tried.append(_Attempt(made, built))
    least = min(tried, key=lambda one: one.built.spills)
    if least.built.spills > allow_spills:
        raise Failed(_refused(least, tried))
    text = f"{least.built.spills} bytes spill, and {allow_spills} are allowed (--allow-spills)"
    if least.made.report is not None:
        least.made.report.remark(SPARING, text, None, ADVICE)
    return least.made, replace(least.built, allowed_spills=allow_spills)


def _translations(program: Program, gpu: Gpu, first: Translation) -> Iterator[Translation]:
    """From the fastest translation to the one with fewest registers, made on demand."""
    yield first
    blocks = first.report.blocks if first.report else 1
    sparing = first.report is not None and first.report.sparing
    for fewer in range(blocks - 1, 0, -1):
        yield translate(program, gpu, sparing, blocks=fewer)
    if not sparing:
        yield translate(program, gpu, sparing=True)
        if blocks > 1:
            yield translate(program, gpu, sparing=True, blocks=1)


def _noted(made: Translation, tried: list[_Attempt]) -> Translation:
    """The translation with remarks on the faster ones that spilled."""
    if tried and made.report is not None:
        kind = "the sparing translation" if made.report.sparing else "the fast translation"
        blocks = made.report.blocks
        room = f" with {blocks} block{'s' * (blocks > 1)} an SM" if not made.report.dealt else ""
        text = f"{kind}{room} is taken: otherwise {_found(tried[0]).message}"
        made.report.remark(SPARING, text, None, ADVICE)
    return made


def _found(one: _Attempt) -> Diagnostic:
    """FW823 with the register limit."""
    found = blame.spills(one.built.spill_stores, one.built.spill_loads, one.built.registers)
    return replace(found, message=found.message + (f" ({one.bounds})" if one.bounds else ""))


def _refused(least: _Attempt, tried: list[_Attempt]) -> Diagnostic:
    """FW823 for the attempt that spills least, with the spills of the others."""
    others = [one for one in tried if one is not least and one.bounds]
    more = "; ".join(f"{one.bounds}: {one.built.spills} bytes" for one in others)
    found = _found(least)
    text = found.message + (f". Tried as well: {more}" if more else "")
    hint = f"{found.help}; --allow-spills {least.built.spills} takes it as it is"
    return replace(found, message=text, help=hint)


def spilled(kernels: Kernels, gpu: Gpu) -> Failed | None:
    """Why the kernels of a program do not compile well: all their translations spill, or ptxas
    serializes wgmma (FW823, FW824). None if they do, or without a compiler. A build finds them in
    the cache. Raises Failed for other errors."""
    if not has_nvcc():
        return None
    named = step_programs(kernels, gpu) if len(kernels.programs) > 1 else {}
    try:
        for text, program in named.values() or ((format_tree(p.tree), p) for p in kernels.programs):
            make(program, gpu, tl=text)
    except Failed as failed:
        if any(d.code not in ("FW823", "FW824") for d in failed.diagnostics):
            raise
        return failed
    return None


def step_programs(kernels: Kernels, gpu: Gpu) -> dict[str, tuple[str, Program]]:
    """Each kernel as a program of its own, by the name of its subfolder: its text, and checked."""
    found = {}
    for name, program in zip(Steps.of(kernels).steps, kernels.programs, strict=True):
        text = format_tree(program.tree)
        found[name] = text, checked_program(parse(text), gpu, part=True)
    return found
