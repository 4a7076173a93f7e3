"""Small kernels of PTX for the emulator's tests: a body, and one array as the parameter."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from flashwright.emulate.emulate import LaunchResult, launch
from flashwright.emulate.encode import encode
from flashwright.emulate.parse import parse
from flashwright.emulate.structs import Region

HEAD = ".version 8.4\n.target sm_90a\n.address_size 64\n"
SCHEDULES = ("eager", "lazy", "random:3")
BASE = 1 << 20
"""The address of the array."""


def run(
    body: str,
    out: Any,
    threads: int | Sequence[int] = 32,
    schedule: str = "eager",
    shared: int = 0,
    grid: int | Sequence[int] = 1,
    use: int = 1,
    directives: str = "",
) -> LaunchResult:
    """Launch a kernel with one parameter, the array `out`: its body in PTX."""
    registers = ".reg .pred %p<8>;\n.reg .b32 %r<32>;\n.reg .f32 %f<8>;\n"
    registers += ".reg .b64 %rd<16>; .reg .b16 %h<8>;\n"
    start = "ld.param.u64 %rd0, [out];\nmov.u32 %r0, %tid.x;\n"
    entry = f".visible .entry k(.param .u64 out){directives}"
    text = f"{HEAD}{entry}\n{{\n{registers}{start}{body}\nret;\n}}\n"
    module = parse(text)
    regions = [Region(BASE, out.nbytes, out.ctypes.data, use)]
    program = encode(module, module.entries["k"])
    sizes = [[n] if isinstance(n, int) else n for n in (grid, threads)]
    return launch(program, regions, struct.pack("<Q", BASE), *sizes, shared, schedule)


def store(value: str = "%r1", index: str = "%r0") -> str:
    """out[index] = value."""
    return f"mad.wide.u32 %rd9, {index}, 4, %rd0;\nst.global.u32 [%rd9], {value};\n"


def kinds(result: LaunchResult) -> set[str]:
    """The kinds of findings of a launch."""
    return {f.kind for f in result.findings}
