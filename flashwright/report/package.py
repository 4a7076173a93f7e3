"""Read a kernel package's folder as a kernel of the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from flashwright.build.classes import read as read_classes
from flashwright.build.package import CLASSES
from flashwright.files import sha256
from flashwright.lower.source_map import SourceMap, Stretch
from flashwright.measure.grid import kernel_name
from flashwright.report.model import RecordedCase, RecordedSchedule, RecordedVerdict, ReportKernel
from flashwright.report.reading import bad, bytes_of, object_of, spec_of, text_of, validated
from flashwright.spec import AttentionSpec, BadSpec, parse

TEXTS = ("code.tl", "kernel.cu", "reasoning.md", "spec.toml")
DIGESTED = (
    *("spec.toml", "code.tl", "kernel.cu", "kernel.map.json", "launch.json"),
    *("kernel.cubin", "kernel.ptx"),
)


class _PackageRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Finding(_PackageRecord):
    code: str = ""
    message: str = ""
    severity: str = "error"


class _Stage(_PackageRecord):
    stage: str
    status: str = "ok"
    seconds: float = 0.0
    why: tuple[_Finding, ...] = ()


class _Result(_PackageRecord):
    """The part of result.json that a report shows (generate/pipeline.py writes it)."""

    ok: bool = True
    spec: dict[str, Any] | None = None
    gpu: str = ""
    stages: tuple[_Stage, ...] = ()
    findings: tuple[_Finding, ...] = ()
    cpu: tuple[RecordedCase, ...] | None = None
    gpu_run: RecordedVerdict | None = None
    emulated_run: RecordedVerdict | None = None
    artefacts: dict[str, str] = {}
    claimed: tuple[str, ...] = ()
    not_claimed: tuple[str, ...] = ()


class _Build(_PackageRecord):
    gpu: str = ""
    registers: int | None = None
    spill_stores: int = 0
    spill_loads: int = 0
    stack: int = 0
    shared: int = 0
    seconds: float | None = None
    schedule: RecordedSchedule | None = None


class _Launch(_PackageRecord):
    threads: int | None = None
    shared: int = 0


Data = TypeVar("Data", bound=_PackageRecord)


def read(folder: Path) -> ReportKernel:
    """The kernel of a package folder. Raises Failed if one of its files is invalid."""
    result = _file(_Result, folder / "result.json")
    build, launch = _file(_Build, folder / "build.json"), _file(_Launch, folder / "launch.json")
    texts = {name: text_of(folder / name) for name in TEXTS if (folder / name).is_file()}
    spec = _spec(folder, texts.get("spec.toml"), result)
    kernel = ReportKernel(
        name=kernel_name(spec) if spec else folder.resolve().name,
        spec=spec,
        gpu=result.gpu or build.gpu,
        folder=str(folder),
        tl=texts.get("code.tl", ""),
        source=texts.get("kernel.cu", ""),
        map=_map(folder / "kernel.map.json"),
        reasoning=texts.get("reasoning.md", ""),
        hashes=_hashes(folder),
        ptxas=_ptxas(build, launch),
        schedule=build.schedule,
        seconds=_seconds(result, build),
        not_claimed=result.not_claimed,
        skipped=_skipped(result),
        changed=_changed(folder, result),
    )
    return kernel if kernel.changed else _with_claims(kernel, result)


def _hashes(folder: Path) -> dict[str, str]:
    """The digests of its files, and of those of its further kernels."""
    others = [f"{name}/{file}" for name in read_classes(folder).others for file in DIGESTED]
    names = (*DIGESTED, CLASSES, *others)
    return {n: sha256(bytes_of(folder / n)) for n in names if (folder / n).is_file()}


def _with_claims(kernel: ReportKernel, result: _Result) -> ReportKernel:
    """Add the claims of result.json; they hold only while the files are unchanged."""
    verdict = result.gpu_run or result.emulated_run
    if verdict is not None and not verdict.candidate:
        verdict = verdict.model_copy(update={"candidate": kernel.folder})
    return replace(
        kernel,
        verdict=verdict,
        cpu=result.cpu or (),
        claimed=result.claimed,
        failures=_failures(result),
    )


def _file(model: type[Data], path: Path) -> Data:
    return validated(model, object_of(path) if path.is_file() else {}, path)


def _spec(folder: Path, toml: str | None, result: _Result) -> AttentionSpec | None:
    if result.spec is not None:
        return spec_of(result.spec, folder / "result.json")
    if toml is None:
        return None
    path = folder / "spec.toml"
    try:
        return parse(toml, str(path))
    except BadSpec as error:
        raise bad(path, error.lines[0].removeprefix(f"{path}: ")) from None


def _map(path: Path) -> tuple[Stretch, ...]:
    return validated(SourceMap, object_of(path), path).lines if path.is_file() else ()


def _changed(folder: Path, result: _Result) -> tuple[str, ...]:
    """The files that differ from the digests in result.json, so that its claims do not apply."""
    kernels = ("", *read_classes(folder).others)
    there = {n: folder / n for n in result.artefacts if n.rpartition("/")[0] in kernels}
    if result.artefacts:  # kernels installed later are not in the record
        there[CLASSES] = folder / CLASSES
    return tuple(
        name
        for name, path in there.items()
        if path.is_file() and sha256(bytes_of(path)) != result.artefacts.get(name)
    )


def _failures(result: _Result) -> tuple[str, ...]:
    """Why `generate` stopped, unless the verdict already shows it."""
    verdicts = (v for v in (result.gpu_run, result.emulated_run) if v is not None)
    if result.ok or any(not v.right for v in verdicts):
        return ()
    errors = tuple(f"{f.code}: {f.message}" for f in result.findings if f.severity == "error")
    stages = tuple(f"the stage `{s.stage}` failed" for s in result.stages if s.status == "failed")
    return errors or stages or ("it failed",)


def _skipped(result: _Result) -> tuple[str, ...]:
    """Why stages did not run."""
    skipped = (s for s in result.stages if s.status == "skipped")
    return tuple(f"{s.stage}: {why.message}" for s in skipped for why in s.why)


def _ptxas(build: _Build, launch: _Launch) -> dict[str, int]:
    """ptxas figures by the names of a benchmark's records; shared memory is static plus dynamic."""
    figures: dict[str, int] = {}
    if build.registers is not None:
        spills = build.spill_stores + build.spill_loads
        figures |= {"registers": build.registers, "spills": spills, "stack": build.stack}
    if launch.threads is not None:
        figures |= {"shared": launch.shared + build.shared, "threads": launch.threads}
    return figures


def _seconds(result: _Result, build: _Build) -> dict[str, float]:
    """Seconds by stage; nvcc's are those of its last run, not of a cache hit."""
    figures = {s.stage: s.seconds for s in result.stages if s.status != "skipped"}
    figures.pop("build", None)
    return figures if build.seconds is None else {**figures, "nvcc": build.seconds}
