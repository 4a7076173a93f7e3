"""The candidate's process: it loads and calls the candidate and copies its outputs to the judge.

    python -m flashwright.sandbox.worker READ WRITE

Requests and answers are lines of JSON on two pipes. Tensors lie in memory that the judge owns and
reads. This process decides nothing about a candidate and never holds an expected value, because the
candidate shares it and can change anything in it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flashwright.confine.seal import die_with_parent
from flashwright.sandbox.candidate import Candidate, InWorker, Unable
from flashwright.sandbox.device import Cpu, Cuda, Device, NoTensor
from flashwright.sandbox.launches import Launches
from flashwright.sandbox.layout import RETURNED
from flashwright.sandbox.limits import Limits, apply
from flashwright.sandbox.memory import mapped
from flashwright.sandbox.tensors import DTYPES, dtype_name

if TYPE_CHECKING:
    from flashwright.sandbox.problem import TimedProblem

_LINES = 6  # of a traceback


class Worker:
    """Answers the judge's requests about one candidate at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """The folder that the candidate may write to."""
        self.device: Device
        self.candidate: Candidate
        self.function: Any
        self.timed: Any = None
        self.memory: Any
        """The judge's memory, as bytes."""
        self.alone = False
        """Whether each tensor gets a separate allocation, for a tool that checks their ends."""
        self.returned: list[tuple[Any, int]] = []
        """The tensors that the last call returned, each with its offset in the memory."""
        self.launches: Launches | None = None
        self.uncounted = "there is no GPU"
        """Why launches are not counted."""

    # --- load ---------------------------------------------------------------------------------

    def load(
        self,
        candidate: Mapping[str, Any],
        spec: Mapping[str, Any],
        device: str,
        limits: Mapping[str, Any],
        path: list[str],
        memory: tuple[int, int],
        alone: bool,
    ) -> dict[str, Any]:
        """Import the candidate. What it prints goes to the log."""
        sys.path[:] = list(dict.fromkeys([*sys.path, *path]))
        if not hasattr(self, "memory"):  # once, however many candidates there are
            self.device = Cuda(Limits(**limits)) if device == "cuda" else Cpu()
            self.memory, self.alone = mapped(device, *memory), alone
        self.candidate = Candidate(**candidate)
        if device == "cuda" and not alone:
            self._count_launches()
        if self.candidate.kind == "package":
            from flashwright.build.classes import load

            self.function = load(self.candidate.where)
        elif self.candidate.kind == "library":
            import tvm_ffi

            self.function = getattr(
                tvm_ffi.load_module(self.candidate.where), self.candidate.function
            )
        else:
            self.function = _python(self.candidate)
            if self.candidate.factory:
                from flashwright.spec import AttentionSpec

                self.function = self.function(AttentionSpec.make(**spec))
        if not callable(self.function):
            raise TypeError(f"{self.candidate.name} is no function, but {self.function!r:.80}")
        gc.freeze()  # the collection before each call skips what exists now
        return {}

    def _count_launches(self) -> None:
        """Start counting launches, before any code of the candidate runs."""
        own = [str(self.folder)]
        if Path(self.candidate.where).is_absolute():
            own.append(str(Path(self.candidate.where).parent))
        try:
            if self.launches is None:
                self.launches = Launches()
            self.launches.begin(own)
        except (OSError, AttributeError) as error:
            self.uncounted = str(error)

    def launched(self) -> dict[str, Any]:
        """The kernels launched since the candidate was loaded."""
        if self.launches is None:
            return {"launches": None, "why": self.uncounted}
        return {"launches": self.launches.told()}

    # --- one call -----------------------------------------------------------------------------

    def call(
        self,
        inputs: list[dict[str, Any]],
        outputs: list[dict[str, Any]],
        returned: dict[str, tuple[int, int]],
        dims: Mapping[str, int],
        staged: list[tuple[int, int, int]],
        times: int,
    ) -> dict[str, Any]:
        """Call the candidate, once or more often, with tensors in the judge's memory."""
        gc.collect()
        self.returned = []
        given = {t["name"]: self.device.tensor(self.memory, t, self.alone) for t in inputs}
        written = {t["name"]: self.device.tensor(self.memory, t, self.alone) for t in outputs}
        self.device.poison()
        late = self.device.late(self.memory, staged) if staged else contextlib.nullcontext()
        with late:
            for _ in range(times):
                result = self._run(given, written, dims)
            answer = self._take(result, returned) if returned else {}
            self.device.arrived()
        spans = {name: self.device.span(tensor) for name, tensor in given.items()}
        return {"outputs": answer, "alias": sorted(self._shared(spans))}

    def settle(self) -> dict[str, Any]:
        """Wait for all work, hidden work too, and copy the outputs again."""
        self.device.finish()
        for tensor, at in self.returned:
            self.device.store(self.memory, at, tensor)
        self.device.finish()
        return {}

    def _run(
        self, inputs: Mapping[str, Any], written: Mapping[str, Any], dims: Mapping[str, int]
    ) -> Any:
        if self.candidate.kind == "package":
            self.function(out=dict(written), **inputs, **dims)
            return None
        with _no_grad(self.device):
            if self.candidate.kind == "library":
                self.function(*inputs.values(), *written.values())
                return None
            return self.function(*inputs.values())

    def _take(self, result: Any, places: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        """Copy a function's results to the judge's memory. Returns their types and shapes."""
        several = result if isinstance(result, tuple | list) else (result,)
        names = [*RETURNED, *(f"output {n + 1}" for n in range(len(RETURNED), len(several)))]
        told = {}
        for name, one in zip(names, several, strict=False):
            if one is None and name != RETURNED[0]:
                continue
            tensor = self.device.plain(name, one)
            if name not in places:
                continue
            at, room = places[name]
            dtype = dtype_name(tensor.dtype)
            fits = dtype in DTYPES and math.prod(tensor.shape) * DTYPES[dtype].itemsize <= room
            told[name] = {"shape": list(tensor.shape), "dtype": dtype, "stored": fits}
            if fits:
                self.returned.append((tensor, at))
                self.device.store(self.memory, at, tensor)
        if not told:
            raise NoTensor("there is no output")
        return told

    def _shared(self, inputs: Mapping[str, tuple[int, int]]) -> set[str]:
        """Inputs whose memory a returned tensor lies in."""
        found = [self.device.span(tensor) for tensor, _ in self.returned]
        return {
            n for n, (a, b) in inputs.items() if any(low < b and a < high for low, high in found)
        }

    # --- timing -------------------------------------------------------------------------------

    def prepare(
        self,
        spec: Mapping[str, Any],
        extra: list[str],
        dims: Mapping[str, int],
        places: list[list[dict[str, Any]]],
        sequences: Sequence[Sequence[int]] = (),
        **sizes: Any,
    ) -> dict[str, Any]:
        """Draw a problem's inputs and call once. `places` are the judge's, for each call's
        outputs."""
        from flashwright.sandbox.problem import TimedProblem
        from flashwright.sandbox.timed import Timed
        from flashwright.spec import AttentionSpec

        self.timed, self.returned = None, []
        gc.collect()
        arrays = {name: np.load(self.folder / f"{name}.npy") for name in extra}
        told = AttentionSpec.make(**spec)
        pairs = tuple((int(rows), int(keys)) for rows, keys in sequences)
        problem = TimedProblem(told, extra=arrays, dims=dims, sequences=pairs, **sizes)
        function = self.function
        if self.candidate.kind == "package":
            function = _by_name(function, problem)
        outputs = [[self.device.tensor(self.memory, one) for one in place] for place in places]
        self.timed = Timed(function, problem, outputs, self.device.plain)
        return {}

    def turn(self, calls: int, seed: int, cold: bool) -> dict[str, Any]:
        """The seconds of timed calls."""
        return {"seconds": self.timed.turn(calls, seed, cold)}

    def ready(self, seed: int) -> dict[str, Any]:
        """Draw the first inputs of a burst."""
        self.timed.ready(seed)
        return {}

    def burst(self, calls: int) -> dict[str, Any]:
        """Make calls that each need the one before. The judge measures the time."""
        self.timed.burst(calls)
        return {}


def _by_name(kernel: Any, problem: TimedProblem) -> Callable[..., Any]:
    """A package's kernel as a function of the problem's tensors in their order."""
    from flashwright.build.load import unshown

    known = problem.sizes
    named = {name: known[name] for name in unshown(kernel.plan) if name in known}
    if problem.spec.batch is None:
        return functools.partial(kernel, **named) if named else kernel
    names = (*problem.shapes, *problem.extra)
    return lambda *given: kernel(**dict(zip(names, given, strict=True)), **named)


def _no_grad(device: Device) -> Any:
    if isinstance(device, Cuda):
        return device.torch.no_grad()
    return contextlib.nullcontext()


def _python(candidate: Candidate) -> Any:
    """The function of a module or a file. A script runs up to its own call of `verify`."""
    if candidate.where.endswith(".py"):
        sys.path.insert(0, str(Path(candidate.where).parent))
        spec = importlib.util.spec_from_file_location("flashwright_candidate", candidate.where)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        with contextlib.suppress(InWorker):
            spec.loader.exec_module(module)
    else:
        module = importlib.import_module(candidate.where)
    return functools.reduce(getattr, candidate.function.split("."), module)


def _error(error: BaseException, device: Device | None) -> dict[str, Any]:
    """An exception as an answer: its kind, message and the last lines of its traceback."""
    name = type(error).__name__
    text = str(error)
    kind = "raises"
    if isinstance(error, Unable):
        kind = "unable"
    elif isinstance(error, NoTensor):
        kind = "wrong_form"
    elif isinstance(error, MemoryError) or "OutOfMemory" in name or "out of memory" in text:
        kind = "out_of_memory"
    elif isinstance(device, Cuda):
        try:
            device.torch.cuda.synchronize()
        except Exception as broken:  # the device is in an error state: nothing more can run here
            kind, text = "device_error", str(broken)
    frames = traceback.format_exception(error)[-_LINES:]
    first = next((line for line in text.splitlines() if line.strip()), "")
    message = first if kind in ("unable", "wrong_form", "device_error") else f"{name}: {first}"
    return {"error": kind, "message": message[:500], "traceback": "".join(frames)[-4000:]}


def main() -> None:
    """Answer requests until the pipe is closed."""
    reading, writing = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent()
    worker = Worker(Path.cwd())
    answers = os.fdopen(writing, "w")
    for line in os.fdopen(reading):
        request = json.loads(line)
        operation = request.pop("op")
        if operation == "load":
            apply(Limits(**request["limits"]))
        try:
            answer = getattr(worker, operation)(**request)
        except KeyboardInterrupt:
            return
        except (Exception, SystemExit, InWorker) as error:
            answer = _error(error, getattr(worker, "device", None))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
