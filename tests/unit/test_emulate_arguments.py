"""Kernels of your own: their sources and names, their arguments, and memory between launches."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashwright.emulate
from flashwright.emulate import address, pointers, struct, tiled_tensor_map
from flashwright.emulate.arguments import pack
from flashwright.emulate.emulate import parse_once
from flashwright.emulate.own import EmulatedKernel
from flashwright.emulate.parse import parse
from flashwright.emulate.ptx import Variable
from flashwright.emulate.signature import (
    KernelSignature,
    ParameterType,
    chosen,
    of_source,
    signatures,
    written_kernels,
)
from flashwright.lang.diagnostic import Failed
from tests.unit.emulated import needs_compilers

SOURCE = """
#include <cuda_bf16.h>
#include <cuda.h>
#include <stdint.h>
#include "helpers.cuh"
namespace ns {
template <class T, int N> __global__ void scaled(const T* __restrict__ x, T* y) {
  y[threadIdx.x] = twice(x[threadIdx.x]) + T(N * MORE);
}
}  // namespace ns
template <class T> __global__ void scaled(T* x) { x[threadIdx.x] = T(7); }
template __global__ void ns::scaled<int, 1>(const int*, int*);
enum class Mode { slow, fast };
template <Mode M, unsigned N> __global__ void moded(int* y) { y[0] = int(M) * 10 + N; }

struct Node { float* values; int count; const Node* next; };
extern "C" __global__ void typed(const uint16_t *__restrict__ a, __nv_bfloat16* b, unsigned n,
                                 bool flag, uint64_t big /* a comment, (with) a bracket */) {
  b[threadIdx.x] = __float2bfloat16(a[threadIdx.x] + n + flag + (float)big);
}
extern "C" __global__ void opaque(void* p, const Node* node, float4* v, float4 w, float** all) {
  static_cast<char*>(p)[0] = 1;
  if (v) v[0] = w;
  if (all) all[1][2] = all[0][1];
}
extern "C" __global__ void listed(Node node, float* sum) {
  for (int i = 0; i < node.count; ++i) sum[0] += node.values[i];
  if (node.next)
    for (int i = 0; i < node.next->count; ++i) sum[0] += 100 * node.next->values[i];
}
extern "C" __global__ void shifted(const float* x, float* y, int n) {
  int i = threadIdx.x;
  if (i < n) y[i] = 2 * x[i];
}
__device__ float* kept;
extern "C" __global__ void keep(float* x) { kept = x; x[0] = 5; }
extern "C" __global__ void use(float* y, int at) { y[0] = kept[at]; }
extern "C" __global__ void box(const __grid_constant__ CUtensorMap map, __nv_bfloat16* y) {
  __shared__ alignas(128) __nv_bfloat16 tile[8 * 16];
  __shared__ alignas(8) uint64_t barrier;
  uint32_t at = __cvta_generic_to_shared(&barrier), to = __cvta_generic_to_shared(tile);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 256;" ::"r"(at));
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(16), "r"(8), "r"(at));
  }
  __syncthreads();
  asm volatile("{ .reg .pred p; w: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra w; }"
               ::"r"(at));
  for (int i = threadIdx.x; i < 128; i += 32) y[i] = tile[i];
}
"""
HELPERS = "template <class T> __device__ T twice(T x) { return x + x; }\n"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "helpers.cuh").write_text(HELPERS)
    (folder / "mine.cu").write_text(SOURCE)
    return folder / "mine.cu"


@pytest.fixture(scope="module")
def module(file: Path) -> EmulatedKernel:
    return flashwright.emulate.kernel(file, "typed", arch="sm_90a", define={"MORE": 100})


@pytest.fixture
def floats() -> np.ndarray[Any, Any]:
    return np.arange(8, dtype=np.float32)


# --- sources and names ------------------------------------------------------------------------


@needs_compilers
def test_a_header_beside_the_file_is_found_and_an_instance_is_compiled(file: Path) -> None:
    """`ns::scaled<float, 3>` is not in the source; nvcc makes it of the template."""
    x, y = np.ones(32, np.float32), np.zeros(32, np.float32)
    kernel = flashwright.emulate.kernel(
        file, "ns::scaled<float,3>", define={"MORE": "10"}, arch="sm_90a"
    )
    assert kernel(1, 32, x, y).ok
    assert (y == 32).all()
    short = np.zeros(4, np.float32)
    done = kernel(1, 32, x, short)
    line = next(n for n, text in enumerate(SOURCE.split("\n"), 1) if "twice" in text)
    assert f"mine.cu:{line}" in str(done), "the lines are those of the file"
    assert "behind the end of `y`" in str(done)


@pytest.mark.slow
@needs_compilers
def test_an_instance_by_arguments_that_the_demangler_writes_otherwise(file: Path) -> None:
    y = np.zeros(1, np.int32)
    options: dict[str, Any] = {"define": {"MORE": 1}, "arch": "sm_90a"}
    kernel = flashwright.emulate.kernel(file, "moded<Mode::fast, 5>", **options)
    assert kernel(1, 1, y).ok
    assert y[0] == 15
    with pytest.raises(Failed, match=r"cannot instantiate moded<7>: nvcc"):
        flashwright.emulate.kernel(file, instantiate="moded<7>", **options)


@needs_compilers
def test_names_as_the_source_has_them(module: EmulatedKernel) -> None:
    assert module.other("scaled").signature.name == "ns::scaled<int, 1>"
    assert module.other("ns::scaled").entry == module.other("scaled<int,1>").entry
    with pytest.raises(Failed) as failed:
        module.other("moded")
    assert "the kernels are: " in str(failed.value)
    assert "ns::scaled<int, 1>" in str(failed.value)
    assert "these templates have no instance: moded<Mode M, unsigned N>" in str(failed.value)
    assert repr(module.other("scaled")) == (
        "<emulated kernel ns::scaled<int, 1>(int const*, int*)>"
    )


@pytest.mark.slow
@needs_compilers
def test_a_header_that_is_not_found_says_how_to_find_it(file: Path) -> None:
    with pytest.raises(Failed, match=r"(?s)helpers.cuh: No such file.*include=\["):
        flashwright.emulate.kernel(SOURCE, "typed", arch="sm_90a")
    with pytest.raises(Failed, match="there is no include folder nowhere"):
        flashwright.emulate.kernel(SOURCE, "typed", include=["nowhere"])
    kernel = flashwright.emulate.kernel(
        SOURCE, "typed", include=[file.parent], arch="sm_90a", flags=["-DMORE=1", "-std=c++20"]
    )
    assert kernel.signature.name == "typed"


@needs_compilers
def test_a_finding_in_a_kernel_of_a_header_has_its_line(tmp_path: Path) -> None:
    (tmp_path / "deep.cuh").write_text(
        "\n\n__global__ void f(int* y) {\n  y[threadIdx.x] = 1;\n}\n"
    )
    (tmp_path / "a.cu").write_text('#include "deep.cuh"\n')
    done = flashwright.emulate.kernel(tmp_path / "a.cu")(1, 8, np.zeros(4, np.int32))
    assert "out_of_bounds at deep.cuh:4, PTX line" in str(done)


@needs_compilers
def test_a_comment_may_be_in_an_old_encoding(tmp_path: Path) -> None:
    path = tmp_path / "old.cu"
    path.write_bytes("// gr\xf6\xdfer\n__global__ void f(int* y) { *y = 1; }\n".encode("latin-1"))
    y = np.zeros(1, np.int32)
    assert flashwright.emulate.kernel(path)(1, 1, y).ok
    assert y[0] == 1


@needs_compilers
def test_a_changed_header_is_compiled_again(tmp_path: Path) -> None:
    (tmp_path / "value.h").write_text("#define VALUE 1\n")
    source = tmp_path / "a.cu"
    source.write_text('#include "value.h"\n__global__ void f(int* y) { *y = VALUE; }\n')
    y = np.zeros(1, np.int32)
    for value in (1, 2):
        (tmp_path / "value.h").write_text(f"#define VALUE {value}\n")
        assert flashwright.emulate.kernel(source)(1, 1, y).ok
        assert y[0] == value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"flags": ["-arch=sm_90"]}, "-arch=sm_90 of nvcc: name the architecture by arch="),
        ({"flags": ["-o"]}, "-o of nvcc: the emulator chooses"),
        ({"arch": "hopper"}, "'hopper' is not an architecture"),
    ],
)
@needs_compilers
def test_options_that_cannot_be_taken(given: dict[str, Any], words: str) -> None:
    with pytest.raises(Failed, match=words):
        flashwright.emulate.kernel("__global__ void f() {}\n", **given)
    with pytest.raises(ValueError, match="untrusted code takes no include"):
        flashwright.emulate.kernel("__global__ void f() {}\n", define={"A": 1}, untrusted=True)


MANY = ["_Z1fILi1EEvi", "_Z1fILi2EEvi"]


def test_signatures_by_the_mangled_name_and_by_the_source() -> None:
    names = {"_ZN2ns6reduceIfLi256EEEvPKT_PS1_i": 3, "plain": 2, "hidden": 1}
    source = """
    // __global__ void plain(int no, int comment) {}
    namespace ns { template <class T, int N>
    __global__ void __launch_bounds__(N, (1 + 1)) reduce(const T* x, T *y, const int count) {} }
    extern "C" __global__ void plain(const unsigned long long *const a, float (&b)[3]) {}
    """
    reduce, plain, hidden = signatures(names, source).values()
    assert reduce.name == "ns::reduce<float, 256>"
    assert [str(p) for p in reduce.parameters or ()] == ["float const* x", "float* y", "int count"]
    assert plain.parameters is not None
    assert plain.parameters[0].type == ParameterType("unsigned long long const*")
    assert plain.parameters[1].type is None, "not simple, so nothing is claimed"
    assert hidden.parameters is None
    assert [one.template for one in written_kernels(source)] == ["class T, int N", ""]
    assert chosen(signatures(dict.fromkeys(MANY, 1)), "f") == MANY
    assert chosen(signatures(dict.fromkeys(MANY, 1)), "f#2") == MANY[1:]
    assert chosen(signatures(dict.fromkeys(MANY, 1)), "f#3") == []
    assert [*of_source(signatures({**names, "cub": 0}), source)] == [*names][:2]
    assert ParameterType("float (*) [5]").pointee == "float"
    assert ParameterType("void (*)(int)").pointee is None


@needs_compilers
def test_kernels_of_a_file_share_its_module_and_leave_it_as_it_is(module: EmulatedKernel) -> None:
    module.other("scaled")
    assert parse_once(module.ptx) is parse_once(module.ptx)
    assert parse_once(module.ptx) == parse(module.ptx)


# --- arguments --------------------------------------------------------------------------------


@needs_compilers
def test_arrays_have_the_type_that_the_pointer_has(module: EmulatedKernel) -> None:
    a, b = np.arange(4, dtype=np.uint16), np.zeros(4, ml_dtypes.bfloat16)
    assert module(1, 4, a, b, 1, True, 3).ok
    np.testing.assert_array_equal(b.astype(np.float32), a + np.float32(5))
    assert module(1, 4, a, b.view(np.uint16), 1, True, 3).ok, "the bits of bfloat16"
    words = r"argument 0 \(`a`\) is unsigned short const\*, and the array is int16: .*view\('uint16"
    with pytest.raises(TypeError, match=words):
        module(1, 4, a.view(np.int16), b, 1, True, 3)
    with pytest.raises(
        TypeError, match=r"`b`\) is __nv_bfloat16\*, .*float32: .*astype\('bfloat16"
    ):
        module(1, 4, a, b.astype(np.float32), 1, True, 3)


@needs_compilers
@pytest.mark.parametrize(
    ("n", "flag", "big", "words"),
    [
        (-1, True, 0, r"argument 2 \(`n`\) is -1, .*\(unsigned int\): 0 to 4294967295"),
        (1 << 32, True, 0, "argument 2"),
        (1, 2, 0, r"argument 3 \(`flag`\) is 2, .*0 to 1"),
        (1, True, 1 << 64, "argument 4"),
        (1, True, None, r"argument 4 \(`big`\) is None"),
        (np.float32(1), True, 0, r"argument 2 \(`n`\) is 1\.0, which is no whole number"),
        (1, True, np.zeros(3), r"argument 4 .* an array, but the kernel takes a number \(unsigned"),
    ],
)
def test_numbers_are_held_against_the_range_of_their_type(
    module: EmulatedKernel, n: Any, flag: Any, big: Any, words: str
) -> None:
    a, b = np.arange(4, dtype=np.uint16), np.zeros(4, ml_dtypes.bfloat16)
    with pytest.raises(TypeError, match=words):
        module(1, 4, a, b, n, flag, big)


@needs_compilers
def test_const_is_only_for_reading_and_void_takes_all(module: EmulatedKernel) -> None:
    x, p = np.ones(8, np.float32), np.zeros(4, np.int16)
    kernel = module.other("opaque")
    w = np.array([1, 2, 3, 4], np.float32)
    assert kernel(1, 1, p, None, x, w, None).ok
    np.testing.assert_array_equal(x[:4], w)
    assert p[0] == 1
    with pytest.raises(TypeError, match=r"`v`.* is float4\*, and the array is float64"):
        kernel(1, 1, p, None, x.astype(np.float64), w, None)
    with pytest.raises(TypeError, match=r"argument 3 \(`w`\) .*16 bytes"):
        kernel(1, 1, p, None, x, w[:3], None)
    with pytest.raises(TypeError, match="a pointer is an array, an address or None"):
        kernel(1, 1, 2.5, None, x, w, None)
    source = "__global__ void f(const int* x) { const_cast<int*>(x)[0] = 1; }\n"
    done = flashwright.emulate.kernel(source)(1, 1, np.zeros(4, np.int32))
    assert [f.kind for f in done.findings] == ["read_only"]
    unset = flashwright.emulate.empty(np.zeros(8, np.float32))
    done = module.other("shifted")(1, 32, unset, x, 8)
    assert {f.kind for f in done.findings} == {"unwritten"}, "const, and not set"


@needs_compilers
def test_tensors_of_pytorch_are_arrays_of_the_same_memory(module: EmulatedKernel) -> None:
    torch = pytest.importorskip("torch")
    a = torch.arange(4, dtype=torch.int16).view(torch.uint16)
    b = torch.zeros(4, dtype=torch.bfloat16)
    assert module(1, 4, a, b, 1, True, 3).ok
    assert b.tolist() == [5, 6, 7, 8]
    x, y = torch.ones(4, requires_grad=True), torch.zeros(8)
    assert module.other("shifted")(1, 32, x, address(y, 4), 4).ok
    assert y.tolist() == [0] * 4 + [2] * 4
    with pytest.raises(TypeError, match=r"`b`.* and the array is float32"):
        module(1, 4, a, b.float(), 1, True, 3)


@needs_compilers
def test_the_same_memory_twice_and_pointers_into_it(
    module: EmulatedKernel, floats: np.ndarray[Any, Any]
) -> None:
    shifted = module.other("shifted")
    assert shifted(1, 32, floats, floats, 4).ok
    np.testing.assert_array_equal(floats, [0, 2, 4, 6, 4, 5, 6, 7])
    assert shifted(1, 32, floats, address(floats, 4), 4).ok
    np.testing.assert_array_equal(floats, [0, 2, 4, 6, 0, 4, 8, 12])
    assert shifted(1, 32, floats[4:], floats[2:6], 2).ok, "views that overlap"
    np.testing.assert_array_equal(floats, [0, 2, 0, 8, 0, 4, 8, 12])
    assert not shifted(1, 32, floats, address(floats, 4), 5).ok
    with pytest.raises(IndexError, match="8 elements, and 9"):
        address(floats, 9)


class Node(ctypes.Structure):
    _fields_ = (("values", ctypes.c_void_p), ("count", ctypes.c_int), ("next", ctypes.c_void_p))


DTYPE = np.dtype([("values", "u8"), ("count", "i4"), ("next", "u8")], align=True)


@needs_compilers
@pytest.mark.parametrize("layout", ["PiP", DTYPE, Node])
def test_structs_have_arrays_for_pointers(
    module: EmulatedKernel, floats: np.ndarray[Any, Any], layout: Any
) -> None:
    memory = flashwright.emulate.memory()
    listed = EmulatedKernel(module.ptx, "listed", text=SOURCE, memory=memory)
    total, halves = np.zeros(1, np.float32), np.full(3, 0.5, np.float32)
    tail = np.zeros(1, DTYPE)
    tail["values"], tail["count"] = memory.address(floats, 2), 2
    done = listed(1, 1, struct(layout, halves, 3, tail), total)
    assert done.ok, done
    assert total[0] == 1.5 + 100 * (2 + 3)
    done = listed(1, 1, struct(layout, halves, 4, None), total)
    assert f"behind the end of `node{'[0]' if layout == 'PiP' else '.values'}`" in str(done)


def test_structs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TypeError, match=r"has 3 fields \(values, count, next\), and 2 values"):
        struct(Node, None, 3)
    with pytest.raises(TypeError, match="the fields of the struct are values, count, next"):
        struct(DTYPE, values=None, count=3, last=None)
    with pytest.raises(TypeError, match="the field count of the struct"):
        struct(Node, None, 2.5, None)
    with pytest.raises(TypeError, match="the struct 'Pi'"):
        struct("Pi", None)
    with pytest.raises(TypeError, match="is no layout of a struct"):
        struct(5, None)


@needs_compilers
def test_an_array_of_device_pointers(module: EmulatedKernel, floats: np.ndarray[Any, Any]) -> None:
    opaque, y = module.other("opaque"), np.zeros(3, np.float32)
    w = np.zeros(4, np.float32)
    assert opaque(1, 1, np.zeros(1, np.int8), None, None, w, pointers(floats, y)).ok
    assert y[2] == 1
    done = opaque(1, 1, np.zeros(1, np.int8), None, None, w, pointers(floats, y[:2]))
    assert "behind the end of `all[1]`" in str(done)


@needs_compilers
def test_a_tensor_map_by_one_call(module: EmulatedKernel) -> None:
    box, y = module.other("box"), np.zeros((8, 16), np.uint16)
    x = np.arange(24 * 64, dtype=np.uint16).reshape(24, 64)
    done = box(1, 32, tiled_tensor_map(x, (8, 16)), y)
    assert done.ok, done
    np.testing.assert_array_equal(y, x[8:16, 16:32])
    half = x[:, :24]  # its rows are 64 apart, and the box runs over its end
    assert box(1, 32, tiled_tensor_map(half, (8, 16)), y).ok
    np.testing.assert_array_equal(y[:, :8], x[8:16, 16:24])
    assert (y[:, 8:] == 0).all()


def test_a_tensor_map_may_begin_a_struct() -> None:
    """CuTe's TMA atoms are larger than the map that they begin with."""
    x, memory = np.zeros((24, 64), np.uint16), flashwright.emulate.memory()
    atom = Variable("atom", "param", 128, 256)
    taken = pack(KernelSignature("k", "k"), (atom,), (tiled_tensor_map(x, (8, 16)),), memory)
    alone = tiled_tensor_map(x, (8, 16)).packed(memory)
    assert taken.parameters == alone + bytes(128)
    small = Variable("small", "param", 8, 64)
    with pytest.raises(TypeError, match="has 64 bytes, and 128 bytes are given"):
        pack(KernelSignature("k", "k"), (small,), (tiled_tensor_map(x, (8, 16)),), memory)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"box": (8,)}, "the box has 1 dimensions, the tensor 2"),
        ({"box": (8, 12)}, "not a multiple of 16"),
        ({"box": (8, 64), "swizzle": "64B"}, "has room for 64"),
        ({"mode": "im2col"}, "mode='im2col' are not emulated: only tiled"),
        ({"interleave": "16B"}, "interleave='16B' are not emulated"),
        ({"element_strides": (1, 2)}, "element_strides=.* are not emulated"),
    ],
)
def test_tensor_maps_that_the_driver_or_the_emulator_refuse(
    given: dict[str, Any], words: str
) -> None:
    array = np.zeros((24, 64), np.uint16)
    with pytest.raises(ValueError, match=words):
        tiled_tensor_map(array, **{"box": (8, 16), **given})
    with pytest.raises(ValueError, match="contiguous along its last axis"):
        tiled_tensor_map(array.T, (8, 16))


# --- memory between launches ------------------------------------------------------------------


@needs_compilers
def test_a_pointer_that_a_kernel_keeps_is_valid_for_the_next(file: Path) -> None:
    memory = flashwright.emulate.memory()
    keep = flashwright.emulate.kernel(
        file, "keep", define={"MORE": 100}, arch="sm_90a", memory=memory
    )
    use, y = keep.other("use"), np.zeros(1, np.float32)
    x = memory.empty(8)
    assert keep(1, 1, x).ok
    assert use(1, 1, y, 0).ok
    assert y[0] == 5
    assert keep.copy_from_symbol("kept", np.uint64)[0] == memory.address(x)
    done = use(1, 1, y, 1)
    assert [f.kind for f in done.findings] == ["unwritten"], "what no launch has written"
    memory.mark_written(x)
    assert use(1, 1, y, 1).ok
    keep.copy_to_symbol("kept", address(x, 2))
    x[3] = 4
    assert use(1, 1, y, 1).ok
    assert y[0] == 4
    memory.free(x)
    assert [f.kind for f in use(1, 1, y, 1).findings] == ["out_of_bounds"], "used after free"
    with pytest.raises(ValueError, match="not in this memory"):
        memory.free(x)
    with pytest.raises(ValueError, match="give the kernel a memory"):
        flashwright.emulate.kernel(keep.ptx, "use").copy_to_symbol("kept", address(x))


def test_memory_grows_with_what_overlaps_and_keeps_its_addresses() -> None:
    memory = flashwright.emulate.memory()
    whole = np.zeros(100, np.float32)
    part = memory.address(whole[10:20])
    assert memory.address(whole, 10) == part
    assert memory.address(whole[50:]) == part + 160
    far = np.zeros(1 << 22, np.uint8)
    assert memory.address(far[:8]) % 256 == 0
    with pytest.raises(ValueError, match="give the whole one first"):
        memory.address(far)
