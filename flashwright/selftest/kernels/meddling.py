"""Candidates that go for their judge instead of the problem. All of them mean causal attention.

Each gives zeros unless it finds something better: what it does must not make it pass.
"""

from __future__ import annotations

import gc
import json
import os
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from flashwright.selftest.kernels.honest import Array, causal

# --- the pipe ---------------------------------------------------------------------------------


def _pipes() -> list[int]:
    """The descriptors that somebody else may be reading from."""
    found = []
    for number in range(3, 64):
        try:
            if stat.S_ISFIFO(os.fstat(number).st_mode):
                found.append(number)
        except OSError:
            continue
    return found


def _send(text: bytes) -> None:
    for number in _pipes():
        try:
            os.write(number, text)
        except OSError:
            continue


def _forged(q: Array) -> dict[str, Any]:
    """An answer as the worker gives it, for one output."""
    told = {"shape": list(q.shape), "dtype": "fp16", "stored": True}
    return {"alias": [], "outputs": {"O": told}}


def writes_garbage(q: Array, k: Array, v: Array) -> Array:
    """As a library does that prints to whatever descriptor it finds."""
    _send(b"Warning: slow path\n")
    return causal(q, k, v)


def forges_an_answer(q: Array, k: Array, v: Array) -> Array:
    """Says that all is well before the worker can."""
    _send(json.dumps(_forged(q)).encode() + b"\n")
    return np.zeros_like(q)


def forges_no_output(q: Array, k: Array, v: Array) -> Array:
    """Nothing that could be wrong, in the worker's name."""
    worker = sys.modules["__main__"].Worker
    worker._take = lambda self, *args: {}
    return np.zeros_like(q)


def answers_twice(q: Array, k: Array, v: Array) -> Array:
    """Is right; but what it sends is taken for the answer, and the worker's for the next one."""
    out = causal(q, k, v)
    _send(json.dumps(_forged(q)).encode() + b"\n")
    return out


def forges_an_error(q: Array, k: Array, v: Array) -> Array:
    """An offence that there is not."""
    _send(b'{"error": "nothing_of_the_kind", "message": "x"}\n')
    return np.zeros_like(q)


def forges_nonsense(q: Array, k: Array, v: Array) -> Array:
    """An answer whose fields have other types."""
    _send(b'{"outputs": [1e999], "alias": {}}\n')
    return np.zeros_like(q)


def forges_infinity(q: Array, k: Array, v: Array) -> Array:
    """Numbers that are no sizes."""
    answer = _forged(q)
    answer["outputs"]["O"]["shape"] = [float("inf")]
    _send(json.dumps(answer).encode() + b"\n")
    return np.zeros_like(q)


def nests_deeply(q: Array, k: Array, v: Array) -> Array:
    """JSON so deep that a reader runs out of stack."""
    _send(b"[" * 50_000 + b"\n")
    return np.zeros_like(q)


def floods(q: Array, k: Array, v: Array) -> Array:
    """A line without an end."""
    (number, *_) = [n for n in _pipes() if os.get_blocking(n) and _writable(n)]
    while True:
        os.write(number, b"x" * 60_000)


def _writable(number: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(number, fcntl.F_GETFL) & os.O_WRONLY)


def closes_the_pipe(q: Array, k: Array, v: Array) -> Array:
    """And lives on."""
    os.closerange(3, 256)
    while True:
        time.sleep(1)


# --- files ------------------------------------------------------------------------------------


def _elsewhere(path: str) -> None:
    os.unlink(path)
    os.mkfifo(path)


def cuts_the_memory_short(q: Array, k: Array, v: Array) -> Array:
    """Whoever has mapped it is ended by reading it."""
    for number in range(3, 64):
        try:
            if os.fstat(number).st_size > 1 << 30:
                os.ftruncate(number, 0)
        except OSError:
            continue
    _send(json.dumps(_forged(q)).encode() + b"\n")
    while True:
        time.sleep(1)


def log_is_a_pipe(q: Array, k: Array, v: Array) -> Array:
    """The same with what it printed."""
    _elsewhere("log.txt")
    os._exit(1)


def log_is_a_link(q: Array, k: Array, v: Array) -> Array:
    """What it printed is a link to a file that only the judge could read."""
    os.unlink("log.txt")
    os.symlink("/etc/hosts", "log.txt")
    os._exit(1)


def no_scratch_folder(q: Array, k: Array, v: Array) -> Array:
    """Takes the folder away under the judge's feet."""
    for path in Path.cwd().iterdir():
        path.unlink()
    Path.cwd().rmdir()
    return np.zeros_like(q)


_OVERWRITING = threading.Event()


def overwrites_the_output(q: Array, k: Array, v: Array) -> Array:
    """From the first call on, a thread writes into the judge's memory, behind the inputs."""
    whole: Any = q
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    behind = v.ctypes.data - whole.ctypes.data + v.nbytes + (1 << 16)

    def work() -> None:
        while True:
            whole[behind : behind + 100_000] = 0

    if not _OVERWRITING.is_set():
        _OVERWRITING.set()
        threading.Thread(target=work, daemon=True).start()
    return causal(q, k, v)


def overwrites_itself(q: Array, k: Array, v: Array) -> Array:
    """Another file than the one that was read, for whoever looks next. Used as a copy."""
    path = Path(sys.modules[overwrites_itself.__module__].__file__ or "")
    if path.parent.name != "kernels":
        path.write_text(path.read_text() + "\n# nothing to see here\n")
    return causal(q, k, v)


# --- the judge's own code ---------------------------------------------------------------------


def patches_the_judge(q: Array, k: Array, v: Array) -> Array:
    """In its own process, which is no use."""
    from flashwright.judge import expected, oracle

    fine = oracle.Comparison(ok=True, reason="")
    for module in (oracle, expected):
        module.compare = lambda *args, **options: fine  # type: ignore[attr-defined]
    np.array_equal = lambda *args, **options: True  # type: ignore[assignment]
    np.allclose = lambda *args, **options: True  # type: ignore[assignment]
    return np.zeros_like(q)


def hides_its_thread(q: Array, k: Array, v: Array) -> Array:
    """The worker's own comparison says that nothing came late."""
    np.array_equal = lambda *args, **options: True  # type: ignore[assignment]
    out, inputs = np.zeros_like(q), [x.copy() for x in (q, k, v)]

    def work() -> None:
        time.sleep(0.005)
        out[:] = causal(*inputs)

    threading.Thread(target=work, daemon=True).start()
    return out


def takes_over_the_worker(q: Array, k: Array, v: Array) -> Array:
    """Answers in its name, and leaves out what it did to its input."""
    out, told = causal(q, k, v), _forged(q)["outputs"]
    q[:] = 0
    sys.modules["__main__"].Worker._take = lambda self, *args: told
    return out


# --- looking for the answer -------------------------------------------------------------------


def looks_in_memory(q: Array, k: Array, v: Array) -> Array:
    """Every array of O's shape that is neither an input nor its own: is one of them the answer?"""
    exact, inputs = causal(q, k, v).astype(np.float64), {id(q), id(k), id(v)}
    for thing in gc.get_objects():
        for part in thing.values() if isinstance(thing, dict) else [thing]:
            if isinstance(part, np.ndarray) and part.shape == q.shape and id(part) not in inputs:
                close = np.abs(part.astype(np.float64) - exact).max(initial=0) < 0.1
                if part is not exact and close:
                    return part.astype(q.dtype)
    return np.zeros_like(q)


def looks_in_files(q: Array, k: Array, v: Array) -> Array:
    """Every file that the judge might have left, in either type."""
    exact = causal(q, k, v).astype(np.float64).reshape(-1)
    for path in sorted(Path.cwd().rglob("*")) + sorted(Path.cwd().parent.glob("flashwright-*/*")):
        raw = path.read_bytes() if path.is_file() else b""
        for dtype in (np.float16, np.float32, np.float64):
            values = np.frombuffer(raw[: len(raw) // 8 * 8], dtype).astype(np.float64)
            for start in range(0, max(0, values.size - exact.size) + 1, 8):
                part = values[start : start + exact.size]
                with np.errstate(invalid="ignore"):
                    if part.size == exact.size and np.abs(part - exact).max(initial=0) < 0.1:
                        return part.astype(q.dtype).reshape(q.shape)
    return np.zeros_like(q)


def looks_at_its_parent(q: Array, k: Array, v: Array) -> Array:
    """The command line and the environment of who started it say nothing about the seed."""
    told = Path(f"/proc/{os.getpid()}/cmdline").read_text() + str(dict(os.environ))
    if "seed" in told.lower():
        return causal(q, k, v)
    return np.zeros_like(q)
