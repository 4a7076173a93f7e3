"""Build one Report from files: kernel packages, verdicts and benchmarks, in any mixture.

An invalid file raises Failed with the file and, if possible, the line: a report must not silently
leave something out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashwright.files import cannot
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure.grid import kernel_name
from flashwright.measure.journal import RECORDS
from flashwright.report import package, recorded
from flashwright.report.model import Bench, RecordedVerdict, Report, ReportKernel
from flashwright.report.paper import figure
from flashwright.report.reading import bad, json_of, spec_of, text_of, validated
from flashwright.report.recorded import PaperLookup

PACKAGE_FILES = ("result.json", "build.json", "code.tl")
NOT_RUN = "not run on a GPU"  # the line of a package's record for a missing GPU verdict


def gather(given: Sequence[str | Path], paper: PaperLookup = figure) -> Report:
    """One report of all paths. Raises Failed if a path is not a valid source of a report."""
    found = _ReportBuilder(paper)
    for one in given:
        found.add(Path(one))
    return Report(
        title=_title(found.kernels, found.benches),
        kernels=tuple(found.kernels),
        benches=tuple(found.benches),
        given=tuple(str(one) for one in given),
    )


class _ReportBuilder:
    """Collects the kernels and benchmarks of a report."""

    def __init__(self, paper: PaperLookup) -> None:
        self.paper = paper
        self.kernels: list[ReportKernel] = []
        self.benches: list[Bench] = []

    def add(self, path: Path) -> None:
        """Read a path: a package, a verdict or a benchmark. Raises Failed for anything else."""
        if path.is_dir():
            self._folder(path)
        elif path.name == "result.json":
            self._package(path.parent)
        else:
            self._file(path)

    def _folder(self, path: Path) -> None:
        has_records = (path / RECORDS).is_file()
        has_package = any((path / name).is_file() for name in PACKAGE_FILES)
        if has_records:
            self._records(path / RECORDS)
        if has_package:
            self._package(path)
        if not has_records and not has_package:
            text = f"{path} has nothing to report: neither {' nor '.join(PACKAGE_FILES)}"
            hint = f"give a folder of generate or bench, a {RECORDS}, or what verify --json printed"
            raise Failed(Diagnostic("FW852", f"{text}, nor {RECORDS}", help=hint))

    def _file(self, path: Path) -> None:
        if not path.exists():
            raise cannot("read", path, FileNotFoundError(2, "No such file or directory"))
        text = text_of(path)
        if path.suffix == ".jsonl" or _first_record(text):
            return self._records(path)
        data = json_of(text, path)
        if not isinstance(data, dict) or not isinstance(data.get("ok"), bool):
            raise bad(path, "this is neither a verdict nor a benchmark's records")
        return self._verdict(path, data)

    # --- packages and verdicts ----------------------------------------------------------------

    def _package(self, folder: Path) -> None:
        new = package.read(folder)
        twin = next((i for i, k in enumerate(self.kernels) if _same(k, new)), None)
        if twin is None:
            self.kernels.append(replace(new, name=self._unused(new.name, new.folder)))
        else:
            self._join(twin, self.kernels[twin], new)

    def _verdict(self, path: Path, data: dict[str, Any]) -> None:
        candidate = data.get("candidate") or data.get("folder") or path.stem
        verdict = validated(RecordedVerdict, {**data, "candidate": str(candidate)}, path)
        spec = spec_of(data["spec"], path) if "spec" in data else None
        for i, kernel in enumerate(self.kernels):
            if _is_about(verdict, spec is None or spec == kernel.spec, kernel):
                self.kernels[i] = _judged(kernel, verdict)
                return
        name = self._unused(kernel_name(spec) if spec else verdict.candidate, verdict.candidate)
        alone = ReportKernel(name, spec, verdict.arch, folder=verdict.candidate, verdict=verdict)
        self.kernels.append(alone)

    # --- benchmarks ---------------------------------------------------------------------------

    def _records(self, path: Path) -> None:
        bench, kernels = recorded.read(path, self.paper)
        names: dict[str, str] = {}
        for kernel in kernels:
            twin = next((i for i, k in enumerate(self.kernels) if _same(k, kernel)), None)
            if twin is None:
                names[kernel.name] = self._unused(kernel.name, str(path))
                self.kernels.append(replace(kernel, name=names[kernel.name]))
            else:
                names[kernel.name] = self.kernels[twin].name
                self._join(twin, kernel, self.kernels[twin])
        known = {name: names.get(name, "") for name in bench.kernels}
        self.benches.append(replace(bench, kernels=known))

    def _join(self, place: int, measured: ReportKernel, packaged: ReportKernel) -> None:
        """Merge two sources of the same kernel; it keeps its name in the report."""
        name = self.kernels[place].name
        self.kernels[place] = replace(_joined(measured, packaged), name=name)

    def _unused(self, name: str, hint: str) -> str:
        """A name that no other kernel of the report has."""
        taken = {k.name for k in self.kernels}
        if name not in taken:
            return name
        tries = (f"{name} ({hint})", *(f"{name} ({hint}, {n})" for n in range(2, 1000)))
        return next(one for one in tries if one not in taken)


def _first_record(text: str) -> bool:
    """Whether the first line is a record of a benchmark."""
    try:
        data = json.loads(text.lstrip().split("\n", 1)[0])
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and "record" in data


def _same(one: ReportKernel, other: ReportKernel) -> bool:
    """Whether two sources are about one kernel: same TL, same CUDA source, same cubin."""
    files = ("code.tl", "kernel.cu", "kernel.cubin")
    further = {n for k in (one, other) for n in k.hashes if n.partition("/")[2] in files}
    names = (*files, *sorted(further))
    mine, theirs = ([k.hashes.get(n) for n in names] for k in (one, other))
    return None not in mine and mine == theirs


def _joined(measured: ReportKernel, packaged: ReportKernel) -> ReportKernel:
    """Merge a benchmark's kernel with its package; a rejection in either one stands."""
    verdicts = [v for v in (measured.verdict, packaged.verdict) if v is not None]
    rejected = [v for v in verdicts if not v.right]
    fullest = max(verdicts, key=lambda v: (v.on_gpu, len(v.cases)), default=None)
    return replace(
        packaged,
        folder=packaged.folder or measured.folder,
        ptxas={**measured.ptxas, **packaged.ptxas},
        seconds={**measured.seconds, **packaged.seconds},
        failures=tuple(dict.fromkeys((*measured.failures, *packaged.failures))),
        verdict=rejected[0] if rejected else fullest,
    )


def _is_about(verdict: RecordedVerdict, same_spec: bool, kernel: ReportKernel) -> bool:
    """Whether a verdict is about this package; it may come from another machine."""
    if not kernel.folder or not same_spec:
        return False
    mine, theirs = Path(kernel.folder).resolve(), Path(verdict.candidate)
    return theirs.resolve() == mine or theirs.name == mine.name


def _judged(kernel: ReportKernel, verdict: RecordedVerdict) -> ReportKernel:
    """A package with a verdict that is newer than its own record."""
    lacks = kernel.not_claimed
    if verdict.on_gpu:
        lacks = tuple(line for line in lacks if line != NOT_RUN)
    before = None if kernel.changed else kernel.verdict
    if before is not None and not before.right:
        return kernel  # the same files were rejected before; another seed does not change that
    if before is not None and before.on_gpu and verdict.right and not verdict.on_gpu:
        return kernel  # a GPU verdict is stronger
    return replace(kernel, verdict=verdict, not_claimed=lacks, changed=())


def _title(kernels: Sequence[ReportKernel], benches: Sequence[Bench]) -> str:
    runs = dict.fromkeys(f"{b.record.title} on {b.record.card}" for b in benches)
    if runs:
        return _capital("; ".join(runs))
    if len(kernels) == 1:
        only = kernels[0]
        return f"{only.name} for {only.gpu}" if only.gpu else only.name
    return f"{len(kernels)} kernels" if kernels else "Nothing to report"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
