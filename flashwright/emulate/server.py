"""The machine in a process of its own: it executes launches that it finds in shared memory.

    python -m flashwright.emulate.server LIBRARY MEMORY

MEMORY is a file descriptor. The server first writes the address of its mapping to stdout. It then
reads the size of each launch from stdin and writes its result to stdout. Outputs of the launch are
in the shared memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

from flashwright.emulate.structs import NUMBER, ROOM, Launch

_TRIM_THRESHOLD, _MMAP_MAX, _NEVER = -1, -4, 2**31 - 1  # of mallopt
_FIXED, _NO_RESERVE = 0x10, 0x4000  # of mmap, alike on all machines that we know
_FAILED = ctypes.c_void_p(-1).value


def main() -> None:
    """Execute launches until stdin ends."""
    machine, memory = ctypes.CDLL(sys.argv[1]), int(sys.argv[2])
    _keep_memory()
    start = _mapped(None, ROOM, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE, -1)
    os.write(1, NUMBER.pack(start))
    access = mmap.PROT_READ | mmap.PROT_WRITE
    while asked := os.read(0, NUMBER.size):
        (size,) = NUMBER.unpack(asked)
        _mapped(start, size, access, mmap.MAP_SHARED | _FIXED, memory)
        os.write(1, NUMBER.pack(machine.fw_run(ctypes.byref(Launch.from_address(start)))))


def _keep_memory() -> None:
    """A launch takes 100 MB and frees them: given back to the system, each page is zeroed again."""
    system = ctypes.CDLL(None)
    if hasattr(system, "mallopt"):  # the GNU library's
        system.mallopt(_MMAP_MAX, 0)
        system.mallopt(_TRIM_THRESHOLD, _NEVER)


def _mapped(start: int | None, size: int, access: int, flags: int, file: int) -> int:
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    found: int | None = call(start, size, access, flags, file, 0)
    if found is None or found == _FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    return found


if __name__ == "__main__":
    main()
