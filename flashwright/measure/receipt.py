"""Receipts: whether the numbers in a benchmark's file can be reproduced.

A receipt is compared field by field (fields.py has the rules). First the file is checked against
itself and the files beside it (consistent.py). Then the TL is translated and compiled again, and
the kernel is judged and measured against the recorded peers that are installed here. Fields that
cannot be checked on this machine are reported as not checked.
"""

from __future__ import annotations

import functools
import platform
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from flashwright import gpu as gpus
from flashwright.build import package
from flashwright.build.driver import Card
from flashwright.build.package import CLASSES, STEPS
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure import ceilings, journal, kernels, machine
from flashwright.measure.bench import Contest, ContestDependencies
from flashwright.measure.ceilings import Ceilings
from flashwright.measure.consistent import RecordFile
from flashwright.measure.contest import Contestant
from flashwright.measure.fields import Field, exact, near, unchecked
from flashwright.measure.grid import Cell
from flashwright.measure.kernels import Judge, KernelBuild
from flashwright.measure.peers import registry
from flashwright.measure.peers.registry import Peer
from flashwright.measure.records import OURS, AbsentRecord, KernelRecord, NumberRecord
from flashwright.measure.results import Results
from flashwright.measure.timing import Rules
from flashwright.sandbox.candidate import Candidate
from flashwright.spec import AttentionSpec
from flashwright.version import __version__

WITHIN = 0.05
"""Tolerance of times and ratios: a kernel's time varies by a few percent from run to run."""
CEILINGS_WITHIN = 0.1
"""Tolerance of the matrix product and the copy, which depend on clocks and other load."""
ERROR_WITHIN = 1.0
"""Tolerance of the error of sampled heads: up to twice the recorded one. The heads are drawn at
random; over all cells of a kernel their errors differ by a fifth."""
DTYPES = ("fp16", "bf16", "fp8")
OWN_VERSIONS = ("flashwright", "translator")
"""Our own versions, which change daily. If they differ, source and cubin are not compared."""

ReceiptStatus = Literal["holds", "part", "differs", "unchecked"]
"""part: our number was reproduced, but other fields could not be checked here."""


@dataclass(frozen=True)
class ReceiptFinding:
    """The result of checking one of our numbers, with its kernel, its run and its peers."""

    cell: str
    fields: tuple[Field, ...] = ()
    then: float | None = None
    """Recorded seconds."""
    now: float | None = None
    """Seconds measured here; None if nothing was measured."""
    peer: str | None = None
    """The fastest recorded peer that was measured again."""
    ratio_then: float | None = None
    """How many times as fast as that peer ours was."""
    ratio_now: float | None = None
    took: float = 0.0
    """Seconds that this check took."""

    @property
    def status(self) -> ReceiptStatus:
        """`holds` only if all fields that can be checked were checked and agree."""
        found = {one.status for one in self.fields}
        if "differs" in found:
            return "differs"
        if self.now is None or any(one.name == "number.seconds" for one in self.unchecked):
            return "unchecked"
        return "part" if "unchecked" in found else "holds"

    @property
    def differing(self) -> tuple[Field, ...]:
        """The fields that differ from the record."""
        return tuple(one for one in self.fields if one.status == "differs")

    @property
    def unchecked(self) -> tuple[Field, ...]:
        """The fields that could not be checked here."""
        return tuple(one for one in self.fields if one.status == "unchecked")

    @property
    def why(self) -> tuple[str, ...]:
        """A line for each field that differs."""
        return tuple(one.in_words for one in self.differing)

    def record(self) -> dict[str, object]:
        """The result as plain data, for JSON."""
        record = {**vars(self), "status": self.status, "why": list(self.why)}
        return {**record, "fields": [one.record() for one in self.fields]}


def versions(peers: Iterable[Peer]) -> Mapping[str, str]:
    """The software versions here; without torch, those that are known."""
    try:
        return machine.environment(peers)
    except ImportError:
        found = {
            "flashwright": __version__,
            "python": platform.python_version(),
            "nvcc": machine.nvcc_version(),
            "translator": machine.translator(),
        }
        return {name: version for name, version in found.items() if version}


@dataclass(frozen=True)
class ReceiptDependencies:
    """The injected dependencies of a receipt check; tests replace them."""

    card: Card | None
    """None if nothing can be measured here; `missing` says why."""
    missing: str = ""
    contest: ContestDependencies = field(default_factory=ContestDependencies)
    build: Callable[[str, AttentionSpec, str, Card], KernelBuild] = kernels.from_tl
    make: Callable[[AttentionSpec, str, Card], KernelBuild] = kernels.make
    """Makes a module of several kernels, which has no TL of its own."""
    judge: Judge = kernels.judged
    peers: Callable[[], Mapping[str, Peer]] = registry.known
    environment: Callable[[Iterable[Peer]], Mapping[str, str]] = versions
    ceilings: Callable[[Iterable[str]], Ceilings] = ceilings.measure


@dataclass(frozen=True)
class Tolerances:
    """The differences that are allowed."""

    within: float = WITHIN
    """Relative tolerance of times and ratios."""
    versions: bool = False
    """Whether other versions count as not checked instead of as differing."""


def numbers(path: Path, cells: Collection[str] = (), sample: int | None = None) -> list[str]:
    """The cells of a file to check: all that have our number, the given ones, or a sample."""
    results = Results.of(journal.read(path))
    ours = [cell for cell, who in results.numbers if who == OURS]
    strange = [cell for cell in cells if cell not in ours]
    if strange:
        raise Failed(Diagnostic("FW001", f"{path} has no number of ours for {strange[0]!r}"))
    if results.run is None or not ours:
        text = "has no run in it" if results.run is None else "has no number of ours"
        raise Failed(Diagnostic("FW001", f"{path} {text}: there is nothing to check"))
    chosen = [cell for cell in ours if not cells or cell in cells]
    if sample is not None and sample < len(chosen):
        lot = set(random.sample(chosen, sample))
        chosen = [cell for cell in chosen if cell in lot]
    return chosen


def check(
    path: Path,
    cells: Sequence[str],
    folder: Path,
    dependencies: ReceiptDependencies,
    tolerances: Tolerances | None = None,
    step: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> Iterator[ReceiptFinding]:
    """Check the numbers of `cells`; kernels are built in `folder`.

    `step` receives the progress and the current activity.
    """
    lines = journal.read_lines(path)
    record = RecordFile(lines, path if path.is_dir() else path.parent)
    run = _RunCheck(record, dependencies, tolerances or Tolerances())
    clock, progress = dependencies.contest.clock, _KernelProgress(step, len(cells))
    before = clock()
    if run.same_card:
        step(0, len(cells), "measuring the machine")
        _ = run.fields
    for name in dict.fromkeys(cell.rpartition(" ")[0] for cell in cells):
        mine = [cell for cell in cells if cell.rpartition(" ")[0] == name]
        say = functools.partial(progress.say, name)
        for finding in _KernelCheck(run, name, folder, say).findings(mine):
            yield replace(finding, took=clock() - before)
            progress.done += 1
            before = clock()


@dataclass
class _KernelProgress:
    """Counts the numbers that are done, and reports the activity of a kernel."""

    step: Callable[[int, int, str], None]
    total: int
    done: int = 0

    def say(self, name: str, text: str) -> None:
        """Report the current activity of a kernel."""
        self.step(self.done, self.total, f"{name}: {text}")


# --- the run ----------------------------------------------------------------------------------


class _RunCheck:
    """Checks the run of a file against this machine."""

    def __init__(
        self, record: RecordFile, dependencies: ReceiptDependencies, tolerances: Tolerances
    ) -> None:
        self.record, self.dependencies, self.tolerances = record, dependencies, tolerances
        self.run, self.results = record.run, record.results
        known = {peer.name: peer for peer in dependencies.peers().values()}
        named = [who for who in self.run.contestants if who != OURS]
        self.here = {n: known[n] for n in named if n in known and known[n].installed}
        self.gone = {
            name: "it is not installed here" if name in known else "no such peer is known here"
            for name in named
            if name not in self.here
        }
        self.now = dict(dependencies.environment(self.here.values()))

    @property
    def same_card(self) -> bool:
        """Whether the recorded card is here, so that times can be compared."""
        return self.dependencies.card is not None and self.dependencies.card.name == self.run.card

    def same(self, *names: str) -> bool:
        """Whether these versions are equal to the recorded ones."""
        then = self.run.environment
        return all(then.get(name) and then.get(name) == self.now.get(name) for name in names)

    @property
    def other_toolchain(self) -> str:
        """How translator and compiler differ from the recorded ones; empty if both are equal."""
        then, now = self.run.environment, self.now
        changed = [
            f"{name} {then.get(name, '?')} then, {now.get(name, 'none')} now"
            for name in ("translator", "nvcc")
            if not self.same(name)
        ]
        return "; ".join(changed)

    @functools.cached_property
    def fields(self) -> tuple[Field, ...]:
        """The fields of the run's record, checked once for all cells."""
        return (*self.record.of_run(), *self._card(), *self._versions(), *self._ceilings())

    def _card(self) -> Iterator[Field]:
        card = self.dependencies.card
        if card is None:
            yield unchecked("run.card", self.run.card, self.dependencies.missing)
        elif not self.same_card:
            yield unchecked("run.card", self.run.card, "another card is here", card.name)
        else:
            yield exact("run.card", self.run.card, card.name)
            yield exact("run.arch", self.run.arch, card.arch, "that of the card here")

    def _versions(self) -> Iterator[Field]:
        """Versions must be equal on the same GPU; on another machine they are not checked."""
        then, now = self.run.environment, self.now
        if not then:
            yield unchecked("run.environment", None, "the record has no versions")
        for name in dict.fromkeys((*then, *now)):
            label, recorded, found = f"run.environment.{name}", then.get(name), now.get(name)
            if recorded == found:
                yield exact(label, recorded, found)
            elif name in then and name not in now:
                why = self.gone.get(name, "it is not installed here, or its version is unknown")
                yield unchecked(label, recorded, why)
            elif name in OWN_VERSIONS or self.tolerances.versions or not self.same_card:
                yield unchecked(label, recorded, f"another version is here: {found}", found)
            else:
                yield exact(label, recorded, found, "another version")

    def _ceilings(self) -> Iterator[Field]:
        """The matrix product and the copy, measured again."""
        run = self.run
        recorded = _rates(Ceilings(run.matmul, run.copy_gbs))
        if not recorded:
            yield unchecked("run.matmul", None, "the record has none")
        if not self.same_card:
            yield from (unchecked(name, rate, self.not_measured) for name, rate in recorded.items())
            return
        known = [dtype for dtype in run.matmul if dtype in DTYPES]
        found = _rates(self.dependencies.ceilings(known)) if recorded else {}
        within = max(self.tolerances.within, CEILINGS_WITHIN)
        for name, rate in recorded.items():
            if name in found:
                yield near(name, rate, found[name], within)
            else:
                yield unchecked(name, rate, "it could not be measured here")

    @property
    def not_measured(self) -> str:
        """Why no time can be compared here."""
        card = self.dependencies.card
        return self.dependencies.missing if card is None else f"another card is here: {card.name}"

    def unmeasured(self, cell: str, why: str) -> Iterator[Field]:
        """The fields of a cell that only a measurement could check."""
        for who in self.run.contestants:
            number, end = self.results.numbers.get((cell, who)), _end(who)
            if number is not None:
                yield unchecked(f"number.seconds{end}", number.seconds, why)
                yield unchecked(f"number.relative_rms{end}", number.relative_rms, why)
            elif (absent := self.results.absent.get((cell, who))) is not None:
                yield unchecked(f"absent.offence{end}", absent.offence, why)
            else:
                yield unchecked(f"number.who{end}", None, f"the record has no line of it; {why}")

    def static(self, cell: str) -> Iterator[Field]:
        """The records of a cell checked against each other and the run."""
        for who in self.run.contestants:
            number = self.results.numbers.get((cell, who))
            absent = self.results.absent.get((cell, who))
            if number is not None:
                yield from self.record.of_number(number, cell)
            elif absent is not None:
                yield from self.record.of_absent(absent)


def _rates(found: Ceilings) -> dict[str, float]:
    """The measured ceilings by field name."""
    rates = {f"run.matmul.{dtype}": rate for dtype, rate in found.matmul.items()}
    return rates | ({} if found.copy_gbs is None else {"run.copy_gbs": found.copy_gbs})


def _end(who: str) -> str:
    return "" if who == OURS else f" ({who})"


# --- a kernel ---------------------------------------------------------------------------------


class _KernelCheck:
    """Checks one kernel of a file and its numbers."""

    def __init__(self, run: _RunCheck, name: str, folder: Path, say: Callable[[str], None]) -> None:
        self.run, self.name, self.folder, self.say = run, name, folder, say
        self.dependencies, self.results = run.dependencies, run.results
        self.record = run.results.kernels.get(name)

    def findings(self, cells: Sequence[str]) -> Iterator[ReceiptFinding]:
        """A finding for each of the kernel's numbers."""
        if self.record is None:
            why = "the file has no record of its kernel"
            none = Field("kernel.name", "differs", None, self.name, why)
            yield from self._unmeasured(cells, (none,), why)
            return
        own = (*self.run.record.of_kernel(self.record), *self._translated(self.record))
        spec = self.run.record.specs[self.name]
        if isinstance(spec, str) or any(one.status == "differs" for one in own):
            own += tuple(_not_built(self.record, "its record is not consistent"))
            yield from self._unmeasured(cells, own, "its kernel's record is not consistent")
        elif why := self._not_makeable(self.record, spec):
            own += (*_not_built(self.record, why),)
            yield from self._unmeasured(cells, own, why)
        else:
            yield from self._again(cells, self.record, spec, own)

    def _not_makeable(self, record: KernelRecord, spec: AttentionSpec) -> str:
        """Why the kernel cannot be built again; empty if it may be possible."""
        if spec.reference:
            return "the reference that its spec names is not in the file"
        if any(f.status == "differs" and f.name == "run.settings.specs" for f in self.run.fields):
            return "the specs of the file are not those of its run"
        if not record.tl and not _is_module(record):
            return "its TL is not in the file"
        try:
            gpus.find(record.gpu)
        except gpus.UnknownGpu as error:
            return f"it cannot be translated here: {error}"
        return ""

    def _unmeasured(
        self, cells: Sequence[str], own: tuple[Field, ...], why: str
    ) -> Iterator[ReceiptFinding]:
        for cell in cells:
            more = (*self.run.static(cell), *self.run.unmeasured(cell, why))
            yield self._finding(cell, (*own, *more))

    def _finding(
        self, cell: str, own: tuple[Field, ...], found: Results | None = None
    ) -> ReceiptFinding:
        then, now = self.results, found or Results()
        peer = then.fastest_peer(cell, [who for c, who in now.numbers if c == cell])
        return ReceiptFinding(
            cell,
            (*self.run.fields, *own),
            then.seconds(cell, OURS),
            now.seconds(cell, OURS),
            peer,
            then.ratio(cell, peer) if peer else None,
            now.ratio(cell, peer) if peer else None,
        )

    # --- made again ---------------------------------------------------------------------------

    def _translated(self, record: KernelRecord) -> Iterator[Field]:
        """Compare source and line map with a new translation of the TL."""
        recorded = {
            "kernel.source": record.source,
            "kernel.map": record.map,
            "kernel.gpu": record.gpu,
        }
        if _is_module(record):  # it is made again, and all of its files are compared
            yield exact("kernel.source", record.source, "")
            yield exact("kernel.map", record.map, {})
            yield exact("kernel.gpu", record.gpu, record.gpu)
            return
        if not record.tl:
            for name, value in recorded.items():
                yield unchecked(name, value, "its TL is not in the file")
            return
        try:
            steps = _steps(record)
            made = {"": {}} if steps else _translations(record.tl, record.gpu)
            others = {
                f"{name}/kernel.cu": _translations(tl, record.gpu, bool(steps))
                for name, tl in _further(record).items()
            }
        except (Failed, gpus.UnknownGpu) as error:
            for name, value in recorded.items():
                yield unchecked(name, value, f"it cannot be translated here: {error}")
            return
        if not self.run.same("translator") and record.source not in made:
            for name, value in recorded.items():
                yield unchecked(name, value, f"another translator: {self._translators}")
            return
        first = next(iter(made))
        source = record.source if record.source in made else first
        why = "the same translator makes different output from its TL"
        yield exact("kernel.source", record.source, source, why)
        yield exact("kernel.gpu", record.gpu, record.gpu)
        yield exact("kernel.map", record.map, made[source], why)
        for name, text in steps.items():
            yield exact(f"kernel.others.{name}", record.others.get(name), text, "from its TL")
        for name, sources in others.items():
            text = record.others.get(name, "")
            found = text if text in sources else next(iter(sources))
            if self.run.same("translator"):
                yield exact(f"kernel.others.{name}", text, found, why)

    @property
    def _translators(self) -> str:
        then, now = self.run.run.environment, self.run.now
        translators = [
            f"{e.get('flashwright', '?')} ({e.get('translator', '?')})" for e in (then, now)
        ]
        return f"{translators[0]} then, {translators[1]} now"

    def _again(
        self,
        cells: Sequence[str],
        record: KernelRecord,
        spec: AttentionSpec,
        own: tuple[Field, ...],
    ) -> Iterator[ReceiptFinding]:
        """Build, judge and measure, as far as this machine can."""
        card = self.dependencies.card
        if card is None:
            own += (*self._without_gpu(record, spec),)
            yield from self._unmeasured(cells, own, self.dependencies.missing)
            return
        self.say("building")
        built = self._built(record, spec, card)
        if built.why:
            # A missing compiler says nothing about the kernel; a compile error does.
            gone = "FW821" in built.why or "FW851" in built.why
            why = f"it cannot be built here: {built.why}"
            own += (*_not_built(record, why),)
            if not gone:
                own += (Field("kernel.tl", "differs", None, None, why),)
            yield from self._unmeasured(cells, own, why)
            return
        own += (*self._compiled(record, built, card.arch),)
        saved = kernels.save(built, self.folder)
        self.say("judging")
        try:
            verdict = self.dependencies.judge(kernels.candidate_of(saved), spec)
        except Failed as failed:
            why = f"it cannot be judged here: {failed}"
            own += (unchecked("kernel.verdict", record.verdict.get("ok"), why),)
            yield from self._unmeasured(cells, own, why)
            return
        named = ", ".join(o.name for o in verdict.offences)
        again = exact("kernel.verdict", True, verdict.ok, f"the judge now rejects it: {named}")
        if again.status == "differs":
            yield from self._unmeasured(cells, (*own, again), again.why)
        else:
            yield from self._measured(cells, spec, kernels.candidate_of(saved), (*own, again), card)

    def _without_gpu(self, record: KernelRecord, spec: AttentionSpec) -> Iterator[Field]:
        """Without a GPU: nvcc can still build the kernel, so the digest of the cubin is checked."""
        why = self.run.other_toolchain
        number = re.fullmatch(r"sm_(\d+)(\d)", self.run.run.arch)
        if why or number is None:
            yield from _not_built(record, why or "its architecture is not known")
        else:
            self.say("building")
            card = Card(0, self.run.run.card, (int(number[1]), int(number[2])))
            built = self._built(record, spec, card)
            if built.why:
                yield from _not_built(record, f"it cannot be built here: {built.why}")
            else:
                yield from self._compiled(record, built, card.arch)
        yield unchecked("kernel.verdict", record.verdict.get("ok"), self.dependencies.missing)

    def _built(self, record: KernelRecord, spec: AttentionSpec, card: Card) -> KernelBuild:
        """Build the package again, with all its kernels."""
        if _is_module(record):
            return self.dependencies.make(spec, record.gpu, card)
        built = self.dependencies.build(record.tl, spec, record.gpu, card)
        if STEPS in record.others:
            return built
        files = dict(built.files)
        for name, tl in _further(record).items():
            other = self.dependencies.build(tl, spec, record.gpu, card)
            if other.why:
                return other
            files |= {f"{name}/{file}": data for file, data in other.files.items()}
        if CLASSES in record.others:
            files[CLASSES] = record.others[CLASSES]
        return replace(built, files=files)

    def _compiled(self, record: KernelRecord, built: KernelBuild, arch: str) -> Iterator[Field]:
        """Compare cubin digests and ptxas figures, if translator and compiler are the same."""
        why = self.run.other_toolchain
        if arch != self.run.run.arch:
            why = f"it is compiled for {arch} here"
        if why:
            yield from _not_built(record, why)
            return
        reason = "the same translator and compiler make a different one"
        every = _is_module(record)
        digests = {n: d for n, d in built.hashes.items() if every or n.endswith("cubin")}
        recorded = {n: d for n, d in record.hashes.items() if every or n.endswith("cubin")}
        for name in dict.fromkeys((*digests, *recorded)):
            before, found = recorded.get(name), digests.get(name)
            yield exact(f"kernel.hashes.{name}", before, found, reason)
        for name, count in record.ptxas.items():
            yield exact(f"kernel.ptxas.{name}", count, built.ptxas.get(name), reason)
        if not record.ptxas:
            yield exact("kernel.ptxas", {}, dict(built.ptxas), reason)

    # --- measured again -----------------------------------------------------------------------

    def _measured(
        self,
        cells: Sequence[str],
        spec: AttentionSpec,
        candidate: Candidate,
        own: tuple[Field, ...],
        card: Card,
    ) -> Iterator[ReceiptFinding]:
        """Measure each cell: ours against the recorded peers that are installed."""
        contest = self._contest(candidate, card)
        beside = ", ".join(self.run.here) or "no peer"
        gone = f"; not here: {', '.join(self.run.gone)}" if self.run.gone else ""
        try:
            for cell in cells:
                static = (*self.run.static(cell),)
                if any(one.status == "differs" for one in static):
                    why = "its records contradict each other"
                    more = (*static, *self.run.unmeasured(cell, why))
                    yield self._finding(cell, (*own, *more))
                    continue
                number = self.results.numbers[cell, OURS]
                self.say(f"measuring {number.length}, beside {beside}{gone}")
                lines = contest.measure(Cell.recorded(spec, cell, number.length, number.batch))
                found = Results.of(lines)
                more = (*static, *self._compared(cell, found))
                yield self._finding(cell, (*own, *more), found)
        finally:
            contest.close()

    def _contest(self, candidate: Candidate, card: Card) -> Contest:
        run, same = self.run.run, self.run.same_card
        contestants = [Contestant(OURS, candidate, watched=True)]
        contestants += [
            Contestant(p.name, p.candidate, p.slack, p.watched) for p in self.run.here.values()
        ]
        now = run.model_copy(
            update={
                "id": "receipt",
                "card": card.name,
                "arch": card.arch,
                "contestants": (OURS, *self.run.here),
                "matmul": run.matmul if same else {},
                "copy_gbs": run.copy_gbs if same else None,
            }
        )
        rules = Rules(warm=run.settings.get("l2") == "both")
        return Contest(now, contestants, rules, self.dependencies.contest)

    def _compared(self, cell: str, found: Results) -> Iterator[Field]:
        """Compare the measurement with the record, contestant by contestant."""
        if not self.run.same_card:
            yield from self.run.unmeasured(cell, self.run.not_measured)
            return
        for who in self.run.run.contestants:
            then = self.results.numbers.get((cell, who))
            absent = self.results.absent.get((cell, who))
            if who in self.run.gone:
                yield from _gone(then, absent, who, self.run.gone[who])
            elif then is not None:
                yield from self._number(then, found, cell, who)
            else:
                yield from _absent(absent, found, cell, who)

    def _number(self, then: NumberRecord, found: Results, cell: str, who: str) -> Iterator[Field]:
        now, end, within = found.numbers.get((cell, who)), _end(who), self.run.tolerances.within
        if now is None:
            lost = found.absent.get((cell, who))
            why = (
                f"{lost.offence}: {lost.why}" if lost and lost.offence else lost.why if lost else ""
            )
            text = f"it has no time now: {why or 'nothing was measured'}"
            yield Field(f"number.seconds{end}", "differs", then.seconds, None, text)
            return
        yield near(f"number.seconds{end}", then.seconds, now.seconds, within)
        yield near(f"number.tflops{end}", then.tflops, now.tflops, within)
        if then.warm_seconds is not None and now.warm_seconds is not None:
            yield near(f"number.warm_seconds{end}", then.warm_seconds, now.warm_seconds, within)
        yield _error(f"number.relative_rms{end}", then.relative_rms, now.relative_rms)
        ratio = found.ratio(cell, who)
        if who != OURS and ratio is not None:
            yield near(f"ratio{end}", self.results.ratio(cell, who), ratio, within)


def _error(name: str, then: float | None, now: float | None) -> Field:
    """Compare the largest errors of timed calls, in both directions."""
    if then and now and max(then / now, now / then) <= 1 + ERROR_WITHIN:
        return Field(name, "holds", then, now)
    return exact(name, then, now, f"more than {1 + ERROR_WITHIN:g} times apart")


def _gone(
    then: NumberRecord | None, absent: AbsentRecord | None, who: str, why: str
) -> Iterator[Field]:
    """The fields of a contestant that is not installed here."""
    end = _end(who)
    if then is not None:
        yield unchecked(f"number.seconds{end}", then.seconds, why)
        yield unchecked(f"number.relative_rms{end}", then.relative_rms, why)
        yield unchecked(f"ratio{end}", None, why)
    elif absent is not None:
        yield unchecked(f"absent.offence{end}", absent.offence, why)
    else:
        yield unchecked(f"number.who{end}", None, f"the record has no line of it; {why}")


def _absent(absent: AbsentRecord | None, found: Results, cell: str, who: str) -> Iterator[Field]:
    """A contestant without a recorded number: it differs if it has a number now."""
    now, lost = found.numbers.get((cell, who)), found.absent.get((cell, who))
    text = f"no time: {absent.why}" if absent else "no line"
    if now is not None:
        yield Field(f"absent.who{_end(who)}", "differs", text, now.seconds, "it has a time now")
    elif absent is not None and lost is not None:
        yield exact(f"absent.offence{_end(who)}", absent.offence, lost.offence, lost.why)
    else:
        yield Field(f"number.who{_end(who)}", "differs", text, "no time", "it has no line")


def _is_module(record: KernelRecord) -> bool:
    """Whether it is a call of several kernels, without TL of its own."""
    return not record.tl and kernels.CALL in record.others


def _not_built(record: KernelRecord, why: str) -> Iterator[Field]:
    """The fields that only a build could check."""
    for name, digest in record.hashes.items():
        if name.endswith("cubin"):
            yield unchecked(f"kernel.hashes.{name}", digest, why)
    yield unchecked("kernel.ptxas", record.ptxas, why)


def _steps(record: KernelRecord) -> dict[str, str]:
    """Of a program of several kernels: the texts that follow from its TL, by file; else none.
    Raises Failed if it has none."""
    from flashwright.build.make import step_programs
    from flashwright.build.steps import Steps
    from flashwright.check.check import check
    from flashwright.lang.parse import parse
    from flashwright.program.kernels import Kernels

    if STEPS not in record.others:
        return {}
    target = gpus.find(record.gpu)
    checked = check(parse(record.tl), target)
    if checked.errors or len(checked.kernels) < 2:
        text = "its TL is no program of several kernels"
        raise Failed(*(checked.errors or (Diagnostic("FW904", text),)))
    found = Kernels(checked.kernels)
    texts = {f"{n}/{kernels.CODE}": text for n, (text, _) in step_programs(found, target).items()}
    return {STEPS: Steps.of(found).dump(), **texts}


def _further(record: KernelRecord) -> dict[str, str]:
    """The TL of the package's further kernels, by name."""
    end = f"/{kernels.CODE}"
    return {n.removesuffix(end): text for n, text in record.others.items() if n.endswith(end)}


@functools.lru_cache(maxsize=64)
def _translations(tl: str, gpu: str, part: bool = False) -> dict[str, dict[str, object]]:
    """Source and line map of both translations of a program, or of a part of one with several
    kernels: the default and the sparing one."""
    from flashwright.check.check import checked_program
    from flashwright.lang.parse import parse
    from flashwright.lower.translate import translate

    target = gpus.find(gpu)
    program = checked_program(parse(tl), target, part=part)
    made = (package.translated(translate(program, target, sparing=s)) for s in (False, True))
    return {one["kernel.cu"]: kernels.read_map(one["kernel.map.json"]) for one in made}
