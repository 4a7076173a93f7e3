"""The line of kernel.cu that each instruction of a cubin comes from, through inlined calls.

Tools name the innermost line, which is mostly a line of a header. nvdisasm also lists the calls
that it was inlined into.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping

from flashwright.build.compile import NAME
from flashwright.build.toolchain import Toolchain

_PLACE = re.compile(rf'//## File "[^"]*?{re.escape(NAME)}", line (\d+)')
_CALL = re.compile(rf'inlined at "[^"]*?{re.escape(NAME)}", line (\d+)')
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s")


def lines_of(cubin: bytes, tools: Toolchain) -> dict[int, int]:
    """The line of each instruction by its address; empty without nvdisasm."""
    beside = tools.nvcc.with_name("nvdisasm")
    program = str(beside) if beside.is_file() else shutil.which("nvdisasm")
    if program is None:
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [program, "-c", "--print-line-info-inline", file.name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return {}
    return read(done.stdout)


def read(listing: str) -> dict[int, int]:
    """The lines in nvdisasm's listing by address. A comment applies until the next group."""
    found: dict[int, int] = {}
    line: int | None = None
    fresh = True
    for text in listing.splitlines():
        if "//## File" in text:
            if fresh:  # a new group of comments: from the innermost call to the outermost
                line, fresh = None, False
            place = _CALL.search(text) or _PLACE.search(text)
            line = int(place[1]) if place else line
        elif match := _INSTRUCTION.match(text):
            fresh = True
            if line is not None:
                found[int(match[1], 16)] = line
    return found


def line_at(addresses: Mapping[int, int], address: int) -> int | None:
    """The line of the instruction at an address, or of the last one before it."""
    before = [a for a in addresses if a <= address]
    return addresses[max(before)] if before else None
