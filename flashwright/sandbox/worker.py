"""The candidate's process: loads it, calls it as asked, and gives back all that it touched.

    python -m flashwright.sandbox.worker READ WRITE

Requests and answers are lines of JSON on two pipes; tensors go through files in the working
directory. Nothing here decides whether a candidate is right, and nothing that is expected ever
comes here: the candidate shares this process and can do to it what it likes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flashwright.confine.seal import die_with_parent
from flashwright.sandbox.candidate import Candidate, InWorker, Unable
from flashwright.sandbox.device import Buffer, Cpu, Cuda, Device
from flashwright.sandbox.limits import Limits, apply
from flashwright.sandbox.tensors import Array, dtype_name

IN, OUT = "inputs.bin", "outputs.bin"
_LINES = 6  # of a traceback


class NoTensor(TypeError):
    """What a candidate returned is nothing that can be compared."""


class Worker:
    """One candidate."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """Where tensors are exchanged."""
        self.device: Device
        self.candidate: Candidate
        self.function: Any
        self.timed: Any = None
        self.sizes: list[Any] = []
        self.kept: dict[tuple[str, int], Buffer] = {}
        """Of the last problem: other inputs of its sizes come to the same addresses."""
        self.called: Callable[[], Any] | None = None
        """The last call, to be made again under the profiler."""

    # --- load ---------------------------------------------------------------------------------

    def load(
        self,
        candidate: Mapping[str, Any],
        spec: Mapping[str, Any],
        device: str,
        limits: Mapping[str, Any],
        path: list[str],
        guard: int,
    ) -> dict[str, Any]:
        """Import the candidate; its own output goes to the log."""
        sys.path[:] = list(dict.fromkeys([*sys.path, *path]))
        self.device = Cuda(Limits(**limits), guard) if device == "cuda" else Cpu(guard)
        self.candidate = Candidate(**candidate)
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
        gc.freeze()  # what is there now is not looked through before each call
        return {}

    # --- one call -----------------------------------------------------------------------------

    def call(
        self,
        inputs: list[dict[str, Any]],
        outputs: list[dict[str, Any]],
        dims: Mapping[str, int],
        shift: int,
        ahead: bool,
        around: int,
        patience: float,
    ) -> dict[str, Any]:
        """Call the candidate once; every byte of every buffer comes back."""
        gc.collect()
        sizes = [(t["name"], t["shape"], t["dtype"]) for t in inputs]
        if sizes != self.sizes:
            self.sizes, self.kept = sizes, {}
        given = np.fromfile(self.folder / IN, np.uint8)
        buffers, work = {}, []
        for t in inputs:
            buffer = self._buffer(t, shift, around)
            buffers[t["name"]] = buffer
            work.append((buffer, given[t["at"] : t["at"] + buffer.size]))
        written = {t["name"]: self._buffer(t, shift, around) for t in outputs}
        self.device.poison()
        self.called = functools.partial(self._run, buffers, written, dims)
        if ahead:
            with self.device.ahead(work):
                result = self.called()
                self.device.arrived()
                found = self._found(result, written)
        else:
            for buffer, bits in work:
                self.device.fill(buffer, bits)
            self.device.arrived()
            result = self.called()
            self.device.arrived()
            found = self._found(result, written)
        self.device.finish(patience)
        later = self._found(result, written)
        late = [n for n in found if not np.array_equal(found[n]["bits"], later[n]["bits"])]
        return self._answer(buffers, written, found, late, result)

    def _buffer(self, told: Mapping[str, Any], shift: int, around: int) -> Buffer:
        key = (str(told["name"]), shift)
        if key in self.kept:
            self.device.empty(self.kept[key], around)
        else:
            self.kept[key] = self.device.buffer(told["shape"], told["dtype"], shift, around)
        return self.kept[key]

    def _run(
        self, inputs: Mapping[str, Buffer], written: Mapping[str, Buffer], dims: Mapping[str, int]
    ) -> Any:
        views = {name: b.view for name, b in inputs.items()}
        out = {name: b.view for name, b in written.items()}
        if self.candidate.kind == "package":
            self.function(out=out, **views, **dims)
            return None
        with _no_grad(self.device):
            if self.candidate.kind == "library":
                self.function(*views.values(), *out.values())
                return None
            return self.function(*views.values())

    def _found(self, result: Any, written: Mapping[str, Buffer]) -> dict[str, dict[str, Any]]:
        """The outputs as they are now, in host memory."""
        if result is None and written:
            return {
                name: {"bits": self.device.host(b.view), "shape": list(b.view.shape), "dtype": ""}
                for name, b in written.items()
            }
        several = result if isinstance(result, tuple | list) else (result,)
        found = {}
        for name, tensor in zip(("O", "LSE"), several, strict=False):
            if tensor is None and name != "O":
                continue
            if not self.device.owns(tensor):
                raise NoTensor(f"{name} is no tensor on the device, but {type(tensor).__name__}")
            found[name] = {
                "bits": self.device.host(tensor),
                "shape": list(tensor.shape),
                "dtype": dtype_name(tensor.dtype),
            }
        if not found:
            raise NoTensor("there is no output")
        return found

    def _answer(
        self,
        inputs: Mapping[str, Buffer],
        written: Mapping[str, Buffer],
        found: Mapping[str, dict[str, Any]],
        late: list[str],
        result: Any,
    ) -> dict[str, Any]:
        answer: dict[str, Any] = {"late": late, "outputs": {}, "buffers": {}, "alias": []}
        with open(self.folder / OUT, "wb") as file:
            for name, told in found.items():
                answer["outputs"][name] = {
                    "at": file.tell(),
                    "size": told["bits"].size,
                    "shape": told["shape"],
                    "dtype": told["dtype"],
                }
                told["bits"].tofile(file)
            for name, buffer in {**inputs, **written}.items():
                whole = self.device.read(buffer)
                place = {"at": file.tell(), "size": whole.size, "start": buffer.start}
                answer["buffers"][name] = place
                whole.tofile(file)
        if result is not None:
            several = result if isinstance(result, tuple | list) else (result,)
            spans = [self.device.span(t) for t in several if t is not None]
            own = {name: self.device.span(b.base) for name, b in inputs.items()}
            for low, high in spans:
                answer["alias"] += [n for n, (a, b) in own.items() if low < b and a < high]
        return answer

    def kernels(self) -> dict[str, Any]:
        """What the last call runs on the device."""
        from flashwright.sandbox.timed import kernels

        return {"kernels": kernels(self.called) if self.called else []}

    # --- timing -------------------------------------------------------------------------------

    def prepare(
        self,
        spec: Mapping[str, Any],
        extra: list[str],
        dims: Mapping[str, int],
        **sizes: Any,
    ) -> dict[str, Any]:
        """Make a problem's inputs and call once."""
        from flashwright.sandbox.problem import TimedProblem
        from flashwright.sandbox.timed import Timed
        from flashwright.spec import AttentionSpec

        self.timed = self.called = None
        gc.collect()
        arrays = {name: np.load(self.folder / f"{name}.npy") for name in extra}
        problem = TimedProblem(AttentionSpec.make(**spec), extra=arrays, dims=dims, **sizes)
        function = self.function
        if self.candidate.kind == "package":
            from flashwright.build.load import unshown

            known = problem.sizes
            named = {name: known[name] for name in unshown(function.plan) if name in known}
            function = functools.partial(function, **named) if named else function
        self.timed = Timed(function, problem)
        return {}

    def turn(self, calls: int, seed: int, cold: bool) -> dict[str, Any]:
        """Timed calls."""
        return {"seconds": self.timed.turn(calls, seed, cold)}

    def burst(self, calls: int) -> dict[str, Any]:
        """Calls one behind the other; who asks has the clock."""
        self.timed.burst(calls)
        return {}

    def fetch(self, call: int, batch: int, head: int) -> dict[str, Any]:
        """One head of an output of the last turn."""
        found: Array = self.timed.fetch(call, batch, head)
        found.tofile(self.folder / OUT)
        return {"shape": list(found.shape)}


def _no_grad(device: Device) -> Any:
    if isinstance(device, Cuda):
        return device.torch.no_grad()
    return contextlib.nullcontext()


def _python(candidate: Candidate) -> Any:
    """The function of a module or of a file; a script runs until it asks for a verdict itself."""
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
    """What went wrong, told by kind; the last lines of the traceback are the candidate's own."""
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
        except Exception as broken:  # the device itself is in error: nothing more can be run here
            kind, text = "device_error", str(broken)
    frames = traceback.format_exception(error)[-_LINES:]
    first = next((line for line in text.splitlines() if line.strip()), "")
    message = first if kind in ("unable", "wrong_form", "device_error") else f"{name}: {first}"
    return {"error": kind, "message": message[:500], "traceback": "".join(frames)[-4000:]}


def main() -> None:
    """Answer requests until there are none."""
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
