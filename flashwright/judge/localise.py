"""Finds the first wrong statement of a wrong program, with its tile, expected and found values.

The thread block that stored the first wrong element runs once more. A Watch (watch.py) compares its
tiles after every statement and names the first one that is wrong. It knows the tiles of attention,
not those of gradients: of a backward pass, and of any program with several kernels, only the wrong
output and the kernels that lead to it are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from flashwright.judge import oracle
from flashwright.judge.truth import Truth
from flashwright.judge.watch import Watch, WrongStatement, problem
from flashwright.lang.diagnostic import Diagnostic, Label
from flashwright.lang.nodes import Copy, Statement, statements
from flashwright.program.kernels import Kernels
from flashwright.program.program import Program, Tensor
from flashwright.semantics.interpret import interpret
from flashwright.semantics.machine import Machine
from flashwright.spec import AttentionSpec

Array = NDArray[Any]


def localise(
    program: Program,
    tensor: Tensor,
    result: oracle.Comparison,
    arrays: Mapping[str, Array],
    dims: Mapping[str, int],
    truth: tuple[AttentionSpec, Mapping[str, Array]] | None,
) -> tuple[Diagnostic, ...]:
    """The finding for a wrong output. Without `truth` (a user's reference) it is at the store."""
    miss = result.first or result.worst
    index = miss.index if miss else (0,) * len(tensor.axes)
    block, store = _block_of(program, tensor, index, arrays, dims)
    last = _whole_output(program, tensor, result, store, block, dims)
    if truth is None or block is None or not result.bad:
        return (last,)
    watch = Watch(program, Truth(*truth, dims), block)
    try:
        interpret(program, arrays, dims, observe=watch.after, blocks=lambda b: b == block)
    except WrongStatement as found:
        return (found.diagnostic,)
    return (watch.suspect.diagnostic if watch.suspect is not None else last,)


def _block_of(
    program: Program,
    tensor: Tensor,
    index: tuple[int, ...],
    arrays: Mapping[str, Array],
    dims: Mapping[str, int],
) -> tuple[dict[str, int] | None, Copy | None]:
    """The thread block that stores one element, and the Copy that stores it."""
    names = [a.name.id for a in program.grid.axes]
    hit: list[tuple[dict[str, int], Copy]] = []

    def after(stmt: Statement, machine: Machine) -> None:
        if isinstance(stmt, Copy) and machine.stores and machine.stores[-1][2] is stmt:
            name, region, _ = machine.stores[-1]
            inside = any(
                all(s <= i < s + n for (s, n), i in zip(part, index, strict=False))
                for part in machine.last_stored
            )
            if name == tensor.name and inside and len(region) == len(index):
                hit.append(({n: int(machine.env[n]) for n in names}, stmt))

    interpret(program, arrays, dims, observe=after)
    return hit[-1] if hit else (None, None)


def blame_kernel(
    kernels: Kernels, tensor: Tensor, result: oracle.Comparison, dims: Mapping[str, int]
) -> Diagnostic:
    """The finding for a wrong output of several kernels: at the Copy that stores it. What its
    kernel reads from earlier ones may be wrong already; their Copies are the secondary places."""
    number, store = _store(kernels, tensor.name, len(kernels.programs))
    labels: dict[str, Label] = {}
    waiting = [number]
    while waiting:
        reader = waiting.pop()
        for read in kernels.programs[reader - 1].inputs:
            maker, earlier = _store(kernels, read.name, reader - 1)
            if earlier is not None and read.name not in labels:
                text = f"kernel {reader} reads `{read.name}`, which kernel {maker} stores here"
                labels[read.name] = Label(earlier.span, text)
                waiting.append(maker)
    return Diagnostic(
        "FW805" if result.nonfinite else "FW801",
        f"`{tensor.name}` is wrong: {result.reason}",
        store.span if store else tensor.declared.span,
        label=f"kernel {number} of {len(kernels.programs)} stores it; {problem({}, dims)}",
        secondary=tuple(labels.values()),
    )


def _store(kernels: Kernels, name: str, last: int) -> tuple[int, Copy | None]:
    """The number of the last kernel up to `last` that stores a tensor, and the Copy that does."""
    for number in range(last, 0, -1):
        program = kernels.programs[number - 1]
        for stmt in statements(program.tree.body):
            if isinstance(stmt, Copy) and program.dest(stmt) == (name, "global"):
                return number, stmt
    return last, None


def _whole_output(
    program: Program,
    tensor: Tensor,
    result: oracle.Comparison,
    store: Copy | None,
    block: dict[str, int] | None,
    dims: Mapping[str, int],
) -> Diagnostic:
    code = "FW805" if result.nonfinite else "FW801"
    miss = result.first
    text = f"`{tensor.name}` is wrong: {result.reason}"
    where = ""
    if miss is not None:
        labels = ", ".join(f"{a.label} {i}" for a, i in zip(tensor.axes, miss.index, strict=False))
        text = (
            f"`{tensor.name}` is wrong at {labels}: {miss.found:.6g} found, "
            f"{miss.expected:.6g} expected ({result.bad} of {result.size} elements are wrong)"
        )
    if block is not None:
        where = problem(block, dims)
    return Diagnostic(code, text, store.span if store else tensor.declared.span, label=where)
