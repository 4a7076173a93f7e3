"""The emulator's machine in a confined process, for untrusted PTX.

The machine is a C++ program that executes any code it is given. A kernel that exploits it controls
a process that can open no file, has no socket and cannot reach the judge. The process returns
bytes only: outputs to compare, and findings, which are checked.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flashwright.confine.seal import hidden
from flashwright.confine.start import NOT_CONFINED, Policy, confined
from flashwright.emulate.machine import library_file
from flashwright.emulate.structs import NUMBER, ROOM, Launch, Region
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.limits import Limits
from flashwright.sandbox.place import environment, make_folder, policy

_ALIGNED = 64
_WRITTEN = ("findings", "counts", "printed")
Parts = list[tuple[int, int, int]]


class MachineProcess:
    """Executes launches as emulate.machine.here does, in a confined process."""

    def __init__(self, limits: Limits) -> None:
        """Start the process. Raises Failed with FW821 or FW851 if that is not possible."""
        library, folder = library_file(), make_folder()
        self._memory = os.memfd_create("launch")
        self._names: dict[int, tuple[object, bytes, Any]] = {}
        started = list[subprocess.Popen[bytes]]()
        hidden.begin()
        self.close = weakref.finalize(self, _end, started, self._memory, folder)
        module = ["-m", "flashwright.emulate.server", str(library), str(self._memory)]
        allowed = _policy(library, folder, limits)
        command, env = confined(allowed, [sys.executable, "-P", "-S", "-s", *module])
        self._process = subprocess.Popen(
            command,
            env=env,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(self._memory,),
            bufsize=0,
        )
        started.append(self._process)
        self._start = self._answer()

    def __call__(self, told: Launch, sizes: Mapping[str, int], regions: Sequence[Region]) -> int:
        """As emulate.machine.Machine. Raises Failed with FW831 if the process ends instead."""
        made, parts, size = self._placed(told, sizes, regions)
        os.pwrite(self._memory, bytes(made), 0)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(NUMBER.pack(size))
        except OSError:
            raise self._ended() from None
        answer = self._answer()
        for address, at, length in parts:
            data = os.pread(self._memory, length, at)
            if len(data) != length:
                raise _taken("it has truncated the shared memory")
            ctypes.memmove(address, data, length)
        return answer

    def _placed(
        self, told: Launch, sizes: Mapping[str, int], regions: Sequence[Region]
    ) -> tuple[Launch, Parts, int]:
        """Copy a launch into shared memory: the launch with its new addresses, the parts that it
        writes, and the total size."""
        made, written = Launch.from_buffer_copy(told), Parts()
        made.threads = 1  # it may start none
        at = self._aligned(ctypes.sizeof(Launch))
        for name, size in sizes.items():
            address = getattr(told, name)
            setattr(made, name, self._start + at)
            if name in _WRITTEN:
                written.append((address, at, size))
            at = self._put(address, size, at)
        listed = (Region * len(regions))(*regions)
        for region, given in zip(listed, regions, strict=True):
            region.data = self._start + at
            if given.use and given.size:
                written.append((given.data, at, given.size))
            at = self._put(given.data, given.size, at)
            if given.marks and given.size:
                region.marks = self._start + at
                written.append((given.marks, at, given.size))
                at = self._put(given.marks, given.size, at)
        made.regions = self._start + at
        at = self._put(ctypes.addressof(listed), ctypes.sizeof(listed), at)
        texts, offsets = self._texts(told)
        made.names = self._start + at
        pointers = offsets + np.uint64(self._start + at + offsets.nbytes)
        os.pwrite(self._memory, pointers.tobytes() + texts, at)
        at = self._aligned(at + offsets.nbytes + len(texts))
        if at > ROOM:
            raise Failed(Diagnostic("FW831", f"a launch with {at} bytes cannot be emulated"))
        return made, written, at

    def _put(self, address: int, size: int, at: int) -> int:
        """Copy `size` bytes from an address. Returns the offset of the next part."""
        if size:
            os.pwrite(self._memory, (ctypes.c_char * size).from_address(address), at)
        return self._aligned(at + max(size, 1))

    def _aligned(self, at: int) -> int:
        at = -(-at // _ALIGNED) * _ALIGNED
        if os.fstat(self._memory).st_size < at:
            os.ftruncate(self._memory, at)
        return at

    def _texts(self, told: Launch) -> tuple[bytes, Any]:
        """The names of a program's instructions, and where each begins: alike for all launches."""
        key = int(told.names)
        if key not in self._names:
            listed = (ctypes.c_char_p * told.instructions).from_address(told.names)
            places: dict[bytes, int] = {}
            texts, offsets = b"", []
            for name in listed:
                if name not in places:
                    places[name] = len(texts)
                    texts += name + b"\0"
                offsets.append(places[name])
            self._names[key] = told.kept, texts, np.array(offsets, np.uint64)
        return self._names[key][1:]

    def _answer(self) -> int:
        assert self._process.stdout is not None
        said = self._process.stdout.read(NUMBER.size)
        if said is None or len(said) != NUMBER.size:
            raise self._ended()
        return int(NUMBER.unpack(said)[0])

    def _ended(self) -> Failed:
        code = self._process.wait()
        if code == NOT_CONFINED:
            return Failed(Diagnostic("FW851", "this system does not confine the emulator"))
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return _taken(f"its process ended with {how}")


def _taken(why: str) -> Failed:
    return Failed(Diagnostic("FW831", f"the emulator does not survive this kernel: {why}"))


def _policy(library: Path, folder: Path, limits: Limits) -> Policy:
    """The policy of the process: it reads Python and the machine, and writes nothing."""
    stranger = Candidate("library", str(library), untrusted=True)
    given = policy(stranger, folder, environment(folder), limits)
    return replace(given, writable=("/dev/null",), addresses=ROOM + limits.memory)


def _end(started: Sequence[subprocess.Popen[bytes]], memory: int, folder: Path) -> None:
    for process in started:
        process.kill()
        process.wait()
        for end in (process.stdin, process.stdout):
            if end is not None:
                end.close()
    os.close(memory)
    hidden.end()
    shutil.rmtree(folder, ignore_errors=True)
