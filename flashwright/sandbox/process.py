"""The judge's side of the sandbox: a candidate's process, what it may take, and how it ended.

Whatever the candidate does to its process, the caller learns of it as `Ended`, with the offence's
name: there is no way for it to end the run, to see what is expected, or to touch the comparison.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashwright.sandbox.candidate import Candidate, Unable
from flashwright.sandbox.device import GUARD, POISON
from flashwright.sandbox.limits import Limits, resident
from flashwright.sandbox.problem import TimedProblem
from flashwright.sandbox.tensors import DTYPES, Array
from flashwright.sandbox.worker import IN, OUT
from flashwright.spec import AttentionSpec

IN_WORKER = "FLASHWRIGHT_WORKER"
"""Set in a candidate's process."""
_COMMAND = (sys.executable, "-m", "flashwright.sandbox.worker")
_KEPT = ("PATH", "LANG", "TMPDIR", "USER", "LOGNAME", "LD_LIBRARY_PATH", "CC", "CXX")
_KEPT_BEGINNINGS = ("CUDA", "NVIDIA", "TORCH", "TRITON", "LC_", "FLASHWRIGHT", "PYTORCH")
_SHARED_MEMORY = Path("/dev/shm")
_ROOM = 8 << 30
_MOST_OF_GPU = 0.95  # torch's own allocations are held to less (device.py)
_TICK = 0.05  # seconds between two looks at the memory
_SHIFT = 256  # bytes by which a tensor moves from call to call


class Ended(Exception):
    """A candidate that gave no answer: the offence, and what is known of it."""

    def __init__(self, offence: str, message: str, log: str = "") -> None:
        super().__init__(f"{offence}: {message}")
        self.offence, self.message, self.log = offence, message, log


@dataclass(frozen=True)
class Output:
    """What a candidate gave: bits, in the type it chose."""

    array: Array
    dtype: str


@dataclass(frozen=True)
class Called:
    """One call: what came out of it, and what it touched that was not its own."""

    outputs: Mapping[str, Output]
    changed: tuple[str, ...] = ()
    """Inputs that are not as they were."""
    spilled: tuple[str, ...] = ()
    """Tensors beside which something was written."""
    late: tuple[str, ...] = ()
    """Outputs that were still being written when the caller's stream had come to its end."""
    alias: tuple[str, ...] = ()
    """Inputs whose memory an output shares."""
    seconds: float = 0.0


@dataclass
class Sandbox:
    """A candidate in a process of its own. Use it as a context manager."""

    candidate: Candidate
    spec: AttentionSpec
    device: str = "cuda"
    limits: Limits = field(default_factory=Limits)
    before: tuple[str, ...] = ()
    """A command that the process is started under, such as a checker of memory accesses."""
    guard: int = GUARD
    """Bytes around each tensor; none for a tool that watches the ends of allocations itself."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More of it for the process."""
    gpu_used: Callable[[], tuple[int, int]] | None = None
    """Free and whole memory of the GPU, where nobody else uses it: what torch does not limit."""

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self.sealed = False
        """Whether the process is kept from the judge's and from the network."""

    # --- life ---------------------------------------------------------------------------------

    def __enter__(self) -> Sandbox:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether it can be asked something."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process and load the candidate; Ended or Unable where that fails."""
        self.close()
        self._folder = _folder()
        down, up = os.pipe(), os.pipe()
        try:
            with open(self._folder / "log.txt", "wb") as log:
                self._process = subprocess.Popen(
                    [*self.before, *_COMMAND, str(down[0]), str(up[1])],
                    pass_fds=(down[0], up[1]),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._folder,
                    env={**_environment(self._folder), **self.environment},
                    start_new_session=True,
                )
        finally:
            os.close(down[0])
            os.close(up[1])
        self._write, self._read, self._buffer = down[1], up[0], b""
        path = [str(Path(p or ".").resolve()) for p in sys.path]
        answer = self._ask(
            "load",
            self.limits.start_seconds,
            candidate=asdict(self.candidate),
            spec=self.spec.model_dump(mode="json"),
            device=self.device,
            limits=asdict(self.limits),
            path=path,
            guard=self.guard,
            judge=None if self.before else os.getpid(),  # such a tool needs what is sealed off
        )
        self.sealed = bool(answer.get("sealed"))

    def close(self) -> None:
        """End the process and all that it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for end in (self._write, self._read):
            with contextlib.suppress(OSError):
                os.close(end)
        shutil.rmtree(self._folder, ignore_errors=True)

    def log(self) -> str:
        """The last of what the candidate printed."""
        try:
            with open(self._folder / "log.txt", "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 4000))
                return file.read().decode(errors="replace")
        except (OSError, AttributeError):
            return ""

    # --- asking -------------------------------------------------------------------------------

    def _ask(self, operation: str, seconds: float | None = None, **request: Any) -> dict[str, Any]:
        if not self.alive:
            raise Ended("crash", "its process is gone", self.log())
        limit = seconds or self.limits.seconds
        with contextlib.suppress(BrokenPipeError):  # what became of it shows below
            os.write(self._write, json.dumps({"op": operation, **request}).encode() + b"\n")
        line = self._line(time.monotonic() + limit, limit)
        try:
            answer = json.loads(line)
            if not isinstance(answer, dict):
                raise ValueError
        except ValueError:
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
            elif time.monotonic() > deadline:
                raise self._end("hang", f"no answer after {limit:g} s")
            else:
                self._watch_memory()
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _watch_memory(self) -> None:
        assert self._process is not None
        if resident(self._process.pid) > self.limits.memory:
            text = f"it holds more than {self.limits.memory / (1 << 30):.3g} GB of memory"
            raise self._end("out_of_memory", text)
        if self.gpu_used is not None:
            free, whole = self.gpu_used()
            most = self.limits.gpu_memory or int(_MOST_OF_GPU * whole)
            if whole - free > most:
                text = f"it takes more than {most / (1 << 30):.3g} GB of the GPU's memory"
                raise self._end("out_of_memory", text)

    def _died(self) -> Ended:
        assert self._process is not None
        code = self._process.wait()
        how = f"exit code {code}"
        if code < 0:
            how = f"signal {-code} ({signal.Signals(-code).name})"
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
    ) -> Called:
        """Call the candidate with these inputs, each in its own guarded memory.

        `outputs` are shapes and types of tensors that it is given to write to (packages and
        libraries). Another `place` means other addresses. `ahead` calls it while the inputs are
        still on their way, on a stream of its own.
        """
        listed, at = [], 0
        with open(self._folder / IN, "wb") as file:
            for name, array in inputs.items():
                names = {dtype: n for n, dtype in DTYPES.items()}
                told = {"name": name, "dtype": names[array.dtype], "shape": array.shape, "at": at}
                listed.append(told)
                flat = np.ascontiguousarray(array).reshape(-1)
                at += flat.nbytes
                if flat.size:
                    flat.view(np.uint8).tofile(file)
        wanted = [
            {"name": n, "shape": list(shape), "dtype": dtype}
            for n, (shape, dtype) in (outputs or {}).items()
        ]
        start = time.monotonic()
        answer = self._ask(
            "call",
            inputs=listed,
            outputs=wanted,
            dims=dict(dims or {}),
            shift=_SHIFT * place,
            ahead=ahead,
        )
        try:
            return self._called(answer, inputs, outputs or {}, time.monotonic() - start)
        except (KeyError, TypeError, ValueError, OSError):
            raise self._end("tampering", "its answer is not the worker's") from None

    def _called(
        self,
        answer: Mapping[str, Any],
        inputs: Mapping[str, Array],
        given: Mapping[str, tuple[Sequence[int], str]],
        seconds: float,
    ) -> Called:
        raw = np.fromfile(self._folder / OUT, np.uint8)
        outputs = {}
        for name, told in answer["outputs"].items():
            dtype = str(told["dtype"]) or given[name][1]
            part = raw[told["at"] : told["at"] + told["size"]]
            kind = DTYPES.get(dtype)
            shape = tuple(int(n) for n in told["shape"])
            array = part if kind is None else part.copy().view(kind).reshape(shape)
            outputs[str(name)] = Output(array, dtype)
        changed, spilled = [], []
        for name, told in answer["buffers"].items():
            whole = raw[told["at"] : told["at"] + told["size"]]
            size = _bytes(inputs, given, name)
            start = int(told["start"])
            before, payload, behind = (
                whole[:start],
                whole[start : start + size],
                whole[start + size :],
            )
            missing = len(before) < self.guard or len(behind) < self.guard
            if missing or (before != POISON).any() or (behind != POISON).any():
                spilled.append(name)
            if name in inputs:
                exact = np.ascontiguousarray(inputs[name]).reshape(-1)
                if exact.size and not np.array_equal(exact.view(np.uint8), payload):
                    changed.append(name)
        return Called(
            outputs,
            tuple(changed),
            tuple(spilled),
            tuple(map(str, answer["late"])),
            tuple(map(str, answer["alias"])),
            seconds,
        )

    def kernels(self) -> list[tuple[str, float]]:
        """The device kernels of the last call again, each with its seconds."""
        return [(str(n), float(s)) for n, s in self._ask("kernels")["kernels"]]

    def prepare(self, problem: TimedProblem) -> None:
        """Get ready for a problem; a first call is made. Unable where the candidate says so."""
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
        )

    def turn(self, calls: int, seed: int, cold: bool = True) -> list[float]:
        """Seconds of that many calls, by events; call i has the inputs of seed + i."""
        answer = self._ask("turn", calls=calls, seed=seed, cold=cold)
        found = answer.get("seconds")
        if (
            not isinstance(found, list)
            or len(found) != calls
            or not all(_positive(s) for s in found)
        ):
            raise self._end("tampering", "its times are no times")
        return [float(s) for s in found]

    def burst(self, calls: int) -> float:
        """Seconds, by this process's own clock, until that many calls are done."""
        start = time.perf_counter()
        self._ask("burst", calls=calls)
        return time.perf_counter() - start

    def fetch(self, call: int, batch: int, head: int) -> Array:
        """O of one head of a call of the last turn, in fp32."""
        self._ask("fetch", call=call, batch=batch, head=head)
        spec = self.spec
        try:
            found: Array = np.fromfile(self._folder / OUT, np.float32)
            return found.reshape(-1, spec.value_dim)
        except (ValueError, OSError):
            raise self._end("tampering", "its output has another shape than it said") from None


def _bytes(
    inputs: Mapping[str, Array], given: Mapping[str, tuple[Sequence[int], str]], name: str
) -> int:
    if name in inputs:
        return inputs[name].nbytes
    shape, dtype = given[name]
    return int(np.prod(shape)) * DTYPES[dtype].itemsize


def _positive(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and value > 0


def _folder() -> Path:
    """A folder in memory where there is room for it: tensors go through it."""
    shared = _SHARED_MEMORY
    usable = shared.is_dir() and os.access(shared, os.W_OK)
    room = usable and shutil.disk_usage(shared).free > _ROOM
    return Path(tempfile.mkdtemp(prefix="flashwright-", dir=shared if room else None))


def _environment(folder: Path) -> dict[str, str]:
    """What a candidate may know of the user's environment: no keys, no home."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or name.startswith(_KEPT_BEGINNINGS)
    }
    package = str(Path(__file__).parents[2])
    paths = [package, *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
    absolute = os.pathsep.join(str(Path(p).resolve()) for p in paths)
    return {
        **kept,
        "PYTHONPATH": absolute,
        "HOME": str(folder),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        IN_WORKER: "1",
    }
