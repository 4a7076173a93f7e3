"""The judge's side of the sandbox: it starts a candidate's process, calls it and ends it.

Whatever the candidate does to its process, the caller gets `Ended` with the offence's name. The
candidate cannot end the run, read expected values or touch the comparison.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flashwright.confine.seal import hidden
from flashwright.confine.session import use
from flashwright.confine.start import (
    CALLS,
    FILES,
    NOT_CONFINED,
    NOT_REFUSED,
    UNCONFINED,
    Policy,
    confined,
)
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.sandbox.candidate import Candidate, Unable
from flashwright.sandbox.layout import GUARD, POISON, RETURNED, Layout, Placed
from flashwright.sandbox.limits import Limits
from flashwright.sandbox.memory import Memory, Short
from flashwright.sandbox.memory import make as make_memory
from flashwright.sandbox.place import (
    TOOLS_FILES,
    environment,
    make_folder,
    need_confinement,
    opened,
    policy,
)
from flashwright.sandbox.problem import TimedProblem
from flashwright.sandbox.tensors import DTYPES, Array
from flashwright.spec import AttentionSpec

_COMMAND = (sys.executable, "-m", "flashwright.sandbox.worker")
_MOST_OF_GPU = 0.95  # torch's own allocations are held to less (device.py)
_TICK = 0.05  # seconds between two checks of the memory
_LEAST_PLACES, _PLACES = 4, 10  # outputs of timed calls that are kept
_PLACES_BYTES = 1 << 30  # what more than the least may take
_FORGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError)
"""The errors of parsing a forged answer."""
_LONGEST = 1 << 20  # bytes of an answer
_ERRORS = ("raises", "wrong_form", "out_of_memory", "device_error", "unable")  # the worker's


class Ended(Exception):
    """Raised if a candidate gave no answer: the offence, a message, the end of its log."""

    def __init__(self, offence: str, message: str, log: str = "") -> None:
        super().__init__(f"{offence}: {message}")
        self.offence, self.message, self.log = offence, message, log


@dataclass(frozen=True)
class Output:
    """One output of a candidate: its bits, and the type it chose."""

    array: Array
    dtype: str


@dataclass(frozen=True)
class Called:
    """The result of one call: the outputs, and what it touched beside them."""

    outputs: Mapping[str, Output]
    changed: tuple[str, ...] = ()
    """Inputs that changed."""
    spilled: tuple[str, ...] = ()
    """Tensors beside which something was written."""
    late: tuple[str, ...] = ()
    """Outputs that were still being written after the caller's stream was done."""
    alias: tuple[str, ...] = ()
    """Inputs whose memory an output shares."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Burst:
    """The result of back-to-back calls."""

    calls: int
    seconds: float
    """Seconds of all calls, by the judge's clock."""


@dataclass(frozen=True)
class Launched:
    """A kernel that a candidate launched, and how often."""

    name: str
    own: bool
    """Whether its code is the candidate's, not a library's."""
    times: int


@dataclass
class Sandbox:
    """A candidate in a separate process. Use it as a context manager.

    The process ends with the thread that started it, as Linux ties it to that thread.
    """

    candidate: Candidate
    spec: AttentionSpec
    device: str = "cuda"
    limits: Limits = field(default_factory=Limits)
    before: tuple[str, ...] = ()
    """A tool that the process runs under, such as compute-sanitizer.

    Such a tool may use sockets and start processes, which candidates may not.
    """
    guard: int = GUARD
    """Bytes around each tensor; 0 for a tool that checks the ends of allocations."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables for the process."""
    room: int = 0
    """Bytes of memory for its tensors, if more than usual."""
    gpu_used: Callable[[], tuple[int, int]] | None = None
    """Free and total memory of the GPU. It shows allocations that bypass torch's limit.

    Memory in use at the start does not count.
    """

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._clear: Callable[[], object] = lambda: None
        self._buffer = b""
        self._policy: Policy | None = None
        self.memory: Memory
        """The judge's memory, which holds the tensors."""
        self._before: list[Launched] | str = []
        """The launches of an earlier process, which was replaced by one with more memory."""
        self.places: list[dict[str, Placed]] = []
        """The outputs of each timed call in the memory, by their names."""
        self.sealed = False
        """Whether seccomp filters its system calls, so that it cannot reach the judge."""
        self.gaps: tuple[str, ...] = ()
        """What this system cannot refuse the process, as notes for the verdict."""

    # --- life ---------------------------------------------------------------------------------

    def __enter__(self) -> Sandbox:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether the process runs and can take requests."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process and load the candidate. Raises Ended or Unable if that fails."""
        self.close()
        need_confinement(self.candidate)
        self.memory = make_memory(self.device, self.room)
        self._others = _in_use(self.gpu_used)
        self._folder, started = make_folder(), list[subprocess.Popen[bytes]]()
        # At the end of the program too: a daemon thread may leave the sandbox open.
        hidden.begin()
        self._clear = weakref.finalize(self, _clear, self._folder, started, self.memory)
        down, up = os.pipe(), os.pipe()
        try:
            command, env = self._command(down[0], up[1])
            with open(self._folder / "log.txt", "wb") as log:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=(down[0], up[1], self.memory.handle),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._folder,
                    env=env,
                    start_new_session=True,
                )
                started.append(self._process)
        finally:
            os.close(down[0])
            os.close(up[1])
        self._write, self._read, self._buffer = down[1], up[0], b""
        try:
            self._load()
        except BaseException:  # Ctrl-C too: __exit__ does not run if __enter__ fails
            self.close()
            raise

    def _command(self, reading: int, writing: int) -> tuple[list[str], dict[str, str]]:
        """The worker's command line and environment.

        It is confined from its first instruction, as a thread that already runs would keep its
        rights.
        """
        command = [*_COMMAND, str(reading), str(writing)]
        env = {**environment(self._folder), **self.environment}
        if sys.platform != "linux":
            return [*self.before, *command], env
        self._policy = policy(self.candidate, self._folder, env, self.limits, self.before)
        self.sealed = CALLS in self._policy.must and not self._policy.watched
        self.gaps = tuple(_gaps(self._policy))
        if not self.before:
            return confined(self._policy, command)
        # The tool starts the worker, another process, which gives up what only the tool needs.
        inner, _ = confined(replace(self._policy, inherits=True), command)
        outer = replace(self._policy, writable=(*self._policy.writable, *TOOLS_FILES))
        return confined(outer, [*self.before, *inner])

    def switch(self, candidate: Candidate, spec: AttentionSpec) -> None:
        """Load another candidate in the same process, which is quicker than a new one.

        A candidate whose files that process cannot open, or that a model wrote, gets a new process.
        """
        alone = self.candidate.untrusted or candidate.untrusted
        self.candidate, self.spec = candidate, spec
        if alone or not self._can_open(candidate):
            self.start()
        else:
            self._load()

    def _can_open(self, candidate: Candidate) -> bool:
        """Whether the running process may open all files that this candidate needs."""
        if self._policy is None:
            return True
        if candidate.kind == "package":
            return candidate.where in self._policy.readable
        needed = policy(candidate, self._folder, {}, self.limits, self.before).readable
        return set(needed) <= set(self._policy.readable)

    def _load(self) -> None:
        self._ask(
            "load",
            self.limits.start_seconds,
            candidate=asdict(self.candidate),
            spec=self.spec.model_dump(mode="json"),
            device=self.device,
            limits=asdict(self.limits),
            path=[str(Path(p or ".").resolve()) for p in sys.path],
            memory=(self.memory.handle, self.memory.size),
            alone=not self.guard,
        )

    def close(self) -> None:
        """End the process and all its children, and release the memory."""
        process, self._process = self._process, None
        self._clear()
        for end in (self._write, self._read) if process else ():
            with contextlib.suppress(OSError):
                os.close(end)

    def log(self) -> str:
        """The end of the candidate's output."""
        try:
            with opened(self._folder / "log.txt") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 4000))
                return file.read().decode(errors="replace")
        except (OSError, AttributeError):
            return ""

    # --- asking -------------------------------------------------------------------------------

    def _ask(self, operation: str, seconds: float | None = None, **request: Any) -> dict[str, Any]:
        if not self.alive:
            raise Ended("crash", "its process is gone", self.log())
        if self._buffer or select.select([self._read], [], [], 0)[0]:
            if not self._buffer and not os.read(self._read, 1 << 16):
                raise self._died()
            raise self._end("tampering", "it answers before it is asked")
        limit = seconds or self.limits.seconds
        with contextlib.suppress(BrokenPipeError):  # reading the answer shows how it ended
            os.write(self._write, json.dumps({"op": operation, **request}).encode() + b"\n")
        line = self._line(time.monotonic() + limit, limit)
        try:
            answer = json.loads(line)
            if not isinstance(answer, dict) or answer.get("error", "raises") not in _ERRORS:
                raise ValueError
        except (ValueError, TypeError, RecursionError):
            raise self._end("tampering", "it writes into the judge's own pipe") from None
        if "error" in answer:
            message = str(answer.get("message", ""))
            if answer["error"] == "unable":
                raise Unable(message)
            error = Ended(str(answer["error"]), message, str(answer.get("traceback", "")))
            if error.offence == "device_error":
                self.close()
            raise error
        return answer

    def _line(self, deadline: float, limit: float) -> bytes:
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], _TICK)
            if ready:
                part = os.read(self._read, 1 << 16)
                if not part:
                    raise self._died()
                self._buffer += part
                if len(self._buffer) > _LONGEST:
                    raise self._end("tampering", "it writes into the judge's own pipe")
            elif time.monotonic() > deadline:
                raise self._end("hang", f"no answer after {limit:g} s")
            else:
                self._watch_memory()
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _watch_memory(self) -> None:
        assert self._process is not None
        if use(self._process.pid).memory > self.limits.memory:
            text = f"it holds more than {self.limits.memory / (1 << 30):.3g} GB of memory"
            raise self._end("out_of_memory", text)
        if self.gpu_used is not None:
            free, whole = self.gpu_used()
            most = self.limits.gpu_memory or int(_MOST_OF_GPU * whole)
            if whole - free - self._others > most:
                text = f"it takes more than {most / (1 << 30):.3g} GB of the GPU's memory"
                raise self._end("out_of_memory", text)

    def _died(self) -> Ended:
        assert self._process is not None
        try:
            code = self._process.wait(1)
        except subprocess.TimeoutExpired:
            return self._end("tampering", "it closes the judge's own pipe")
        how = f"exit code {code}"
        if code == NOT_CONFINED and (log := self.log()).startswith(NOT_REFUSED):
            self.close()
            raise Failed(Diagnostic("FW851", log.strip()[:500], help=f"{UNCONFINED}=1 runs it"))
        if code == -signal.SIGSYS:
            return self._end("tampering", "it makes system calls of another architecture")
        if code < 0:
            known = -code in [int(number) for number in signal.Signals]
            how = f"signal {-code}" + (f" ({signal.Signals(-code).name})" if known else "")
        log = self.log()
        last = next((line for line in reversed(log.splitlines()) if line.strip()), "")
        offence = "out_of_memory" if code == -signal.SIGKILL else "crash"
        return self._end(offence, f"its process ended with {how}" + (f": {last}" if last else ""))

    def _end(self, offence: str, message: str) -> Ended:
        log = self.log()
        self.close()
        return Ended(offence, message, log)

    # --- what can be asked --------------------------------------------------------------------

    def call(
        self,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, tuple[Sequence[int], str]] | None = None,
        dims: Mapping[str, int] | None = None,
        *,
        place: int = 0,
        ahead: bool = False,
        around: int = POISON,
        patience: float = 0.0,
        viewed: Sequence[str] = (),
        far: bool = False,
        times: int = 1,
    ) -> Called:
        """Call the candidate with these inputs, each in its own guarded memory.

        `outputs` are shapes and types of tensors that it is given to write to (packages and
        libraries) or returns. Another `place` means other addresses. `ahead` calls it while the
        inputs are still being copied, on another stream. `around` is the byte in the guard zones.
        The outputs must not change for `patience` seconds after the call. `viewed` passes Q, K and
        V that are not contiguous, `far` batches with offsets past 2^31. The call is made `times`
        times, and the last one counts.
        """
        if not self.alive:
            raise Ended("crash", "its process is gone")
        returns = self.candidate.kind == "python"
        layout = Layout.of(
            inputs,
            outputs or {},
            returns,
            late=ahead,
            guard=self.guard,
            around=around,
            place=place,
            viewed=tuple(viewed),
            far=far,
        )
        self._provide(layout.end)
        start = time.monotonic()
        try:
            self._fill(layout, layout.image(inputs))
            answer = self._ask(
                "call",
                inputs=[placed.request() for placed in layout.inputs.values()],
                outputs=[placed.request() for placed in layout.outputs.values()],
                returned=layout.returned,
                dims=dict(dims or {}),
                staged=layout.staged,
                times=times,
            )
            seconds = time.monotonic() - start
            found = self._look(layout)
            self._wait(patience)
            self._ask("settle")
            later = self._look(layout)
            return _called(layout, inputs, answer, (found, later), seconds)
        except (*_FORGED, Short):
            raise self._end("tampering", "its answer is not the worker's") from None

    def _fill(self, layout: Layout, image: Array) -> None:
        for number, part in enumerate(image.reshape(layout.chunks, layout.size)):
            self.memory.write(number * layout.pitch, part)

    def _look(self, layout: Layout) -> Array:
        starts = [number * layout.pitch for number in range(layout.chunks)]
        return np.concatenate([self.memory.read(start, layout.size) for start in starts])

    def has_room(self, size: int) -> bool:
        """Whether there is memory for `size` bytes of tensors and as much for the candidate."""
        if self.device == "cpu":
            return size <= self.memory.size
        free, _ = self.gpu_used() if self.gpu_used else (0, 0)
        return 2 * size <= free

    def _wait(self, seconds: float) -> None:
        """Wait, so that a write by a thread that outlives the call shows."""
        time.sleep(seconds)

    def _provide(self, size: int) -> None:
        """Provide `size` bytes. More memory means a new process, as this one has mapped the old."""
        if size > self.memory.size:
            self._before = self.ran()
            self.room = max(size, 2 * self.memory.size)
            self.start()

    def ran(self) -> list[Launched] | str:
        """The kernels launched since the candidate was loaded, or why they are unknown."""
        answer = self._ask("launched")
        try:
            if answer["launches"] is None:
                return str(answer["why"])
            listed = [Launched(str(name), bool(own), int(n)) for name, own, n in answer["launches"]]
            return listed if isinstance(self._before, str) else [*self._before, *listed]
        except _FORGED:
            raise self._end("tampering", "its answer is not the worker's") from None

    def prepare(self, problem: TimedProblem) -> None:
        """Prepare a problem and make a first call. Raises Unable if the candidate declines it."""
        self.places = self._places(problem)
        for name, array in problem.extra.items():
            np.save(self._folder / f"{name}.npy", array)
        self._ask(
            "prepare",
            self.limits.start_seconds,
            spec=problem.spec.model_dump(mode="json"),
            extra=list(problem.extra),
            dims=dict(problem.dims),
            batch=problem.batch,
            length=problem.length,
            layout=problem.layout,
            kv_len=problem.kv_len,
            sequences=problem.sequences,
            places=[[one.request() for one in place.values()] for place in self.places],
        )

    def _places(self, problem: TimedProblem) -> list[dict[str, Placed]]:
        """Room for the outputs of a burst's calls, or for as many as fit into the memory."""
        one = Layout.of({}, problem.outputs, returns=False, guard=0)
        self._provide(max(_LEAST_PLACES * one.size, min(_PLACES * one.size, _PLACES_BYTES)))
        count = min(_PLACES, self.memory.size // max(1, one.size))
        return [
            {name: replace(out, at=n * one.size + out.at) for name, out in one.outputs.items()}
            for n in range(count)
        ]

    def turn(self, calls: int, seed: int, cold: bool = True) -> list[float]:
        """Seconds of each of `calls` calls, by events. Call i has the inputs of seed + i."""
        answer = self._ask("turn", calls=calls, seed=seed, cold=cold)
        found = answer.get("seconds")
        if (
            not isinstance(found, list)
            or len(found) != calls
            or not all(_positive(s) for s in found)
        ):
            raise self._end("tampering", "its times are no times")
        return [float(s) for s in found]

    def burst(self, calls: int, seed: int) -> Burst:
        """Time `calls` calls, or as many as there is room for, by this process's clock.

        Each needs the output of the one before. `fetch` reads them all.
        """
        calls = min(calls, len(self.places))
        self._ask("ready", seed=seed)
        start = time.perf_counter()
        self._ask("burst", calls=calls)
        return Burst(calls, time.perf_counter() - start)

    def fetch(self, call: int, batch: int, head: int, name: str = "O") -> Array:
        """One head of an output of a call of the last turn or burst, from the judge's memory: O in
        fp32, whole numbers as they are."""
        place = self.places[call % len(self.places)][name]
        width = DTYPES[place.dtype].itemsize
        at = batch * place.steps[0] + head * place.steps[1]
        _, _, rows, dim = place.shape
        bits = self.memory.read(place.at + at * width, rows * dim * width)
        found: Array = bits.view(DTYPES[place.dtype]).reshape(rows, dim)
        return found if place.dtype == "int32" else found.astype(np.float32)


def _called(
    layout: Layout,
    inputs: Mapping[str, Array],
    answer: Mapping[str, Any],
    found: tuple[Array, Array],
    seconds: float,
) -> Called:
    """The result of a call, from the memory after the call and again after all work was done."""
    if layout.returned and RETURNED[0] not in answer["outputs"]:
        raise ValueError
    first, later = (_outputs(layout, answer, bits) for bits in found)
    right = layout.after(inputs)
    stored = [n for n in first if n not in answer["outputs"] or answer["outputs"][n]["stored"]]
    return Called(
        first,
        tuple(dict.fromkeys(n for memory in found for n in layout.changed(memory, right))),
        tuple(dict.fromkeys(n for memory in found for n in layout.spilled(memory, right))),
        tuple(n for n in stored if first[n].array.tobytes() != later[n].array.tobytes()),
        tuple(str(name) for name in answer["alias"]),
        seconds,
    )


def _outputs(layout: Layout, answer: Mapping[str, Any], memory: Array) -> dict[str, Output]:
    made = {
        name: Output(placed.elements(memory).copy(), placed.dtype)
        for name, placed in layout.outputs.items()
    }
    for name, told in answer["outputs"].items():
        at, room = layout.returned[name]
        dtype, shape = str(told["dtype"]), tuple(int(n) for n in told["shape"])
        if not told["stored"]:  # an unknown type, or too large for its room
            made[name] = Output(np.broadcast_to(np.float32(np.nan), shape), dtype)
            continue
        size = math.prod(shape) * DTYPES[dtype].itemsize
        if not 0 <= size <= room:
            raise ValueError
        bits = memory[at : at + size].copy()
        made[name] = Output(bits.view(DTYPES[dtype]).reshape(shape), dtype)
    return made


def _clear(folder: Path, started: Sequence[subprocess.Popen[bytes]], memory: Memory) -> None:
    for process in started:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    memory.close()
    shutil.rmtree(folder, ignore_errors=True)
    hidden.end()


def _gaps(given: Policy) -> Iterator[str]:
    """Notes on what a policy cannot refuse on this system."""
    if CALLS not in given.must:
        yield "this system has no seccomp: its process could reach the judge's"
    if FILES not in given.must:
        yield "this system has no Landlock: its code could open every file"


def _positive(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and value > 0


def _in_use(memory: Callable[[], tuple[int, int]] | None) -> int:
    free, whole = memory() if memory else (0, 0)
    return whole - free
