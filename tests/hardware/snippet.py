"""A snippet: a kernel that loads its operands, executes one instruction, and stores the results.

Each thread has one number of each operand for each trial; a trial is a thread block. In the buffers
all numbers of the first operand come first, then those of the second, and so on.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.hardware.formats import KINDS, Array

VERSION = "8.4"  # of PTX: every driver from CUDA 12.4 on takes it
WARP, WARPGROUP = 32, 128
MAP = 128  # bytes of a tensor map
MORE = 64  # what is passed behind the two addresses is aligned to that: a tensor map must be

Operands = list[Array]
"""Of each operand, or result, the bits: an array of trials times threads."""
Bound = Callable[[Operands, Operands], Operands]
"""From operands and the hardware's results how far those of the emulator may be from them."""
Model = Callable[..., "Array | Operands"]
"""The results for some operands, in NumPy."""


@dataclass(frozen=True)
class Tensor:
    """What a tensor map says of the operands' buffer, or of the results': innermost first."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes; not that of the innermost."""
    box: tuple[int, ...]
    swizzle: str = "none"
    element_bytes: int = 2
    fill: str = "zeros"
    of_results: bool = False


@dataclass(frozen=True)
class Snippet:
    """A kernel of one instruction, and what it is tried with."""

    name: str
    group: str
    body: str
    """PTX. Operands are %i0, %i1 ..., results %o0 ...; %t is the thread."""
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    operands: Callable[[], Operands]
    arch: str = "sm_80"
    threads: int = WARP
    declares: str = ""
    """Further registers and shared memory."""
    bound: Bound | None = None
    """None: the results must be the same bits."""
    model: Model | None = None
    version: str = VERSION
    parameters: bytes = b""
    """Behind the two addresses; it is called `more`."""
    tensor: Tensor | None = None
    """A map of it is passed in their stead."""

    @property
    def entry(self) -> str:
        """The kernel's name."""
        return "fw_" + re.sub(r"\W", "_", self.name)


def counts(snippet: Snippet, operands: Operands) -> int:
    """Trials."""
    sizes = {len(o) for o in operands}
    assert len(sizes) == 1, snippet.name
    trials, rest = divmod(sizes.pop(), snippet.threads)
    assert rest == 0, snippet.name
    return trials


def offsets(kinds: Sequence[str], count: int) -> list[int]:
    """Where each operand begins; last, the bytes of all."""
    places = [0]
    for kind in kinds:
        places.append(places[-1] + -(-KINDS[kind].bytes * count // 16) * 16)
    return places


def packed(kinds: Sequence[str], arrays: Operands) -> bytes:
    """All operands in one buffer."""
    count = len(arrays[0]) if arrays else 0
    places = offsets(kinds, count)
    buffer = bytearray(places[-1])
    for kind, array, place in zip(kinds, arrays, places, strict=False):
        data = np.ascontiguousarray(array.astype(KINDS[kind].word)).tobytes()
        buffer[place : place + len(data)] = data
    return bytes(buffer)


def unpacked(kinds: Sequence[str], data: bytes, count: int) -> Operands:
    """The opposite."""
    places = offsets(kinds, count)
    return [
        np.frombuffer(data, KINDS[kind].word, count, place)
        for kind, place in zip(kinds, places, strict=False)
    ]


# --- text ---------------------------------------------------------------------------------------


def kernel(snippet: Snippet, trials: int) -> str:
    """The kernel's text, without the module's head."""
    count = trials * snippet.threads
    lines = [*_head(snippet), *_addresses(snippet)]
    for n, (kind, place) in enumerate(
        zip(snippet.takes, offsets(snippet.takes, count), strict=False)
    ):
        lines += _load(n, kind, place)
    lines += [line.strip() for line in snippet.body.strip().split("\n")]
    for n, (kind, place) in enumerate(
        zip(snippet.gives, offsets(snippet.gives, count), strict=False)
    ):
        lines += _store(n, kind, place)
    room = MAP if snippet.tensor else len(snippet.parameters)
    more = f", .param .align {MORE} .b8 more[{room}]" if room else ""
    start = f".visible .entry {snippet.entry}(.param .u64 from, .param .u64 into{more})\n"
    return start + "{\n" + "\n".join(f"  {line}" for line in [*lines, "ret;"]) + "\n}\n"


def module(arch: str, version: str, kernels: Sequence[str]) -> str:
    """A file of PTX."""
    return f".version {version}\n.target {arch}\n.address_size 64\n\n" + "\n".join(kernels)


def _head(snippet: Snippet) -> list[str]:
    lines = [".reg .b64 %in, %out;", ".reg .b32 %t, %block, %index;"]
    lines += [f".reg .b64 %in{n}, %out{n};" for n in (1, 2, 4, 8)]
    for letter, kinds in (("i", snippet.takes), ("o", snippet.gives)):
        for n, kind in enumerate(kinds):
            lines.append(f".reg .{_register(kind)} %{letter}{n};")
            if kind == "pred":
                lines.append(f".reg .b32 %{letter}w{n};")
    return lines + [line.strip() for line in snippet.declares.split("\n") if line.strip()]


def _register(kind: str) -> str:
    return "pred" if kind == "pred" else KINDS[kind].register


def _addresses(snippet: Snippet) -> list[str]:
    lines = ["ld.param.u64 %in, [from];", "ld.param.u64 %out, [into];", "mov.u32 %t, %tid.x;"]
    lines += ["mov.u32 %block, %ctaid.x;", f"mad.lo.s32 %index, %block, {snippet.threads}, %t;"]
    for way, kinds in (("in", snippet.takes), ("out", snippet.gives)):
        for size in sorted({KINDS[k].bytes for k in kinds}):
            lines.append(f"mul.wide.u32 %{way}{size}, %index, {size};")
            lines.append(f"add.s64 %{way}{size}, %{way}, %{way}{size};")
    return lines


def _load(n: int, kind: str, place: int) -> list[str]:
    size = KINDS[kind].bytes
    target = f"%iw{n}" if kind == "pred" else f"%i{n}"
    lines = [f"ld.global.b{8 * size} {target}, [%in{size}+{place}];"]
    return [*lines, f"setp.ne.b32 %i{n}, %iw{n}, 0;"] if kind == "pred" else lines


def _store(n: int, kind: str, place: int) -> list[str]:
    size = KINDS[kind].bytes
    if kind == "pred":
        take = f"selp.b32 %ow{n}, 1, 0, %o{n};"
        return [take, f"st.global.b32 [%out4+{place}], %ow{n};"]
    return [f"st.global.b{8 * size} [%out{size}+{place}], %o{n};"]


# --- a whole launch -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """All that a launch takes; the same on the GPU and in the emulator."""

    snippet: Snippet
    operands: Operands
    trials: int
    kernel: str
    data: bytes
    """The operands' buffer."""
    size: int
    """Bytes of the results' buffer."""

    @property
    def ptx(self) -> str:
        """A module with this kernel alone."""
        return module(self.snippet.arch, self.snippet.version, [self.kernel])

    @property
    def digest(self) -> str:
        """Another one makes a recording worthless."""
        more = self.snippet.parameters + repr(self.snippet.tensor).encode()
        parts = [self.ptx.encode(), self.data, more]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]

    def results(self, data: bytes) -> Operands:
        """What a results' buffer holds."""
        return unpacked(self.snippet.gives, data, self.trials * self.snippet.threads)


def prepare(snippet: Snippet) -> Prepared:
    """Draw the operands, write the kernel."""
    operands = snippet.operands()
    trials = counts(snippet, operands)
    size = offsets(snippet.gives, trials * snippet.threads)[-1]
    data = packed(snippet.takes, operands)
    return Prepared(snippet, operands, trials, kernel(snippet, trials), data, size)
