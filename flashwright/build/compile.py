"""One run of nvcc: device code to a cubin and its PTX, and what ptxas says about it.

One run gives both: with --keep the PTX that the cubin is assembled from stays there, at no cost.
What is measured to be slow is an error here: spilled registers, wgmma that ptxas serialises.
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
from flashwright.build.cache import Cache, Entry, digest
from flashwright.build.process import Limits, need_confinement, run, run_confined
from flashwright.build.toolchain import Toolchain, find
from flashwright.files import cannot
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.source_map import SourceMap

# No fast-math: what is approximate is written so in the source.
FLAGS = (
    *("-std=c++17", "-O3", "--expt-relaxed-constexpr", "--expt-extended-lambda"),
    *("-Xptxas", "-v", "-cubin", "--keep"),
)
# nvcc puts a digest of the folder it works in into names that nobody sees: without it the same
# source gives the same bytes everywhere.
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
class Facts:
    """What ptxas says: registers of a thread, and bytes."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    """Static shared memory only; what a launch asks for is in the launch plan."""
    seconds: float
    """What the compilation took, now or when it was put into the cache."""

    @property
    def spills(self) -> int:
        """Bytes that a thread stores to local memory and loads from it."""
        return self.spill_stores + self.spill_loads


@dataclass(frozen=True)
class Built(Facts):
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
    """The bytes of `--allow-spills`, where it is thanks to them that the kernel was taken."""

    def record(self) -> dict[str, Any]:
        """The facts as plain data."""
        names = [f.name for f in fields(Facts)]
        facts = {name: getattr(self, name) for name in names}
        if self.allowed_spills:
            facts["allowed_spills"] = self.allowed_spills
        return {"arch": self.arch, "real": self.real, "nvcc": self.nvcc, "key": self.key, **facts}


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

    `real` compiles the same PTX for a newer GPU than `arch`. `map` and the text of `tl` put what
    nvcc complains about under its TL line. A kernel that spills is refused, unless it `may_spill`.
    `line_info` keeps the source's lines in the cubin, for tools that tell of them. `untrusted`
    code, which a model wrote, is compiled in a confined process (process.py), in two minutes at
    most, and what nvcc complains about is put under the line of the source itself; FW828 where the
    compiler has read a file that is no header of its own, of CUTLASS or of ours, and FW821 where
    the system cannot confine it.
    """
    if untrusted:
        need_confinement()
    tools, store = toolchain or find(), cache or Cache()
    seconds = time_limit or (Limits.seconds if untrusted else TIME_LIMIT)
    limits = Limits(seconds=seconds) if untrusted else None
    places = blame.Places(None, source, own=True) if untrusted else blame.Places(map, tl)
    real = real or arch
    flags = (*FLAGS, *(("-lineinfo",) if line_info else ()), *target(arch, real))
    # What was compiled without a look at the files it read is not taken for what was.
    asked = (*flags, *(_LISTED if untrusted else ()))
    key = digest([source, tools.version, *asked], [tools.device, tools.cutlass])
    entry, cached = store.get(key), True
    if entry is None:
        with store.turn(key, patience=seconds):
            entry = store.get(key)  # whoever had the turn before may have made it
            if entry is None:
                work = _Work(tools, store, places, seconds, limits)
                entry, cached = _compiled(source, asked, work), False
                store.put(key, entry)
    facts = Facts(**entry.facts)
    if facts.spills and not may_spill:
        raise Failed(blame.spills(facts.spill_stores, facts.spill_loads, facts.registers))
    return Built(
        **asdict(facts),
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
    """nvcc's words for PTX of one architecture, assembled for another that is not older."""
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
class _Work:
    """What one run of nvcc has to do with, beside what it compiles."""

    tools: Toolchain
    store: Cache
    places: blame.Places
    seconds: float
    limits: Limits | None
    """Of code that nobody has read."""

    def nvcc(self, command: Sequence[str], place: Path) -> tuple[int, str]:
        if self.limits is None:
            return run(command, place, self.seconds)
        return run_confined(command, place, self.tools, self.limits)


def _compiled(source: str, flags: Sequence[str], work: _Work) -> Entry:
    tools, places = work.tools, work.places
    start = time.monotonic()
    with work.store.workplace() as place:
        command = [str(tools.nvcc), *flags, "-I", str(tools.device), "-I", str(tools.cutlass)]
        try:
            (place / NAME).write_text(source, encoding="utf-8")
            code, log = work.nvcc([*command, "-o", "kernel.cubin", NAME], place)
            if work.limits is not None:  # before its messages are shown, which quote what it read
                _refuse_other_files(work, place, code, log)
            if code != 0:
                half = place / "kernel.ptx"
                text = half.read_text(errors="replace") if places.own and half.is_file() else ""
                raise blame.refused(code, log, places, text)
            named = [(place / n).read_bytes() for n in ("kernel.cubin", "kernel.ptx")]
            cubin, ptx = (_PLACE.sub(rb"\g<1>00000000", data) for data in named)
        except OSError as error:
            raise cannot("compile in", place, error) from None
        facts = read_facts(log, time.monotonic() - start)
    if not facts.registers:  # then "no spills" would be said of nothing
        raise Failed(Diagnostic("FW822", "ptxas tells of no kernel in the generated code"))
    blame.refuse_serialised(log)
    return Entry(asdict(facts), cubin, ptx)


# --- which files were read --------------------------------------------------------------------


def _refuse_other_files(work: _Work, place: Path, code: int, log: str) -> None:
    """Failed with FW828 where the compiler read anything but headers; FW821 where that is not told.

    This does not rest on the screen. The list of the preprocessor, the line markers in its output
    and the messages each name files; a directive that is left in the output would be carried out by
    the next stage, which lists nothing.
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
    for name in _not_allowed(names, work, place):
        text = (
            f"the code makes the compiler read `{Path(name).name}`, which is no header it may use"
        )
        raise Failed(Diagnostic("FW828", text))


def _quoted(log: str, place: Path) -> Iterator[str]:
    """The files that messages are about, but for those that the compiler has made."""
    for name in {*_IN_LOG.findall(log)}:
        if (place / name).is_file() and not _below(place / name, [place]):
            yield name


def _prerequisites(rule: str) -> Iterator[str]:
    """The names in a rule of make, `kernel.o: kernel.cu a.h`, as the preprocessor writes it."""
    _, _, names = rule.replace("\\\n", " ").partition(":")
    for name in re.findall(r"(?:\\[ #\\]|[^\s])+", names):
        yield re.sub(r"\\([ #\\])", r"\1", name).replace("$$", "$")


def _entered(preprocessed: bytes) -> Iterator[str]:
    """The files of the line markers; Failed where another directive is left for the next stage."""
    for match in _DIRECTIVE.finditer(preprocessed):
        marker = _MARKER.fullmatch(match[1].strip())
        if marker is not None:
            yield os.fsdecode(marker[1])
        elif not _HARMLESS.fullmatch(match[1]):
            raise Failed(Diagnostic("FW828", "a directive that appears once macros are expanded"))


def _not_allowed(names: Iterable[str], work: _Work, place: Path) -> list[str]:
    """Those that are neither kernel.cu nor below a folder of headers, links followed."""
    given = [f for f in (work.tools.device, work.tools.cutlass) if f.is_dir()]
    left = [name for name in sorted(names) if not _pseudo(name, place)]
    left = [name for name in left if not _below(place / name, given)]
    if left:  # then the compiler is asked for its own folders
        searched = _searched(work, place)
        left = [name for name in left if not _below(place / name, searched)]
    return left


def _pseudo(name: str, place: Path) -> bool:
    """`<built-in>`, the folder `kernel.cu` is compiled in, and itself."""
    inside = name.startswith("<") and name.endswith(">") and "/" not in name
    return inside or (place / name).resolve() in (place.resolve(), (place / NAME).resolve())


def _below(path: Path, folders: Iterable[Path]) -> bool:
    real = path.resolve()
    return any(real.is_relative_to(folder.resolve()) for folder in folders)


def _searched(work: _Work, place: Path) -> list[Path]:
    """Where the compiler looks for headers by itself."""
    (place / "nothing.cu").write_text("")
    asked = [str(work.tools.nvcc), "-E", "-Xcompiler", "-v", "-o", "nothing.out", "nothing.cu"]
    _, log = work.nvcc(asked, place)
    found = _SEARCH.search(log)
    lines = found[1].splitlines() if found else []
    return [Path(line.strip()) for line in lines if os.path.isabs(line.strip())]


# --- what ptxas says --------------------------------------------------------------------------


def read_facts(log: str, seconds: float) -> Facts:
    """The numbers of `ptxas -v`: the largest over the functions, and the sum of all spills."""

    def numbers(pattern: str) -> list[int]:
        return [int(n) for n in re.findall(pattern, log)]

    return Facts(
        registers=max(numbers(r"Used (\d+) registers"), default=0),
        spill_stores=sum(numbers(r"(\d+) bytes spill stores")),
        spill_loads=sum(numbers(r"(\d+) bytes spill loads")),
        stack=max(numbers(r"(\d+) bytes stack frame"), default=0),
        shared=max(numbers(r"(\d+) bytes smem"), default=0),
        seconds=round(seconds, 2),
    )
