"""Receipts: is a number in a benchmark's file still so?

Each number of ours is followed back: the TL in its record is translated and compiled again,
judged, and measured beside the fastest peer that is there now as it was then. Where there is no
GPU, what is left is the form of the file and the digests, and that is said.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import flashwright
from flashwright import gpu as gpus
from flashwright.build.driver import Card
from flashwright.build.package import CLASSES
from flashwright.files import sha256
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure import journal, kernels, machine
from flashwright.measure.bench import Tools, bench
from flashwright.measure.contest import Contestant
from flashwright.measure.grid import Cell, kernel_name
from flashwright.measure.journal import Journal
from flashwright.measure.kernels import Judge, Made
from flashwright.measure.peers import registry
from flashwright.measure.peers.registry import Peer
from flashwright.measure.records import OURS, KernelRecord, RunRecord
from flashwright.measure.results import Results
from flashwright.sandbox.candidate import Candidate
from flashwright.spec import AttentionSpec, BadSpec

WITHIN = 0.05
"""A kernel's time moves by a few percent from run to run; its ratio to a peer by less."""

Status = Literal["holds", "differs", "unchecked"]


@dataclass(frozen=True)
class Finding:
    """What became of one number."""

    cell: str
    status: Status
    why: tuple[str, ...] = ()
    """What differs, or why it cannot be checked; then what else a reader should know."""
    then: float | None = None
    """Seconds."""
    now: float | None = None
    peer: str | None = None
    """The fastest one that is there now as it was then."""
    ratio_then: float | None = None
    """How many times as fast as that peer ours was."""
    ratio_now: float | None = None

    def record(self) -> dict[str, object]:
        """As plain data."""
        return {**vars(self), "why": list(self.why)}


@dataclass(frozen=True)
class Parts:
    """What a check is made with; tests bring their own."""

    card: Card | None
    """None: nothing can be measured here, and `missing` says why."""
    missing: str = ""
    tools: Tools = field(default_factory=Tools)
    build: Callable[[str, AttentionSpec, str, Card], Made] = kernels.from_tl
    judge: Judge = kernels.judged
    peers: Callable[[], Mapping[str, Peer]] = registry.known
    environment: Callable[[], Mapping[str, str]] = lambda: {
        "flashwright": flashwright.__version__,
        "translator": machine.translator(),
        "nvcc": machine.nvcc_version(),
    }


@dataclass(frozen=True)
class _Digests:
    """What the digests of a kernel say: what is wrong, what is merely another version."""

    wrong: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unchecked: str = ""


def numbers(path: Path, cells: Collection[str] = (), sample: int | None = None) -> list[str]:
    """The cells of a file that are to be checked: all with a number of ours, or some of them."""
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
    parts: Parts,
    within: float = WITHIN,
    step: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> Iterator[Finding]:
    """Each number again; `folder` is for the kernels that are built on the way."""
    results = Results.of(journal.read(path))
    names = dict.fromkeys(cell.rpartition(" ")[0] for cell in cells)
    done = 0
    for name in names:
        mine = [cell for cell in cells if cell.rpartition(" ")[0] == name]
        step(done, len(cells), name)
        checked = _Kernel(results, name, folder, parts, within)
        for finding in checked.findings(mine):
            done += 1
            step(done, len(cells), finding.cell)
            yield finding


class _Kernel:
    """One kernel of a file, and all that is found about its numbers."""

    def __init__(
        self, results: Results, name: str, folder: Path, parts: Parts, within: float
    ) -> None:
        assert results.run is not None  # `numbers` has seen to it
        self.results, self.run, self.name = results, results.run, name
        self.folder, self.parts, self.within = folder, parts, within

    def findings(self, cells: Sequence[str]) -> Iterator[Finding]:
        """One for each of its numbers."""
        record = self.results.kernels.get(self.name)
        if record is None:
            yield from self._all(cells, "unchecked", "the file has no record of its kernel")
            return
        try:
            spec = AttentionSpec.make(**record.spec)
        except BadSpec as error:
            yield from self._all(cells, "unchecked", f"its spec: {error.lines[0]}")
            return
        if kernel_name(spec) != self.name:
            yield from self._all(cells, "differs", "its spec is not what its name says")
            return
        digests = _digests(record, self.run, self.parts)
        notes = digests.notes
        if digests.wrong:
            yield from self._all(cells, "differs", *digests.wrong, *notes)
        elif digests.unchecked:
            yield from self._all(cells, "unchecked", digests.unchecked, *notes)
        elif self.parts.card is None:
            text = f"the digests hold; its time was not measured: {self.parts.missing}"
            yield from self._all(cells, "unchecked", text, *notes)
        else:
            yield from self._again(cells, record, spec, self.parts.card, notes)

    def _all(self, cells: Sequence[str], status: Status, *why: str) -> Iterator[Finding]:
        for cell in cells:
            yield Finding(cell, status, why, self.results.seconds(cell, OURS))

    def _again(
        self,
        cells: Sequence[str],
        record: KernelRecord,
        spec: AttentionSpec,
        card: Card,
        notes: tuple[str, ...],
    ) -> Iterator[Finding]:
        """Build, judge and measure."""
        built = self._built(record, spec, card)
        if built.why:
            # A compiler that is not there says nothing of the kernel; one that refuses it does.
            gone = "FW821" in built.why or "FW851" in built.why
            status: Status = "unchecked" if gone else "differs"
            yield from self._all(cells, status, f"it cannot be built here: {built.why}", *notes)
            return
        notes += self._cubin(record, built, card)
        saved = kernels.save(built, self.folder)
        try:
            verdict = self.parts.judge(kernels.candidate_of(saved), spec)
        except Failed as failed:
            yield from self._all(cells, "unchecked", f"it cannot be judged here: {failed}", *notes)
            return
        if verdict.ok != bool(record.verdict.get("ok")):
            named = ", ".join(o.name for o in verdict.offences)
            text = f"the judge now rejects it: {named}" if named else "the judge now accepts it"
            yield from self._all(cells, "differs", text, *notes)
            return
        peers = {cell: self._peer(cell) for cell in cells}
        found = self._timed(cells, spec, kernels.candidate_of(saved), peers, card)
        for cell in cells:
            yield self._compared(cell, found, peers[cell], card, notes)

    def _built(self, record: KernelRecord, spec: AttentionSpec, card: Card) -> Made:
        """The package again, with all its kernels."""
        built = self.parts.build(record.tl, spec, record.gpu, card)
        files = dict(built.files)
        for name, tl in _further(record).items():
            other = self.parts.build(tl, spec, record.gpu, card)
            if other.why:
                return other
            files |= {f"{name}/{file}": data for file, data in other.files.items()}
        if CLASSES in record.others:
            files[CLASSES] = record.others[CLASSES]
        return replace(built, files=files)

    def _cubin(self, record: KernelRecord, built: Made, card: Card) -> tuple[str, ...]:
        if card.arch != self.run.arch or record.hashes.get("cubin") == built.hashes.get("cubin"):
            return ()
        then, now = (e.get("nvcc", "?") for e in (self.run.environment, self.parts.environment()))
        if then != now:
            return (f"the cubin differs: nvcc {then} then, {now} now",)
        return (f"the cubin differs, by the same nvcc {now}: it tells in which folder it was made",)

    def _compared(
        self, cell: str, found: Results, peer: Peer | None, card: Card, notes: tuple[str, ...]
    ) -> Finding:
        then, now = self.results.numbers[cell, OURS].seconds, found.seconds(cell, OURS)
        if now is None:
            absent = found.absent.get((cell, OURS))
            offence = f"{absent.offence}: " if absent and absent.offence else ""
            why = f"it has no time now: {offence}{absent.why if absent else 'nothing was measured'}"
            return Finding(cell, "differs", (why, *notes), then)
        name = peer.name if peer and found.seconds(cell, peer.name) else None
        ratios = [r.ratio(cell, name) if name else None for r in (self.results, found)]
        if card.name != self.run.card:
            text = f"its time is that of another card: {self.run.card} then, {card.name} now"
            return Finding(cell, "unchecked", (text, *notes), then, now, name, *ratios)
        change = now / then - 1
        if abs(change) <= self.within:
            return Finding(cell, "holds", notes, then, now, name, *ratios)
        text = f"it takes {abs(change):.1%} {'more' if change > 0 else 'less'} time"
        return Finding(cell, "differs", (text, *notes), then, now, name, *ratios)

    def _peer(self, cell: str) -> Peer | None:
        """The fastest of then that is there now."""
        here = {p.name: p for p in self.parts.peers().values() if p.installed}
        name = self.results.fastest_peer(cell, here)
        return here[name] if name else None

    def _timed(
        self,
        names: Sequence[str],
        spec: AttentionSpec,
        candidate: Candidate,
        peers: Mapping[str, Peer | None],
        card: Card,
    ) -> Results:
        """All cells of the kernel in one run, with everybody who was the fastest in one of them."""
        beside = {p.name: p for p in peers.values() if p is not None}
        contestants = [Contestant(OURS, candidate, watched=True)]
        contestants += [
            Contestant(p.name, p.candidate, p.slack, p.watched) for p in beside.values()
        ]
        same = card.name == self.run.card
        run = self.run.model_copy(
            update={
                "id": "receipt",
                "card": card.name,
                "arch": card.arch,
                "contestants": (OURS, *beside),
                "matmul": self.run.matmul if same else {},
                "copy_gbs": self.run.copy_gbs if same else None,
            }
        )
        kept = Journal(Path("receipt"), [run], put=lambda path, at, data: None)
        cells = [
            Cell(spec, number.length, number.batch)
            for number in (self.results.numbers[name, OURS] for name in names)
        ]
        bench(run, cells, contestants, kept, None, self.parts.tools)
        return Results.of(kept.records)


# --- digests ----------------------------------------------------------------------------------


def _digests(record: KernelRecord, run: RunRecord, parts: Parts) -> _Digests:
    """Hold the texts against their digests, and what they become against theirs."""
    if record.spec.get("reference"):
        return _Digests(unchecked="the reference that its spec names is not in the file")
    if record.why or not record.tl:
        return _Digests(unchecked=record.why or "its TL is not in the file")
    told = {"tl": record.tl, "source": record.source, **record.others}
    wrong = tuple(
        f"the {name} in the file is not that of its digest"
        for name, text in told.items()
        if text and record.hashes.get(name) != sha256(text)
    )
    if wrong:
        return _Digests(wrong)
    pairs = [(record.tl, record.hashes.get("source") if record.source else None)]
    pairs += [(tl, record.hashes.get(f"{n}/kernel.cu")) for n, tl in _further(record).items()]
    try:
        same = all(s is None or s in _sources(tl, record.gpu) for tl, s in pairs)
    except (Failed, gpus.UnknownGpu) as error:
        return _Digests(unchecked=f"it cannot be translated here: {error}")
    if same:
        return _Digests()
    then, now = run.environment, parts.environment()
    if then.get("translator") != now.get("translator"):
        versions = [
            f"{e.get('flashwright', '?')} ({e.get('translator', '?')})" for e in (then, now)
        ]
        return _Digests(notes=(f"another translator: {versions[0]} then, {versions[1]} now",))
    return _Digests(("the same translator makes another source of its TL",))


def _further(record: KernelRecord) -> dict[str, str]:
    """The TL of the kernels beside the package's own, by name."""
    end = f"/{kernels.CODE}"
    return {n.removesuffix(end): text for n, text in record.others.items() if n.endswith(end)}


def _sources(tl: str, gpu: str) -> set[str]:
    """The digests of what a program is translated to: the fast one, and the sparing one."""
    from flashwright.check.check import check
    from flashwright.lang.parse import parse
    from flashwright.lower.translate import translate

    target = gpus.find(gpu)
    checked = check(parse(tl), target)
    if checked.program is None or checked.errors:
        raise Failed(*checked.errors)
    sources = (translate(checked.program, target, sparing=s).source for s in (False, True))
    return {sha256(source) for source in sources}
