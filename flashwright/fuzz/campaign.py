"""Runs many seeds: chunks of programs in separate processes, one line of JSON for each program.

A campaign resumes from its record: seeds that are in it are not run again. If a process dies, the
program it ran is recorded as a crash, and a new process runs the rest of the chunk.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from flashwright.fuzz.case import FuzzCase
from flashwright.fuzz.generate import generate
from flashwright.fuzz.oracle import (
    FAILURES,
    Prepared,
    ProgramOutcome,
    assembled,
    compare,
    compiled,
    prepare,
)
from flashwright.fuzz.sizes import GPUS

CHUNK = 96
ASSEMBLED = 50  # one program in so many is also put through ptxas
RECORD = "record.jsonl"
LIMIT = 1800.0  # seconds for a chunk
Tell = Callable[[dict[str, Any]], None]


@dataclass
class Campaign:
    """A set of programs to run, and the folder of the record."""

    seeds: Sequence[int]
    out: Path
    gpus: tuple[str, ...] = GPUS
    jobs: int = 1
    chunk: int = CHUNK
    seconds: float | None = None
    """No chunk starts after this many seconds."""
    _running: list[tuple[Any, Connection, list[int], float]] = field(default_factory=list)

    def run(self, tell: Tell) -> None:
        """Run all seeds that are not in the record; `tell` is called with each new line."""
        self.out.mkdir(parents=True, exist_ok=True)
        done = {line["seed"] for line in read(self.out)}
        left = [s for s in self.seeds if s not in done]
        waiting = [left[n : n + self.chunk] for n in range(0, len(left), self.chunk)]
        begun = time.monotonic()
        with (self.out / RECORD).open("a", encoding="utf-8") as record:

            def note(line: dict[str, Any]) -> None:
                record.write(json.dumps(line) + "\n")
                record.flush()
                tell(line)

            try:
                while waiting or self._running:
                    late = self.seconds is not None and time.monotonic() - begun > self.seconds
                    if late:
                        waiting = []
                    while waiting and len(self._running) < self.jobs:
                        self._start(waiting.pop(0))
                    if self._running:
                        waiting = self._collect(note) + waiting
            finally:
                for process, *_ in self._running:
                    process.kill()

    def _start(self, seeds: list[int]) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(there, seeds, self.gpus), daemon=True)
        process.start()
        there.close()
        self._running.append((process, here, list(seeds), time.monotonic() + LIMIT))

    def _collect(self, note: Tell) -> list[list[int]]:
        """Take the reported lines. Returns the rest of each chunk whose process died."""
        again: list[list[int]] = []
        wait([pipe for _, pipe, *_ in self._running], timeout=1.0)
        for entry in list(self._running):
            process, pipe, seeds, until = entry
            ended = False
            try:
                while pipe.poll():
                    line = pipe.recv()
                    if line["seed"] in seeds:
                        seeds.remove(line["seed"])
                    note(line)
            except (EOFError, OSError):
                ended = True
            if not ended and time.monotonic() > until:
                process.kill()
                ended = True
            if ended:
                process.join(5)
                self._running.remove(entry)
                pipe.close()
                if seeds:  # it died on the first of them
                    text = f"the process ended with exit code {process.exitcode}"
                    lost = generate(seeds[0], self.gpus)
                    note(line_of(lost, ProgramOutcome("crash", text, "process")))
                    again += [seeds[1:]] if seeds[1:] else []
        return again


def _work(pipe: Connection, seeds: Sequence[int], gpus: tuple[str, ...]) -> None:
    """Run one chunk in this process; every line goes into the pipe as soon as it is known."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for line in run_chunk(seeds, gpus):
        pipe.send(line)
    pipe.close()
    os._exit(0)  # a launch without an end may still be running in a thread


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def run_chunk(seeds: Sequence[int], gpus: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Lines of the record for some seeds."""
    ready: list[tuple[Prepared, float]] = []
    for seed in seeds:
        begun = time.monotonic()
        case = generate(seed, gpus)
        step = prepare(case)
        if isinstance(step, ProgramOutcome):
            yield line_of(case, step, time.monotonic() - begun)
        else:
            ready.append((step, time.monotonic() - begun))
    for arch in dict.fromkeys(p.made.plan.arch for p, _ in ready):
        group = [(p, before) for p, before in ready if p.made.plan.arch == arch]
        begun = time.monotonic()
        made = compiled([p for p, _ in group])
        share = (time.monotonic() - begun) / len(group)
        for (prepared, before), ptx in zip(group, made, strict=True):
            begun = time.monotonic()
            outcome = ptx if isinstance(ptx, ProgramOutcome) else compare(prepared, ptx)
            if outcome.kind == "agree" and prepared.case.seed % ASSEMBLED == 0:
                outcome = assembled(prepared)
            yield line_of(prepared.case, outcome, before + share + time.monotonic() - begun)


def line_of(case: FuzzCase, outcome: ProgramOutcome, seconds: float = 0.0) -> dict[str, Any]:
    """A line of the record."""
    return {
        "seed": case.seed,
        "gpu": case.gpu,
        "kind": outcome.kind,
        "where": outcome.where,
        "detail": outcome.detail,
        "spoilt": case.spoilt,
        "tags": list(case.tags),
        "seconds": round(seconds, 2),
    }


def read(out: Path) -> list[dict[str, Any]]:
    """The lines of a record; a line that was cut off is left out."""
    path, found = out / RECORD, []
    if path.is_file():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(text))
            except ValueError:
                continue
    return found


def summary(lines: Iterable[dict[str, Any]]) -> str:
    """Counts by outcome and GPU, the features that fail most, and how many were covered."""
    lines = list(lines)
    kinds = Counter(line["kind"] for line in lines)
    text = [", ".join(f"{kind} {count}" for kind, count in kinds.most_common())]
    ran = [line for line in lines if line["kind"] in FAILURES | {"agree"}]
    failed = [line for line in ran if line["kind"] in FAILURES]
    for (gpu, kind, where), count in Counter(
        (line["gpu"], line["kind"], line["where"]) for line in failed
    ).most_common(40):
        text.append(f"  {count:5d}  {gpu:5s} {kind}: {where}")
    tags: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for line in ran:
        for tag in line["tags"]:
            tags[tag][0] += 1
            tags[tag][1] += line["kind"] in FAILURES
    text.append(f"{len(ran)} programs ran, {len(failed)} failed; {len(tags)} features covered")
    share = len(failed) / max(1, len(ran))
    worst = sorted(
        ((bad / n, bad, n, tag) for tag, (n, bad) in tags.items() if bad > 1), reverse=True
    )
    for rate, bad, n, tag in worst[:12]:
        if rate > 1.5 * share:
            text.append(f"  {tag}: {bad} of {n} failed")
    return "\n".join(text)
