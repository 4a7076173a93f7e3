"""The machine a benchmark runs on: versions, and what the driver says of clocks and power."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from flashwright.lang.diagnostic import Failed
from flashwright.measure.peers.registry import Peer
from flashwright.version import __version__

TOOL = "nvidia-smi"
_PATIENCE = 10.0  # seconds; it answers in a tenth of one
CLOCKS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "most_sm_mhz": "clocks.max.sm",
    "watts": "power.draw",
    "limit_watts": "power.limit",
    "celsius": "temperature.gpu",
}


def environment(peers: Iterable[Peer]) -> dict[str, str]:
    """The versions of everything that a time may depend on, as far as they can be told."""
    import torch

    told = {
        "flashwright": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "driver": driver_version(),
        "nvcc": nvcc_version(),
        "translator": translator(),
    }
    told |= {peer.name: peer.version for peer in peers}
    return {name: version for name, version in told.items() if version}


@functools.cache
def translator() -> str:
    """A digest of the code that turns TL into CUDA: a version number changes too seldom."""
    here = Path(__file__).parents[1]
    files = [*(here / "lower").rglob("*.py"), *(here / "device").rglob("*.cuh")]
    whole = hashlib.sha256()
    for path in sorted(files):
        whole.update(path.relative_to(here).as_posix().encode() + path.read_bytes())
    return whole.hexdigest()[:12]


def nvcc_version() -> str:
    """Of the compiler here; empty where there is none."""
    from flashwright.build import toolchain

    try:
        return toolchain.find().version
    except Failed:
        return ""


def driver_version() -> str:
    """The NVIDIA driver's version; empty where its tool does not tell."""
    found = _ask(["driver_version"])
    return found[0] if found else ""


def clocks() -> dict[str, float]:
    """MHz, watts and degrees at this moment, as far as the driver tells."""
    found = _ask(list(CLOCKS.values()))
    told = {}
    for name, value in zip(CLOCKS, found, strict=False):
        with contextlib.suppress(ValueError):  # "[N/A]"
            told[name] = float(value)
    return told


def clock_mhz() -> float | None:
    """The clock of the SMs at this moment."""
    found = _ask(["clocks.sm"])
    try:
        return float(found[0]) if found else None
    except ValueError:
        return None


def _ask(fields: list[str]) -> list[str]:
    tool = shutil.which(TOOL)
    if tool is None:
        return []
    query = f"--query-gpu={','.join(fields)}"
    command = [tool, query, "--format=csv,noheader,nounits", "-i", _visible()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = done.stdout.splitlines()
    return [part.strip() for part in lines[0].split(",")] if done.returncode == 0 and lines else []


def _visible() -> str:
    """The GPU that CUDA calls 0, by its number or its name."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
