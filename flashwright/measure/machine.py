"""The machine of a benchmark: software versions, and clocks and power from the driver."""

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
_PATIENCE = 10.0  # seconds; it usually answers in a tenth of a second
IGNORED_VERSIONS = ("flashwright", "python")
"""Versions that no time depends on: translator and compiler are recorded separately."""
CLOCKS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "most_sm_mhz": "clocks.max.sm",
    "watts": "power.draw",
    "limit_watts": "power.limit",
    "celsius": "temperature.gpu",
}


def environment(peers: Iterable[Peer]) -> dict[str, str]:
    """The versions of all software that a time may depend on; unknown ones are left out."""
    import torch

    versions = {
        "flashwright": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "driver": driver_version(),
        "nvcc": nvcc_version(),
        "translator": translator(),
    }
    versions |= {peer.name: peer.version for peer in peers}
    return {name: version for name, version in versions.items() if version}


@functools.cache
def translator() -> str:
    """A digest of the translator and its device headers: they change more often than versions."""
    here = Path(__file__).parents[1]
    files = [*(here / "lower").rglob("*.py"), *(here / "device").rglob("*.cuh")]
    whole = hashlib.sha256()
    for path in sorted(files):
        whole.update(path.relative_to(here).as_posix().encode() + path.read_bytes())
    return whole.hexdigest()[:12]


def nvcc_version() -> str:
    """The version of nvcc; empty if there is none."""
    from flashwright.build import toolchain

    try:
        return toolchain.find().version
    except Failed:
        return ""


def driver_version() -> str:
    """The NVIDIA driver's version; empty if nvidia-smi does not report it."""
    found = _ask(["driver_version"])
    return found[0] if found else ""


def clocks() -> dict[str, float]:
    """Current clocks, power and temperature, as far as nvidia-smi reports them."""
    found = _ask(list(CLOCKS.values()))
    values = {}
    for name, value in zip(CLOCKS, found, strict=False):
        with contextlib.suppress(ValueError):  # "[N/A]"
            values[name] = float(value)
    return values


def clock_mhz() -> float | None:
    """The current SM clock in MHz; None if nvidia-smi does not report it."""
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
    """The first visible GPU, as an index or UUID for nvidia-smi."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
