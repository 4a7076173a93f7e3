"""Many kernels in one translation unit: the headers, which take seconds, are read once.

Each kernel has its own namespace and a numbered entry. `#line` gives every kernel a file name, so
that an error of nvcc names the kernels at fault; these are removed and the rest is compiled again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from flashwright.build.process import run
from flashwright.build.toolchain import Toolchain, find
from flashwright.lang.diagnostic import Failed

FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-w", "-ptx")
SECONDS = 900.0
_INCLUDE = re.compile(r"^#include <fw/(\w+)\.cuh>\n", re.MULTILINE)
_FILE = re.compile(r"\bk(\d+)\.cu\b")
_ENTRY = re.compile(r"^\.visible \.entry (\w+)\(", re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """A generated kernel to compile."""

    text: str
    entry: str
    arch: str


@dataclass(frozen=True)
class CompileFailure:
    """A kernel that nvcc rejects, and its message."""

    message: str


def compile_many(
    sources: Sequence[Source], toolchain: Toolchain | None = None
) -> list[str | CompileFailure]:
    """The PTX of each kernel with its original entry name, or its CompileFailure."""
    tools = toolchain or find()
    found: dict[int, str | CompileFailure] = {}
    for arch in dict.fromkeys(s.arch for s in sources):
        group = {n: s for n, s in enumerate(sources) if s.arch == arch}
        found |= _compiled(group, arch, tools)
    return [found[n] for n in range(len(sources))]


def _compiled(
    group: Mapping[int, Source], arch: str, tools: Toolchain
) -> dict[int, str | CompileFailure]:
    found: dict[int, str | CompileFailure] = {}
    left = dict(group)
    while left:
        code, log, ptx = _nvcc(_unit(left), arch, tools)
        if code == 0:
            return found | _split_modules(ptx, left)
        blamed = {int(n) for n in _FILE.findall(log)} & set(left)
        if not blamed and len(left) == 1:
            blamed = set(left)
        if not blamed:  # the compiler crashed: find the kernel that causes it
            half = len(left) // 2
            names = list(left)
            for part in (names[:half], names[half:]):
                found |= _compiled({n: left[n] for n in part}, arch, tools)
            return found
        for number in blamed:
            found[number] = CompileFailure(_complaint(log, number))
            del left[number]
    return found


def _unit(group: Mapping[int, Source]) -> str:
    """All kernels in one file."""
    headers = {name for s in group.values() for name in _INCLUDE.findall(s.text)}
    parts = [f"#include <fw/{name}.cuh>" for name in sorted(headers)]
    for number, source in group.items():
        text = _INCLUDE.sub("\n", source.text)
        text = re.sub(rf"\b{source.entry}\(", f"{source.entry}_{number}(", text)
        parts += [f"namespace k{number} {{", f'#line 1 "k{number}.cu"', text, "}"]
    return "\n".join(parts) + "\n"


def _nvcc(text: str, arch: str, tools: Toolchain) -> tuple[int, str, str]:
    with TemporaryDirectory(prefix="flashwright-fuzz-") as name:
        place = Path(name)
        (place / "unit.cu").write_text(text, encoding="utf-8")
        command = [str(tools.nvcc), *FLAGS, f"-arch={arch}", "-I", str(tools.device)]
        command += ["-I", str(tools.cutlass), "-o", "unit.ptx", "unit.cu"]
        try:
            code, log = run(command, place, SECONDS)
        except Failed as failed:
            return 1, failed.diagnostics[0].message, ""
        made = place / "unit.ptx"
        return code, log, made.read_text() if code == 0 else ""


def _split_modules(ptx: str, group: Mapping[int, Source]) -> dict[int, str | CompileFailure]:
    """The PTX of a unit, cut into modules of one kernel each."""
    starts = list(_ENTRY.finditer(ptx))
    head = ptx[: starts[0].start()]
    ends = [*(m.start() for m in starts[1:]), len(ptx)]
    by_name = {m[1]: ptx[m.start() : end] for m, end in zip(starts, ends, strict=True)}
    found: dict[int, str | CompileFailure] = {}
    for number, source in group.items():
        text = by_name[f"{source.entry}_{number}"]
        found[number] = head + text.replace(f"{source.entry}_{number}", source.entry, 1)
    return found


def _complaint(log: str, number: int) -> str:
    """The first error that names a kernel."""
    lines = log.splitlines()
    own = [line for line in lines if line.startswith(f"k{number}.cu") and "error" in line]
    if own:
        return own[0].strip()[:300]
    for at, line in enumerate(lines):
        if "error" in line and any(f"k{number}.cu" in near for near in lines[at : at + 14]):
            return line.strip()[:300]
    return next((line.strip()[:300] for line in lines if "error" in line), log.strip()[:300])
