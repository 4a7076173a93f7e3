"""compute-sanitizer on kernels of each architecture: no bad access, no race in shared memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashwright.cli.main import app

SANITIZER = shutil.which("compute-sanitizer")
KERNELS = {
    "a100": ("gqa", "--gpu", "a100", "--causal", "--head-dim", "128", "--dtype", "bf16"),
    "a100-window": ("mha", "--gpu", "a100", "--window", "100", "--head-dim", "64"),
    "t4": ("mha", "--gpu", "t4", "--causal", "--head-dim", "64", "--dtype", "fp16"),
    "t4-wide": ("mha", "--gpu", "t4", "--head-dim", "256", "--dtype", "fp16"),
    "l40s-fp8": ("mha", "--gpu", "l40s", "--causal", "--head-dim", "64", "--dtype", "fp8"),
    "h200": ("mha", "--gpu", "h200", "--causal", "--head-dim", "64", "--dtype", "bf16"),
}
SIZES = ("--q-len", "200", "--kv-len", "333")


@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not on the PATH")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("name", KERNELS)
def test_clean(name: str, tool: str, tmp_path: Path) -> None:
    made = CliRunner().invoke(app, ["generate", *KERNELS[name], "--out", str(tmp_path), "-q"])
    assert made.exit_code == 0, made.output
    verify = [sys.executable, "-m", "flashwright", "verify", str(tmp_path), *SIZES]
    options = ["--tool", tool, "--kernel-regex", "kns=attention", "--error-exitcode", "9"]
    done = subprocess.run(
        [str(SANITIZER), *options, *verify], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "0 errors" in done.stdout or "0 hazards displayed (0 errors" in done.stdout
