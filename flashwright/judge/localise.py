"""Finds the first wrong statement of a wrong program, with its tile, expected and found values.

The thread block that stored the first wrong element runs once more. A Watch (watch.py) compares its
tiles after every statement and names the first one that is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from flashwright.judge import oracle
from flashwright.judge.truth import Truth
from flashwright.judge.watch import Watch, WrongStatement, problem
from flashwright.lang.diagnostic import Diagnostic
from flashwright.lang.nodes import Copy, Statement
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
            inside = all(s <= i < s + n for (s, n), i in zip(region, index, strict=False))
            if name == tensor.name and inside and len(region) == len(index):
                hit.append(({n: int(machine.env[n]) for n in names}, stmt))

    interpret(program, arrays, dims, observe=after)
    return hit[-1] if hit else (None, None)


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
