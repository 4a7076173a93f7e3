"""A user's reference in a confined process.

    python -m flashwright.judge.reference_process FILE.py[:function]

A reference may come with a package, from the author of the kernel. Its code therefore never runs in
the judge's process, which holds inputs, comparison and verdict. The process returns numbers only,
never Python objects.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from flashwright.confine.seal import hidden
from flashwright.confine.start import confined
from flashwright.judge.reference import Array, Dims, Floats, Inputs, split, user_reference
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.limits import Limits
from flashwright.sandbox.place import environment, make_folder, policy
from flashwright.spec import AttentionSpec, BadSpec

SECONDS = 600.0  # for one answer
MOST = 1 << 36  # bytes of an answer
_LENGTH = struct.Struct("<Q")
Message = tuple[dict[str, Any], dict[str, Array]]


class ReferenceProcess:
    """A reference.UserReference in another process. It raises BadSpec if that process fails."""

    def __init__(self, path: str | Path) -> None:
        self.path, _ = split(str(path))
        where = Path(self.path).resolve()
        self._absolute = str(where)
        if not where.is_file():  # fail before starting a process for it
            user_reference(path)
        folder = make_folder()
        beside = Candidate("python", str(where.parent), title=self.path, untrusted=True)
        allowed = policy(beside, folder, environment(folder), Limits())
        module = ["-m", "flashwright.judge.reference_process", _absolute(path)]
        command, env = confined(allowed, [sys.executable, "-P", *module])
        hidden.begin()
        started = list[subprocess.Popen[bytes]]()
        weakref.finalize(self, _end, started, folder)
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder
        )
        started.append(self._process)
        described = self._request({"do": "describe"})[0]
        self.by_name = bool(described.get("by_name"))
        self.reads = tuple(str(name) for name in described.get("reads") or ())

    def __call__(self, inputs: Inputs, dims: Dims) -> dict[str, Floats]:
        """The outputs by name, in fp64. Raises BadSpec if the user's code fails."""
        found = self._request({"do": "outputs", "dims": _int_dims(dims)}, inputs)[1]
        return {name: array.astype(np.float64) for name, array in found.items()}

    def gradients(self, inputs: Inputs, dims: Dims) -> dict[str, Floats]:
        """The gradients of the inputs and their noise: see reference.UserReference.gradients."""
        found = self._request({"do": "gradients", "dims": _int_dims(dims)}, inputs)[1]
        return {name: array.astype(np.float64) for name, array in found.items()}

    def make_inputs(self, rng: np.random.Generator, dims: Dims) -> dict[str, Array] | None:
        """The user's inputs by name, or None if the file has no make_inputs."""
        state = rng.bit_generator.state
        told, found = self._request({"do": "inputs", "dims": _int_dims(dims), "state": state})
        return None if told.get("none") else found

    def _request(self, what: Mapping[str, Any], arrays: Inputs | None = None) -> Message:
        given, answer = self._process.stdin, self._process.stdout
        assert given is not None
        assert answer is not None
        late = threading.Timer(SECONDS, self._process.kill)
        late.start()
        try:
            _send(given, what, arrays or {})
            told, found = _receive(answer)
        except (OSError, EOFError, ValueError, TypeError, RecursionError):
            text = f"{self.path}: the reference's process ended or did not answer with arrays"
            raise BadSpec(text) from None
        finally:
            late.cancel()
        if lines := told.get("wrong"):
            shown = (str(line)[:2000].replace(self._absolute, self.path) for line in list(lines))
            raise BadSpec(*itertools.islice(shown, 20))
        return told, found


def _int_dims(dims: Dims) -> dict[str, int]:
    return {name: int(size) for name, size in dims.items()}


def _absolute(path: str | Path) -> str:
    file, function = split(str(path))
    where = str(Path(file).resolve())
    return f"{where}:{function}" if function else where


def _end(started: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    for process in started:
        process.kill()
        process.wait()
    hidden.end()
    shutil.rmtree(folder, ignore_errors=True)


# --- what goes through the pipe ---------------------------------------------------------------


def _send(to: IO[bytes], what: Mapping[str, Any], arrays: Inputs) -> None:
    parts = [json.dumps({**what, "arrays": {n: str(a.dtype) for n, a in arrays.items()}}).encode()]
    for array in arrays.values():
        held = io.BytesIO()
        known = array.dtype.kind in "iubf" and array.dtype.name != "bfloat16"
        plain = array if known else array.astype(np.float64)  # 8 and 16 bits are exact there
        np.save(held, np.ascontiguousarray(plain), allow_pickle=False)
        parts.append(held.getvalue())
    for part in parts:
        to.write(_LENGTH.pack(len(part)))
        to.write(part)
    to.flush()


def _receive(source: IO[bytes]) -> Message:
    """One message. Raises ValueError, TypeError or EOFError if it is malformed."""
    told = json.loads(_part(source))
    if not isinstance(told, dict) or not isinstance(told.get("arrays"), dict):
        raise ValueError("no message")
    arrays = {
        str(name): np.load(io.BytesIO(_part(source)), allow_pickle=False) for name in told["arrays"]
    }
    return told, arrays


def _part(source: IO[bytes]) -> bytes:
    (size,) = _LENGTH.unpack(_exactly(source, _LENGTH.size))
    if size > MOST:
        raise ValueError("the message is longer than a reference may send")
    return _exactly(source, size)


def _exactly(source: IO[bytes], size: int) -> bytes:
    found = source.read(size)
    if found is None or len(found) != size:
        raise EOFError
    return found


# --- before anybody is asked ------------------------------------------------------------------


def try_out(where: str, spec: AttentionSpec) -> None:
    """Call a function that takes inputs by name, on a small problem. Raises Failed if it fails or
    gives an O of the wrong shape."""
    from flashwright.judge.inputs import make_inputs
    from flashwright.judge.problems import sizes

    dims = sizes(spec, 6, 9, 2, 2)
    try:
        reference = ReferenceProcess(where)
        if not reference.by_name:  # what it is given depends on the program
            return
        own = reference.make_inputs(np.random.default_rng(0), dims) or {}
        found = reference({**make_inputs(spec, dims, 0), **own}, dims).get("O")
    except BadSpec as error:
        raise Failed(*(Diagnostic("FW903", line) for line in error.lines)) from None
    wanted = (dims["batch"], dims["heads"], dims["q_len"], spec.value_dim)
    if found is None or found.shape != wanted:
        what = "no O" if found is None else f"an O of shape {found.shape}"
        text = f"{where}: the reference gives {what}, where {wanted} is asked for"
        raise Failed(Diagnostic("FW903", text, help="(batch, heads, queries, width of V)"))
    if np.isnan(found).any():
        text = f"{where}: {int(np.isnan(found).sum())} elements of the reference's O are NaN"
        raise Failed(Diagnostic("FW903", text))


# --- in the process ---------------------------------------------------------------------------


def main() -> None:
    """Answer requests until stdin ends. What the user's file prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    asked = os.fdopen(os.dup(0), "rb")
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    reference = None
    while True:
        try:
            what, arrays = _receive(asked)
        except EOFError:
            return
        try:
            reference = reference or user_reference(sys.argv[1])
            if what["do"] == "describe":
                _send(answers, {"by_name": reference.by_name, "reads": reference.reads}, {})
            elif what["do"] == "outputs":
                _send(answers, {}, reference(arrays, what["dims"]))
            elif what["do"] == "gradients":
                _send(answers, {}, reference.gradients(arrays, what["dims"]))
            else:
                rng = np.random.default_rng()
                rng.bit_generator.state = what["state"]
                made = reference.make_inputs(rng, what["dims"])
                _send(answers, {"none": made is None}, made or {})
        except BadSpec as error:
            _send(answers, {"wrong": list(error.lines)}, {})


if __name__ == "__main__":
    main()
