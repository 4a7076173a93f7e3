"""Instructions that compilers and headers use now and then: carries, parts of words, rounding."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import flashwright.emulate
from flashwright.emulate.own import EmulatedKernel
from flashwright.lang.diagnostic import Failed
from tests.unit.emulated import needs_compilers

pytestmark = needs_compilers
HEAD = """.version 8.8
.target sm_90a
.address_size 64
.const .align 4 .b32 constant[2] = {5, 6};
.visible .entry k(.param .u64 x, .param .u64 y)
{
.reg .pred %p<10>;
.reg .b16 %h<10>;
.reg .b32 %r<20>;
.reg .b64 %rd<20>;
.reg .b128 %rq<10>;
.reg .f32 %f<10>;
.reg .f64 %fd<10>;
.shared .align 16 .b8 tile[1024];
.local .align 16 .b8 own[16];
ld.param.u64 %rd18, [x];
ld.param.u64 %rd19, [y];
mov.u32 %r19, %tid.x;
"""
ALL = (1 << 32) - 1


def kernel(code: str) -> EmulatedKernel:
    return flashwright.emulate.kernel(f"{HEAD}{code}\nret;\n}}\n")


def run(code: str, x: np.ndarray, count: int, dtype: type = np.uint32) -> np.ndarray:
    """What one thread makes of x: %rd18 has its address, %rd19 that of the result."""
    y: np.ndarray = np.zeros(count, dtype)
    done = kernel(code)(1, 1, x, y)
    assert done.ok, done
    return y


def words(given: str, count: int) -> str:
    """Load words into %r1, %r2, ..."""
    return "".join(f"ld.global.u32 %r{n + 1}, [%rd18+{4 * n}];\n" for n in range(count)) + given


def number(parts: np.ndarray) -> int:
    return int.from_bytes(parts.tobytes(), "little")


def test_sums_with_carries() -> None:
    x = np.array([ALL, ALL, 7, 3, 0, ALL - 2], np.uint32)
    a, b = number(x[:3]), number(x[3:])
    for op, wanted in (("add", a + b), ("sub", a - b)):
        code = f"{op}.cc.u32 %r7, %r1, %r4; {op}c.cc.u32 %r8, %r2, %r5; {op}c.u32 %r9, %r3, %r6;"
        code += "st.global.u32 [%rd19], %r7; st.global.u32 [%rd19+4], %r8;"
        found = run(words(f"{code} st.global.u32 [%rd19+8], %r9;", 6), x, 3)
        assert number(found) == wanted % (1 << 96)


def test_a_product_of_64_bits_with_carries() -> None:
    x = np.array([0xFEDCBA98, 0x89ABCDEF, 0xDEADBEEF, 0xCAFEBABE], np.uint32)
    code = """
mul.lo.u32 %r5, %r1, %r3; mul.hi.u32 %r6, %r1, %r3;
mad.lo.cc.u32 %r6, %r2, %r3, %r6; madc.hi.u32 %r7, %r2, %r3, 0;
mad.lo.cc.u32 %r6, %r1, %r4, %r6; madc.hi.cc.u32 %r7, %r1, %r4, %r7; addc.u32 %r8, 0, 0;
mad.lo.cc.u32 %r7, %r2, %r4, %r7; madc.hi.u32 %r8, %r2, %r4, %r8;
st.global.v4.u32 [%rd19], {%r5, %r6, %r7, %r8};"""
    assert number(run(words(code, 4), x, 4)) == number(x[:2]) * number(x[2:])


@pytest.mark.parametrize(
    ("code", "given", "wanted"),
    [
        ("mul24.lo.u32 %r9, %r1, %r2;", (0xFF123456, 0xFFABCDEF), 0x123456 * 0xABCDEF & ALL),
        ("mul24.hi.s32 %r9, %r1, %r2;", (0xFFFFFE, 0x7FFFFF), (-2 * 0x7FFFFF >> 16) & ALL),
        ("mad24.lo.s32 %r9, %r1, %r2, %r3;", (5, 7, 100), 135),
        ("szext.clamp.s32 %r9, %r1, 4;", (0x1F8,), -8 & ALL),
        ("szext.wrap.u32 %r9, %r1, 40;", (0x1FF8,), 0xF8),
        ("fns.b32 %r9, %r1, 4, 2;", (0b11010001,), 6),
        ("fns.b32 %r9, %r1, 7, -3;", (0b11010001,), 4),
        ("fns.b32 %r9, %r1, 7, 3;", (0b11010001,), ALL),
        ("vadd4.u32.u32.u32.sat %r9, %r1, %r2, %r3;", (0xFF01807F, 0x02027F01, 0), 0xFF03FF80),
        ("vsub4.s32.s32.s32.sat %r9, %r1, %r2, %r3;", (0x80017F00, 0x0102FF01, 0), 0x80FF7FFF),
        ("vadd2.u32.u32.u32 %r9, %r1, %r2, %r3;", (0xFFFF0001, 0x00020003, 0), 0x00010004),
        ("vabsdiff4.u32.u32.u32.add %r9, %r1, %r2, %r3;", (0x01020304, 0x04030201, 1000), 1008),
        ("vavrg4.u32.u32.u32 %r9, %r1, %r2, %r3;", (0x01020304, 0x02020405, 0), 0x02020405),
        ("vset4.u32.u32.gt %r9, %r1, %r2, %r3;", (0x01050304, 0x04030201, 0), 0x00010101),
        ("vmin2.s32.s32.s32 %r9.h1, %r1, %r2, %r3;", (0x80000001, 0x00010002, 0xABCD), 0x8000ABCD),
        ("vmad.u32.u32.u32 %r9, %r1.b1, %r2.h1, %r3;", (0x3400, 0x50000, 7), 0x34 * 5 + 7),
        ("vadd.s32.s32.s32.sat %r9, %r1, %r2;", (0x7FFFFFFF, 5), 0x7FFFFFFF),
        ("vshl.u32.u32.u32.clamp.add %r9, %r1, %r2, %r3;", (3, 4, 1000), 1048),
        ("vset.u32.u32.le %r9, %r1.b0, %r2;", (0x105, 5), 1),
        ("cvt.pack.sat.u8.s32.b32 %r9, %r1, %r2, %r3;", (300, -5 & ALL, 0x1234), 0x1234FF00),
        ("cvt.pack.sat.s16.s32 %r9, %r1, %r2;", (40000, -40000 & ALL), 0x7FFF8000),
        ("set.gt.f16x2.f16x2 %r9, %r1, %r2;", (0x3C004000, 0x40003C00), 0x3C00),
        ("set.neu.u32.bf16x2 %r9, %r1, %r2;", (0x7FC03F80, 0x7FC03F80), 0xFFFF0000),
    ],
)
def test_words(code: str, given: tuple[int, ...], wanted: int) -> None:
    x = np.array([*given, 0, 0, 0], np.uint32)
    assert hex(run(words(f"{code} st.global.u32 [%rd19], %r9;", 3), x, 1)[0]) == hex(wanted)


@pytest.mark.parametrize("op", ["add", "mul", "div", "sqrt"])
def test_fp64_is_rounded_as_the_instruction_says(op: str) -> None:
    x = np.array([1.1, 3.3e-3, -1.1, 7e-17], np.float64)
    for a, b in ((0, 1), (2, 1), (0, 3)):
        found = {}
        for round_ in ("rm", "rz", "rp"):
            both = f"%fd{a}, %fd{b}" if op != "sqrt" else f"%fd{b}"
            code = "".join(f"ld.global.f64 %fd{n}, [%rd18+{8 * n}];" for n in range(4))
            code += f"{op}.{round_}.f64 %fd5, {both}; st.global.f64 [%rd19], %fd5;"
            found[round_] = Fraction(run(code, x, 1, np.float64)[0])
        first, second = Fraction(x[a]), Fraction(x[b])
        down, up = found["rm"], found["rp"]
        if op == "sqrt":
            assert down * down < second < up * up
        else:
            exact = {"add": first + second, "mul": first * second, "div": first / second}[op]
            assert down < exact < up
            assert found["rz"] == (down if exact > 0 else up)
        assert np.nextafter(float(down), np.inf) == float(up)


def test_rough_reciprocals() -> None:
    x = np.array([3.7, 1e300, 0.0, np.inf], np.float64)
    for op, wanted in (("rcp", 1 / 3.7), ("rsqrt", 3.7**-0.5)):
        code = "ld.global.f64 %fd1, [%rd18];"
        code += f"{op}.approx.ftz.f64 %fd2, %fd1; st.global.f64 [%rd19], %fd2;"
        found = run(code, x, 1, np.float64)
        assert found[0] == pytest.approx(wanted, rel=2.0**-19)
        assert found.view(np.uint64)[0] & ALL == 0


def test_spaces_of_addresses() -> None:
    code = """
mov.u64 %rd1, tile; cvta.shared.u64 %rd1, %rd1; mov.u64 %rd2, own; cvta.local.u64 %rd2, %rd2;
mov.u64 %rd3, constant; cvta.const.u64 %rd3, %rd3; mov.u64 %rd4, %rd18; mov.u32 %r5, 0;
"""
    for n in range(1, 5):
        for bit, space in enumerate(("shared", "local", "const", "global")):
            code += f"isspacep.{space} %p1, %rd{n}; selp.u32 %r4, {1 << (4 * n + bit)}, 0, %p1;"
            code += "add.u32 %r5, %r5, %r4;"
    found = run(f"{code} st.global.u32 [%rd19], %r5;", np.zeros(1, np.uint32), 1)
    assert hex(found[0]) == "0x84210"


def test_a_jump_by_a_table() -> None:
    code = """
shr.u32 %r1, %r19, 1; min.u32 %r1, %r1, 2;
T: .branchtargets A, B, C;
brx.idx %r1, T;
A: mov.u32 %r2, 10; bra E;
B: mov.u32 %r2, 20; bra E;
C: mov.u32 %r2, 30;
E: mul.wide.u32 %rd1, %r19, 4; add.u64 %rd1, %rd1, %rd19; st.global.u32 [%rd1], %r2;
"""
    y = np.zeros(6, np.uint32)
    assert kernel(code)(1, 6, np.zeros(1, np.uint32), y).ok
    np.testing.assert_array_equal(y, [10, 10, 20, 20, 30, 30])
    with pytest.raises(Failed, match="there is no table E"):
        kernel(code.replace("brx.idx %r1, T", "brx.idx %r1, E"))


def test_a_register_of_32_bits_below_zero_is_an_address_with_its_offset() -> None:
    code = "mov.u32 %r1, tile; sub.u32 %r1, %r1, 128; st.shared.u32 [%r1+132], 5;"
    code += "ld.shared.u32 %r2, [%r1+132]; st.global.u32 [%rd19], %r2;"
    assert run(code, np.zeros(1, np.uint32), 1)[0] == 5


def test_atomics_of_vectors_and_of_128_bits() -> None:
    x = np.array([1, 2, 3, 4], np.float32)
    code = "mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f40000000;"
    code += "atom.global.add.v2.f32 {%f3, %f4}, [%rd18], {%f1, %f2};"
    code += "red.global.add.v2.f32 [%rd18+8], {%f2, %f1}; st.global.v2.f32 [%rd19], {%f3, %f4};"
    np.testing.assert_array_equal(run(code, x, 2, np.float32), [1, 2])
    np.testing.assert_array_equal(x, [2, 4, 5, 5])
    halves = np.array([1, 5, -2, 0.5], np.float16)
    code = "mov.b32 %r1, 0x44004000; mov.b32 %r2, 0x3C003C00;"  # 4 and 2, 1 and 1
    run(f"{code} red.global.max.noftz.v2.f16x2 [%rd18], {{%r1, %r2}};", halves, 1)
    np.testing.assert_array_equal(halves, [2, 5, 1, 1])
    wide = np.array([5, 6, 7, 8], np.uint64)
    code = "ld.global.b128 %rq1, [%rd18]; ld.global.b128 %rq2, [%rd18+16];"
    code += "atom.global.cas.b128 %rq3, [%rd18], %rq1, %rq2; mov.b128 {%rd1, %rd2}, %rq3;"
    code += "st.global.v2.u64 [%rd19], {%rd1, %rd2}; mov.b128 %rq4, {%rd2, %rd1};"
    code += "atom.global.exch.b128 %rq3, [%rd18+16], %rq4;"
    np.testing.assert_array_equal(run(code, wide, 2, np.uint64), [5, 6])
    np.testing.assert_array_equal(wide, [7, 8, 6, 5])


def test_cache_hints_and_policies_change_nothing() -> None:
    code = "createpolicy.fractional.L2::evict_first.b64 %rd1, 1.0;"
    code += "ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%r1, %r2}, [%rd18], %rd1;"
    code += "st.global.L2::cache_hint.v2.u32 [%rd19], {%r2, %r1}, %rd1;"
    code += "prefetch.global.L2 [%rd18]; applypriority.global.L2::evict_normal [%rd18], 128;"
    found = run(code, np.array([3, 4], np.uint32), 2)
    np.testing.assert_array_equal(found, [4, 3])


def test_a_copy_with_a_predicate_takes_nothing() -> None:
    code = "setp.eq.u32 %p1, 0, 0; mov.u32 %r1, tile;"
    code += "cp.async.ca.shared.global [%r1], [%rd18], 4, %p1;"
    code += "cp.async.ca.shared.global [%r1+4], [%rd18+4], 4, !%p1; cp.async.wait_all;"
    code += "ld.shared.v2.u32 {%r2, %r3}, [%r1]; st.global.v2.u32 [%rd19], {%r2, %r3};"
    np.testing.assert_array_equal(run(code, np.array([7, 9], np.uint32), 2), [0, 9])


def test_a_bulk_copy_that_adds() -> None:
    x = np.arange(4, dtype=np.float32)
    code = "mov.u32 %r1, tile; mov.f32 %f1, 0f40000000; st.shared.v4.f32 [%r1], "
    code += "{%f1, %f1, %f1, %f1}; fence.proxy.async.shared::cta; mov.u32 %r2, 16;"
    code += "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd18], [%r1], %r2;"
    code += "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    run(code, x, 1)
    np.testing.assert_array_equal(x, [2, 3, 4, 5])
