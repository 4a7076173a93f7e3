"""The way without TL: the model writes CUDA directly, after thinking step by step.

The kernel has the contract of the built-in author's program, without tensor maps and the parts that
only TL needs. The contract keeps the number of queries per block, which the grid depends on. The
kernel is screened, compiled and judged like the others.
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

# The constants of a TL program's tiles, except that of the queries, and its MMA.
_OF_TL = re.compile(
    r"(?:constexpr \w+ (?:BN|Warps|Stages|QStages|SinkBlocks|WeightScale) = |using Mma).*\n", re.M
)
_BLOCK = re.compile(r"constexpr int BM = (\d+);\n")


def plan(authors: Authors) -> Sequence[Stage]:
    """The stages of a run: the model writes the kernel, then it is built and judged."""
    title = "Kernel: CUDA straight from the operator"
    asking = Stage("direct", title, partial(work, authors), proves="", lacks="")
    return [asking, *(stage for stage in STAGES if stage.name in ("build", "verdict"))]


def work(authors: Authors, run: Run, progress: Progress) -> Run:
    """Ask the model for the kernel until one compiles and is right."""
    program = _program(run.spec, run.gpu)
    agreed = without_tl(contract(program, run.gpu, "plain"))
    attempt = partial(attempted, run, program, agreed=agreed)
    fields = {"header": agreed.header, "notes": agreed.notes}
    done: JudgedKernel | None
    choose = partial(fastest, authors.stopwatch)
    run, done = ask(authors, run, "direct", extract.cuda, attempt, progress, choose, **fields)
    return run if done is None else taken(run, done)


def _program(spec: AttentionSpec, gpu: Gpu) -> Program:
    """The built-in author's program, for its tensors and its grid. Raises Failed."""
    try:
        code = write_code(write_sketch(spec), spec, gpu).code
    except NothingFits as error:
        raise Failed(Diagnostic("FW905", str(error))) from None
    program = check(parse(code), gpu).program
    assert program is not None, "the built-in author's code passes"
    return program


def without_tl(agreed: Contract) -> Contract:
    """The contract without the constants that only TL needs."""
    header = _OF_TL.sub("", agreed.header)
    header = _BLOCK.sub(partial(_block, agreed), header)
    threads = f"constexpr int Threads = {agreed.plan.threads};"
    header = re.sub(r"constexpr int Threads = .*", threads, header)
    header = re.sub(r"constexpr int SharedBytes = .*", "constexpr int SharedBytes = 0;", header)
    header = re.sub(r"__launch_bounds__\(Threads, \d+\)", "__launch_bounds__(Threads)", header)
    return replace(agreed, header=header, notes=agreed.notes.replace(", Warps", ""))


def _block(agreed: Contract, found: re.Match[str]) -> str:
    """The constant of queries per block, if the grid depends on it; else nothing."""
    if not any(int(found[1]) in count for count in agreed.plan.grid):
        return ""
    return f"constexpr int BM = {found[1]};  // queries of a block: the grid goes by them\n"
