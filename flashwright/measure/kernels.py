"""The kernels of a benchmark: written, translated and compiled in parallel, then judged.

Each is a kernel package in the benchmark's folder, so that users can read and run it.
"""

from __future__ import annotations

import functools
import importlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from flashwright import gpu as gpus
from flashwright import spec as specs
from flashwright.build import classes, package
from flashwright.build.driver import Card
from flashwright.files import cannot, content, sha256, write
from flashwright.fleet.fleet import Fleet
from flashwright.fleet.job import Job, Need, plain
from flashwright.fleet.processes import LocalMachine
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure.contest import Missing, WorkerThread
from flashwright.measure.grid import kernel_name
from flashwright.measure.records import KernelRecord
from flashwright.program.kernels import Kernels
from flashwright.sandbox.candidate import Candidate
from flashwright.spec import AttentionSpec

if TYPE_CHECKING:
    from flashwright.build.compile import Built
    from flashwright.judge.verdict import Verdict
    from flashwright.lower.translate import Translation
    from flashwright.program.program import Program

CODE, SPEC = "code.tl", "spec.toml"
LENGTHS = ((1, 1), (63, 63), (128, 128), (1000, 1000), (130, 1000), (1000, 63))
"""The (queries, keys) on which a kernel is judged before it is timed; `verify` has more."""
CALL = "call.py"
"""In place of a launch plan: the call of a module of several kernels, which lie beside it."""
WHOLE_NSA = "flashwright.sparse.contestant"
"""The module that has this call, and makes its kernels: flashwright.nsa is above this one."""
_CALL_TEXT = f'''"""The call of the kernels beside this file: a factory for `flashwright bench`."""

from pathlib import Path

from {WHOLE_NSA} import contestant

attention = contestant(Path(__file__).parent)
'''
JUDGES = 4
"""Verdicts in parallel: most of a trial is spent waiting for processes to start."""

ProgressCallback = Callable[[int, int, str], None]
Judge = Callable[[Candidate, AttentionSpec], "Verdict"]


@dataclass(frozen=True)
class KernelBuild:
    """The files and figures of a kernel package, or in `why` the reason that there is none."""

    spec: AttentionSpec
    gpu: str
    """The GPU it was translated for."""
    files: Mapping[str, str | bytes] = field(default_factory=dict, repr=False)
    """Contents by file name, as in a kernel package."""
    reasoning: str = field(default="", repr=False)
    ptxas: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    folder: str = ""
    why: str = ""

    @property
    def name(self) -> str:
        """Such as `mha d64 causal`."""
        return kernel_name(self.spec)

    @property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of TL, source and cubin, if present; files of further kernels are keyed by file
        name."""
        names = {"tl": CODE, "source": "kernel.cu", "cubin": "kernel.cubin"}
        files = {key: self.files[n] for key, n in names.items() if n in self.files}
        files |= {n: data for n, data in self.files.items() if _of_others(n, *names.values())}
        return {key: sha256(data) for key, data in files.items()}

    def record(self, verdict: Mapping[str, Any], seconds: Mapping[str, float]) -> KernelRecord:
        """The kernel's record in a benchmark's file."""
        text = {name: data for name, data in self.files.items() if isinstance(data, str)}
        return KernelRecord(
            name=self.name,
            spec=self.spec.model_dump(mode="json"),
            gpu=self.gpu,
            tl=text.get(CODE, ""),
            source=text.get("kernel.cu", ""),
            map=read_map(text.get("kernel.map.json", "")),
            reasoning=self.reasoning,
            hashes=self.hashes,
            ptxas=dict(self.ptxas),
            seconds={**self.seconds, **seconds},
            verdict=dict(verdict),
            why=self.why,
            others={n: t for n, t in text.items() if _of_others(n, CODE, "kernel.cu")},
        )


def _of_others(name: str, *files: str) -> bool:
    """Whether a file is one of `files` of a further kernel of the package, or says what they are
    for."""
    folder, _, own = name.rpartition("/")
    return own in (package.CLASSES, package.STEPS, CALL) or (folder != "" and own in files)


def read_map(text: str) -> dict[str, Any]:
    """The data of kernel.map.json; empty for an empty text."""
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


# --- making them ------------------------------------------------------------------------------


def make(spec: AttentionSpec, gpu: str, card: Card | None) -> KernelBuild:
    """The built-in author's package of a spec: written for `gpu`, compiled for `card`."""
    from flashwright.author.builtin.author import write_code, write_sketch
    from flashwright.author.builtin.choose import NothingFits
    from flashwright.author.builtin.reasoning import reasoning

    target, start = gpus.find(gpu), time.perf_counter()
    if spec.branch == "all":
        return _module(spec, gpu, card)
    try:
        written = write_code(write_sketch(spec), spec, target)
    except NothingFits as error:
        return KernelBuild(spec, gpu, why=f"FW905: {error}")
    author = time.perf_counter() - start
    further = {name: from_tl(code, spec, gpu, card) for name, code in written.further.items()}
    others = {name: one.files for name, one in further.items()}
    beside = classes.packed(others, classes.Classes.of(written.classes))
    made = from_tl(written.code, spec, gpu, card, beside)
    failed = [f"{name}: {one.why}" for name, one in further.items() if one.why]
    return replace(
        made,
        reasoning=reasoning(spec, target, written),
        seconds=_sum({"author": author}, made.seconds, *(one.seconds for one in further.values())),
        why=made.why or "; ".join(failed),
    )


def _module(spec: AttentionSpec, gpu: str, card: Card | None) -> KernelBuild:
    """NSA as a whole: the kernels that a call of flashwright.nsa makes on this card."""
    made, start = KernelBuild(spec, gpu), time.perf_counter()
    try:
        if card is None or gpus.find(card.name).name != gpu:
            raise RuntimeError(f"flashwright.nsa makes kernels for the card here, not for {gpu}")
        found = importlib.import_module(WHOLE_NSA).packages(spec)
    except (gpus.UnknownGpu, ImportError, RuntimeError) as error:
        return replace(made, why=str(error))
    files = {n: data if n.endswith("kernel.cubin") else _text(data) for n, data in found.items()}
    took = {"build": round(time.perf_counter() - start, 3)}
    return replace(made, files={**files, CALL: _CALL_TEXT}, seconds=took)


def _sum(*parts: Mapping[str, float]) -> dict[str, float]:
    """The seconds of each step, summed over all kernels of a package."""
    steps = dict.fromkeys(step for part in parts for step in part)
    return {step: round(sum(part.get(step, 0.0) for part in parts), 3) for step in steps}


def from_tl(
    code: str,
    spec: AttentionSpec,
    gpu: str,
    card: Card | None,
    beside: Mapping[str, str | bytes] | None = None,
) -> KernelBuild:
    """The kernel of a TL program. Without a card it is translated but not compiled.

    `beside` are the files of the package's other kernels and its classes.json.
    """
    from flashwright.check.check import check
    from flashwright.lang.parse import parse

    files: dict[str, str | bytes] = {CODE: code, SPEC: specs.dump(spec), **(beside or {})}
    made = KernelBuild(spec, gpu, files)
    try:  # failures are returned, not raised: they cross process boundaries
        checked = check(parse(code), gpus.find(gpu), spec.dims)
        if checked.errors or not checked.kernels:
            return replace(made, why=_why(checked.errors))
        if checked.program is not None:
            return _compiled(made, checked.program, card)
        return _of_steps(made, Kernels(checked.kernels), card)
    except Failed as failed:
        return replace(made, why=_why(failed.diagnostics))


def _compiled(made: KernelBuild, program: Program, card: Card | None) -> KernelBuild:
    """A package with the kernel of its program. Raises Failed."""
    from flashwright.build.make import make as build
    from flashwright.lower.translate import translate

    target, files, start = gpus.find(made.gpu), dict(made.files), time.perf_counter()
    code = files[CODE]
    assert isinstance(code, str)
    translation = translate(program, target)
    files |= package.translated(translation)
    translated = time.perf_counter()
    took = {"translate": round(translated - start, 3)}
    if card is None:
        return replace(made, files=files, seconds=took)
    real = _real(target, card)
    translation, built = build(program, target, first=translation, real=real, tl=code)
    # A build from the cache counts with the time of the original build.
    took["build"] = round(max(time.perf_counter() - translated, built.seconds), 3)
    files |= {**package.translated(translation), **package.compiled(built)}
    files[package.RECORD] = package.record(built, target, files, translation.report)
    return replace(made, files=files, ptxas=_ptxas(built, translation), seconds=took)


def _of_steps(made: KernelBuild, kernels: Kernels, card: Card | None) -> KernelBuild:
    """A package whose program has several kernels, each in a subfolder. Raises Failed. The figures
    of ptxas are those of the first."""
    from flashwright.build.make import step_programs
    from flashwright.build.steps import Steps

    target = gpus.find(made.gpu)
    own = {**made.files, package.STEPS: Steps.of(kernels).dump()}
    parts = {
        name: _compiled(replace(made, files={CODE: text}), program, card)
        for name, (text, program) in step_programs(kernels, target).items()
    }
    files = {f"{name}/{file}": x for name, one in parts.items() for file, x in one.files.items()}
    if card is not None:
        records = {name: data for name, data in files.items() if name.endswith(package.RECORD)}
        own[package.RECORD] = package.record_of_steps(target, {**own, **records})
    seconds = _sum(*(one.seconds for one in parts.values()))
    return replace(made, files={**files, **own}, ptxas=parts["1"].ptxas, seconds=seconds)


def _why(diagnostics: Sequence[Diagnostic]) -> str:
    return "; ".join(f"{d.code}: {d.message}" for d in diagnostics)


def _real(target: gpus.Gpu, card: Card) -> str | None:
    arch = target.arch
    if not card.takes(arch):
        text = f"a kernel for {target.title} ({arch}) cannot run on {card.name} ({card.arch})"
        raise Failed(Diagnostic("FW851", text, help="name an older GPU: --as a100"))
    return None if arch.rstrip("af") == card.arch else card.arch


def _ptxas(built: Built, translation: Translation) -> dict[str, int]:
    return {
        "registers": built.registers,
        "spill_stores": built.spill_stores,
        "spill_loads": built.spill_loads,
        "stack": built.stack,
        "shared": translation.plan.shared + built.shared,
        "threads": translation.plan.threads,
    }


def make_all(
    wanted: Iterable[AttentionSpec], gpu: str, card: Card, step: ProgressCallback, jobs: int = 0
) -> Iterator[KernelBuild]:
    """Make the kernels of all specs in processes; yields each as it is done. Those of a module are
    made by calling it, which takes the GPU."""
    work: dict[Need, dict[AttentionSpec, Job]] = {Need(jobs=jobs): {}, Need(card.name): {}}
    for spec, need in ((s, [*work][s.branch == "all"]) for s in wanted):
        work[need][spec] = Job(kernel_name(spec), plain(make, spec, gpu, card))
    done, total = 0, sum(map(len, work.values()))
    with Fleet(LocalMachine()) as fleet:
        for need, jobs_of in work.items():
            for end in fleet.ends(need, [*jobs_of.values()]):
                made: KernelBuild = end.result()
                step(done := done + 1, total, "")
                yield made


def save(made: KernelBuild, folder: Path) -> KernelBuild:
    """Write a kernel package to a subfolder with the kernel's name; see `put`."""
    if made.why:
        return made
    return put(made, place_of(folder, made.name))


def place_of(folder: Path, name: str) -> Path:
    """The subfolder that `save` uses for a kernel."""
    return folder / name.replace(" ", "-").replace("/", "_")


def put(made: KernelBuild, place: Path) -> KernelBuild:
    """Write a kernel package to this folder; the record of its files comes last."""
    # A concurrent reader must not find what names the kernels without them.
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name in (package.CLASSES, package.STEPS):
            (place / name).unlink(missing_ok=True)
    except OSError as error:
        raise cannot("use", place, error) from None
    last = (package.CLASSES, package.STEPS, package.RECORD)
    for name in sorted(made.files, key=lambda n: last.index(n) if n in last else -1):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        write(place / name, made.files[name])
    return replace(made, folder=str(place))


class _Facts(BaseModel):
    """The part of build.json that a benchmark records."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    gpu: str | None = None
    registers: int | None = None
    spill_stores: int | None = None
    spill_loads: int | None = None
    stack: int | None = None


def load(folder: Path) -> KernelBuild:
    """Read an existing kernel package. Raises Failed with FW852 if it is invalid.

    The spec is read strictly: a tolerance of its own is ignored.
    """
    from flashwright.build.reading import read_model
    from flashwright.judge.own_spec import strict
    from flashwright.lower import source_map

    plan = classes.plan_of(folder)
    files: dict[str, str | bytes] = {}
    for kernel, place in {package.OWN: folder, **classes.folders(folder)}.items():
        if (place / "kernel.cu").is_file():
            source_map.read(place)  # it goes into the record
        for name in (package.CLASSES, package.STEPS, *package.IN_RECORD):
            data = content(place / name)
            if data is not None:
                binary = name == "kernel.cubin"
                files[package.inside(kernel, name)] = data if binary else _text(data)
    spec, _ = strict(_spec(folder / SPEC))
    facts = read_model(_Facts, folder / package.RECORD) or _Facts()
    known = ("registers", "spill_stores", "spill_loads", "stack")
    values = {name: getattr(facts, name) for name in known}
    numbers = {name: value for name, value in values.items() if value is not None}
    ptxas = {**numbers, "shared": plan.shared, "threads": plan.threads}
    why = _text(content(folder / "reasoning.md") or b"")
    # Only build.json names the GPU that the kernel was made for.
    gpu = facts.gpu if facts.gpu is not None else plan.arch
    return KernelBuild(spec, gpu, files, why, ptxas, folder=str(folder.resolve()))


def _spec(path: Path) -> AttentionSpec:
    data = content(path)
    try:
        if data is None:
            raise specs.BadSpec(f"{path}: there is no such file")
        return specs.parse(_text(data), str(path))
    except specs.BadSpec as error:
        raise Failed(*(Diagnostic("FW852", line) for line in error.lines)) from None


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


# --- judging them -----------------------------------------------------------------------------


def judged(candidate: Candidate, spec: AttentionSpec, seed: int | None = None) -> Verdict:
    """The judge's verdict on a few lengths, which include every length class of a package."""
    if spec.branch == "all":
        from flashwright.measure import module_verdict

        return module_verdict.judged(candidate, spec, seed)
    from flashwright.judge.form import bounds_of
    from flashwright.judge.judge import judge

    bounds = bounds_of(candidate)
    lengths = None if spec.reference else (*LENGTHS, *((130, n + 1) for n in bounds))
    return judge(candidate, spec, seed=seed, base=Path(candidate.where), lengths=lengths)


def verdicts(
    every: Sequence[KernelBuild], judge: Judge, step: ProgressCallback
) -> Iterator[KernelRecord]:
    """Judge the kernels in parallel; yields each record as its verdict arrives, failed builds
    first."""
    waiting: list[Future[KernelRecord]] = []
    threads = [WorkerThread(f"judge {n}") for n in range(min(JUDGES, len(every)))]
    for number, made in enumerate(every):
        if made.why:
            yield made.record({}, {})
        else:
            work = functools.partial(_judged, made, judge)
            waiting.append(threads[number % len(threads)].submit(work))
    for thread in threads:
        thread.shutdown()
    for done, future in enumerate(as_completed(waiting), 1):
        record = future.result()
        step(done, len(waiting), record.name)
        yield record


def _judged(made: KernelBuild, judge: Judge) -> KernelRecord:
    start = time.perf_counter()
    try:
        verdict = judge(candidate_of(made), made.spec)
    except Failed as failed:  # without a judge, the kernel is not measured
        return replace(made, why=_why(failed.diagnostics)).record({}, {})
    took = {"verdict": round(time.perf_counter() - start, 3)}
    record = verdict.record()
    del record["spec"]  # the kernel's own
    return made.record(record, took)


def candidate_of(made: KernelBuild) -> Candidate:
    """The package as a candidate for the sandbox."""
    return _candidate(made.folder, made.name, CALL in made.files)


def _candidate(folder: str, name: str, call: bool) -> Candidate:
    """A package, or the call of a module of several."""
    if not call:
        return Candidate.package(Path(folder), name)
    where = str((Path(folder) / CALL).resolve())
    return Candidate("python", where, "attention", factory=True, title=name)


def entry(record: KernelRecord, folder: str) -> Candidate | Missing:
    """Our candidate for a kernel: its package, or the reason that it is not measured."""
    if record.why:
        return Missing(record.why)
    offences = [str(o["name"]) for o in record.verdict.get("offences", [])]
    if not record.verdict.get("ok"):
        named = ", ".join(offences) or "it has no verdict"
        return Missing(f"the judge rejects it: {named}", offences[0] if offences else None)
    return _candidate(folder, record.name, CALL in record.others)
