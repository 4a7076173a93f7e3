"""A whole CUDA program on the CPU: its process calls the stand-in for CUDA, which asks this one.

The two share the device's memory, so that a launch copies nothing. Each process of the program has
its own connection and its own memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from flashwright.emulate.emulate import Finding, LaunchResult, launch
from flashwright.emulate.encode import EncodedKernel, encode
from flashwright.emulate.fatbin import DeviceCode, Image, choose, read_image
from flashwright.emulate.host_library import NAME, library_folder
from flashwright.emulate.parse import bad, parse
from flashwright.emulate.places import Extent, Origin, diagnostics
from flashwright.emulate.ptx import Entry, Module
from flashwright.emulate.structs import EMPTY, READ, READ_WRITE, UNSET, Region
from flashwright.emulate.tensor_map import encode_tensor_map
from flashwright.gpu import GPUS, KIB, Gpu
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.render import terminal

SOCKET = "FLASHWRIGHT_EMULATE_SOCKET"
# The same numbers are in host/host.h.
ARENA, ARENA_SIZE = 1 << 40, 1 << 40
MODULES = ARENA + ARENA_SIZE - (ARENA_SIZE >> 4)
_UNIT = 1 << 16  # between variables of two modules, and in multiples of which these begin
_DEVICE = 0  # kinds of memory; the others can be accessed by the host
_NUMBER = struct.Struct("<Q")
_HEAD = struct.Struct("<QQ")  # a request: which, and the bytes behind it
_ANSWER = struct.Struct("<qQ")
_NO_RESERVE = 0x4000  # of mmap, alike on all machines that we know
_BUS = 256  # bits; what a program is told of every GPU
_MOST_SOURCE = 1 << 22  # bytes of a source file that is shown
_EXTERN = re.compile(r"^[ \t]*\.extern\s+\.(?:global|const)\b[^;]*;", re.MULTILINE)
_MANAGED = re.compile(r"\.attribute\(\s*\.managed\s*\)")
# Errors of CUDA.
SUCCESS, INVALID_VALUE, INVALID_SYMBOL, NO_IMAGE = 0, 1, 13, 209
NOT_FOUND, TIMEOUT, ASSERT, NOT_SUPPORTED, LAUNCH_FAILURE = 500, 702, 710, 801, 719
# Of cuTensorMapEncodeTiled, by number: the bytes of an element, and whether it is a float.
_ELEMENTS = (
    *((1, False), (2, False), (4, False), (4, False), (8, False), (8, False)),
    *((2, True), (4, True), (8, True), (2, True), (4, True), (4, True), (4, True)),
)


class _Request(IntEnum):
    HELLO = 1
    DEVICE = 2
    MODULE = 3
    KERNEL = 4
    SYMBOL = 5
    LAUNCH = 6
    NOTE = 7
    TENSOR_MAP = 8


_REFUSED = 1  # the kind of a note; 2: a wrong use of CUDA


class _Reader:
    """The content of a request."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def number(self) -> int:
        (value,) = _NUMBER.unpack_from(self.data, self.at)
        self.at += _NUMBER.size
        return int(value)

    def numbers(self, count: int) -> list[int]:
        return [self.number() for _ in range(count)]

    def data_of(self) -> bytes:
        size = self.number()
        self.at += size
        return self.data[self.at - size : self.at]

    def text(self) -> str:
        return self.data_of().decode(errors="replace")


def _packed(*values: int | str | bytes) -> bytes:
    made = b""
    for value in values:
        if isinstance(value, int):
            made += _NUMBER.pack(value)
        else:
            data = value.encode() if isinstance(value, str) else value
            made += _NUMBER.pack(len(data)) + data
    return made


# --- what is told -----------------------------------------------------------------------------


@dataclass
class Report:
    """What was found while a program ran. Everything is printed when it is found, once."""

    program: str
    launches: int = 0
    kernels: set[str] = field(default_factory=set)
    findings: int = 0
    misuses: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """How often each call or kernel that is not emulated was asked for."""
    _told: set[object] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def launched(self, kernel: str) -> None:
        """Count a launch."""
        with self._lock:
            self.launches += 1
            self.kernels.add(kernel)

    def found(self, kernel: str, findings: Sequence[Finding], origin: Origin, name: str) -> None:
        """Print the findings of a launch that no earlier launch had."""
        with self._lock:
            fresh = [one for one in findings if self._is_new(kernel, one)]
            told = diagnostics(fresh, origin)
            self.findings += len(told)
        if told:
            _say(terminal(told, origin.text, name, sys.stderr.isatty()) + f"  in {kernel}")

    def _is_new(self, kernel: str, one: Finding) -> bool:
        other = one.other.line if one.other else 0
        key = (kernel, one.kind, one.instruction.line, other)
        fresh = key not in self._told
        self._told.add(key)
        return fresh

    def refuse(self, what: str, failed: Failed | None = None) -> None:
        """Print and count what is not emulated."""
        with self._lock:
            self.refused[what] = self.refused.get(what, 0) + 1
            if self.refused[what] > 1:
                return
        if failed is None:
            text = f"{what} is not emulated: the call returns cudaErrorNotSupported"
            failed = Failed(Diagnostic("FW831", text))
        _say(terminal(failed.diagnostics, "", self.program, sys.stderr.isatty()))

    def misuse(self, text: str) -> None:
        """Print and count a wrong use of CUDA."""
        with self._lock:
            self.misuses += 1
            fresh = text not in self._told
            self._told.add(text)
        if fresh:
            _say(f"flashwright: {text}")

    @property
    def status(self) -> int | None:
        """2 if something was not emulated, 1 if something is wrong, None if all is well."""
        if self.refused:
            return 2
        return 1 if self.findings or self.misuses else None

    def __str__(self) -> str:
        kernels = f" of {_count(len(self.kernels), 'kernel')}" if self.launches else ""
        text = f"{_count(self.launches, 'launch', 'launches')}{kernels}, "
        text += _count(self.findings, "finding")
        if self.misuses:
            text += f", {_count(self.misuses, 'wrong call')}"
        for what, times in self.refused.items():
            text += f"\n  not emulated: {what}, {_count(times, 'time')}"
        return text


def _count(number: int, noun: str, several: str = "") -> str:
    return f"{number or 'no'} {noun if number == 1 else several or noun + 's'}"


def _say(text: str) -> None:
    print(text.rstrip("\n"), file=sys.stderr, flush=True)


# --- device code ------------------------------------------------------------------------------


class _DeviceModule:
    """The device code of a file of the program, or of several that nvcc has linked."""

    def __init__(self, images: Sequence[Image], start: int) -> None:
        self.images, self.start = images, start
        self.capability = 0
        self._kernels: dict[str, EncodedKernel] = {}

    @property
    def newest(self) -> DeviceCode | None:
        """The newest PTX that it has."""
        found = [code for image in self.images for code in image.codes]
        return max(found, key=lambda code: code.capability, default=None)

    @cached_property
    def module(self) -> Module:
        """The parsed PTX for the GPU. Raises Failed with FW831 if there is none."""
        codes = choose(self.images, self.capability)
        if not codes:
            raise Failed(_without_ptx(self.images, self.capability))
        parsed = []
        for code in codes:
            text = _MANAGED.sub("", code.ptx)
            parsed.append(parse(_EXTERN.sub(_blank, text) if len(codes) > 1 else text))
        entries = {name: one for module in parsed for name, one in module.entries.items()}
        functions = {name: one for module in parsed for name, one in module.functions.items()}
        variables = {one.name: one for module in parsed for one in module.variables}
        return Module(parsed[0].target, entries, tuple(variables.values()), functions)

    @cached_property
    def placed(self) -> EncodedKernel:
        """A kernel without code: the variables of the module and their first contents."""
        return encode(self.module, Entry("", (), {}, (), (), {}), self.start)

    def kernel(self, name: str) -> EncodedKernel:
        """A kernel by its name. Raises Failed with FW831 if it cannot be executed."""
        if name not in self._kernels:
            if name not in self.module.entries:
                raise bad(
                    1, f"there is no kernel {name}; there are {', '.join(self.module.entries)}"
                )
            # The variables are in memory that both processes have: a launch need not add them.
            made = encode(self.module, self.module.entries[name], self.start)
            self._kernels[name] = replace(made, variables={})
        return self._kernels[name]

    @property
    def end(self) -> int:
        """The address behind its variables."""
        return self.start + len(self.placed.data)

    def regions(self, memory: int) -> Iterator[Region]:
        """Its variables in memory; neighbours of the same use are one region."""
        made: Region | None = None
        for placed in self.placed.variables.values():
            use = READ if placed.variable.space == "const" else READ_WRITE
            use = UNSET if placed.unset else use
            at = self.start + placed.offset
            if made is None or made.use != use or use == UNSET:
                if made is not None:
                    yield made
                made = _region(memory, at, 0, use)
            made.size = at + placed.variable.size - made.base
        if made is not None:
            yield made


def _region(memory: int, base: int, size: int, use: int) -> Region:
    """Memory of the device: its contents, and behind all contents, which bytes were written."""
    data = memory + base - ARENA
    return Region(base, size, data, use, data + ARENA_SIZE if use in (EMPTY, UNSET) else None)


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def _without_ptx(images: Sequence[Image], capability: int) -> Diagnostic:
    machine = sorted({number for image in images for number in image.machine_code if number})
    newer = sorted({code.capability for image in images for code in image.codes})
    if newer:
        listed = ", ".join(f"sm_{number}" for number in newer)
        text = f"the program has PTX of {listed}, which a GPU of sm_{capability} does not take"
        return Diagnostic("FW831", text, help="name a GPU: --gpu; `flashwright gpus` lists them")
    listed = ", ".join(f"sm_{number}" for number in machine) or "some GPU"
    text = f"the program has machine code of {listed}, and no PTX for the emulator"
    hint = (
        "build it with PTX: nvcc -gencode arch=compute_90,code=[sm_90,compute_90], or -arch=sm_90"
    )
    return Diagnostic("FW831", text, help=hint)


def _file_of(program: EncodedKernel) -> str:
    """The file that a kernel stands in: where its instructions were inlined to."""
    for one in program.source:
        for place in reversed(one.source_lines):
            if place.line > 0:
                return place.file
    return ""


# --- a process of the program -----------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """How a program is emulated."""

    gpu: Gpu | None = None
    """None: one that takes all kernels of the program."""
    sms: int | None = None
    """The number of SMs that the program is told; None: that of the GPU."""
    schedule: str = "eager"


class _Process:
    """A process of the program: its memory and its device code."""

    def __init__(self, line: socket.socket, options: Options, report: Report) -> None:
        self.line, self.options, self.report = line, options, report
        self.memory: mmap.mmap | None = None
        self.modules: list[_DeviceModule] = []
        self.start = MODULES
        self.gpu: Gpu | None = options.gpu
        self.texts: dict[str, str] = {}
        self.answers: Mapping[int, Callable[[_Reader], tuple[int, bytes]]] = {
            _Request.DEVICE: self._device,
            _Request.MODULE: self._module,
            _Request.KERNEL: self._kernel,
            _Request.SYMBOL: self._symbol,
            _Request.LAUNCH: self._launch,
            _Request.NOTE: self._note,
            _Request.TENSOR_MAP: self._tensor_map,
        }

    def serve(self) -> None:
        """Answer until the process ends."""
        self._receive(_HEAD.size)
        _, files, _, _ = socket.recv_fds(self.line, 1, 1)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED | _NO_RESERVE
        self.memory = mmap.mmap(files[0], 2 * ARENA_SIZE, flags, access)
        os.close(files[0])
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        while head := self._receive(_HEAD.size):
            which, size = _HEAD.unpack(head)
            error, content = self._answer(which, _Reader(self._receive(size)))
            self.line.sendall(_ANSWER.pack(error, len(content)) + content)

    def _receive(self, size: int) -> bytes:
        """So many bytes; none at the end."""
        data = bytearray()
        while len(data) < size:
            part = self.line.recv(min(size - len(data), 1 << 20))
            if not part:
                return b""
            data += part
        return bytes(data)

    def _answer(self, which: int, given: _Reader) -> tuple[int, bytes]:
        try:
            return self.answers[which](given)
        except Failed as failed:
            self.report.refuse(failed.diagnostics[0].message, failed)
            return NOT_SUPPORTED, b""

    def _note(self, given: _Reader) -> tuple[int, bytes]:
        kind, text = given.number(), given.text()
        (self.report.refuse if kind == _REFUSED else self.report.misuse)(text)
        return SUCCESS, b""

    # --- the device and its code --------------------------------------------------------------

    def _device(self, given: _Reader) -> tuple[int, bytes]:
        gpu = self._chosen()
        sms = self.options.sms or gpu.sms
        clock = int(gpu.clock_ghz * 1e6)
        shared = (min(48 * KIB, gpu.shared_per_block), gpu.shared_per_block, gpu.shared_per_sm)
        rest = (gpu.shared_reserved, gpu.threads_per_sm, gpu.max_blocks_per_sm)
        more = (gpu.registers_per_sm, gpu.l2_bytes, clock, _BUS)
        first = (gpu.title, gpu.capability, sms, gpu.memory_bytes)
        return SUCCESS, _packed(*first, *shared, *rest, *more)

    def _chosen(self) -> Gpu:
        """The GPU of the options, or the oldest that takes the newest PTX of the program."""
        if self.gpu is None:
            codes = [module.newest for module in self.modules]
            wanted = max((code.capability for code in codes if code), default=80)
            exact = any(code.suffix for code in codes if code and code.capability == wanted)
            cards = sorted(GPUS.values(), key=lambda card: card.capability)
            fitting = [c for c in cards if c.capability == wanted]
            fitting += [c for c in cards if c.capability > wanted and not exact]
            if not fitting:
                text = f"the program is compiled for sm_{wanted}, and there is no such GPU here"
                raise Failed(Diagnostic("FW831", text, help="`flashwright gpus` lists them"))
            self.gpu = fitting[0]
        return self.gpu

    def _module(self, given: _Reader) -> tuple[int, bytes]:
        images = [read_image(given.data_of()) for _ in range(given.number())]
        self.modules.append(_DeviceModule(images, 0))
        return SUCCESS, _packed(len(self.modules) - 1)

    def _loaded(self, number: int) -> _DeviceModule:
        """A module with its variables in memory."""
        module = self.modules[number]
        if not module.start:
            module.capability = self._chosen().capability
            module.start = self.start
            data = bytes(module.placed.data)
            assert self.memory is not None
            self.memory[self.start - ARENA : self.start - ARENA + len(data)] = data
            self.start += (len(data) // _UNIT + 2) * _UNIT
        return module

    def _kernel(self, given: _Reader) -> tuple[int, bytes]:
        number, name = given.number(), given.text()
        module = self._checked(number)
        if module is None:
            return NO_IMAGE, b""
        if name not in module.module.entries:
            return NOT_FOUND, b""
        made = module.kernel(name)
        bound = made.directives.get("maxntid", ())
        threads = 1
        for size in bound:
            threads *= size
        constant = sum(
            p.variable.size for p in module.placed.variables.values() if p.variable.space == "const"
        )
        target = int(re.sub(r"\D", "", module.module.target) or 0)
        cluster = int("reqnctapercluster" in made.directives)
        facts = (made.shared, made.local, constant, threads if bound else 0, target, cluster)
        pairs = zip(made.offsets, made.parameters, strict=True)
        places = [value for offset, one in pairs for value in (offset, one.size)]
        return SUCCESS, _packed(*facts, len(made.parameters), *places)

    def _checked(self, number: int) -> _DeviceModule | None:
        """A module, or None if it has no PTX that the GPU takes, which is told."""
        module = self.modules[number]
        if choose(module.images, self._chosen().capability):
            return self._loaded(number)
        problem = _without_ptx(module.images, self._chosen().capability)
        self.report.refuse(problem.message, Failed(problem))
        return None

    def _symbol(self, given: _Reader) -> tuple[int, bytes]:
        number, name = given.number(), given.text()
        module = self._checked(number)
        if module is None:
            return NO_IMAGE, b""
        placed = module.placed.variables.get(name)
        if placed is None:
            return NOT_FOUND, b""
        return SUCCESS, _packed(module.start + placed.offset, placed.variable.size)

    # --- launches -----------------------------------------------------------------------------

    def _launch(self, given: _Reader) -> tuple[int, bytes]:
        number, name = given.number(), given.text()
        grid, block, cluster = (given.numbers(3) for _ in range(3))
        shared, cooperative = given.numbers(2)
        parameters = given.data_of()
        living = [given.numbers(4) for _ in range(given.number())]
        freed = [given.numbers(4) for _ in range(given.number())]
        program = self.modules[number].kernel(name)
        regions = [*self._regions(living, parameters), *self._variables()]
        together = _together(cluster, bool(cooperative))
        self.report.launched(name)
        sizes = (grid, block, shared)
        done = launch(program, regions, parameters, *sizes, self.options.schedule, **together)
        self._tell(name, program, done, grid, _extents(living, freed))
        return _error(done), b""

    def _regions(self, living: Sequence[Sequence[int]], parameters: bytes) -> list[Region]:
        """The allocations, as the machine looks for them: those of the parameters first."""
        words = {w for (w,) in _NUMBER.iter_unpack(parameters[: len(parameters) // 8 * 8])}
        first = sorted(living, key=lambda one: one[0] not in words)
        return [
            _region(self.address, base, size, EMPTY if kind == _DEVICE else READ_WRITE)
            for base, size, kind, _ in first
        ]

    def _variables(self) -> Iterator[Region]:
        for module in self.modules:
            if module.start:
                yield from module.regions(self.address)

    def _tell(
        self,
        name: str,
        program: EncodedKernel,
        done: LaunchResult,
        grid: Sequence[int],
        extents: tuple[Extent, ...],
    ) -> None:
        if not done.findings:
            return
        for module in self.modules:
            if module.start:
                extents += tuple(
                    Extent(one, module.start + placed.offset, placed.variable.size)
                    for one, placed in module.placed.variables.items()
                )
        file = _file_of(program)
        shown = PurePath(file).name
        origin = Origin(shown or name, grid=tuple(grid), tensors=extents, text=self._text(file))
        self.report.found(name, done.findings, origin, shown or "PTX")

    def _text(self, file: str) -> str:
        """The text of a source file, if it is still there."""
        if file not in self.texts:
            self.texts[file] = ""
            path = Path(file)
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if file and path.is_file() and path.stat().st_size < _MOST_SOURCE:
                    self.texts[file] = path.read_text(encoding="utf-8")
        return self.texts[file]

    def _tensor_map(self, given: _Reader) -> tuple[int, bytes]:
        kind, rank, address = given.numbers(3)
        axes = [given.numbers(4) for _ in range(min(rank, 5))]
        interleave, swizzle, fill = given.numbers(3)
        sizes, strides, box, steps = ([axis[n] for axis in axes] for n in range(4))
        if interleave or kind >= len(_ELEMENTS) or swizzle > 3 or any(step != 1 for step in steps):
            self.report.refuse(
                "cuTensorMapEncodeTiled with an interleave, element strides, or a new type"
            )
            return NOT_SUPPORTED, b""
        size, real = _ELEMENTS[kind]
        words = ("none", "32B", "64B", "128B")[swizzle], ("zeros", "nan")[fill]
        try:
            made = encode_tensor_map(
                address, sizes, strides[:-1], box, size, *words, "float" if real else "integer"
            )
        except (ValueError, IndexError) as error:
            self.report.misuse(f"cuTensorMapEncodeTiled: {error} (cudaErrorInvalidValue)")
            return INVALID_VALUE, b""
        return SUCCESS, _packed(made)


def _together(cluster: Sequence[int], cooperative: bool) -> dict[str, Any]:
    """The arguments of a launch whose blocks are not independent."""
    asked: dict[str, Any] = {"cooperative": True} if cooperative else {}
    return asked | ({"cluster": cluster} if any(size > 1 for size in cluster) else {})


def _extents(living: Sequence[Sequence[int]], freed: Sequence[Sequence[int]]) -> tuple[Extent, ...]:
    """Allocations by name, for findings."""
    made = [Extent(f"allocation {n} ({size} bytes)", base, size) for base, size, _, n in living]
    made += [Extent(f"freed allocation {n} ({size} bytes)", b, size) for b, size, _, n in freed]
    return tuple(made)


def _error(done: LaunchResult) -> int:
    """The error that a kernel ends with on a GPU."""
    for one in done.findings:
        if one.kind == "trap":
            failed = one.instruction.opcode == "__assertfail"
            return ASSERT if failed else LAUNCH_FAILURE
        if one.kind == "deadlock":
            return TIMEOUT
    return SUCCESS


# --- the program ------------------------------------------------------------------------------


def run_program(command: Sequence[str], options: Options) -> tuple[int, Report]:
    """Run a program with its kernels in the emulator. Returns its exit status and the report.

    Raises Failed: FW821 without a C++ compiler, FW001 if the program cannot be started.
    """
    folder = library_folder()
    report = Report(command[0])
    with tempfile.TemporaryDirectory(prefix="flashwright-") as place:
        path = os.path.join(place, "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen()
            accepting = threading.Thread(
                target=_accept, args=(listener, options, report), daemon=True
            )
            accepting.start()
            env = {**os.environ, SOCKET: path}
            env["LD_PRELOAD"] = _before(str(folder / NAME), os.environ.get("LD_PRELOAD"))
            env["LD_LIBRARY_PATH"] = _before(str(folder), os.environ.get("LD_LIBRARY_PATH"))
            status = _run(command, env)
    return status, report


def _before(first: str, others: str | None) -> str:
    return f"{first}:{others}" if others else first


def _run(command: Sequence[str], env: Mapping[str, str]) -> int:
    try:
        child = subprocess.Popen(command, env=dict(env))
    except OSError as error:
        text = f"cannot run {command[0]}: {error.strerror}"
        raise Failed(Diagnostic("FW001", text)) from None
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.wait()
        raise


def _accept(listener: socket.socket, options: Options, report: Report) -> None:
    with contextlib.suppress(OSError):  # the listener is closed
        while True:
            line, _ = listener.accept()
            process = _Process(line, options, report)
            threading.Thread(target=_serve, args=(process,), daemon=True).start()


def _serve(process: _Process) -> None:
    try:
        process.serve()
    except OSError:  # the process has ended
        return
    finally:
        process.line.close()
