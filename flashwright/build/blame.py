"""Errors of nvcc and ptxas as diagnostics at the TL line that the code came from."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from itertools import islice

from flashwright.build.toolchain import GET_HOST, GET_NVCC
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.nodes import Span, line_span
from flashwright.lower.source_map import SourceMap

MOST = 5  # further errors mostly repeat the first
_MOST_READ = 200

# `kernel.cu(12): error: x` and `fw/a.cuh(3): error #20: x` of nvcc, `kernel.cu:12:5: error: x` of
# the host's preprocessor, `ptxas x.ptx, line 3; error   : x` of ptxas.
_ERROR = re.compile(
    r"^(?P<file>[^\s(:][^(:\n]*)[(:](?P<line>\d+)\)?(?::\d+)?: (?:catastrophic |fatal )?error"
    r"(?: #[\w-]+)?: (?P<text>.+)$"
    r"|^ptxas [^\n]*?, line (?P<ptx>\d+); (?:error|fatal)\s*: (?P<said>.+)$"
    r"|^(?:nvcc|ptxas|cicc) (?:fatal|error)\s*: (?P<plain>.+)$",
    re.MULTILINE,
)
_FROM_KERNEL = re.compile(r"\bat line (\d+) of \"?kernel\.cu\b")
_HOST = re.compile(r"(?<![\w)\]])/(?:[\w.+@-]+/)+")  # the folders of this machine
_NO_HEADER = re.compile(r"fatal error: (\S+): No such file or directory")

# Messages of nvcc about the machine, not about the kernel.
_MACHINE = (
    (
        re.compile(r"Failed to preprocess host compiler|Cannot find compiler|exec\w* .?cc1plus"),
        GET_HOST,
    ),
    (
        re.compile(r"unsupported (?:GNU|clang) version[^\n]*", re.IGNORECASE),
        "name an older compiler in NVCC_CCBIN, or take a newer nvcc",
    ),
    (re.compile(r"Unsupported gpu architecture[^\n]*"), f"take another nvcc: {GET_NVCC}"),
)

# ptxas: wgmma serialised for different reasons, and a setmaxnreg that it ignores.
_SLOW = re.compile(r"^.*\((C7508|C75\d\d(?=\)\s*Potential Perf))\)\s*(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class LineMap:
    """Maps a line of kernel.cu to the text in which its errors are reported.

    That text is the TL, or kernel.cu itself if a model wrote it (`own`).
    """

    map: SourceMap | None
    tl: str
    own: bool = False
    ptx: tuple[str, ...] = ()
    """The lines of the PTX, for errors in the inline assembly of a model."""

    def span(self, cu_line: int | None) -> Span | None:
        """The span of the reported line, or None if it is unknown."""
        if self.own and cu_line is not None:
            return line_span(self.tl, cu_line)
        if cu_line is None or self.map is None:
            return None
        line = self.map.tl_line(cu_line)
        return None if line is None else line_span(self.tl, line)


def refused(code: int, log: str, line_map: LineMap, ptx: str = "") -> Failed:
    """The diagnostics for an nvcc that failed. `ptx` is the PTX that it made before it failed."""
    if code < 0 or (code >= 128 + signal.SIGHUP and code != 255):  # 255: ptxas reports an error
        number = -code if code < 0 else code - 128
        return unfinished(f"nvcc was ended from outside or broke down (signal {number})")
    matches = list(islice(_ERROR.finditer(log), _MOST_READ))
    # A model's code can print any message, so it cannot blame the machine.
    own = line_map.own and any((m["file"] or "").endswith("kernel.cu") for m in matches)
    machine = None if own else _machine(log)
    if machine is not None:
        return Failed(machine)
    ends = [m.start() for m in matches[1:]] + [len(log)]  # the text up to the next error
    line_map = replace(line_map, ptx=tuple(ptx.split("\n"))) if line_map.own else line_map
    errors = [
        _error(m, log[m.start() : end], line_map) for m, end in zip(matches, ends, strict=False)
    ]
    found = list(dict.fromkeys(errors))
    if len(found) > 1:  # "ptxas fatal: aborted due to errors" says nothing after the errors
        found = [d for d in found if "aborted due to errors" not in d.message]
    if not found:
        last = " / ".join(line.strip() for line in log.strip().split("\n")[-3:])[:500]
        last = _HOST.sub("", last) if line_map.own else last
        found = [Diagnostic("FW822", f"nvcc failed with {code}: {last or 'it said nothing'}")]
    return Failed(*found[:MOST])


def _machine(log: str) -> Diagnostic | None:
    if "No space left on device" in log:
        text = "nvcc cannot write its files: no space left on the disk"
        return Diagnostic("FW001", text, help="FLASHWRIGHT_CACHE names another folder to work in")
    header = _NO_HEADER.search(log)
    if header and not header[1].startswith("fw/"):
        hint = "this nvcc and these headers are not a whole set"
        return Diagnostic("FW821", f"nvcc does not find {header[1]}", help=f"{hint}; {GET_NVCC}")
    for pattern, hint in _MACHINE:
        said = pattern.search(log)
        if said:
            line = next(part for part in log.split("\n") if said[0][:40] in part).strip()
            return Diagnostic("FW821", f"nvcc cannot work here: {line}", help=hint)
    return None


def _error(match: re.Match[str], whole: str, line_map: LineMap) -> Diagnostic:
    """One error, at its line of kernel.cu or at the line that instantiated it."""
    line: int | None = None
    where = match["file"] or (f"line {match['ptx']} of the PTX" if match["ptx"] else "")
    if match["file"] and match["file"].endswith("kernel.cu"):
        line = int(match["line"])
    elif match["file"]:
        where = f"{_short(match['file'])}:{match['line']}"
        called = _FROM_KERNEL.findall(whole)
        line = int(called[-1]) if called else None
    if line is not None:
        inside = "" if match["file"].endswith("kernel.cu") else f"{where}, from "
        where = f"{inside}kernel.cu:{line}"
    text = (match["text"] or match["said"] or match["plain"]).strip()
    span = line_map.span(line)
    if line_map.own:
        return _own_error(_HOST.sub("", text), where, span, match["ptx"], line_map)
    at = f" ({where})" if where else ""
    hint = (
        "the generated code is wrong, not your program: please report it with the TL"
        if span or line_map.map
        else None
    )
    label = "this became the code that nvcc refuses" if span else ""
    return Diagnostic("FW822", f"nvcc: {text}{at}", span, label, help=hint)


def _own_error(
    text: str, where: str, span: Span | None, ptx: str | None, line_map: LineMap
) -> Diagnostic:
    """An error in code that a model wrote: at its own line, with the PTX line of an `asm`."""
    here = where.startswith("kernel.cu:") and span is not None
    at = "" if here or not where else f" (in {where})"
    if ptx and 1 <= int(ptx) <= len(line_map.ptx):
        at = f" (in the PTX: {line_map.ptx[int(ptx) - 1].strip()[:120]})"
    return Diagnostic("FW822", f"nvcc: {text}{at}", span)


def _short(path: str) -> str:
    """The path of a header as an `#include` names it."""
    parts = path.replace("\\", "/").split("/")
    for root in ("fw", "cute", "cutlass"):
        if root in parts[:-1]:
            return "/".join(parts[parts.index(root) :])
    return parts[-1]


def spills(stores: int, loads: int, registers: int) -> Diagnostic:
    """FW823: the kernel spills registers, which would make it slow."""
    text = (
        f"the kernel spills: {stores} bytes stored to and {loads} bytes loaded from local "
        f"memory, with {registers} registers a thread"
    )
    hint = "smaller tiles (BM, BN), more warps or fewer tiles in registers at a time"
    return Diagnostic("FW823", text, help=hint)


def refuse_serialised(log: str) -> None:
    """Raises Failed with FW824 if ptxas serialised wgmma, which is many times slower."""
    found = [
        Diagnostic("FW824", f"ptxas ({code}): {text.strip()}")
        for code, text in dict.fromkeys(_SLOW.findall(log))
    ]
    if found:
        raise Failed(*found)


SHORT = "nothing was kept of it; the machine may be short of memory, or the tiles very large"


def unfinished(text: str, hint: str = SHORT) -> Failed:
    """FW825: the compiler was stopped or crashed."""
    return Failed(Diagnostic("FW825", text, help=hint))
