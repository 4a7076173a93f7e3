"""compute-sanitizer on a candidate: invalid accesses, races and barriers behind a right answer.

A kernel package is compiled again with line information. The tool's messages are then mapped to the
line of kernel.cu, and through kernel.map.json to the line of TL.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from flashwright.build import driver, steps, toolchain
from flashwright.build.classes import folders
from flashwright.build.compile import NAME
from flashwright.build.reading import CUBIN, PLAN, PTX, read_plan
from flashwright.judge.expected import Expected
from flashwright.judge.form import form_of
from flashwright.judge.judge import need_torch
from flashwright.judge.offences import offence, once
from flashwright.judge.problems import SHARED, Problem, sizes
from flashwright.judge.sass_lines import line_at, lines_of
from flashwright.judge.tiling import served_by
from flashwright.judge.verdict import Offence
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.nodes import line_span
from flashwright.lower.source_map import SourceMap, read
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.limits import Limits
from flashwright.sandbox.process import Ended, Sandbox
from flashwright.spec import AttentionSpec
from flashwright.untrusted.build import build_untrusted

TOOLS = {
    "memcheck": "out_of_bounds",
    "racecheck": "race",
    "initcheck": "unwritten",
    "synccheck": "race",
}
"""The tools, and the offence that a finding of each is."""
LENGTHS = (200, 333)
SECONDS = 600.0  # everything is slower by one or two orders of magnitude
_NO_POOL = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
_SUMMARY = re.compile(r"========= (?:ERROR|RACECHECK) SUMMARY: (\d+)")
_FINDING = re.compile(
    r"^========= (?:Error: |Warning: )?"
    r"((?:Invalid|Misaligned|Uninitialized|Race reported|Barrier error|Potential|Illegal"
    r"|Divergent|Unused)[^\n]*(?:\n=========  [^\n]*)*)",
    re.MULTILINE,
)
_PLACE = re.compile(r"(?:\+0x([0-9a-f]+) )?in \S*?([\w.-]+):(\d+)")


@dataclass(frozen=True)
class Lines:
    """Maps a tool's addresses and lines to lines of kernel.cu, and those to lines of TL."""

    addresses: Mapping[int, int] = field(default_factory=dict)
    """The line of kernel.cu of each instruction."""
    map: SourceMap = field(default_factory=SourceMap)

    def cu(self, text: str) -> tuple[int, ...]:
        """The lines of kernel.cu in a tool's message, each once."""
        found: list[int | None] = []
        for address, file, line in _PLACE.findall(text):
            if file == NAME:
                found.append(int(line))
            elif address:
                found.append(line_at(self.addresses, int(address, 16)))
        return tuple(dict.fromkeys(line for line in found if line is not None))

    def tl(self, cu: Iterable[int]) -> tuple[int, ...]:
        """The lines of TL that these lines of kernel.cu implement."""
        found = (self.map.tl_line(line) for line in cu)
        return tuple(dict.fromkeys(line for line in found if line is not None))


@dataclass(frozen=True)
class Finding:
    """One message of a tool, with the lines it names."""

    tool: str
    text: str
    cu_lines: tuple[int, ...] = ()
    tl_lines: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = ""
        if self.cu_lines:
            where = f" (kernel.cu:{', '.join(map(str, self.cu_lines))})"
        if self.tl_lines:
            where += f" from code.tl:{', '.join(map(str, self.tl_lines))}"
        return f"{self.tool}: {self.text}{where}"


def sanitize(
    candidate: Candidate,
    spec: AttentionSpec,
    *,
    tools: tuple[str, ...] = tuple(TOOLS),
    base: Path | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> tuple[Offence, ...]:
    """Run a small ragged problem under each tool: the offences found, with their lines of TL."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        text = "compute-sanitizer is not on the PATH"
        hint = "it comes with the CUDA toolkit: add its bin folder to PATH"
        raise Failed(Diagnostic("FW851", text, help=hint))
    driver.cards()
    need_torch()
    found: list[Offence] = []
    kernels = [candidate]
    if candidate.kind == "package" and steps.read(Path(candidate.where)) is None:
        # Each kernel alone, whatever lengths it serves.
        places = folders(Path(candidate.where)).values()
        kernels = [replace(candidate, where=str(folder)) for folder in places]
    for kernel in kernels:
        # A line of a subfolder's kernel is no line of the package's TL, which is shown beside it.
        tl = _text(Path(kernel.where, "code.tl")) if kernel == candidate else ""
        found += _run_tools(program, kernel, spec, tools, base, progress, tl)
    return once(found)


def _run_tools(
    program: str,
    candidate: Candidate,
    spec: AttentionSpec,
    tools: tuple[str, ...],
    base: Path | None,
    progress: Callable[[int, int, str], None],
    tl: str,
) -> Iterator[Offence]:
    """Run one kernel under each tool."""
    with tempfile.TemporaryDirectory(prefix="flashwright-") as place:
        inside, lines = _rebuild_with_lines(candidate, Path(place))
        for number, tool in enumerate(tools):
            progress(number, len(tools), tool)
            log = Path(place, f"{tool}.log")
            command = _command(program, tool, candidate, log)
            try:
                _call(inside, spec, base, command)
            except Ended as ended:
                said = findings(tool, _text(log), lines)
                if not said:  # the tool did not end it
                    yield offence(ended.offence, f"under {tool}: {ended.message}")
            yield from (_offence(f, tl) for f in findings(tool, _text(log), lines))


def _command(program: str, tool: str, candidate: Candidate, log: Path) -> tuple[str, ...]:
    only = ("--kernel-regex", "kns=attention") if candidate.kind == "package" else ()
    options = ("--tool", tool, "--log-file", str(log), "--print-limit", "20", *only)
    return (program, *options, "--target-processes", "all")


def _call(
    candidate: Candidate, spec: AttentionSpec, base: Path | None, command: tuple[str, ...]
) -> None:
    expected = Expected(spec, "cuda", base)
    form = form_of(candidate, spec)
    served = served_by(Path(candidate.where)) if candidate.kind == "package" else ()
    most = spec.group if any(kernel.tiling.grouped for kernel in served) else SHARED
    problem = Problem({**spec.dims, **sizes(spec, *LENGTHS, 1, 2, most)}, "normal", 0)
    made = form.inputs(problem, expected.reference)
    made = expected.inputs(made, problem.dims, problem.seed)
    answer = expected.outputs(made, problem.dims)
    limits = Limits(seconds=SECONDS, start_seconds=SECONDS)
    # Each tensor is a separate allocation of its exact size, so that the tool sees its end.
    with Sandbox(
        candidate, spec, "cuda", limits, before=command, guard=0, environment=_NO_POOL
    ) as running:
        running.call(form.taken(made), form.outputs(problem, answer), form.dims(problem))


def _rebuild_with_lines(candidate: Candidate, place: Path) -> tuple[Candidate, Lines]:
    """A copy of the package with line information in its cubin; other candidates unchanged."""
    if candidate.kind != "package":
        return candidate, Lines()
    folder = Path(candidate.where)
    source = folder / NAME
    if not source.is_file():
        return candidate, Lines()
    tools = toolchain.find()
    plan, card = read_plan(folder), driver.cards()[0]
    real = None if plan.arch.rstrip("af") == card.arch else card.arch
    # A stranger may have written the files of the package.
    built = build_untrusted(_text(source), plan.arch, real=real, toolchain=tools)
    copy = place / "package"
    copy.mkdir()
    (copy / PLAN).write_bytes((folder / PLAN).read_bytes())
    (copy / CUBIN).write_bytes(built.cubin)
    (copy / PTX).write_text(built.ptx)
    return replace(candidate, where=str(copy)), Lines(lines_of(built.cubin, tools), read(folder))


def findings(tool: str, log: str, lines: Lines) -> list[Finding]:
    """The findings in a tool's log. An error count without a message is a finding too."""
    found = list(_findings(tool, log, lines))
    counted = [int(n) for n in _SUMMARY.findall(log)]
    if not found and any(counted):
        found.append(Finding(tool, f"{max(counted)} errors"))
    return found


def _findings(tool: str, log: str, lines: Lines) -> Iterator[Finding]:
    for match in _FINDING.finditer(log):
        text = match[1]
        cu = lines.cu(text)
        yield Finding(tool, _shorten(text), cu, lines.tl(cu))


def _shorten(text: str) -> str:
    """The first line of a message and the other access of a race, without long mangled names."""
    lines = [line.lstrip("= ") for line in text.splitlines()]
    told = lines[:2] if lines[1:] and lines[1].startswith("and ") else lines[:1]
    return re.sub(r" at \S.*?\+0x[0-9a-f]+(?: in \S+)?", "", " ".join(told)).strip()


def _offence(found: Finding, tl: str) -> Offence:
    made = offence(TOOLS[found.tool], str(found))
    if not found.tl_lines or not tl:
        return made
    span = line_span(tl, found.tl_lines[0])
    return replace(made, diagnostic=replace(made.diagnostic, span=span))


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""
