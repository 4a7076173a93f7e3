"""A kernel package for the emulator: its PTX, its plan, and the maps to its source and TL."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from flashwright.build import classes, steps, toolchain
from flashwright.build.classes import Classes
from flashwright.build.compile import NAME, build
from flashwright.build.reading import PTX, read_plan, read_ptx
from flashwright.emulate.emulate import (
    Array,
    Finding,
    LaunchResult,
    Variables,
    addresses,
    prepare,
    run,
    sms_of,
)
from flashwright.emulate.encode import EncodedKernel
from flashwright.emulate.machine import Machine, here
from flashwright.emulate.parse import bad, parse
from flashwright.emulate.places import Extent, Origin
from flashwright.emulate.ptx import Entry, Instruction, SourceLine
from flashwright.files import content
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.launch_plan import LaunchPlan
from flashwright.lower.source_map import SourceMap, read
from flashwright.untrusted.build import build_untrusted

CODE = "code.tl"


class Unending(Exception):
    """A launch exceeded its time limit."""


@dataclass(frozen=True)
class Package:
    """A kernel with its launch plan and its maps to source and TL."""

    name: str
    plan: LaunchPlan
    ptx: str = field(repr=False)
    source: str = field(default="", repr=False)
    """The text of kernel.cu, if the folder has it."""
    map: SourceMap = field(default_factory=SourceMap, repr=False)
    tl: str = field(default="", repr=False)
    source_lines: Mapping[int, tuple[SourceLine, ...]] = field(default_factory=dict, repr=False)
    """The source lines of each PTX line, if the PTX has no line information."""
    translated: bool = False
    """Whether the source was translated in this process, not read from a folder."""

    @cached_property
    def program(self) -> EncodedKernel:
        """The decoded kernel. Raises Failed with FW831 if the emulator cannot execute it."""
        made = prepare(self.ptx, self.plan.entry)
        made.source = [
            replace(i, source_lines=self.source_lines.get(i.line, i.source_lines))
            for i in made.source
        ]
        return made

    def with_lines(self) -> Package:
        """This package with source lines, which a package's PTX does not have.

        They come from compiling kernel.cu again. Returns the package itself without a compiler, or
        if the PTX was not made from this kernel.cu.
        """
        entry = self._entry(self.ptx)
        if not self.source or any(one.source_lines for one in entry.code):
            return self
        try:
            tools = toolchain.find()
            arch = self.plan.arch
            if self.translated:
                built = build(self.source, arch, toolchain=tools, may_spill=True, line_info=True)
            else:  # the files of a folder are untrusted
                built = build_untrusted(self.source, arch, toolchain=tools)
            lined = self._entry(built.ptx)
        except Failed:
            return self
        told = [[(one.opcode, one.operands) for one in e.code] for e in (entry, lined)]
        if told[0] != told[1]:
            return self
        pairs = zip(entry.code, lined.code, strict=True)
        return replace(self, source_lines={one.line: other.source_lines for one, other in pairs})

    def add_source_lines(self, finding: Finding) -> Finding:
        """A finding of the same PTX with source lines added to its instructions."""

        def lined(one: Instruction) -> Instruction:
            return replace(one, source_lines=self.source_lines.get(one.line, one.source_lines))

        other = lined(finding.other) if finding.other is not None else None
        return replace(finding, instruction=lined(finding.instruction), other=other)

    def _entry(self, ptx: str) -> Entry:
        module = parse(ptx)
        if self.plan.entry not in module.entries:
            raise bad(1, f"there is no kernel {self.plan.entry}")
        return module.entries[self.plan.entry]

    def origin(self, dims: Mapping[str, int], arrays: Mapping[str, Array] | None = None) -> Origin:
        """The maps from an instruction to TL, for a launch of these sizes and arrays."""
        grid = self.plan.blocks(dims, sms_of(self.program))
        given = arrays or {}
        placed = addresses(self.plan, given)
        extents = tuple(Extent(name, base, given[name].nbytes) for name, base in placed.items())
        return Origin(map=self.map, tl=self.tl, grid=grid, tensors=extents, text=self.source)

    def run(
        self,
        arrays: Mapping[str, Array],
        dims: Mapping[str, int],
        schedule: str = "eager",
        seconds: float | None = None,
        variables: Variables | None = None,
        machine: Machine = here,
    ) -> LaunchResult:
        """Run it on arrays; outputs are written in place. Raises Unending after `seconds`.

        `variables` are the module's; they persist from launch to launch. The machine runs in a
        separate thread, so that Ctrl-C works meanwhile.
        """
        program, answer = self.program, _Answer()

        def work() -> None:
            try:
                given = (arrays, dims, schedule, variables, machine)
                answer.result = run(program, self.plan, *given)
            except BaseException as error:
                answer.error = error

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            raise Unending(f"no end after {seconds:g} s")
        if answer.error is not None:
            raise answer.error
        assert answer.result is not None
        return answer.result


class _Answer:
    result: LaunchResult | None = None
    error: BaseException | None = None


def read_package(folder: Path, name: str = "", file: str = PTX) -> Package:
    """The kernel in a folder. Raises Failed with FW852 if it has no PTX."""
    plan = read_plan(folder)
    ptx = read_ptx(folder / file, plan)
    if ptx is None:
        text = f"{folder} has no {file}, which is what the emulator executes"
        raise Failed(Diagnostic("FW852", text, help=f"flashwright build {folder}"))
    return Package(
        name or str(folder),
        plan,
        ptx,
        _text(folder / NAME),
        read(folder),
        _text(folder / CODE),
    )


@dataclass(frozen=True)
class ServedKernels:
    """The kernels of a package: each for the sizes that it serves, or all one after another."""

    plan: LaunchPlan
    """How the package is called."""
    classes: Classes
    packages: Mapping[str, Package]
    zeroed: tuple[str, ...] = ()
    """The tensors that begin at 0."""
    in_order: bool = False
    """Whether a call launches all kernels, in order."""

    def pick(self, dims: Mapping[str, int]) -> tuple[Package, ...]:
        """The kernels that a call with these sizes launches."""
        if self.in_order:
            return tuple(self.packages.values())
        return (self.packages[self.classes.pick(dims.get(self.classes.by, 0))],)


def read_served_kernels(folder: Path) -> ServedKernels:
    """All kernels of a package that are launched. Raises Failed as read_package does."""
    several, rules = steps.read(folder), classes.read(folder)
    used = several.steps if several else tuple(dict.fromkeys(r.kernel for r in rules.rules))
    packages = {name: read_package(folder / name) for name in used}
    zeroed = several.zeroed if several else ()
    return ServedKernels(classes.plan_of(folder), rules, packages, zeroed, several is not None)


def compile_package(path: Path, name: str = "") -> Package:
    """A package's current kernel.cu, compiled. Raises Failed as build_untrusted does."""
    folder, source = path.parent, _text(path)
    plan = read_plan(folder)
    if not source:
        raise Failed(Diagnostic("FW001", f"{path} is empty"))
    built = build_untrusted(source, plan.arch)
    return Package(name or str(path), plan, built.ptx, source, read(folder), _text(folder / CODE))


def _text(path: Path) -> str:
    return (content(path) or b"").decode("utf-8", errors="replace")
