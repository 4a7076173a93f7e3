"""The way without TL: the model writes CUDA at once, after thinking step by step.

The kernel is launched as every other: the contract is that of the built-in author's program, less
what only TL needs, and without tensor maps. Then it is screened, compiled and judged like the
others. What the contract keeps is how many queries a block has, because the grid goes by it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.choose import NothingFits
from flashwright.author.llm import extract
from flashwright.check.check import check
from flashwright.generate.by_model.ask import Authors, ask
from flashwright.generate.by_model.kernel import JudgedKernel, attempted, fastest, taken
from flashwright.generate.pipeline import STAGES, Stage
from flashwright.generate.state import Progress, Run
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.parse import parse
from flashwright.program.program import Program
from flashwright.spec import AttentionSpec
from flashwright.untrusted.contract import Contract, contract

# What tiles a program in TL has besides those of queries, and what they are multiplied with.
_OF_TL = re.compile(
    r"(?:constexpr \w+ (?:BN|Warps|Stages|QStages|SinkBlocks|WeightScale) = |using Mma).*\n", re.M
)
_BLOCK = re.compile(r"constexpr int BM = (\d+);\n")


def plan(authors: Authors) -> Sequence[Stage]:
    """The kernel by the model; what comes after it finds it made."""
    title = "Kernel: CUDA straight from the operator"
    asking = Stage("direct", title, partial(work, authors), proves="", lacks="")
    return [asking, *(stage for stage in STAGES if stage.name in ("build", "verdict"))]


def work(authors: Authors, run: Run, progress: Progress) -> Run:
    """Ask for the kernel, until one compiles and is right."""
    program = _program(run.spec, run.gpu)
    agreed = without_tl(contract(program, run.gpu, "plain"))
    attempt = partial(attempted, run, program, agreed=agreed)
    told = {"header": agreed.header, "notes": agreed.notes}
    done: JudgedKernel | None
    choose = partial(fastest, authors.stopwatch)
    run, done = ask(authors, run, "direct", extract.cuda, attempt, progress, choose, **told)
    return run if done is None else taken(run, done)


def _program(spec: AttentionSpec, gpu: Gpu) -> Program:
    """The built-in author's, for its tensors and its grid."""
    try:
        code = write_code(write_sketch(spec), spec, gpu).code
    except NothingFits as error:
        raise Failed(Diagnostic("FW905", str(error))) from None
    program = check(parse(code), gpu).program
    assert program is not None, "the built-in author's code passes"
    return program


def without_tl(agreed: Contract) -> Contract:
    """The contract for one who knows of no TL."""
    header = _OF_TL.sub("", agreed.header)
    header = _BLOCK.sub(partial(_block, agreed), header)
    threads = f"constexpr int Threads = {agreed.plan.threads};"
    header = re.sub(r"constexpr int Threads = .*", threads, header)
    header = re.sub(r"constexpr int SharedBytes = .*", "constexpr int SharedBytes = 0;", header)
    header = re.sub(r"__launch_bounds__\(Threads, \d+\)", "__launch_bounds__(Threads)", header)
    return replace(agreed, header=header, notes=agreed.notes.replace(", Warps", ""))


def _block(agreed: Contract, found: re.Match[str]) -> str:
    """The queries of a block, where the grid goes by them."""
    if not any(int(found[1]) in count for count in agreed.plan.grid):
        return ""
    return f"constexpr int BM = {found[1]};  // queries of a block: the grid goes by them\n"
