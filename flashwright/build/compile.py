"""One run of nvcc: device code to a cubin and its PTX, and what ptxas says about it.

One run gives both: --keep preserves the PTX that the cubin is assembled from.
Spilled registers and serialised wgmma are errors, because such kernels are slow.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from flashwright.build import blame
from flashwright.build.cache import Cache, CacheEntry, digest
from flashwright.build.process import CompilerLimits, need_confinement, run, run_confined
from flashwright.build.toolchain import Toolchain, find
from flashwright.files import cannot
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.source_map import SourceMap

# No fast-math: the source asks for approximate functions by name.
FLAGS = (
    *("-std=c++17", "-O3", "--expt-relaxed-constexpr", "--expt-extended-lambda"),
    *("-Xptxas", "-v", "-cubin", "--keep"),
)
# nvcc puts a digest of its work folder into internal names. Without it, the same source gives the
# same bytes everywhere.
_PLACE = re.compile(rb"(_INTERNAL_|_GLOBAL__N__)[0-9a-f]{8}(?=_)")
TIME_LIMIT = 600.0
NAME = "kernel.cu"
# The preprocessor lists the files that it reads, in the same run.
_LIST = "kernel.d"
_LISTED = ("-Xcompiler", f"-MD,-MF,{_LIST}")
_DIRECTIVE = re.compile(rb"^[ \t\f\v\r]*(?:#|%:|\?\?=)([^\n]*)", re.MULTILINE)
_MARKER = re.compile(rb'(?:line)?[ \t]*\d+[ \t]+"([^"]*)"[ \t\r\d]*')
_HARMLESS = re.compile(
    rb"[ \t]*(?:pragma\b(?![ \t]*GCC[ \t]+pch).*|ident\b.*|line[ \t]+\d+|\d+)?[ \t\r]*"
)
_SEARCH = re.compile(r"^#include <\.\.\.> search starts here:\n(.*?)^End of search", re.M | re.S)
_IN_LOG = re.compile(r"^(?:In file included from|\s+from)?\s*([^\s:(]+)[:(]\d+", re.MULTILINE)


@dataclass(frozen=True)
class ResourceUsage:
    """Resource usage as ptxas reports it: registers per thread, and bytes."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    """Static shared memory only; the dynamic part is in the launch plan."""
    seconds: float
    """Duration of the compilation, also for a kernel from the cache."""

    @property
    def spills(self) -> int:
        """Bytes that a thread stores to local memory and loads from it."""
        return self.spill_stores + self.spill_loads


@dataclass(frozen=True)
class Built(ResourceUsage):
    """A compiled kernel."""

    cubin: bytes
    ptx: str
    arch: str
    real: str
    """The GPU that the cubin is for; the same as `arch`, or newer."""
    key: str
    nvcc: str
    cached: bool
    warnings: tuple[Diagnostic, ...] = ()
    allowed_spills: int = 0
    """The bytes of `--allow-spills`, if the kernel was accepted because of it; else 0."""

    def record(self) -> dict[str, Any]:
        """The build as JSON-compatible data."""
        names = [f.name for f in fields(ResourceUsage)]
        usage = {name: getattr(self, name) for name in names}
        if self.allowed_spills:
            usage["allowed_spills"] = self.allowed_spills
        return {"arch": self.arch, "real": self.real, "nvcc": self.nvcc, "key": self.key, **usage}


def build(
    source: str,
    arch: str,
    *,
    real: str | None = None,
    map: SourceMap | None = None,
    tl: str = "",
    toolchain: Toolchain | None = None,
    cache: Cache | None = None,
    time_limit: float | None = None,
    may_spill: bool = False,
    line_info: bool = False,
    untrusted: bool = False,
) -> Built:
    """Compile a kernel, or take it from the cache.

    `real` compiles the same PTX for a newer GPU than `arch`. With `map` and the text of `tl`,
    errors of nvcc are reported at their TL line. A kernel that spills is refused unless it
    `may_spill`. `line_info` keeps source lines in the cubin, for profilers and sanitizers.
    `untrusted` code, which a model wrote, is compiled in a confined process (process.py) in at most
    two minutes, and its errors are reported at its own lines.

    Raises Failed: FW822 for errors of nvcc, FW823 for spills, FW828 if untrusted code read a file
    that is not a header of the compiler, CUTLASS or Flashwright, FW821 if the system cannot confine
    the compiler.
    """
    if untrusted:
        need_confinement()
    tools, store = toolchain or find(), cache or Cache()
    seconds = time_limit or (CompilerLimits.seconds if untrusted else TIME_LIMIT)
    limits = CompilerLimits(seconds=seconds) if untrusted else None
    line_map = blame.LineMap(None, source, own=True) if untrusted else blame.LineMap(map, tl)
    real = real or arch
    flags = (*FLAGS, *(("-lineinfo",) if line_info else ()), *target(arch, real))
    # A separate key: entries of trusted builds were made without a check of the files read.
    arguments = (*flags, *(_LISTED if untrusted else ()))
    key = digest([source, tools.version, *arguments], [tools.device, tools.cutlass])
    entry, cached = store.get(key), True
    if entry is None:
        with store.locked(key, patience=seconds):
            entry = store.get(key)  # the previous holder of the lock may have compiled it
            if entry is None:
                nvcc_run = _NvccRun(tools, store, line_map, seconds, limits)
                entry, cached = _compiled(source, arguments, nvcc_run), False
                store.put(key, entry)
    usage = ResourceUsage(**entry.facts)
    if usage.spills and not may_spill:
        raise Failed(blame.spills(usage.spill_stores, usage.spill_loads, usage.registers))
    return Built(
        **asdict(usage),
        cubin=entry.cubin,
        ptx=entry.ptx.decode(),
        arch=arch,
        real=real,
        key=key,
        nvcc=tools.version,
        cached=cached,
        warnings=_warnings(store),
    )


def target(arch: str, real: str) -> tuple[str, str]:
    """nvcc's options for PTX of `arch`, assembled for `real`. ValueError if `real` is older."""
    found = [re.fullmatch(r"sm_(\d{2,3})([af]?)", name) for name in (arch, real)]
    if None in found:
        wrong = arch if found[0] is None else real
        raise ValueError(f"{wrong!r} is not an architecture such as sm_80")
    versions = [int(match[1]) for match in found if match]
    if versions[1] < versions[0]:
        raise ValueError(f"{real} is older than {arch}, and cannot run its code")
    return "-gencode", f"arch={arch.replace('sm_', 'compute_')},code={real}"


def _warnings(store: Cache) -> tuple[Diagnostic, ...]:
    if store.trouble is None:
        return ()
    hint = "the next build compiles again; FLASHWRIGHT_CACHE names another folder"
    text = f"the build cache cannot be written: {store.trouble}"
    return (Diagnostic("FW826", text, help=hint),)


@dataclass(frozen=True)
class _NvccRun:
    """The tools, the cache and the limits of one run of nvcc."""

    tools: Toolchain
    store: Cache
    line_map: blame.LineMap
    seconds: float
    limits: CompilerLimits | None
    """The limits for untrusted code; None for our own."""

    def nvcc(self, command: Sequence[str], place: Path) -> tuple[int, str]:
        if self.limits is None:
            return run(command, place, self.seconds)
        return run_confined(command, place, self.tools, self.limits)


def _compiled(source: str, flags: Sequence[str], nvcc_run: _NvccRun) -> CacheEntry:
    tools, line_map = nvcc_run.tools, nvcc_run.line_map
    start = time.monotonic()
    with nvcc_run.store.workplace() as place:
        command = [str(tools.nvcc), *flags, "-I", str(tools.device), "-I", str(tools.cutlass)]
        try:
            (place / NAME).write_text(source, encoding="utf-8")
            code, log = nvcc_run.nvcc([*command, "-o", "kernel.cubin", NAME], place)
            if nvcc_run.limits is not None:  # before its messages, which quote files, are shown
                _refuse_other_files(nvcc_run, place, code, log)
            if code != 0:
                half = place / "kernel.ptx"
                text = half.read_text(errors="replace") if line_map.own and half.is_file() else ""
                raise blame.refused(code, log, line_map, text)
            named = [(place / n).read_bytes() for n in ("kernel.cubin", "kernel.ptx")]
            cubin, ptx = (_PLACE.sub(rb"\g<1>00000000", data) for data in named)
        except OSError as error:
            raise cannot("compile in", place, error) from None
        usage = read_resource_usage(log, time.monotonic() - start)
    if not usage.registers:  # no report of ptxas: spills are unknown
        raise Failed(Diagnostic("FW822", "ptxas tells of no kernel in the generated code"))
    blame.refuse_serialised(log)
    return CacheEntry(asdict(usage), cubin, ptx)


# --- which files were read --------------------------------------------------------------------


def _refuse_other_files(nvcc_run: _NvccRun, place: Path, code: int, log: str) -> None:
    """Raises Failed with FW828 if the compiler read anything but headers, FW821 if that is unknown.

    This check does not rely on screen.py. The preprocessor's list of files, the line markers in its
    output and its messages name the files. A directive that is left in the output is refused: the
    next stage would execute it and list nothing.
    """
    made = [path.read_bytes() for path in sorted(place.glob("kernel*.ii"))]
    listed = place / _LIST
    if code == 0 and not (made and listed.is_file()):
        text = "the compiler does not tell which files it has read"
        raise Failed(Diagnostic("FW821", text, help="gcc and clang do; NVCC_CCBIN names one"))
    names = {*_quoted(log, place)} if code != 0 else set()
    if listed.is_file():
        names |= {*_prerequisites(listed.read_text(errors="surrogateescape"))}
    for output in made:
        names |= {*_entered(output)}
    for name in _not_allowed(names, nvcc_run, place):
        text = (
            f"the code makes the compiler read `{Path(name).name}`, which is no header it may use"
        )
        raise Failed(Diagnostic("FW828", text))


def _quoted(log: str, place: Path) -> Iterator[str]:
    """The files that messages name, except files that the compiler wrote."""
    for name in {*_IN_LOG.findall(log)}:
        if (place / name).is_file() and not _below(place / name, [place]):
            yield name


def _prerequisites(rule: str) -> Iterator[str]:
    """The names in a rule of make, `kernel.o: kernel.cu a.h`, as the preprocessor writes it."""
    _, _, names = rule.replace("\\\n", " ").partition(":")
    for name in re.findall(r"(?:\\[ #\\]|[^\s])+", names):
        yield re.sub(r"\\([ #\\])", r"\1", name).replace("$$", "$")


def _entered(preprocessed: bytes) -> Iterator[str]:
    """The files of the line markers. Raises Failed if another directive is left in the output."""
    for match in _DIRECTIVE.finditer(preprocessed):
        marker = _MARKER.fullmatch(match[1].strip())
        if marker is not None:
            yield os.fsdecode(marker[1])
        elif not _HARMLESS.fullmatch(match[1]):
            raise Failed(Diagnostic("FW828", "a directive that appears once macros are expanded"))


def _not_allowed(names: Iterable[str], nvcc_run: _NvccRun, place: Path) -> list[str]:
    """The files that are neither kernel.cu nor in a folder of headers, after resolving links."""
    given = [f for f in (nvcc_run.tools.device, nvcc_run.tools.cutlass) if f.is_dir()]
    left = [name for name in sorted(names) if not _pseudo(name, place)]
    left = [name for name in left if not _below(place / name, given)]
    if left:  # ask the compiler for its own folders
        searched = _searched(nvcc_run, place)
        left = [name for name in left if not _below(place / name, searched)]
    return left


def _pseudo(name: str, place: Path) -> bool:
    """Whether a name is `<built-in>` or the like, the work folder, or kernel.cu."""
    inside = name.startswith("<") and name.endswith(">") and "/" not in name
    return inside or (place / name).resolve() in (place.resolve(), (place / NAME).resolve())


def _below(path: Path, folders: Iterable[Path]) -> bool:
    real = path.resolve()
    return any(real.is_relative_to(folder.resolve()) for folder in folders)


def _searched(nvcc_run: _NvccRun, place: Path) -> list[Path]:
    """The default include folders of the compiler."""
    (place / "nothing.cu").write_text("")
    arguments = [
        str(nvcc_run.tools.nvcc),
        "-E",
        "-Xcompiler",
        "-v",
        "-o",
        "nothing.out",
        "nothing.cu",
    ]
    _, log = nvcc_run.nvcc(arguments, place)
    found = _SEARCH.search(log)
    lines = found[1].splitlines() if found else []
    return [Path(line.strip()) for line in lines if os.path.isabs(line.strip())]


# --- what ptxas says --------------------------------------------------------------------------


def read_resource_usage(log: str, seconds: float) -> ResourceUsage:
    """The output of `ptxas -v`: the maximum over all functions, and the sum of their spills."""

    def numbers(pattern: str) -> list[int]:
        return [int(n) for n in re.findall(pattern, log)]

    return ResourceUsage(
        registers=max(numbers(r"Used (\d+) registers"), default=0),
        spill_stores=sum(numbers(r"(\d+) bytes spill stores")),
        spill_loads=sum(numbers(r"(\d+) bytes spill loads")),
        stack=max(numbers(r"(\d+) bytes stack frame"), default=0),
        shared=max(numbers(r"(\d+) bytes smem"), default=0),
        seconds=round(seconds, 2),
    )
