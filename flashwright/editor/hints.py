"""What an editor shows inside the lines: shared memory, registers, values of params."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashwright.check.budget import KB, in_words, register_bytes, shared_bytes
from flashwright.check.names import Names
from flashwright.editor.analysis import Analysis, Known
from flashwright.gpu import Gpu
from flashwright.lang.nodes import Allocate, Num, Param, Span
from flashwright.program.program import Buffer


@dataclass(frozen=True)
class Hint:
    """A note at the end of a statement, on a line of the text (from 1)."""

    line: int
    text: str


def hints(analysis: Analysis, text: str, gpu: Gpu | None) -> list[Hint]:
    """The hints of a text. Those of an earlier text are shown on the lines that are still there."""
    known = analysis.known
    if known is None:
        return []
    now = {old: new for new, old in known.lines(text).items()}
    made = dict.fromkeys((span.end_line, note) for span, note in _notes(known, gpu))
    return [Hint(now[line], note) for line, note in made if line in now]


def _notes(known: Known, gpu: Gpu | None) -> Iterator[tuple[Span, str]]:
    for kernel in known.kernels:
        for stmt in kernel.tree.body:
            if isinstance(stmt, Param) and not isinstance(stmt.value, Num):
                yield stmt.span, f"= {float(kernel.params[stmt.name.id]):g}"
        for buffer in kernel.buffers.values():
            yield buffer.declared.span, _size(buffer, kernel)
    for program in known.programs if known.sound else ():
        total = f"shared memory {shared_bytes(program) / KB:g} KB"
        if gpu is not None:
            total = f"{in_words(program, gpu)} on {gpu.title}"
        yield program.grid.span, total


def _size(buffer: Buffer, kernel: Names) -> str:
    """The shared memory of a tile, or its registers; with its name where a Copy declares it."""
    name = "" if isinstance(buffer.declared, Allocate) else f"{buffer.name}: "
    if buffer.space == "register":
        threads = 32 * int(kernel.params.get("Warps", 4))
        each = max(1, register_bytes(buffer) // (4 * threads))
        return f"{name}{each} register{'s' * (each > 1)} per thread"
    stages = f"{buffer.stages} x " if buffer.stages > 1 else ""
    return f"{name}{stages}{buffer.bytes / KB:g} KB"
