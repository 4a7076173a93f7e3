"""What a program uses its tiles and names for."""

from __future__ import annotations

from flashwright.lang import nodes as tl
from flashwright.lang.nodes import Name
from flashwright.program.program import Key, Program


def direct_operands(program: Program) -> dict[Key, str]:
    """The register tiles that a GEMM takes as its left operand without a Reshape: `loaded` where
    they only come from shared memory, as an operand lies, else `computed`."""
    flat = list(tl.statements(program.tree.body))
    reshaped = {program.tile(s.target or s.name) for s in flat if isinstance(s, tl.Reshape)}
    computes = [s for s in flat if isinstance(s, tl.Compute)]
    gemms = [s for s in computes if s.operation == "gemm"]
    left = {program.tile(s.args[0]) for s in gemms if isinstance(s.args[0], Name)} - reshaped
    copied = {program.dest(s) for s in flat if isinstance(s, tl.Copy) and s.source == "global"}
    stored = {program.source(s) for s in flat if isinstance(s, tl.Copy) and s.source == "register"}
    spoken = {
        program.tile(e)
        for s in computes
        if s.operation != "gemm"
        for e in (*tl.expressions(s), *((s.target,) if s.target else ()))
        if isinstance(e, Name)
    }
    spoken |= {program.tile(s.target) for s in gemms if s.target} | copied | stored
    moves = [s for s in flat if isinstance(s, tl.Copy) and s.source == "shared"]
    other = [s for s in moves if not _same_type(program, s)]
    spoken |= {program.dest(s) for s in other}
    return {
        key: "computed" if key in spoken else "loaded"
        for key in left
        if key and key[1] == "register"
    }


def _same_type(program: Program, copy: tl.Copy) -> bool:
    source, dest = (program.buffers.get(k) for k in (program.source(copy), program.dest(copy)))
    return source is None or dest is None or source.dtype == dest.dtype


def only_offsets(program: Program) -> set[str]:
    """The lets that only say where views begin."""
    lets = {s.name.id: s for s in tl.statements(program.tree.body) if isinstance(s, tl.Let)}
    rest = [s for s in tl.statements(program.tree.body) if not isinstance(s, (tl.Let, tl.Allocate))]
    used = {e.id for s in rest for e in tl.expressions(s) if isinstance(e, Name)}
    pending = [n for n in used if n in lets]
    while pending:
        inner = [e.id for e in tl.expressions(lets[pending.pop()].value) if isinstance(e, Name)]
        pending += [n for n in inner if n in lets and n not in used]
        used |= set(inner)
    return set(lets) - used
