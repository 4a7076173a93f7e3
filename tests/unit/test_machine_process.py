"""The emulator's machine in a confined process: the same answers, and nothing to be had by it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwright.confine import landlock, seal
from flashwright.emulate import machine_process
from flashwright.emulate.emulate import Variables, launch, prepare, variables_of
from flashwright.emulate.machine import Machine, here
from flashwright.emulate.machine_process import MachineProcess
from flashwright.emulate.own import kernel
from flashwright.emulate.package import Package, read_package
from flashwright.emulate.structs import Launch, Region
from flashwright.judge import emulated as judged
from flashwright.judge.emulated import judge_emulated, pose
from flashwright.lang.diagnostic import Failed
from flashwright.sandbox.limits import Limits
from flashwright.sandbox.tensors import bits
from tests.unit import emulated
from tests.unit.emulated import needs_compilers

pytestmark = pytest.mark.skipif(
    not (landlock.available() and seal.available() and shutil.which("c++")),
    reason="this system confines no process, or has no C++ compiler",
)
SPEC = emulated.SPEC
DIMS = {"batch": 1, "heads": SPEC.heads, "kv_heads": SPEC.kv_heads, "q_len": 21, "kv_len": 37}
COUNTER = """.version 8.4
.target sm_80
.address_size 64
.global .align 4 .u32 calls;
.visible .entry k(.param .u64 p)
{
  .reg .b32 %r<4>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [p];
  mov.u64 %rd2, calls;
  ld.global.u32 %r1, [%rd2];
  add.u32 %r1, %r1, 1;
  st.global.u32 [%rd2], %r1;
  st.global.u32 [%rd1 + OFFSET], %r1;
  ret;
}
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulated.write(tmp_path_factory.mktemp("package") / "package")


def launched(package: Package, machine: Machine, schedule: str = "eager") -> Any:
    posed = pose(package.plan, SPEC, None, DIMS, 0)
    tensors = posed.tensors()
    result = judged.launch(package, tensors, DIMS, schedule, 60.0, None, machine)
    return {name: tensors[name] for name in posed.outputs}, result


@needs_compilers
def test_it_says_what_the_machine_here_says(package: Path) -> None:
    one, machine = read_package(package), MachineProcess(Limits())
    for schedule in ("eager", "random:3"):
        outputs, result = launched(one, here, schedule)
        others, other = launched(one, machine, schedule)
        assert all((bits(outputs[n]) == bits(others[n])).all() for n in outputs)
        assert result.findings == other.findings
        assert (result.counts == other.counts).all()
    machine.close()


def counted(machine: Machine, offset: int, kept: Variables | None = None) -> Any:
    program = prepare(COUNTER.replace("OFFSET", str(offset)), "k")
    out = np.zeros(4, np.int32)
    regions = [Region(1 << 20, out.nbytes, out.ctypes.data, 2)]
    given = (1 << 20).to_bytes(8, "little")
    variables = variables_of(program) if kept is None else kept
    found = launch(program, regions, given, [1], [1], 0, "eager", variables, machine)
    return out.tolist(), [f.kind for f in found.findings], variables


def test_variables_and_findings_come_back() -> None:
    machine = MachineProcess(Limits())
    _, _, kept = counted(machine, 4)
    assert counted(machine, 4, kept)[:2] == ([0, 2, 0, 0], [])
    assert counted(machine, 64)[:2] == counted(here, 64)[:2] == ([0] * 4, ["out_of_bounds"])
    machine.close()


def test_a_kernel_that_is_not_trusted_is_executed_elsewhere() -> None:
    text = COUNTER.replace("OFFSET", "4")
    found = []
    for untrusted in (False, True):
        one, out = kernel(text, untrusted=untrusted), np.zeros(4, np.int32)
        assert (one.machine is here) != untrusted
        assert one(1, 1, out).ok
        found.append(out.tolist())
    assert found == [[0, 1, 0, 0]] * 2


# --- a machine that was taken over ------------------------------------------------------------

HOSTILE = """
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>
static int opens(const char* path, int how) {{ return open(path, how, 0600) >= 0; }}
extern "C" long fw_run(char* told) {{
  char memory[64];
  snprintf(memory, sizeof memory, "/proc/%d/mem", getppid());
  int got = opens("/etc/passwd", O_RDONLY) << 1 | opens(memory, O_RDWR) << 2
    | opens("{outside}.new", O_CREAT | O_WRONLY) << 3 | opens("{outside}", O_RDONLY) << 4
    | (socket(AF_INET, SOCK_STREAM, 0) >= 0) << 5 | (kill(getppid(), 0) == 0) << 6
    | opens("here", O_CREAT | O_WRONLY) << 7;
  {body}
}}
"""
BODIES = {
    "return got & ~2 ? -9999 : 0;": "",  # a system may let programs know who its users are
    "*(volatile int*)0 = 1; return 0;": "FW831.*ended with signal 11",
    "_exit(3);": "FW831.*ended with exit code 3",
    "return -9999;": "FW831.*instructions that do not exist",
    "int* f = *(int**)(told + FINDINGS); f[0] = 77; f[1] = 1 << 30; return 1;": "FW831.*not exist",
    "for (int f = 3; f < 64; ++f) ftruncate(f, 64); return 0;": "FW831.*has truncated",
}


@pytest.mark.parametrize("body", BODIES)
def test_who_takes_the_machine_over_has_nothing(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hush-hush")
    source, library = tmp_path / "machine.cpp", tmp_path / "machine.so"
    inside = body.replace("FINDINGS", str(Launch.findings.offset))
    source.write_text(HOSTILE.format(outside=secret, body=inside))
    subprocess.run(["c++", "-shared", "-fPIC", "-w", source, "-o", library], check=True)
    monkeypatch.setattr(machine_process, "library_file", lambda: library)
    machine = MachineProcess(Limits())
    if not BODIES[body]:
        assert counted(machine, 4)[1] == []
    else:
        with pytest.raises(Failed, match=BODIES[body]):
            counted(machine, 4)
    machine.close()


@needs_compilers
def test_the_judge_has_no_machine_of_its_own(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*given: object) -> int:
        raise AssertionError("it was executed in the judge's process")

    monkeypatch.setattr("flashwright.emulate.machine.library", never)
    monkeypatch.setattr(judged, "ROUNDS", 2)
    assert judge_emulated(package, SPEC, seed=1, lengths=[(9, 17)]).ok


@needs_compilers
def test_a_launch_without_end_is_ended(package: Path) -> None:
    found = judge_emulated(package, SPEC, seed=1, lengths=[(200, 900)], limits=Limits(seconds=0.01))
    assert [o.name for o in found.offences] == ["hang"]
