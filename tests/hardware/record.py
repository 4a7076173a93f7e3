"""Run every snippet on this machine's GPU and keep what comes out.

    python -m tests.hardware.record OUT.npz        record, and compare with the emulator
    python -m tests.hardware.record --missing      the same for what has no results, or old ones
    python -m tests.hardware.record --compare      the emulator against what was recorded before

It needs NumPy and the NVIDIA driver; to compare also a C++ compiler. The table of all snippets goes
to OUT.txt; printed are the sums, and what differs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.hardware import recording
from tests.hardware.compare import Verdict, compare
from tests.hardware.recording import Recording
from tests.hardware.snippet import Prepared
from tests.hardware.snippets import modules, prepared

CHUNK = 128  # kernels to a module
PATIENCE = 25.0  # seconds without a word: a module of so many kernels takes less
RESTARTS = 40


# --- the child: everything that touches the GPU ---------------------------------------------------


def work(place: Path, device: str) -> int:
    """Run those snippets that todo.json lists, say how each went, and leave its results in a file.

    An error of a kernel ends the process: nothing that follows in the same context could be
    believed. Whoever started it starts another one for the rest.
    """
    todo = json.loads((place / "todo.json").read_text())
    gpu = _device(device)
    _say("machine", gpu.description)
    numbers = {one.snippet.name: n for n, one in enumerate(prepared())}
    wanted = [prepared()[n] for n in todo]
    for many in modules(wanted).values():
        for start in range(0, len(many), CHUNK):
            for loaded, one in _loaded(gpu, many[start : start + CHUNK], numbers):
                number = numbers[one.snippet.name]
                _say("start", number)
                try:
                    data = gpu.run(loaded, one)
                except Exception as error:
                    _say("failed", number, " ".join(str(error).split()))
                    return 3
                (place / f"{number}.bin").write_bytes(data)
                _say("done", number)
    return 0


def _device(name: str) -> Any:
    """The GPU; or what a test names in its stead."""
    file, _, call = name.rpartition(":")
    return getattr(importlib.import_module(file), call)()


def _loaded(
    gpu: Any, many: list[Prepared], numbers: dict[str, int]
) -> Iterator[tuple[Any, Prepared]]:
    """Kernels with the module they are in: all in one, or, if that is refused, each in its own."""
    try:
        loaded = gpu.load(many)
    except Exception:
        for one in many:
            try:
                alone = gpu.load([one])
            except Exception as error:
                _say("failed", numbers[one.snippet.name], " ".join(str(error).split()))
                continue
            yield alone, one
        return
    for one in many:
        yield loaded, one


def _say(*words: object) -> None:
    print(*words, flush=True)


# --- the parent -----------------------------------------------------------------------------------


def collect(
    todo: Sequence[int], place: Path, command: Sequence[str], patience: float = PATIENCE
) -> tuple[str, dict[int, str]]:
    """Have children do it all; what the machine is, and why some snippets have no results."""
    machine, failed, left = "", {}, list(todo)
    for _ in range(RESTARTS):
        if not left:
            break
        (place / "todo.json").write_text(json.dumps(left))
        current = None
        for words in _heard([*command, str(place)], patience):
            kind, _, rest = words.partition(" ")
            if kind == "machine":
                machine = rest
            elif kind == "start":
                current = int(rest)
            elif kind == "done":
                left.remove(int(rest))
                current = None
            elif kind == "failed":
                number, _, why = rest.partition(" ")
                failed[int(number)] = why
                left.remove(int(number))
                current = None
            elif kind == "end" and current is not None:
                failed[current] = f"the process ended in it ({rest})"
                left.remove(current)
            elif kind == "end" and not machine:
                raise SystemExit(f"there is no GPU to be used here: {rest}")
    failed.update(dict.fromkeys(left, "not tried: too many others failed"))
    return machine, failed


def _heard(command: list[str], patience: float) -> Iterator[str]:
    """Lines of a child, last an `end`; one that is silent for too long is ended."""
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    lines: queue.Queue[str | None] = queue.Queue()
    errors: list[str] = []

    def listen() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.put(line.strip())
        lines.put(None)

    def complain() -> None:
        assert child.stderr is not None
        errors.extend(child.stderr)

    threads = [threading.Thread(target=f, daemon=True) for f in (listen, complain)]
    for thread in threads:
        thread.start()
    why = ""
    try:
        while True:
            try:
                line = lines.get(timeout=patience)
            except queue.Empty:
                why = f"nothing was heard for {patience:g} seconds"
                break
            if line is None:
                break
            yield line
    finally:
        child.kill() if why else None
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=10)
    threads[1].join(timeout=1)
    said = errors[-1].strip() if errors else ""
    yield f"end {why or said or f'status {child.returncode}'}"


def record(out: Path, device: str, before: Recording | None = None) -> Recording:
    """All snippets, or those that have no results before."""
    command = [sys.executable, "-m", "tests.hardware.record", "--device", device, "--worker"]
    start = time.monotonic()
    before = before or Recording("", {}, {})
    kept = [one.snippet.name for one in prepared() if before.of(one) is not None]
    todo = [n for n, one in enumerate(prepared()) if one.snippet.name not in kept]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        machine, failed = collect(todo, place, command)
        results = {name: before.results[name] for name in kept}
        for number in todo:
            one, file = prepared()[number], place / f"{number}.bin"
            if number not in failed and file.is_file():
                results[one.snippet.name] = (one.digest, file.read_bytes())
    reasons = {prepared()[number].snippet.name: why[:200] for number, why in sorted(failed.items())}
    if machine in before.machine:
        machine = before.machine
    elif before.machine:
        machine = f"{before.machine}; {machine}"
    found = Recording(machine, results, reasons)
    recording.save(out, found)
    seconds, size = time.monotonic() - start, out.stat().st_size
    print(
        f"{machine}: {len(todo) - len(failed)} of {len(todo)} snippets in {seconds:.0f} s, "
        f"{len(results)} of {len(prepared())} are known, {size} bytes"
    )
    for name, why in reasons.items():
        print(f"  no results: {name}: {why}")
    return found


# --- comparison -----------------------------------------------------------------------------------


def verdict(one: Prepared, found: Recording) -> Verdict | None:
    """How the emulator does; None where nothing was recorded."""
    from tests.hardware import emulated  # where there is no compiler, recording goes on without

    hardware = found.of(one)
    if hardware is None:
        return None
    try:
        results, findings = emulated.run(one)
    except Exception as error:
        return Verdict("differs", note=f"it is not emulated: {' '.join(str(error).split())[:150]}")
    if findings:
        return Verdict("differs", note=f"the emulator finds {findings[0].kind}")
    return compare(one.snippet, one.operands, hardware, results)


def report(found: Recording) -> list[str]:
    """A line for each snippet; printed are the sums of the groups, and what differs."""
    lines: list[str] = []
    groups: dict[str, list[str]] = {}
    worst: dict[str, float] = {}
    different = []
    for one in prepared():
        told = verdict(one, found)
        what = told.what if told else "missing"
        groups.setdefault(one.snippet.group, []).append(what)
        if told:
            worst[one.snippet.group] = max(worst.get(one.snippet.group, 0.0), told.worst)
        lines.append(f"{one.snippet.name}: {told or 'not recorded'}")
        if told and not told.ok:
            different.append(lines[-1])
    kinds = ("equal", "nan", "within", "differs", "missing")
    print(f"\n{'':12}" + "".join(f"{kind:>9}" for kind in kinds) + "  nearest to a bound")
    for group, whats in groups.items():
        row = "".join(f"{whats.count(kind):9}" for kind in kinds)
        print(f"{group:12}{row}  {worst.get(group, 0):.2f}")
    print(f"\n{len(different)} differ" + (":" if different else ""))
    for line in different[:60]:
        print("  " + line[:400])
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.hardware.record")
    parser.add_argument("out", nargs="?", type=Path, default=recording.FILE)
    parser.add_argument("--compare", action="store_true", help="run nothing on the GPU")
    parser.add_argument(
        "--missing", action="store_true", help="keep the results that OUT has; record the others"
    )
    parser.add_argument("--device", default="tests.hardware.gpu:Gpu", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        return work(given.worker, given.device)
    found = recording.load(given.out) if given.compare or given.missing else None
    if found is None and given.compare:
        raise SystemExit(f"there is no {given.out}")
    if found is None or given.missing:
        found = record(given.out, given.device, found)
    try:
        importlib.import_module("tests.hardware.emulated").library()
    except Exception as error:  # a bare machine: what was recorded can be compared elsewhere
        print(f"not compared: {error}")
        return 0
    lines = report(found)
    given.out.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
