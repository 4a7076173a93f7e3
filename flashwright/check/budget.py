"""Budgets: shared memory, registers and MMA shapes of the chosen GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flashwright.check.alive import Moment, moments
from flashwright.check.names import Names
from flashwright.gpu import HALF_SWIZZLE, Gpu
from flashwright.lang.diagnostic import Diagnostic, Label
from flashwright.lang.nodes import (
    Compute,
    Copy,
    Name,
    Num,
    Param,
    Reshape,
    Span,
    Transpose,
    Tree,
    expressions,
    statements,
)
from flashwright.program.conversions import converted_tiles
from flashwright.program.program import Buffer, Program
from flashwright.program.vocabulary import DTYPES
from flashwright.semantics.machine import operand_dtypes

KB = 1024


@dataclass(frozen=True)
class Use:
    """The resources of one thread block: bytes of shared memory, registers per thread."""

    shared: int
    registers: int


def use(program: Program, gpu: Gpu) -> Use:
    """Shared memory per block in bytes, and registers per thread (an estimate)."""
    most, _ = _most_live(program, gpu)
    return Use(shared_bytes(program), gpu.registers(most, program.warps))


def shared_bytes(program: Program) -> int:
    """Bytes of shared memory per block."""
    return sum(b.bytes * b.stages for b in _in(program, "shared"))


def in_words(program: Program, gpu: Gpu) -> str:
    """The shared memory and the registers of a checked program in words, beside the limits."""
    need, limit = use(program, gpu), gpu.register_limit(program.warps)
    return (
        f"shared memory {need.shared / KB:g} of {gpu.shared_per_block // KB} KB, "
        f"registers ~{need.registers} of {limit}"
    )


def check_budget(program: Program, gpu: Gpu) -> Iterator[Diagnostic]:
    """Findings about a program that exceeds the GPU's shared memory, registers or MMA shapes."""
    yield from _shared(program, gpu)
    yield from _registers(program, gpu)
    yield from _gemms(program, gpu)


def _in(program: Program, space: str) -> list[Buffer]:
    return [b for b in program.buffers.values() if b.space == space]


def _most_live(program: Program, gpu: Gpu) -> tuple[int, Moment | None]:
    """The most bytes of register tiles that are live together in a block, and where."""
    operands = operand_dtypes(program)
    factor = _rescale_factor(program)
    most, where = 0, None
    apart = set() if gpu.reshape_in_place else _operands_apart(program)
    for moment in moments(program):
        need = factor + sum(register_bytes(program.buffers[key]) for key in moment.tiles)
        stmt = moment.stmt
        if isinstance(stmt, Reshape) and not stmt.target and id(stmt) in apart:
            key = program.tile(stmt.name)
            if key is not None:
                rows, cols = program.buffers[key].shape
                dtype = operands.get(id(stmt), program.buffers[key].dtype)
                need += rows * cols * DTYPES[dtype]
        if need >= most:
            most, where = need, moment
    return most, where


def _operands_apart(program: Program) -> set[int]:
    """The Reshapes whose operand takes registers of its own, since the next iteration's GEMM into
    the tile runs beside the operand's: in all loops but those in which a tile goes to shared
    memory, which wait for each other."""
    found = {id(s) for s in statements(program.tree.body) if isinstance(s, Reshape)}
    passing = converted_tiles(program)
    for loop in program.outer_loops:
        inner = list(statements(loop.body))
        stored = (s for s in inner if isinstance(s, Copy) and s.dest == "shared")
        if any(s.source == "register" and program.source(s) not in passing for s in stored):
            found -= {id(s) for s in inner}
    return found


def _rescale_factor(program: Program) -> int:
    """The bytes of the vector with which a running softmax rescales the accumulators. It is live
    from the Softmax to the GEMM that accumulates."""
    steps = (s for s in statements(program.tree.body) if isinstance(s, Compute) and s.rescale)
    states = [program.tile(step.state[0]) for step in steps if step.state]
    return max((register_bytes(program.buffers[key]) for key in states if key), default=0)


def register_bytes(buffer: Buffer) -> int:
    """The bytes of a register tile over a block; four threads hold each element of a vector."""
    return buffer.bytes * (4 if len(buffer.shape) == 1 else 1)


# --- over the budget --------------------------------------------------------------------------


def _shared(program: Program, gpu: Gpu) -> Iterator[Diagnostic]:
    need = use(program, gpu).shared
    if need <= gpu.shared_per_block:
        return
    largest = sorted(_in(program, "shared"), key=lambda b: -b.bytes * b.stages)
    where = tuple(
        Label(b.declared.span, f"{_kb(b.bytes * b.stages)} KB: {_factors(b)}") for b in largest
    )
    text = (
        f"the block needs {_kb(need)} KB of shared memory, but a block on {gpu.title} has "
        f"{_kb(gpu.shared_per_block)} KB"
    )
    where += _sizes(largest, program)
    hint = _smallest_change(program, gpu)
    yield Diagnostic("FW701", text, _culprit(largest[0], program), secondary=where, help=hint)


def _registers(program: Program, gpu: Gpu) -> Iterator[Diagnostic]:
    limit, need = gpu.register_limit(program.warps), use(program, gpu).registers
    if need <= limit:
        return
    _, moment = _most_live(program, gpu)
    assert moment is not None
    alive = (program.buffers[key] for key in moment.tiles)
    largest = sorted(alive, key=lambda b: (-b.bytes, b.name))
    threads = 32 * program.warps
    where = tuple(
        Label(b.declared.span, f"{b.bytes // (4 * threads)} registers per thread")
        for b in largest
        if len(b.shape) == 2
    )
    together = ", ".join(f"`{b.name}`" for b in largest)
    where += (Label(moment.stmt.span, f"live here: {together}"),)
    text = (
        f"each of the {threads} threads needs about {need} registers, but has {limit} on "
        f"{gpu.title}: {together} are live together on line {moment.stmt.span.line}"
    )
    where += _sizes(largest, program)
    hint = _smallest_change(program, gpu)
    yield Diagnostic("FW702", text, _culprit(largest[0], program), secondary=where, help=hint)


def _kb(size: int) -> str:
    return f"{size / KB:.1f}".removesuffix(".0")


def _factors(buffer: Buffer) -> str:
    shape = " x ".join(map(str, buffer.shape))
    stages = f", {buffer.stages} stages" if buffer.stages > 1 else ""
    return f"`{buffer.name}` {shape} x {DTYPES[buffer.dtype]} bytes{stages}"


def _culprit(buffer: Buffer, program: Program) -> Span:
    """The largest parameter in the largest tile's size is what a person would change first."""
    declared = buffer.declared
    named = {e.id for e in expressions(declared) if isinstance(e, Name)}
    tunable = [
        s
        for s in statements(program.tree.body)
        if isinstance(s, Param) and s.name.id in named and s.name.id in _tunable(program)
    ]
    best = max(tunable, key=lambda p: program.params[p.name.id], default=None)
    return best.span if best else declared.span


def _sizes(buffers: list[Buffer], program: Program) -> tuple[Label, ...]:
    """The parameters that a person could change to make the tiles smaller."""
    named = {e.id for b in buffers for e in expressions(b.declared) if isinstance(e, Name)}
    return tuple(
        Label(s.span, f"{s.name.id} = {program.params[s.name.id]}")
        for s in statements(program.tree.body)
        if isinstance(s, Param) and s.name.id in named and s.name.id in _tunable(program)
    )


def _tunable(program: Program) -> list[str]:
    """Parameters that only decide the schedule: those that no tensor's size depends on."""
    fixed = {
        e.id
        for t in program.tensors.values()
        for a in t.axes
        for e in expressions(a.size)
        if isinstance(e, Name)
    }
    return [n for n, v in program.params.items() if n not in fixed and isinstance(v, int) and v > 1]


def _smallest_change(program: Program, gpu: Gpu) -> str:
    """The one parameter that must change least, relative to its value, for all to fit."""
    options: list[tuple[float, str, int, Use]] = []
    for name in _tunable(program):
        value = int(program.params[name])
        smaller = range(value - 16, 15, -16) if value > 16 else range(value - 1, 0, -1)
        larger = (value * 2, value * 4) if name == "Warps" else ()
        for candidate in (*smaller, *larger):
            changed = _changed(program, name, candidate)
            if changed is not None and _fits(changed, gpu):
                distance = abs(value - candidate) / value
                options.append((distance, name, candidate, use(changed, gpu)))
                break
    if not options:
        return "no change of one parameter fits; lower two parameters"
    _, name, candidate, need = min(options, key=lambda o: o[:3])
    return (
        f"the smallest change that fits: {name} = {candidate} (now {program.params[name]}); it "
        f"needs {_kb(need.shared)} KB of shared memory and about {need.registers} registers"
    )


def _changed(program: Program, name: str, value: int) -> Program | None:
    """The program with one parameter changed, if it still has its shapes right."""
    body = tuple(
        replace(s, value=Num(str(value))) if isinstance(s, Param) and s.name.id == name else s
        for s in program.tree.body
    )
    names = Names(Tree(body))
    return None if names.diagnostics else names.program()


def _fits(program: Program, gpu: Gpu) -> bool:
    need = use(program, gpu)
    return (
        need.shared <= gpu.shared_per_block
        and need.registers <= gpu.register_limit(program.warps)
        and not any(_gemms(program, gpu))
    )


# --- MMA --------------------------------------------------------------------------------------


def _gemms(program: Program, gpu: Gpu) -> Iterator[Diagnostic]:
    for stmt in statements(program.tree.body):
        if isinstance(stmt, Compute) and stmt.operation == "gemm":
            yield from _mma(stmt, program, gpu)


def _mma(stmt: Compute, program: Program, gpu: Gpu) -> Iterator[Diagnostic]:
    names = [a.operand if isinstance(a, Transpose) else a for a in stmt.args]
    keys = [program.tile(n) for n in names if isinstance(n, Name)]
    target = program.tile(stmt.target) if stmt.target else None
    if len(keys) != 2 or keys[1] is None or target is None:
        return
    right, out = program.buffers[keys[1]], program.buffers[target]
    if not gpu.takes(right.dtype):
        text = f"{gpu.title} has no MMA for {right.dtype}"
        hint = f"it supports {', '.join(gpu.mma)}"
        where = (Label(right.declared.span, f"{right.dtype} here"),)
        yield Diagnostic("FW703", text, stmt.span, help=hint, secondary=where)
        return
    depth = right.shape[1] if isinstance(stmt.args[1], Transpose) else right.shape[0]
    m, n = out.shape
    step_m, step_n, step_k = gpu.mma[right.dtype][0]
    along = program.warps
    columns = f"MMA tiles of {step_n} columns"
    less = ""
    if shares := _shares(m, right, program, gpu):
        along, step_n = 4, shares * (16 if isinstance(stmt.args[1], Transpose) else HALF_SWIZZLE)
        columns = f"{shares} warpgroups with the same {m} rows"
        less = f", or set Warps to {m // 16}"
    for size, step, what, reason in (
        (m, step_m * along, "rows", f"{along} warps of {step_m} rows"),
        (n, step_n, "columns", columns),
        (depth, step_k, "summed elements", f"MMA steps of {step_k} elements"),
    ):
        if size % step:
            text = f"{size} {what} are not a multiple of {step}: {reason}"
            text += f" ({gpu.title}, {right.dtype})"
            hint = f"make it a multiple of {step}{less if what == 'columns' else ''}"
            yield Diagnostic("FW704", text, stmt.span, help=hint)


def _shares(rows: int, right: Buffer, program: Program, gpu: Gpu) -> int:
    """The number of warpgroups that share the columns of a product; 0 if they do not."""
    shares = gpu.beside(rows, program.warps)
    return shares if shares > 1 and rows == 64 and DTYPES[right.dtype] == 2 else 0
