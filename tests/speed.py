"""How long the commands take that people wait for: `python -m tests.speed`.

CPU seconds of a process of its own, the least of three: no test asserts them, since a busy machine
would fail it. Rows that need a compiler are left out where there is none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.build import toolchain
from flashwright.judge.problems import Problem
from tests.unit import fake_gpu
from tests.unit.together import emulated, kernels

LOAD = "import sys, flashwright; flashwright.load(sys.argv[1])"


def child(*command: str, **environment: str) -> float:
    """User and system time of a command of Python's, which must succeed."""
    env = {**os.environ, **environment}
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, env=env)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with exit status {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def here(work: Callable[[], object]) -> float:
    """The same of a function in this process."""
    start = time.process_time()
    work()
    return time.process_time() - start


def commands(folder: Path) -> Iterator[tuple[str, Callable[[], float]]]:
    """Start-up, the checker, the cache, and the first load of a kernel, with a fake driver."""
    spec = make_spec("nsa-selected")
    file, made = folder / "program.tl", folder / "made"
    file.write_text(write_code(write_sketch(spec), spec, gpus.find("h200")).code)
    run = ("-m", "flashwright")
    yield "start of Python", lambda: child("-c", "pass")
    yield "flashwright --help", lambda: child(*run, "--help")
    yield "check of 50 lines", lambda: child(*run, "check", str(file), "--gpu", "h200")
    if toolchain.has_nvcc():
        build = (*run, "build", str(file), "--gpu", "h200", "-o", str(made))
        child(*build)  # fills the cache
        yield "build from the cache", lambda: child(*build)
        fake_gpu.build(folder)
        driver = {"LD_LIBRARY_PATH": str(folder)}
        child("-c", LOAD, str(made), **driver)  # compiles the launcher, if it is not built in
        yield "first load", lambda: child("-c", LOAD, str(made), **driver)


def emulations() -> Iterator[tuple[str, Callable[[], float]]]:
    """One block of a d128 kernel over 512 keys, and a causal problem of two heads."""
    wanted = [make_spec("mha", head_dim=128, dtype="bf16", causal=c) for c in (False, True)]
    codes = [(write_code(write_sketch(s), s, gpus.find("a100")).code, s) for s in wanted]
    block, causal = kernels(codes, "a100")
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 128, "kv_len": 512}
    whole = sizes | {"heads": 2, "kv_heads": 2, "q_len": 512}
    for name, kernel, dims in (("1 block", block, sizes), ("8 blocks", causal, whole)):
        problem = Problem(dims, "normal", 1)
        yield f"emulation of {name}", lambda k=kernel, p=problem: here(lambda: emulated(k, p))


def main() -> None:
    """Print a row for each."""
    with tempfile.TemporaryDirectory() as folder:
        for name, measure in commands(Path(folder)):
            print(f"{name:22} {min(measure() for _ in range(3)):6.2f} s", flush=True)
    for name, measure in emulations() if toolchain.has_nvcc() else ():
        print(f"{name:22} {min(measure() for _ in range(3)):6.2f} s", flush=True)


if __name__ == "__main__":
    main()
