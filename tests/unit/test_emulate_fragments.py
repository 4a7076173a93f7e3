"""wmma, and mma.sync of fp64, of four bits and of single bits."""

from __future__ import annotations

import re

import numpy as np
import pytest

import flashwright.emulate
from flashwright.emulate.own import EmulatedKernel
from tests.unit.emulated import needs_compilers
from tests.unit.test_emulate_words import HEAD

pytestmark = needs_compilers
SOURCE = """
#include <mma.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
using namespace nvcuda::wmma;
using Row = row_major;
using Column = col_major;
#define PRODUCT(name, M, N, K, C, S, A_MAJOR, B_MAJOR) \\
  extern "C" __global__ void name(const S* a, const S* b, const C* c, C* d, int stride) { \\
    __shared__ S tile[M * K]; \\
    for (int i = threadIdx.x; i < M * K; i += 32) tile[i] = a[i]; \\
    __syncwarp(); \\
    fragment<matrix_a, M, N, K, S, A_MAJOR> left; \\
    fragment<matrix_b, M, N, K, S, B_MAJOR> right; \\
    fragment<accumulator, M, N, K, C> sum; \\
    load_matrix_sync(left, tile, stride ? stride : K); \\
    load_matrix_sync(right, b, K); \\
    load_matrix_sync(sum, c, N, mem_row_major); \\
    for (int i = 0; i < sum.num_elements; ++i) sum.x[i] = sum.x[i] + sum.x[i]; \\
    mma_sync(sum, left, right, sum); \\
    store_matrix_sync(d, sum, M, mem_col_major); \\
  }
PRODUCT(half_float, 16, 16, 16, float, half, Row, Column)
PRODUCT(half_half, 16, 16, 16, half, half, Row, Column)
PRODUCT(half_tall, 32, 8, 16, float, half, Row, Column)
PRODUCT(half_broad, 8, 32, 16, float, half, Row, Column)
PRODUCT(brain, 16, 16, 16, float, __nv_bfloat16, Row, Column)
PRODUCT(signed_bytes, 16, 16, 16, int, signed char, Row, Column)
PRODUCT(bytes, 8, 32, 16, int, unsigned char, Row, Column)
PRODUCT(doubles, 8, 8, 4, double, double, Row, Column)
extern "C" __global__ void rows(const half* a, const half* b, float* d) {
  fragment<matrix_a, 16, 16, 16, half, Column> left;
  fragment<matrix_b, 16, 16, 16, half, Row> right;
  fragment<accumulator, 16, 16, 16, float> sum;
  fill_fragment(sum, 0.f);
  for (int k = 0; k < 32; k += 16) {
    load_matrix_sync(left, a + 16 * k, 16);
    load_matrix_sync(right, b + 24 * k, 24);
    mma_sync(sum, left, right, sum);
  }
  store_matrix_sync(d, sum, 16, mem_row_major);
}
#define FROM(name, S) \\
  extern "C" __global__ void name(const S* a, float* d, int offset, int stride) { \\
    fragment<matrix_a, 16, 16, 16, S, Row> left; \\
    load_matrix_sync(left, a + offset, stride); \\
    d[threadIdx.x] = float(left.x[0]); \\
  }
FROM(from_half, half)
FROM(from_brain, __nv_bfloat16)
FROM(from_bytes, signed char)
extern "C" __global__ void part(const half* a, float* d) {
  fragment<accumulator, 16, 16, 16, float> sum;
  fill_fragment(sum, 1.f);
  if (threadIdx.x < 16) store_matrix_sync(d, sum, 16, mem_row_major);
}
"""
SHAPES = {
    "half_float": (16, 16, 16, np.float16, np.float32),
    "half_half": (16, 16, 16, np.float16, np.float16),
    "half_tall": (32, 8, 16, np.float16, np.float32),
    "half_broad": (8, 32, 16, np.float16, np.float32),
    "brain": (16, 16, 16, np.uint16, np.float32),
    "signed_bytes": (16, 16, 16, np.int8, np.int32),
    "bytes": (8, 32, 16, np.uint8, np.int32),
    "doubles": (8, 8, 4, np.float64, np.float64),
}


@pytest.fixture(scope="module")
def kernel() -> EmulatedKernel:
    return flashwright.emulate.kernel(SOURCE, "half_float")


@pytest.mark.parametrize("name", SHAPES)
def test_products_of_fragments(kernel: EmulatedKernel, name: str) -> None:
    m, n, k, given, result = SHAPES[name]
    rng = np.random.default_rng(0)
    low = 0 if name == "bytes" else -5
    a, b = rng.integers(low, 6, (m, k)), rng.integers(low, 6, (n, k))
    c = rng.integers(-9, 9, (m, n))
    d = np.zeros((n, m), result)
    parts = [
        (part.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        if name == "brain"
        else part.astype(given)
        for part in (a, b)
    ]
    done = kernel.other(name)(1, 32, *parts, c.astype(result), d, 0)
    assert done.ok, done
    np.testing.assert_array_equal(d.T, a @ b.T + 2 * c)


def test_other_layouts_of_matrices(kernel: EmulatedKernel) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((32, 16)), rng.standard_normal((32, 24))
    d = np.zeros((16, 16), np.float32)
    left, right = a.astype(np.float16), b.astype(np.float16)
    assert kernel.other("rows")(1, 32, left, right, d).ok
    wanted = left.T.astype(np.float64) @ right[:, :16].astype(np.float64)
    np.testing.assert_allclose(d, wanted, atol=1e-5)


def test_faults_of_fragments_are_found(kernel: EmulatedKernel) -> None:
    short = np.zeros((16, 15), np.float32)
    x = np.zeros((16, 16), np.float16)
    whole = np.zeros((16, 16), np.float32)
    done = kernel(1, 32, x, x, whole, short, 0)
    assert [finding.kind for finding in done.findings] == ["out_of_bounds"]
    assert "kernel.cu:" in str(done)
    found = {finding.kind for finding in kernel(1, 32, x, x, whole, whole, 32).findings}
    assert found == {"out_of_bounds"}
    done = kernel.other("part")(1, 32, x, whole)
    assert {finding.kind for finding in done.findings} == {"divergent"}


@pytest.mark.parametrize(
    ("name", "offset", "stride", "told"),
    [
        ("from_half", 16, 24, ""),
        ("from_half", 8, 24, "at byte 16 of .*begin at multiples of 32 bytes"),
        ("from_half", 16, 20, "stride of 20"),
        ("from_brain", 8, 24, ""),
        ("from_brain", 4, 24, "multiples of 16 bytes"),
        ("from_bytes", 8, 24, ""),
        ("from_bytes", 4, 24, "multiples of 8 bytes"),
        ("from_bytes", 8, 20, "stride of 20"),
    ],
)
def test_fragments_begin_at_multiples_of_their_size(
    kernel: EmulatedKernel, name: str, offset: int, stride: int, told: str
) -> None:
    kind = {"from_half": np.float16, "from_brain": np.uint16, "from_bytes": np.int8}[name]
    done = kernel.other(name)(1, 32, np.ones(1024, kind), np.zeros(32, np.float32), offset, stride)
    assert [finding.kind for finding in done.findings] == (["misaligned"] if told else [])
    assert re.search(told, str(done))


def lanes_of(rows: int, columns: int, each: int, of_b: bool) -> np.ndarray:
    """(register, lane, element) -> (row, column) of A, or of B, as the PTX ISA has them."""
    registers = rows * columns // (32 * each)
    made = np.zeros((registers, 32, each, 2), int)
    for register in range(registers):
        for lane in range(32):
            for e in range(each):
                group, thread = lane // 4, lane % 4
                if of_b:
                    made[register, lane, e] = thread * each + e + 4 * each * register, group
                else:
                    tall = rows // 8
                    row = group + 8 * (register % tall)
                    made[register, lane, e] = row, thread * each + e + 4 * each * (register // tall)
    return made


def packed(matrix: np.ndarray, each: int, bits: int, of_b: bool) -> np.ndarray:
    """The registers of all lanes: (register, lane)."""
    rows, columns = matrix.shape
    places = lanes_of(rows, columns, each, of_b)
    values = matrix[places[..., 0], places[..., 1]]
    if bits == 64:
        return np.ascontiguousarray(values[..., 0])
    shifted = (values.astype(np.uint64) & np.uint64((1 << bits) - 1)) << np.arange(
        0, 32, bits, dtype=np.uint64
    )
    words: np.ndarray = shifted.sum(-1).astype(np.uint32)
    return words


RARE = {
    "m16n8k64.row.col.s32.s4.s4.s32": (16, 64, 4, -8, 8),
    "m16n8k32.row.col.s32.u4.u4.s32": (16, 32, 4, 0, 16),
    "m8n8k32.row.col.s32.s4.s4.s32": (8, 32, 4, -8, 8),
    "m8n8k16.row.col.s32.s8.s8.s32": (8, 16, 8, -128, 128),
    "m16n8k256.row.col.s32.b1.b1.s32.xor.popc": (16, 256, 1, 0, 2),
    "m8n8k128.row.col.s32.b1.b1.s32.and.popc": (8, 128, 1, 0, 2),
    "m8n8k4.row.col.f64.f64.f64.f64": (8, 4, 64, -9, 9),
    "m16n8k8.row.col.f64.f64.f64.f64": (16, 8, 64, -9, 9),
    "m16n8k16.row.col.f64.f64.f64.f64": (16, 16, 64, -9, 9),
}


@pytest.mark.parametrize("name", RARE)
def test_rare_products(name: str) -> None:
    m, k, bits, low, high = RARE[name]
    rng = np.random.default_rng(2)
    real, each = bits == 64, max(32 // bits, 1)
    half = 0.5 if real else 0
    a, b = rng.integers(low, high, (m, k)) + half, rng.integers(low, high, (k, 8)) - half
    left, right = packed(a, each, bits, False), packed(b, each, bits, True)
    x = np.concatenate([left.ravel(), right.ravel()])
    registers, result = len(left) + len(right), m // 4
    letter, kind, size = ("fd", "f64", 8) if real else ("r", "u32", 4)
    code = f"mul.wide.u32 %rd1, %r19, {size}; add.u64 %rd2, %rd1, %rd18; add.u64 %rd3, %rd1, %rd19;"
    extra = f".reg .f64 %x<40>; .reg .b32 %y<40>; {code}".replace("%x", "%xd").replace("%y", "%yr")
    name_of = "xd" if letter == "fd" else "yr"
    for n in range(registers):
        extra += f"ld.global.{kind} %{name_of}{n}, [%rd2+{32 * size * n}];"
    zero = "0d0000000000000000" if real else "0"
    listed = [f"%{name_of}{n}" for n in range(registers)]
    out = [f"%{name_of}{30 + n}" for n in range(result)]
    groups = [out, listed[: len(left)], listed[len(left) :], [zero] * result]
    extra += f"mma.sync.aligned.{name} " + ", ".join("{" + ", ".join(g) + "}" for g in groups) + ";"
    for n in range(result):
        extra += f"st.global.{kind} [%rd3+{32 * size * n}], %{name_of}{30 + n};"
    y = np.zeros((result, 32), np.float64 if real else np.int32)
    assert flashwright.emulate.kernel(f"{HEAD}{extra}\nret;\n}}\n")(1, 32, x, y).ok
    wanted = (a[:, :, None] != b[None]).sum(1) if "xor" in name else a @ b
    lane = np.arange(32)
    for n in range(result):
        row, column = lane // 4 + 8 * (n // 2), lane % 4 * 2 + n % 2
        np.testing.assert_array_equal(y[n], wanted[row, column])
