"""Any CUDA kernel on the CPU, without launch plan or package: pointers are NumPy arrays.

saxpy = kernel(source)
print(saxpy(grid, block, x, y, 2.0, len(x)))
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike

from flashwright.build.compile import NAME
from flashwright.emulate.arguments import pack, value_bytes
from flashwright.emulate.device_memory import Array, Memory, Placeable, as_placeable
from flashwright.emulate.emulate import (
    LaunchResult,
    launch,
    make_heap,
    parse_once,
    prepare,
    variables_of,
)
from flashwright.emulate.encode import MODULE, PlacedVariable
from flashwright.emulate.machine import Machine, here
from flashwright.emulate.own_source import CompileOptions, checked_folders, compile_own
from flashwright.emulate.places import Extent, Origin, diagnostics
from flashwright.emulate.profile import Profile, profile
from flashwright.emulate.ptx import Variable
from flashwright.emulate.signature import (
    KernelSignature,
    as_instance,
    chosen,
    of_source,
    shown_names,
    signatures,
    templates,
    without_types,
)
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.render import terminal
from flashwright.untrusted.build import build_untrusted

Size = int | Sequence[int]


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
            return f"{self.printed}{self.name}: nothing found"
        return self.printed + terminal(self.diagnostics, self.text, self.name).rstrip("\n")


def kernel(
    source: str | Path,
    entry: str | None = None,
    *,
    arch: str = "sm_80",
    include: Sequence[str | Path] = (),
    define: Mapping[str, str | int | None] | None = None,
    flags: Sequence[str] = (),
    instantiate: str | Sequence[str] = (),
    memory: Memory | None = None,
    untrusted: bool = False,
) -> EmulatedKernel:
    """A kernel from CUDA or PTX: the text, or a file that ends in .cu, .cuh or .ptx.

    `entry` names one of several kernels as its source does: `saxpy`, `ns::saxpy`, or an instance of
    a template, `reduce<float, 256>`, which is compiled if the source itself does not use it. CUDA
    is compiled for `arch` with the project's nvcc; headers beside the file are found, and those in
    the `include` folders. `define` are macros, `flags` further options of nvcc, `instantiate` more
    instances to compile. With a `memory`, arrays keep their addresses from launch to launch.

    The code counts as your own, which may include any file. `untrusted` code is screened, and
    compiled and executed in confinement; it takes none of the options of the compiler.

    Raises Failed: FW821 without nvcc or without confinement for untrusted code, FW822 if nvcc
    rejects the code, FW828 if the screening does, FW831 if the emulator cannot execute it.
    """
    text, name = _read(source)
    more = [instantiate] if isinstance(instantiate, str) else [*instantiate]
    given = (*include, *(define or ()), *flags, *more)
    if untrusted or _is_ptx(text):
        if given:
            what = "untrusted code" if untrusted else "PTX"
            raise ValueError(f"{what} takes no include, define, flags or instantiate")
        return _ready_made(text, name, entry, arch, memory, untrusted)
    beside = [] if name == NAME and isinstance(source, str) else [Path(source).parent]
    macros = {key: None if value is None else str(value) for key, value in (define or {}).items()}
    folders = checked_folders([*beside, *include])
    options = CompileOptions(arch, folders, macros, tuple(flags), tuple(more))
    ptx = compile_own(text, options, name)
    instance = as_instance(entry or "")
    if instance and not more and not chosen(module_signatures(ptx, text), instance):
        before = set(module_signatures(ptx, text))
        ptx = compile_own(text, replace(options, instantiate=(instance,)), name)
        added = set(module_signatures(ptx, text)) - before
        entry = added.pop() if len(added) == 1 else entry
    elif entry is None and len(more) == 1 and as_instance(more[0]):
        entry = more[0]
    return EmulatedKernel(ptx, entry, name, text, memory=memory)


@dataclass(frozen=True)
class DeclaredKernel:
    """A kernel of a file, which the emulator has not decoded."""

    signature: KernelSignature
    parameters: tuple[Variable, ...]
    directives: Mapping[str, tuple[int, ...]]
    """What it demands of a launch, such as maxntid."""


def declared_kernels(source: Path, **options: Any) -> list[DeclaredKernel]:
    """All kernels of a file; the options are those of kernel().

    Raises Failed as kernel() does, with FW831 if the file has none.
    """
    text, name = _read(source)
    if _is_ptx(text):
        ptx, text = text, ""
    else:
        given = {"include": (), "define": {}, "flags": (), **options}
        folders = checked_folders([source.parent, *given.pop("include")])
        ptx = compile_own(text, CompileOptions(include=folders, **given), name)
    known, entries = module_signatures(ptx, text), parse_once(ptx).entries
    if not known:
        _choose(known, None, _how_to_name(text, known))
    return [
        DeclaredKernel(one, entries[symbol].parameters, entries[symbol].directives)
        for symbol, one in of_source(known, text).items()
    ]


def _ready_made(
    text: str, name: str, entry: str | None, arch: str, memory: Memory | None, untrusted: bool
) -> EmulatedKernel:
    """A kernel of PTX or of untrusted code."""
    machine = _confined() if untrusted else here
    if _is_ptx(text):
        name = name if name != NAME else "kernel.ptx"
        return EmulatedKernel(text, entry, name, machine=machine, memory=memory)
    return EmulatedKernel(build_untrusted(text, arch).ptx, entry, name, text, machine, memory)


def module_signatures(ptx: str, text: str) -> dict[str, KernelSignature]:
    """The signatures of the kernels in a file of PTX that was compiled from a text."""
    entries = parse_once(ptx).entries
    return signatures({name: len(one.parameters) for name, one in entries.items()}, text)


def _how_to_name(text: str, known: Mapping[str, KernelSignature]) -> str:
    """What to do about templates of which the source uses no instance."""
    found = templates(text, list(known.values())) if text else []
    if not found:
        return ""
    listed = ", ".join(found)
    how = "name one: entry= or --kernel 'name<arguments>'"
    return f"these templates have no instance: {listed}; {how}"


def _confined() -> Machine:
    """The machine in a confined process, if this system supports it."""
    from flashwright.emulate.machine_process import MachineProcess
    from flashwright.sandbox.limits import Limits

    return MachineProcess(Limits()) if sys.platform == "linux" else here


def _read(source: str | Path) -> tuple[str, str]:
    """The source text and its name for messages."""
    if isinstance(source, str) and ("\n" in source or not source.endswith((".cu", ".cuh", ".ptx"))):
        return source, NAME
    path = Path(source)
    try:
        data = path.read_bytes()
    except OSError as error:
        text = f"cannot read {path}: {error.strerror}"
        raise Failed(Diagnostic("FW001", text)) from None
    try:
        return data.decode("utf-8-sig"), path.name
    except UnicodeDecodeError:  # a comment in an old encoding
        return data.decode("latin-1"), path.name


def _is_ptx(text: str) -> bool:
    return any(line.strip().startswith(".version") for line in text.splitlines()[:50])


class EmulatedKernel:
    """A kernel of PTX. Call it with the grid, the block and its arguments."""

    def __init__(
        self,
        ptx: str,
        entry: str | None,
        name: str = NAME,
        text: str = "",
        machine: Machine = here,
        memory: Memory | None = None,
    ) -> None:
        self.ptx, self.name, self.text, self.machine = ptx, name, text, machine
        module = parse_once(ptx)
        counts = {name: len(one.parameters) for name, one in module.entries.items()}
        self.kernels = signatures(counts, text) if machine is here else without_types(counts)
        """The signatures of all kernels of the module, by their names in the PTX."""
        among = of_source(self.kernels, text) if entry is None else self.kernels
        self.entry = _choose(among, entry, _how_to_name(text, self.kernels))
        self.signature = self.kernels[self.entry]
        self.parameters = module.entries[self.entry].parameters
        self.memory = memory
        """The memory of all launches; None if each has its own."""
        self.program = prepare(ptx, self.entry)
        self.variables = variables_of(self.program)
        """The `__device__` and `__constant__` variables; they persist from launch to launch."""
        self.constants: set[str] = set()
        """The constants that were set by copy_to_symbol."""
        self.heap = make_heap()
        """The memory of malloc in kernels; it persists from launch to launch."""

    def __repr__(self) -> str:
        return f"<emulated kernel {self.signature}>"

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
        unless the array is marked as read-only or the parameter points to const. None is a null
        pointer. Numbers are passed in the parameter's own size, structs as bytes. The functions of
        flashwright.emulate make other arguments: empty, address, pointers, struct,
        tiled_tensor_map. `shared` are the bytes of dynamic shared memory; `schedule` says when
        asynchronous work is done: "eager", "lazy" or "random:SEED". `cluster`, `cooperative` and
        `how` are those of emulate.launch.

        Raises TypeError or ValueError for an argument that does not fit its parameter, Failed with
        FW831 for a launch that no GPU can do.
        """
        sizes, threads = _size("grid", grid), _size("block", block)
        memory = self.memory if self.memory is not None else Memory()
        packed = pack(self.signature, self.parameters, args, memory)
        given = (memory.regions(packed.used), packed.parameters, sizes, threads, shared, schedule)
        together = None if cluster is None else _size("cluster", cluster)
        more = {"cluster": together, "cooperative": cooperative, **how}
        own = (self.variables, self.machine, self.constants, self.heap)
        done = launch(self.program, *given, *own, **more)
        extents = memory.extents(packed.used)
        extents += [
            Extent(name, MODULE + placed.offset, placed.variable.size)
            for name, placed in self.program.variables.items()
        ]
        return self._launched(done, tuple(sizes), tuple(extents))

    def other(self, entry: str) -> EmulatedKernel:
        """Another kernel of the same module. The two share the variables of the module."""
        made = EmulatedKernel(self.ptx, entry, self.name, self.text, self.machine, self.memory)
        made.variables, made.constants = self.variables, self.constants
        made.heap = self.heap
        return made

    def limit_heap(self, size: int) -> None:
        """Set the bytes of malloc's memory, as cudaDeviceSetLimit does, and free all of it."""
        self.heap = make_heap(size)

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
        elif (placeable := as_placeable(value)) is not None:
            data = self._placed(name, placeable, size)
        else:
            data = value_bytes(name, value, placed.variable)
        self.variables[placed.offset : placed.offset + size] = np.frombuffer(data, np.uint8)
        self.constants.add(name)

    def copy_from_symbol(self, name: str, dtype: DTypeLike = np.uint8) -> Array:
        """The contents of a `__device__` or `__constant__` variable, as cudaMemcpyFromSymbol."""
        _, placed = self._symbol(name)
        end = placed.offset + placed.variable.size
        return self.variables[placed.offset : end].copy().view(dtype)

    def _symbol(self, wanted: str) -> tuple[str, PlacedVariable]:
        known = list(self.program.variables)
        # C++ puts the length before a name: _ZN5inner6offsetE is inner::offset.
        last = wanted.rpartition("::")[2]
        found = [wanted] if wanted in known else [n for n in known if f"{len(last)}{last}" in n]
        if len(found) != 1:
            text = "there are several variables" if found else "there is no variable"
            text += f" {wanted}; the variables are: {', '.join(known) or 'none'}"
            raise Failed(Diagnostic("FW831", text))
        return found[0], self.program.variables[found[0]]

    def _placed(self, name: str, value: Placeable, size: int) -> bytes:
        """The bytes of a value with addresses, which stay valid in the kernel's memory."""
        if self.memory is None:
            text = f"{name} would have an address: give the kernel a memory, kernel(..., memory=)"
            raise ValueError(text)
        if value.size != size:
            raise ValueError(f"{name} has {size} bytes, and {value.size} are given")
        self.memory.place([*value.used(name)])
        return value.packed(self.memory)

    def _launched(
        self, done: LaunchResult, grid: tuple[int, ...], extents: tuple[Extent, ...]
    ) -> LaunchReport:
        origin = Origin(grid=grid, tensors=extents, shown=self.name, text=self.text)
        counted = profile(self.program.source, done.counts, origin)
        told = diagnostics(done.findings, origin)
        return LaunchReport(
            done.findings, done.counts, done.printed, told, counted, self.name, self.text
        )


def _choose(known: Mapping[str, KernelSignature], wanted: str | None, hint: str = "") -> str:
    """The kernel of that name, or the only one."""
    found = list(known) if wanted is None else chosen(known, wanted)
    if len(found) == 1:
        return found[0]
    text = "there are several kernels" if found else "there is no kernel"
    text += f" {wanted}" if wanted is not None else ""
    text += f"; the kernels are: {', '.join(shown_names(known)) or 'none'}"
    raise Failed(Diagnostic("FW831", text, help=hint or "name one: entry=, --kernel"))


def _size(name: str, given: Size) -> list[int]:
    sizes = [given] if isinstance(given, SupportsIndex) else list(given)
    if not 1 <= len(sizes) <= 3 or any(int(size) < 1 for size in sizes):
        raise ValueError(f"{name} must be one to three counts of at least 1, not {given!r}")
    return [int(size) for size in sizes]
