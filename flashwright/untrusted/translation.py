"""A translation that a model wrote: read, held to its contract, compiled, and packed like ours.

    screen -> bound -> build(untrusted) -> what the PTX says -> the files of a package

The compiler of such code reads its headers and nothing else. Where the system cannot see to that
(no Landlock), nothing is compiled unless FLASHWRIGHT_UNCONFINED=1 says so.

Whatever is wrong is told in the lines of kernel.cu: `for_model(diagnostics, source)` shows them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flashwright import spec as specs
from flashwright.build import package
from flashwright.build.compile import Built, build
from flashwright.build.process import need_confinement
from flashwright.build.toolchain import Toolchain
from flashwright.gpu import Gpu
from flashwright.lang.format import format_tree
from flashwright.lang.nodes import For, Grid, If, statements
from flashwright.lower.launch_plan import LaunchPlan
from flashwright.lower.translate import Translation
from flashwright.program.program import Program
from flashwright.spec import AttentionSpec
from flashwright.untrusted.comments import commented
from flashwright.untrusted.contract import Contract, Flavour, bound, contract
from flashwright.untrusted.contract_check import broken
from flashwright.untrusted.screen import screen

_ALIGNMENTS = (8, 64, 128)  # of the struct: without tensor maps, and with them by the CUDA version
_MAP, _POINTER, _STRIDE, _DIM = 128, 8, 8, 4  # bytes (lower/launch_plan.py)


@dataclass(frozen=True)
class TranslationByModel:
    """A kernel.cu that keeps its contract and compiles."""

    translation: Translation
    """As the translator's own: source, map and launch plan."""
    built: Built
    files: dict[str, str | bytes]
    """Of the package, by name, in the order in which they are written."""


def translated_by_model(
    program: Program,
    gpu: Gpu,
    spec: AttentionSpec,
    source: str,
    *,
    tl: str = "",
    flavour: Flavour = "full",
    agreed: Contract | None = None,
    toolchain: Toolchain | None = None,
) -> TranslationByModel:
    """Take what a model wrote for a program; Failed says what is wrong with it, and where.

    `tl` is the text that the model was given; with a contract `agreed` with one who was given none,
    there is none in the package. FW827 and FW828 are about the text, FW822 to FW825 about what nvcc
    says; codes.MACHINE are the machine's trouble, not the model's.
    """
    screen(source)
    need_confinement()
    text = tl if tl or agreed else format_tree(program.tree)
    lines = _lines(program) if text else {}
    agreed = agreed or contract(program, gpu, flavour)
    plan = bound(agreed, source)
    built = build(source, plan.arch, toolchain=toolchain, untrusted=True)
    _compare(built, plan, agreed)
    made = Translation(source, commented(source, lines), plan)
    return TranslationByModel(made, built, _files(made, built, gpu, spec, text))


def _files(
    made: Translation, built: Built, gpu: Gpu, spec: AttentionSpec, tl: str
) -> dict[str, str | bytes]:
    files: dict[str, str | bytes] = {"code.tl": tl} if tl else {}
    files["spec.toml"] = specs.dump(spec)
    files |= {**package.translated(made), **package.compiled(built)}
    return {**files, package.RECORD: package.record(built, gpu, files)}


def _lines(program: Program) -> dict[int, int]:
    """First and last line of each statement; of a block only the line that opens it."""
    found = {}
    for stmt in statements(program.tree.body):
        whole = not isinstance(stmt, For | If | Grid)
        found[stmt.span.line] = stmt.span.end_line if whole else stmt.span.line
    return found


# --- what the compiler made of it -------------------------------------------------------------


def _compare(built: Built, plan: LaunchPlan, agreed: Contract) -> None:
    """Macros can make a text mean something else than it says: the PTX is what will run."""
    head = re.search(rf"\.visible \.entry {plan.entry}\((.*?)\)(.*?)\{{", built.ptx, re.DOTALL)
    if head is None:
        raise broken(f"the compiled code has no kernel `{plan.entry}`")
    taken = re.findall(r"\.param [^\n]*?\[(\d+)\]", head[1])
    size = _size(plan)
    if len(taken) != 1 or int(taken[0]) not in {-(-size // a) * a for a in _ALIGNMENTS}:
        found = " and ".join(taken) or "no"
        raise broken(f"the compiled kernel takes {found} bytes, and the caller passes {size}")
    bounds = re.search(r"\.maxntid (\d+)(?:, (\d+))?(?:, (\d+))?", head[2])
    most = int(bounds[1]) * int(bounds[2] or 1) * int(bounds[3] or 1) if bounds else None
    if most is not None and most < plan.threads:
        text = f"the kernel is compiled for {most} threads a block"
        raise broken(f"{text}, and Threads is {plan.threads}", hint="__launch_bounds__(Threads)")
    total = plan.shared + built.shared
    if total > agreed.gpu.shared_per_block:
        text = f"{built.shared} bytes of static and {plan.shared} of dynamic shared memory"
        raise broken(f"{text} are more than the {agreed.gpu.shared_per_block} of a block")


def _size(plan: LaunchPlan) -> int:
    """Bytes of the struct, as the launch plan tells them."""
    tensors = sum(_POINTER + _STRIDE * len(tensor.axes) for tensor in plan.tensors)
    return _MAP * len(plan.maps) + tensors + _DIM * len(plan.dims)
