"""Any CUDA kernel on the CPU, without launch plan or package: pointers are NumPy arrays.

saxpy = kernel(source)
print(saxpy(grid, block, x, y, 2.0, len(x)))
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsFloat, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike, NDArray

from flashwright.build.compile import NAME, build
from flashwright.emulate.emulate import GAP, LaunchResult, behind, launch, prepare, variables_of
from flashwright.emulate.encode import MODULE, PlacedVariable
from flashwright.emulate.machine import Machine, here
from flashwright.emulate.parse import parse
from flashwright.emulate.places import Extent, Origin, diagnostics
from flashwright.emulate.profile import Profile, profile
from flashwright.emulate.ptx import Variable
from flashwright.emulate.structs import EMPTY, READ, READ_WRITE, Region
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.render import terminal
from flashwright.untrusted.build import build_untrusted

Array = NDArray[Any]
Size = int | Sequence[int]

_REALS = {2: "<e", 4: "<f", 8: "<d"}


@dataclass(frozen=True)
class LaunchReport(LaunchResult):
    """The result of a launch. Printed, it lists the findings."""

    diagnostics: tuple[Diagnostic, ...] = ()
    """The findings as diagnostics: what, where, and which thread."""
    profile: Profile | None = field(default=None, repr=False)
    name: str = ""
    text: str = field(default="", repr=False)

    @property
    def ok(self) -> bool:
        """Whether the launch has no findings."""
        return not self.findings

    def __str__(self) -> str:
        if self.ok:
            return f"{self.name}: nothing found"
        return terminal(self.diagnostics, self.text, self.name).rstrip("\n")


def kernel(
    source: str | Path, entry: str | None = None, *, arch: str = "sm_80", untrusted: bool = False
) -> EmulatedKernel:
    """A kernel from CUDA or PTX: the text, or a file that ends in .cu or .ptx.

    `entry` names one of several kernels; an unmangled name is enough if it is unique. CUDA is
    compiled for `arch` with the project's nvcc. By default it counts as your own code, which may
    include any file. `untrusted` code is screened, and compiled and executed in confinement.

    Raises Failed: FW821 without nvcc or without confinement for untrusted code, FW822 if nvcc
    rejects the code, FW828 if the screening does, FW831 if the emulator cannot execute it.
    """
    text, name = _read(source)
    if _is_ptx(text):
        name = name if name != NAME else "kernel.ptx"
        return EmulatedKernel(text, entry, name, machine=_confined() if untrusted else here)
    if untrusted:
        return EmulatedKernel(build_untrusted(text, arch).ptx, entry, name, text, _confined())
    built = build(text, arch, may_spill=True, line_info=True)
    return EmulatedKernel(built.ptx, entry, name, text)


def _confined() -> Machine:
    """The machine in a confined process, if this system supports it."""
    from flashwright.emulate.machine_process import MachineProcess
    from flashwright.sandbox.limits import Limits

    return MachineProcess(Limits()) if sys.platform == "linux" else here


def _read(source: str | Path) -> tuple[str, str]:
    """The source text and its name for messages."""
    if isinstance(source, str) and ("\n" in source or not source.endswith((".cu", ".ptx"))):
        return source, NAME
    path = Path(source)
    try:
        return path.read_text(encoding="utf-8"), path.name
    except OSError as error:
        text = f"cannot read {path}: {error.strerror}"
        raise Failed(Diagnostic("FW001", text)) from None


def _is_ptx(text: str) -> bool:
    return any(line.strip().startswith(".version") for line in text.splitlines()[:50])


@dataclass(frozen=True)
class Empty:
    """An array of which a launch may read only what it has written before."""

    array: Array


class EmulatedKernel:
    """A kernel of PTX. Call it with the grid, the block and its arguments."""

    def __init__(
        self,
        ptx: str,
        entry: str | None,
        name: str = NAME,
        text: str = "",
        machine: Machine = here,
    ) -> None:
        self.ptx, self.name, self.text, self.machine = ptx, name, text, machine
        module = parse(ptx)
        self.entry = _choose(list(module.entries), entry)
        self.parameters = module.entries[self.entry].parameters
        """The names of the parameters that are floating-point numbers."""
        self.program = prepare(ptx, self.entry)
        self.variables = variables_of(self.program)
        """The `__device__` and `__constant__` variables; they persist from launch to launch."""
        self.constants: set[str] = set()
        """The constants that were set by copy_to_symbol."""

    def __repr__(self) -> str:
        return f"<emulated kernel {self.entry}, {len(self.parameters)} parameters>"

    def __call__(
        self,
        grid: Size,
        block: Size,
        *args: Any,
        shared: int = 0,
        schedule: str = "eager",
        cluster: Size | None = None,
        cooperative: bool = False,
        **how: Any,
    ) -> LaunchReport:
        """Launch it; what it writes is in the arrays afterwards.

        A contiguous NumPy array is passed as a pointer to its data, and the kernel may write to it
        unless it is marked as read-only; an Empty one is memory that is allocated and not set.
        Numbers are passed in the parameter's own size, a bytes object as a struct. `shared` are the
        bytes of dynamic shared memory; `schedule` says when
        asynchronous work is done: "eager", "lazy" or "random:SEED". `cluster`, `cooperative` and
        `how` are those of emulate.launch.
        """
        if len(args) != len(self.parameters):
            text = f"{self.entry} takes {len(self.parameters)} arguments, and {len(args)} are given"
            raise TypeError(text)
        packed, regions, extents = self._packed(args)
        sizes, threads = _size("grid", grid), _size("block", block)
        given = (regions, packed, sizes, threads, shared, schedule, self.variables, self.machine)
        together = None if cluster is None else _size("cluster", cluster)
        more = {"cluster": together, "cooperative": cooperative, **how}
        done = launch(self.program, *given, self.constants, **more)
        extents += [
            Extent(name, MODULE + placed.offset, placed.variable.size)
            for name, placed in self.program.variables.items()
        ]
        return self._launched(done, tuple(sizes), tuple(extents))

    def other(self, entry: str) -> EmulatedKernel:
        """Another kernel of the same module. The two share the variables of the module."""
        made = EmulatedKernel(self.ptx, entry, self.name, self.text, self.machine)
        made.variables, made.constants = self.variables, self.constants
        return made

    def copy_to_symbol(self, name: str, value: Any) -> None:
        """Set a `__device__` or `__constant__` variable, as cudaMemcpyToSymbol does.

        An array or bytes of the variable's size, or a number for a variable that is one.
        """
        name, placed = self._symbol(name)
        size = placed.variable.size
        if isinstance(value, np.ndarray | np.generic | bytes | bytearray):
            data = bytes(value) if isinstance(value, bytes | bytearray) else value.tobytes()
            if len(data) != size:
                raise ValueError(f"{name} has {size} bytes, and {len(data)} are given")
        else:
            data = _number(name, value, placed.variable, placed.variable.real)
        self.variables[placed.offset : placed.offset + size] = np.frombuffer(data, np.uint8)
        self.constants.add(name)

    def copy_from_symbol(self, name: str, dtype: DTypeLike = np.uint8) -> Array:
        """The contents of a `__device__` or `__constant__` variable, as cudaMemcpyFromSymbol."""
        _, placed = self._symbol(name)
        end = placed.offset + placed.variable.size
        return self.variables[placed.offset : end].copy().view(dtype)

    def _symbol(self, wanted: str) -> tuple[str, PlacedVariable]:
        name = _choose(list(self.program.variables), wanted, "variable")
        return name, self.program.variables[name]

    def _packed(self, args: Sequence[Any]) -> tuple[bytes, list[Region], list[Extent]]:
        packed, regions, extents, base = b"", [], [], GAP
        for number, (parameter, value) in enumerate(zip(self.parameters, args, strict=True)):
            packed = packed.ljust(-(-len(packed) // parameter.align) * parameter.align, b"\0")
            given = value.array if isinstance(value, Empty) else value
            if isinstance(given, np.ndarray) and given.ndim:
                array = _pointed(number, given, parameter)
                use = EMPTY if given is not value else READ_WRITE
                use = use if array.flags.writeable else READ
                regions.append(Region(base, array.nbytes, array.ctypes.data, use))
                extents.append(Extent(f"argument {number}", base, array.nbytes))
                packed += struct.pack("<Q", base)
                base = behind(base, array.nbytes)
            else:
                packed += _number(f"argument {number}", value, parameter, parameter.real)
        return packed, regions, extents

    def _launched(
        self, done: LaunchResult, grid: tuple[int, ...], extents: tuple[Extent, ...]
    ) -> LaunchReport:
        origin = Origin(grid=grid, tensors=extents, shown=self.name, text=self.text)
        counted = profile(self.program.source, done.counts, origin)
        told = diagnostics(done.findings, origin)
        return LaunchReport(done.findings, done.counts, told, counted, self.name, self.text)


def _choose(names: list[str], wanted: str | None, what: str = "kernel") -> str:
    if wanted in names:
        return str(wanted)
    # C++ puts the length before a name: _Z5saxpyPf is saxpy.
    found = names if wanted is None else [n for n in names if f"{len(wanted)}{wanted}" in n]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(names) or "none"
    text = f"there is no {what}" if not found else f"there are several {what}s"
    text += f" {wanted}" if wanted is not None else ""
    text += f"; the {what}s are: {listed}"
    raise Failed(Diagnostic("FW831", text, help="name one: entry=" if what == "kernel" else None))


def _size(name: str, given: Size) -> list[int]:
    sizes = [given] if isinstance(given, SupportsIndex) else list(given)
    if not 1 <= len(sizes) <= 3 or any(int(size) < 1 for size in sizes):
        raise ValueError(f"{name} must be one to three counts of at least 1, not {given!r}")
    return [int(size) for size in sizes]


def _pointed(number: int, array: Array, parameter: Variable) -> Array:
    if parameter.size != 8:
        raise TypeError(
            f"argument {number} is an array, but the kernel takes {parameter.size} bytes"
        )
    if not array.flags.c_contiguous:
        raise ValueError(f"argument {number} must be contiguous: numpy.ascontiguousarray")
    return array


def _number(name: str, value: Any, parameter: Variable, real: bool) -> bytes:
    """A value as the bytes of its parameter."""
    size = parameter.size
    if isinstance(value, bytes | bytearray | np.generic | np.ndarray):
        data = value.tobytes() if isinstance(value, np.generic | np.ndarray) else bytes(value)
        if len(data) == size:
            return data
    elif real and isinstance(value, SupportsFloat) and size in _REALS:
        return struct.pack(_REALS[size], float(value))
    elif not real and isinstance(value, SupportsIndex):
        whole = int(value)
        if -(1 << 8 * size - 1) <= whole < 1 << 8 * size:
            return (whole % (1 << 8 * size)).to_bytes(size, "little")
    kind = "floating-point number" if real else "whole number"
    text = f"{name} is {value!r}, which is no {kind} of {size} bytes"
    raise TypeError(text)
