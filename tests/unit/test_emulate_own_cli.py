"""`flashwright emulate` for CUDA without a package: arguments, outputs, comparison, the list."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.unit.emulated import needs_compilers
from tests.unit.test_cli import Outcome

SOURCE = """
#include "scale.h"
#include <cuda_bf16.h>
__global__ void scaled(const float* x, float* y, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * SCALE * x[i];
}
extern "C" __global__ void __launch_bounds__(64) turned(const int* x, int* y) {
  extern __shared__ int tile[];
  tile[threadIdx.x] = x[threadIdx.x];
  BARRIER;
  y[threadIdx.x] = tile[63 - threadIdx.x];
}
template <class T, int N> __global__ void filled(T* x, T v) { x[threadIdx.x] = v + T(N); }
__global__ void all_kinds(void* p, bool flag, float4 v, long long k, const double* d) {
  if (flag) *(double*)p = v.x + k + d[1];
}
"""
OPTIONS = ("--define", "BARRIER=__syncthreads()")
SAXPY = ("--kernel", "scaled", "--grid", "8", "--block", "128")
ARGUMENTS = ("x=float32[1000]:arange", "y=[1000]:empty", "a=2", "n=1000")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "include").mkdir()
    (folder / "include" / "scale.h").write_text("#define SCALE 3\n")
    (folder / "mine.cu").write_text(SOURCE)
    return folder / "mine.cu"


def emulate(file: Path, *words: str, given: tuple[str, ...] = ()) -> Outcome:
    told = [part for one in given for part in ("--arg", one)]
    include = str(file.parent / "include")
    return Outcome("emulate", str(file), "--include", include, *OPTIONS, *words, *told)


def said(outcome: Outcome) -> str:
    return " ".join(outcome.err.replace("│", " ").split())


@needs_compilers
def test_a_launch_by_names_writes_and_compares_its_outputs(file: Path, tmp_path: Path) -> None:
    wanted = tmp_path / "wanted.npy"
    np.save(wanted, 6 * np.arange(1000, dtype=np.float64))
    compare = ("--compare", f"y=@{wanted}", "--out", str(tmp_path / "out"))
    done = emulate(file, *SAXPY, *compare, given=ARGUMENTS)
    assert done.code == 0, done.err
    for words in ("scaled(float const*, float*, float, int)", "agrees with what is expected"):
        assert words in done.out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["y.npy"], "x is const"
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "y.npy"), 6 * np.arange(1000))
    again = emulate(file, *SAXPY, *compare[:2], given=(*ARGUMENTS[:2], "3.5", "1000"))
    assert again.code == 1
    assert "wrong: y[1] is 10.5, and 6 is expected; 999 of 1000 elements are off" in again.err
    loose = emulate(file, *SAXPY, *compare[:2], "--rtol", "1", given=(*ARGUMENTS[:2], "3", "1000"))
    assert loose.code == 0
    assert "NOTHING WAS COMPARED" in emulate(file, *SAXPY, given=ARGUMENTS).out


@needs_compilers
def test_a_finding_is_1_with_its_line_and_as_json(file: Path) -> None:
    done = emulate(file, *SAXPY, given=(*ARGUMENTS[:3], "n=1001"))
    assert done.code == 1
    assert "error[FW833]: out_of_bounds at mine.cu:6, PTX line" in done.err
    assert "byte 0 behind the end of `x`" in done.err
    assert "6 |   if (i < n) y[i]" in done.err
    found = emulate(file, *SAXPY, "--json", "--profile", given=(*ARGUMENTS[:3], "n=1001"))
    told = json.loads(found.out)
    assert (told["ok"], told["grid"], told["compared"]) == (False, [8], False)
    assert "FW833" in {one["code"] for one in told["diagnostics"]}
    assert told["profile"]["total"]["executed"] > 0


@needs_compilers
def test_a_missing_barrier_under_all_schedules(file: Path) -> None:
    launch = ("--kernel", "turned", "--grid", "1", "--block", "64", "--shared", "256")
    given = ("x=int32[64]:arange", "y=int32[64]")
    right = emulate(file, *launch, "--schedule", "all", given=given)
    assert right.code == 0, right.err
    assert "random:0" in right.out
    wrong = emulate(file, *launch, "--define", "BARRIER=", given=given)
    assert wrong.code == 1
    assert "error[FW837]: race at mine.cu:" in wrong.err
    beyond = emulate(file, *launch[:-2], given=given)
    assert "error[FW833]" in beyond.err, "no dynamic shared memory"


@needs_compilers
def test_an_instance_bits_of_a_file_and_memory_of_another_argument(
    file: Path, tmp_path: Path
) -> None:
    bits = tmp_path / "bits.npy"
    np.save(bits, np.arange(8).astype(ml_dtypes.bfloat16))
    launch = ("--kernel", "filled<__nv_bfloat16, 2>", "--grid", "1", "--block", "4")
    done = emulate(file, *launch, "--out", str(tmp_path), given=(f"x=@{bits}", "v=5"))
    assert done.code == 0, done.err
    x = np.load(tmp_path / "x.npy").view(ml_dtypes.bfloat16)
    assert x.astype(int).tolist() == [7, 7, 7, 7, 4, 5, 6, 7]
    given = ("x=float32[16]:1.5", "y=&x+8", "a=1", "n=8")
    shifted = emulate(file, *SAXPY, "--compare", "x=4.5", "--rtol", "0.7", given=given)
    assert shifted.code == 0, shifted.err
    given = ("p=uint8[8]", "flag=true", f"v=hex:{'0000803f' * 4}", "k=0x10", "d=float64[2]:0.25")
    kinds = emulate(
        file,
        "--kernel",
        "all_kinds",
        "--grid",
        "1",
        "--block",
        "1",
        "--out",
        str(tmp_path),
        given=given,
    )
    assert kinds.code == 0, kinds.err
    assert np.load(tmp_path / "p.npy").view(np.float64)[0] == 1 + 16 + 0.25


@needs_compilers
def test_without_a_launch_the_kernels_are_listed_with_commands_that_run(file: Path) -> None:
    listed = emulate(file)
    assert listed.code == 2, "nothing was run"
    assert "nothing was run" in said(listed)
    assert "scaled(float const* x, float* y, float a, int n)" in listed.out
    assert "filled<class T, int N>: a template without an instance" in listed.out
    commands = [line.strip() for line in listed.out.splitlines() if " --kernel " in line][:3]
    for command in commands:
        words = shlex.split(command)[1:]
        if "turned" in words:
            assert words[words.index("--block") + 1] == "64", "its launch bound"
        done = Outcome(*words, *(("--shared", "256") if "turned" in words else ()))
        assert done.code == 0, done.err
    told = json.loads(emulate(file, "--json").out)
    assert {one["symbol"] for one in told["kernels"]} >= {"turned"}
    assert told["ok"] is False


@needs_compilers
def test_a_kernel_that_cannot_be_emulated_does_not_hide_the_others(tmp_path: Path) -> None:
    path = tmp_path / "two.cu"
    odd = 'asm volatile("nonsense.u32 %0, 1;" : "=r"(*x));'
    path.write_text(f"__global__ void odd(int* x) {{ {odd} }}\n__global__ void fine(int* x) {{}}\n")
    listed = Outcome("emulate", str(path))
    assert "odd(int* x)" in listed.out
    assert "fine(int* x)" in listed.out
    launch = ("--grid", "1", "--block", "1", "--arg", "[1]")
    assert Outcome("emulate", str(path), "--kernel", "fine", *launch).code == 0
    refused = Outcome("emulate", str(path), "--kernel", "odd", *launch)
    assert refused.code == 2
    assert "error[FW831]: PTX line" in refused.err


@needs_compilers
@pytest.mark.parametrize(
    ("words", "given", "says"),
    [
        (SAXPY, ARGUMENTS[:3], "argument 3 is missing: int n, such as --arg n=1000"),
        (SAXPY, (*ARGUMENTS, "5"), "'5' is one more than scaled(float const*, "),
        (SAXPY, (*ARGUMENTS, "m=5"), "has no parameter m; they are: x, y, a, n"),
        (SAXPY, (*ARGUMENTS, "n=5"), "--arg n is given twice"),
        (SAXPY, ("x=float64[10]", *ARGUMENTS[1:]), "and the array is float64"),
        (SAXPY, ("x=float33[10]", *ARGUMENTS[1:]), "float33 is no dtype"),
        (SAXPY, ("x=float32[10]:some", *ARGUMENTS[1:]), "filled with random, zeros"),
        (SAXPY, ("x=soon", *ARGUMENTS[1:]), "an argument is a number"),
        (SAXPY, ("x=@nowhere.npy", *ARGUMENTS[1:]), "cannot read nowhere.npy"),
        (SAXPY, ("x=@nowhere", *ARGUMENTS[1:]), "is no .npy file"),
        (SAXPY, ("x=&z", *ARGUMENTS[1:]), "z is no argument with an array; those are: y"),
        (SAXPY, (*ARGUMENTS[:3], "n=2.5"), "which is no whole number"),
        ((*SAXPY, "--compare", "a=3"), ARGUMENTS, "this argument has no array"),
        (SAXPY[:4], ARGUMENTS, "a launch needs --grid and --block"),
        ((*SAXPY[:4], "--block", "32,x"), ARGUMENTS, "'32,x' is no size"),
        ((*SAXPY[:4], "--block", "2048"), ARGUMENTS, "a GPU takes at most 1024"),
        ((*SAXPY, "--kernel", "softmax"), ARGUMENTS, "there is no kernel softmax"),
        ((*SAXPY, "--define", "1A"), ARGUMENTS, "'1A' is no macro"),
        ((*SAXPY, "--q-len", "5"), ARGUMENTS, "--q-len: for kernel packages and TL code"),
    ],
)
def test_bad_input_is_2_with_what_to_do(
    file: Path, words: tuple[str, ...], given: tuple[str, ...], says: str
) -> None:
    done = emulate(file, *words, given=given)
    assert done.code == 2
    assert says.replace(" ", "") in said(done).replace(" ", ""), "however wide the box is"


def test_options_of_own_kernels_are_not_for_packages(tmp_path: Path) -> None:
    done = Outcome("emulate", str(tmp_path), "--grid", "8")
    assert done.code == 2
    assert "--grid: for a file of CUDA or PTX" in said(done)
    nowhere = Outcome("emulate", str(tmp_path / "none.cu"))
    assert nowhere.code == 2
    assert "cannot read" in nowhere.err


TOGETHER = """
#include <cooperative_groups.h>
#include <cstdio>
__global__ void summed(const int* x, int* part, int* total) {
  atomicAdd(&part[blockIdx.x], x[blockIdx.x * blockDim.x + threadIdx.x]);
  cooperative_groups::this_grid().sync();
  if (blockIdx.x + threadIdx.x == 0) {
    for (int n = 0; n < gridDim.x; ++n) *total += part[n];
    printf("the sum is %d\\n", *total);
  }
}
"""


@needs_compilers
def test_blocks_that_run_together_and_what_a_kernel_prints(tmp_path: Path) -> None:
    file = tmp_path / "together.cu"
    file.write_text(TOGETHER)
    arguments = ("x=int32[128]:ones", "part=int32[4]:zeros", "total=int32[1]:zeros")
    told = [part for one in arguments for part in ("--arg", one)]
    launch = ("emulate", str(file), "--kernel", "summed", "--grid", "4", "--block", "32", *told)
    right = Outcome(*launch, "--cooperative", "--races", "global", "--compare", "total=128")
    assert right.code == 0, right.err
    assert "the sum is 128" in right.out
    alone = Outcome(*launch)
    assert alone.code == 1
    assert "trap at together.cu:6" in alone.err
    for words, wrong in (
        (("--order", "sideways"), "there are in-order, reversed, all and random:SEED"),
        (("--races", "all"), "there are none, shared, global"),
        (("--cluster", "3"), "not a whole number of clusters"),
    ):
        refused = Outcome(*launch, *words)
        assert refused.code == 2
        assert re.search(wrong, said(refused))
