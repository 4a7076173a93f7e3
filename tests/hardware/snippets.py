"""All snippets."""

from __future__ import annotations

import functools
import itertools
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.hardware import barriers, convert, floats, integers, matrix, memory, tma, warp, wgmma
from tests.hardware.snippet import Prepared, Snippet, module, prepare

FAMILIES = (
    *(integers.arithmetic, integers.bits, integers.words, integers.moves, integers.comparisons),
    *(integers.specials, floats.singles, floats.doubles, floats.halves, floats.approximations),
    *(floats.compared, convert.integers, convert.between, convert.floats, convert.reductions),
    *(
        warp.shuffles,
        warp.votes,
        warp.matches,
        memory.globals_,
        memory.shared,
        memory.outputs,
        memory.copies,
    ),
    *(
        memory.matrices,
        barriers.phases,
        barriers.arrivals,
        barriers.tokens,
        barriers.bulk,
        barriers.named,
        matrix.mmas,
    ),
    *(wgmma.wgmmas, tma.loads, tma.stores),
)


@functools.cache
def snippets() -> tuple[Snippet, ...]:
    """Every snippet, each name once."""
    found = tuple(itertools.chain.from_iterable(family() for family in FAMILIES))
    entries = [s.entry for s in found]
    assert len(set(entries)) == len(entries), {e for e in entries if entries.count(e) > 1}
    return found


@functools.cache
def prepared() -> tuple[Prepared, ...]:
    """All of them with their operands."""
    return tuple(prepare(snippet) for snippet in snippets())


def covered() -> set[str]:
    """The spellings of the instructions that some snippet is about."""
    found = set()
    for snippet in snippets():
        for line in snippet.body.split("\n"):
            words = [word for word in line.split() if not word.startswith("@")]
            if words and not words[0].endswith(":"):
                found.add(words[0].rstrip(";"))
    return found


def modules(many: Sequence[Prepared]) -> dict[tuple[str, str], list[Prepared]]:
    """By architecture and version of PTX."""
    found: dict[tuple[str, str], list[Prepared]] = {}
    for one in many:
        found.setdefault((one.snippet.arch, one.snippet.version), []).append(one)
    return found


def assemble(ptxas: Path, arch: str, version: str, many: Sequence[Prepared]) -> str:
    """What ptxas has to say against a module of these; nothing, where all is well."""
    with tempfile.TemporaryDirectory() as place:
        source = Path(place, "snippets.ptx")
        source.write_text(module(arch, version, [one.kernel for one in many]))
        # For the GPU that records: PTX of an older architecture is taken by it too.
        real = "sm_90a" if arch == "sm_90a" else "sm_90"
        command = [str(ptxas), f"-arch={real}", "-O1", str(source), "-o", str(source) + ".cubin"]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stderr if done.returncode else ""
