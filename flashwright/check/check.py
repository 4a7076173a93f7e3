"""The checker: tree in, program or diagnostics out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flashwright.check.between import (
    check_between,
    check_fragments,
    check_in_place,
    check_shared,
    check_turns,
)
from flashwright.check.names import Names
from flashwright.check.operations import check_operations
from flashwright.check.spaces import check_copies, check_operands
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.nodes import Tree
from flashwright.program.kernels import split_kernels
from flashwright.program.program import Program


@dataclass(frozen=True)
class Checked:
    """The result of a check: level, findings, and the program if it is code without errors."""

    level: Literal["sketch", "code"]
    diagnostics: tuple[Diagnostic, ...]
    kernels: tuple[Program, ...] = ()

    @property
    def program(self) -> Program | None:
        """The program, if it has one kernel."""
        return self.kernels[0] if len(self.kernels) == 1 else None

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """The findings that are errors."""
        return tuple(d for d in self.diagnostics if d.severity == "error")

    @property
    def ok(self) -> bool:
        """Whether there are no errors; warnings and notes are allowed."""
        return not self.errors


def check(
    tree: Tree,
    gpu: Gpu | None = None,
    dims: Mapping[str, int] | None = None,
    part: bool = False,
) -> Checked:
    """Check a sketch or code, and with a GPU also its budgets and instructions. `dims` are the
    sizes that a spec gives to the program's own dims. A `part` is one kernel of a program that was
    checked as a whole."""
    found = _words(tree, gpu)
    if tree.level == "sketch":
        from flashwright.check.sketch import check_sketch

        return _verdict("sketch", [*found, *check_sketch(tree)])
    parts = split_kernels(tree)
    if len(parts) == 1:
        one = _kernel(tree, gpu, dims or {}, found)
        shown = [] if part else [*_outside(one.kernels)]
        return _verdict("code", [*one.diagnostics, *shown], one.kernels) if shown else one
    found += check_shared(tree, parts)
    checked = [_kernel(part, gpu, dims or {}, _words(part, gpu)) for part in parts]
    found += [d for one in checked for d in one.diagnostics]
    programs = tuple(p for one in checked for p in one.kernels)
    if len(programs) == len(parts):
        found += [*check_between(programs), *_outside(programs)]
    return _verdict("code", found, programs)


def _words(tree: Tree, gpu: Gpu | None) -> list[Diagnostic]:
    """Findings about statements by themselves: their operations, operands and spaces."""
    return [*check_operations(tree), *check_copies(tree, gpu)]


def _outside(programs: Sequence[Program]) -> Iterator[Diagnostic]:
    """Findings about tensors as the caller, or another kernel, has them."""
    yield from check_fragments(programs)
    yield from check_in_place(programs)
    yield from check_turns(programs)


def _kernel(
    tree: Tree, gpu: Gpu | None, dims: Mapping[str, int], found: list[Diagnostic]
) -> Checked:
    """Check one kernel as code, after what was found already."""
    from flashwright.check.shapes import check_shapes

    names = Names(tree)
    found += [*names.diagnostics, *check_operands(names)]
    known = len(names.diagnostics)
    if names.sized:
        found += list(check_shapes(names))
    found += names.diagnostics[known:]
    program = names.program()
    if any(d.severity == "error" for d in found) or program is None:
        from flashwright.check.fragment import check_fragment

        return _verdict("code", [*found, *check_fragment(names)])
    return _check_flow_and_budget(program, gpu, dims, found)


def _check_flow_and_budget(
    program: Program, gpu: Gpu | None, dims: Mapping[str, int], found: list[Diagnostic]
) -> Checked:
    """Run the checks that need correct names and shapes: data flow and budgets."""
    from flashwright.check.budget import check_budget
    from flashwright.check.flow import check_flow

    found += check_flow(program, dims)
    if gpu is not None:
        found += check_budget(program, gpu)
    return _verdict("code", found, (program,))


def over_budget(tree: Tree, gpu: Gpu) -> tuple[Diagnostic, ...]:
    """The errors of the budgets alone, of code that is right otherwise; faster than a check."""
    from flashwright.check.budget import check_budget

    programs = (Names(part).program() for part in split_kernels(tree))
    found = (d for p in programs if p is not None for d in check_budget(p, gpu))
    return tuple(d for d in found if d.severity == "error")


def _verdict(
    level: Literal["sketch", "code"], found: list[Diagnostic], kernels: tuple[Program, ...] = ()
) -> Checked:
    """Errors first, each place and code once, in the order of the program."""
    unique = {(d.code, d.span, d.message): d for d in found}
    ordered = sorted(
        unique.values(), key=lambda d: (d.severity != "error", d.span.start if d.span else 0)
    )
    wrong = any(d.severity == "error" for d in ordered)
    return Checked(level, tuple(ordered), () if wrong else kernels)


def checked_program(tree: Tree, gpu: Gpu | None = None, part: bool = False) -> Program:
    """The checked program. Raises Failed with the errors if there are any."""
    verdict = check(tree, gpu, part=part)
    if verdict.program is None:
        raise Failed(*verdict.errors)
    return verdict.program
