"""The machine's own rules, on kernels small enough to read."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashwright.emulate.emulate import launch
from flashwright.emulate.encode import encode
from flashwright.emulate.parse import parse
from flashwright.emulate.structs import Region
from flashwright.emulate.tensor_map import encode_tensor_map
from flashwright.lang.diagnostic import Failed
from tests.unit.ptx_kernels import BASE, HEAD, SCHEDULES, kinds, run, store

# --- control ----------------------------------------------------------------------------------


def test_lanes_part_and_meet_again() -> None:
    out = np.zeros(32, np.uint32)
    body = """
    mov.u32 %r1, 0;
    mov.u32 %r2, 0;
LOOP:
    setp.ge.u32 %p0, %r2, %r0;
    @%p0 bra DONE;
    add.u32 %r1, %r1, %r2;
    add.u32 %r2, %r2, 1;
    bra LOOP;
DONE:
    activemask.b32 %r3;
    add.u32 %r1, %r1, %r3;
"""
    result = run(body + store(), out)
    assert not result.findings
    lane = np.arange(32, dtype=np.uint32)
    np.testing.assert_array_equal(out, lane * (lane - 1) // 2 + np.uint32(0xFFFFFFFF))


def test_the_same_label_in_two_scopes_is_two_labels() -> None:
    out = np.zeros(32, np.uint32)
    part = (
        "{\n.reg .pred P;\nsetp.eq.u32 P, %r0, N;\n@P bra SKIP;\nadd.u32 %r1, %r1, 1;\nSKIP:\n}\n"
    )
    body = "mov.u32 %r1, 0;\n" + part.replace("N", "3") + part.replace("N", "5")
    run(body + store(), out)
    expected = np.full(32, 2)
    expected[[3, 5]] = 1
    np.testing.assert_array_equal(out, expected)


def test_a_kernel_that_never_ends_is_stopped() -> None:
    result = run("LOOP:\nbra LOOP;", np.zeros(1, np.uint32))
    assert kinds(result) == {"deadlock"}


def test_a_trap_stops_the_kernel() -> None:
    out = np.zeros(32, np.uint32)
    body = "mov.u32 %r1, 7;\nsetp.eq.u32 %p0, %r0, 9;\n@%p0 trap;\n"
    result = run(body + store(), out)
    assert kinds(result) == {"trap"}
    assert result.findings[0].lane == 9
    assert not out.any()


def test_special_registers_say_where_a_thread_is() -> None:
    out = np.zeros(3 * 64, np.uint32)
    body = """
    mov.u32 %r1, %ctaid.x;
    mad.lo.u32 %r2, %r1, 64, %r0;
    mov.u32 %r3, %laneid;
    mov.u32 %r4, %warpid;
    mad.lo.u32 %r4, %r4, 32, %r3;
    mad.lo.u32 %r1, %r1, 1000, %r4;
"""
    run(body + store("%r1", "%r2"), out, threads=64, grid=3)
    np.testing.assert_array_equal(
        out.reshape(3, 64) - np.arange(64), [[0] * 64, [1000] * 64, [2000] * 64]
    )


# --- memory -----------------------------------------------------------------------------------


def test_an_output_that_nobody_wrote_is_not_read() -> None:
    out = np.zeros(32, np.uint32)
    body = "mad.wide.u32 %rd1, %r0, 4, %rd0;\nld.global.u32 %r1, [%rd1];\n"
    assert kinds(run(body, out, use=2)) == {"unwritten"}
    assert not kinds(run(store("%r0") + body, out, use=2))
    assert not kinds(run(body, out, use=1))


def test_threads_own_memory_and_variables_of_the_module() -> None:
    out = np.zeros(32, np.uint32)
    text = f"""{HEAD}
.global .align 4 .u32 table[4] = {{5, 6, 7, 8}};
.visible .entry k(.param .u64 out)
{{
.local .align 8 .b8 depot[16];
.reg .b32 %r<8>;
.reg .b64 %rd<8>;
ld.param.u64 %rd0, [out];
mov.u32 %r0, %tid.x;
mov.u64 %rd1, depot;
cvta.local.u64 %rd2, %rd1;
st.u32 [%rd2+4], %r0;
and.b32 %r1, %r0, 3;
mov.u64 %rd3, table;
mad.wide.u32 %rd4, %r1, 4, %rd3;
ld.global.u32 %r2, [%rd4];
ld.local.u32 %r3, [%rd1+4];
add.u32 %r2, %r2, %r3;
{store("%r2").replace("%rd9", "%rd5")}
ret;
}}
"""
    module = parse(text)
    regions = [Region(BASE, out.nbytes, out.ctypes.data, 1)]
    program = encode(module, module.entries["k"])
    result = launch(program, regions, struct.pack("<Q", BASE), [1], [32], 0)
    assert not result.findings
    np.testing.assert_array_equal(out, np.arange(32) + 5 + np.arange(32) % 4)


ATOMICS: Mapping[str, int] = {
    "add.u32": 3 * 32 + 100,
    "max.u32": 100,
    "min.u32": 3,
    "or.b32": 103,
    "exch.b32": 3,
    "inc.u32": 29,
}


@pytest.mark.parametrize("operation", ATOMICS)
def test_atomic_operations_are_all_done(operation: str) -> None:
    out = np.full(1, 100, np.uint32)
    body = "mov.u32 %r1, 3;\nred.global.OP [%rd0], %r1;\n".replace("OP", operation)
    if operation == "inc.u32":  # up to 40, then from 0 again
        out[0], body = 38, body.replace("%r1, 3", "%r1, 40")
    assert not run(body, out).findings
    assert out[0] == ATOMICS[operation]


@pytest.mark.parametrize(("kind", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_sums_of_16_bits(kind: str, dtype: Any) -> None:
    """Each addition is rounded: from 2048 on an fp16 has no odd numbers, from 256 on a bf16."""
    out = np.array([0, 1, 0, 0], dtype)
    one = int(np.ones(1, dtype).view(np.uint16)[0])
    body = f"mov.b16 %h1, {one};\natom.add.noftz.{kind} %h2, [%rd0+2], %h1;"
    assert not run(body + f"red.global.add.noftz.{kind} [%rd0+4], %h1;", out, 32, grid=80).findings
    assert out.astype(float).tolist() == [0, *((2048,) * 2 if kind == "f16" else (256,) * 2), 0]


def test_atomics_that_compare_16_bits() -> None:
    out = np.zeros(2, np.uint16)
    body = "cvt.u16.u32 %h1, %r0;\nadd.u16 %h3, %h1, 1;\n"
    assert not run(body + "atom.global.cas.b16 %h2, [%rd0+2], %h1, %h3;", out, 32).findings
    assert out.tolist() == [0, 32]  # each lane finds what the one before has left


@pytest.mark.parametrize("count", [1, 2, 4])
def test_reductions_add_to_neighbours(count: int) -> None:
    out = np.zeros(8, np.float32)
    values = [f"mov.f32 %f{n}, 0f{0x3F800000 + (n << 23):08X};" for n in range(count)]  # 1, 2, 4, 8
    operand = ", ".join(f"%f{n}" for n in range(count))
    how, given = (f".v{count}", f"{{{operand}}}") if count > 1 else ("", operand)
    add = f"red.relaxed.gpu.global.add{how}.f32 [%rd0+16], {given};"
    result = run("\n".join([*values, "setp.lt.u32 %p0, %r0, 3;", f"@%p0 {add}"]), out, grid=2)
    assert not result.findings
    wanted = [2.0 * 3 * 2**n if n < count else 0 for n in range(4)]
    np.testing.assert_array_equal(out, [0, 0, 0, 0, *wanted])


def test_sums_in_global_memory_flush_subnormal_numbers() -> None:
    tiny = np.float32(2.0**-127)
    out = np.array([tiny, 0, 3 * tiny, 1], np.float32)  # subnormal, none, normal, far greater
    add = "mad.wide.u32 %rd9, %r0, 4, %rd0;\n@%p0 red.global.add.f32 [%rd9], %f0;"
    body = f"setp.lt.u32 %p0, %r0, 4;\nmov.b32 %f0, {int(tiny.view(np.uint32))};\n{add}"
    assert not run(body, out).findings
    np.testing.assert_array_equal(out, np.array([0, 0, 3 * tiny, 1], np.float32))


def test_a_vector_of_reductions_is_aligned() -> None:
    body = "mov.f32 %f0, 0f3F800000;\nred.global.add.v2.f32 [%rd0+4], {%f0, %f0};"
    assert kinds(run(body, np.zeros(8, np.float32))) == {"misaligned"}


@pytest.mark.parametrize(
    "text",
    [
        "red.global.add.v2.f32 [%rd0], {%f0, %f0, %f0};",
        "red.global.add.v2.f32 [%rd0], %f0;",
        "red.global.min.v2.f32 [%rd0], {%f0, %f0};",
        "red.shared.add.v2.f32 [%r1], {%f0, %f0};",
        "red.global.add.f32 [%rd0], {%f0, %f0};",
    ],
)
def test_vectors_of_reductions_that_there_are_not(text: str) -> None:
    with pytest.raises(Failed):
        run(text, np.zeros(8, np.float32))


ADD = "mov.f32 %f0, 0f3F800000;\nred.global.add.f32 [%rd0], %f0;\n"
LOAD = "setp.eq.u32 %p0, %r0, 0;\n@%p0 ld.global.f32 %f1, [%rd0];\n"


@pytest.mark.parametrize(
    ("body", "threads", "grid", "races"),
    [
        (ADD, 64, 3, False),
        (ADD + LOAD, 32, 1, True),  # other lanes of the warp
        (ADD + "bar.warp.sync -1;\n" + LOAD, 32, 1, False),
        (ADD + "bar.warp.sync -1;\n" + LOAD, 64, 1, True),  # other warps
        (ADD + "bar.sync 0;\n" + LOAD, 64, 1, False),
        (ADD + "bar.sync 0;\n" + LOAD, 64, 2, True),  # other blocks
        (LOAD + "bar.sync 0;\n" + ADD, 64, 2, True),
        (ADD + "bar.sync 0;\n" + LOAD + "atom.global.add.u32 %r1, [%rd0+4], 1;\n", 64, 2, False),
    ],
)
def test_plain_accesses_beside_reductions(body: str, threads: int, grid: int, races: bool) -> None:
    out = np.zeros(8, np.float32)
    for schedule in SCHEDULES:
        found = kinds(run(body, out, threads, schedule, grid=grid))
        assert found == ({"race"} if races else set())


# --- barriers ---------------------------------------------------------------------------------

EXCHANGE = """
    .shared .align 16 .b8 tile[1024];
    mov.u32 %r2, tile;
    mad.lo.u32 %r3, %r0, 4, %r2;
    st.shared.u32 [%r3], %r0;
    MEET
    xor.b32 %r4, %r0, WITH;
    mad.lo.u32 %r5, %r4, 4, %r2;
    ld.shared.u32 %r1, [%r5];
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("limit", [0, 37, 96])
@pytest.mark.parametrize("spelled", ["bar.red", "barrier.cta.red"])
def test_a_barrier_reduces_predicates(spelled: str, limit: int, schedule: str) -> None:
    """Of all threads, also where some exit before: how many hold, whether all do, whether one."""
    out = np.zeros(3 * 128, np.uint32)
    body = f"""
    setp.lt.u32 %p0, %r0, {limit};
    setp.ge.u32 %p1, %r0, 96;
    @%p1 ret;
    {spelled}.popc.aligned.u32 %r1, 0, %p0;
    {spelled}.and.aligned.pred %p2, 0, %p0;
    {spelled}.or.aligned.pred %p3, 1, 96, !%p0;
    selp.u32 %r2, 1, 0, %p2;
    selp.u32 %r3, 1, 0, %p3;
    mad.wide.u32 %rd9, %r0, 12, %rd0;
    st.global.u32 [%rd9], %r1;
    st.global.u32 [%rd9+4], %r2;
    st.global.u32 [%rd9+8], %r3;
    """
    result = run(body, out, threads=128, schedule=schedule)
    assert not result.findings
    assert (out.reshape(128, 3)[:96] == [limit, limit == 96, limit < 96]).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("meet", "other", "found"),
    [
        ("bar.sync 0;", 32, set()),
        ("bar.sync 1, 64;", 32, set()),
        ("bar.warp.sync -1;", 1, set()),
        ("bar.sync 0;", 1, set()),
        ("", 1, {"race"}),  # lanes of a warp go their own ways
        ("bar.warp.sync -1;", 32, {"race", "unwritten"}),
        ("", 0, set()),
    ],
)
def test_what_orders_two_threads(schedule: str, meet: str, other: int, found: set[str]) -> None:
    out = np.zeros(64, np.uint32)
    body = EXCHANGE.replace("MEET", meet).replace("WITH", str(other))
    result = run(body + store(), out, threads=64, schedule=schedule)
    assert kinds(result) <= found if found else not result.findings
    assert bool(result.findings) == bool(found)
    if not found:
        np.testing.assert_array_equal(out, np.arange(64) ^ other)


def test_bytes_beside_each_other_are_no_race() -> None:
    body = """
    .shared .align 16 .b8 tile[64];
    mov.u32 %r2, tile;
    add.u32 %r3, %r2, %r0;
    st.shared.u8 [%r3], %r0;
    bar.sync 0;
    ld.shared.u8 %r1, [%r3];
"""
    out = np.zeros(64, np.uint32)
    assert not run(body + store(), out, threads=64).findings
    np.testing.assert_array_equal(out, np.arange(64))


MBARRIER = """
    .shared .align 8 .b64 bar;
    .shared .align 4 .b32 word;
    mov.u32 %r2, bar;
    mov.u32 %r3, word;
    setp.ne.u32 %p0, %r0, 0;
    @!%p0 mbarrier.init.shared::cta.b64 [%r2], COUNT;
    bar.sync 0;
    setp.lt.u32 %p1, %r0, 32;
    @%p1 bra CONSUME;
    setp.ne.u32 %p2, %r0, 32;
    @!%p2 st.shared.u32 [%r3], 77;
    @!%p2 mbarrier.arrive.shared::cta.b64 _, [%r2];
    bra END;
CONSUME:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r2], 0;
    @!%p3 bra CONSUME;
    ld.shared.u32 %r1, [%r3];
END:
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_mbarrier_hands_on_what_was_known(schedule: str) -> None:
    out = np.zeros(64, np.uint32)
    guarded = "@%p1 bra STORE;\nbra OVER;\nSTORE:\n" + store() + "OVER:\n"
    result = run(MBARRIER.replace("COUNT", "1") + guarded, out, threads=64, schedule=schedule)
    assert not result.findings
    assert (out[:32] == 77).all()
    stuck = run(MBARRIER.replace("COUNT", "2"), out, threads=64, schedule=schedule)
    assert kinds(stuck) == {"deadlock"}
    assert stuck.findings[0].detail == (1, 0)
    early = MBARRIER.replace("COUNT", "1").replace("@!%p3 bra CONSUME;\n", "")
    wrong = kinds(run(early, out, threads=64, schedule=schedule))
    assert wrong <= {"race", "unwritten"}


COPIED = """
    .shared .align 8 .b64 bar;
    .shared .align 256 .b8 tile[256];
    mov.u32 %r2, bar;
    mov.u32 %r3, tile;
    mad.lo.u32 %r4, %r0, 4, %r3;
    mad.wide.u32 %rd1, %r0, 4, %rd0;
    setp.ne.u32 %p0, %r0, 0;
    @!%p0 mbarrier.init.shared::cta.b64 [%r2], COUNT;
    bar.sync 0;
    cp.async.ca.shared.global [%r4], [%rd1], 4;
    ARRIVE
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r2], 0;
    @!%p3 bra WAIT;
    xor.b32 %r4, %r4, 128;
    ld.shared.u32 %r1, [%r4];
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_arrive_at_an_mbarrier(schedule: str) -> None:
    """Each of 64 lanes when its own is there; without .noinc the barrier counts one more first."""
    arrive = "cp.async.mbarrier.arrive{}.shared::cta.b64 [%r2];"
    both = arrive.format("") + "\nmbarrier.arrive.shared::cta.b64 _, [%r2];"
    for count, how in ((64, arrive.format(".noinc")), (64, both)):
        out = np.arange(64, dtype=np.uint32)
        body = COPIED.replace("COUNT", str(count)).replace("ARRIVE", how)
        result = run(body + store(), out, threads=64, schedule=schedule)
        assert not result.findings
        np.testing.assert_array_equal(out, np.arange(64) ^ 32)
    out = np.arange(64, dtype=np.uint32)
    stuck = run(body.replace("], 64;", "], 65;"), out, threads=64, schedule=schedule)
    assert kinds(stuck) == {"deadlock"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_behind_the_arrival_are_not_waited_for(schedule: str) -> None:
    arrive = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r2];"
    copy = "cp.async.ca.shared.global [%r4], [%rd1], 4;"
    body = COPIED.replace("COUNT", "64").replace(copy, "").replace("ARRIVE", f"{arrive}\n{copy}")
    out = np.arange(64, dtype=np.uint32)
    found = kinds(run(body, out, threads=64, schedule=schedule))
    assert "race" in found
    assert found <= {"race", "unwritten"}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bytes_that_a_thread_completes(schedule: str) -> None:
    expect = "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r2], 64;\n"
    complete = "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r2], BYTES;\n"
    body = MBARRIER.replace("COUNT", "1").replace(
        "    @!%p2 mbarrier.arrive", f"@!%p2 {expect}@!%p2 {complete}    @!%p2 mbarrier.arrive"
    )
    out = np.zeros(64, np.uint32)
    assert not run(body.replace("BYTES", "64"), out, threads=64, schedule=schedule).findings
    stuck = run(body.replace("BYTES", "48"), out, threads=64, schedule=schedule)
    assert kinds(stuck) == {"deadlock"}
    assert stuck.findings[0].detail == (0, 16)


def test_conversions_in_wider_registers() -> None:
    """The upper bits are not read, and are written with the sign."""
    body = """
    mad.lo.u32 %r2, %r0, 257, 0x1f0;
    cvt.s8.s32 %r1, %r2;
    cvt.s32.s8 %r3, %r2;
    cvt.u8.u32 %r4, %r2;
    sub.u32 %r5, %r1, %r3;
    mad.lo.u32 %r1, %r5, 1000, %r4;
"""
    out = np.zeros(32, np.uint32)
    assert not run(body + store(), out).findings
    np.testing.assert_array_equal(out, (np.arange(32) * 257 + 0x1F0) & 0xFF)
    body = "cvt.u64.u16 %rd1, %r0;\ncvt.s16.s64 %rd2, -2;\ncvt.u32.u64 %r1, %rd2;\n"
    assert not run(body + store(), out).findings
    assert (out == 0xFFFFFFFE).all()


# --- TMA --------------------------------------------------------------------------------------

LOADED = """
    .shared .align 8 .b64 bar;
    .shared .align 128 .b8 tile[128];
    mov.u32 %r2, bar;
    mov.u32 %r3, tile;
    setp.eq.u32 %p0, %r0, 0;
    @%p0 mbarrier.init.shared::cta.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
    @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 64;
    @%p0 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
         [%r3], [%rd0, {X, Y}], [%r2];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], 0;
    @!%p1 bra WAIT;
"""
STORED = """
    .shared .align 128 .b8 tile[128];
    mov.u32 %r3, tile;
    mad.lo.u32 %r4, %r0, 4, %r3;
    setp.eq.u32 %p0, %r0, 0;
    st.shared.u32 [%r4], %r0;
    fence.proxy.async;
    bar.sync 0;
    @%p0 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd0, {X, Y}], [%r3];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
"""
FORBIDDEN: list[tuple[str, int, tuple[int, int], dict[str, tuple[int, int]]]] = [
    *((LOADED, 2, at, {}) for at in ((0, 0), (8, 1), (-8, -3), (-16, 0), (32, 0), (0, 4), (0, -9))),
    *((LOADED, 2, (x, 1), {"misaligned": (0, x)}) for x in (5, -3, 4, 12, 1001)),
    (LOADED, 4, (4, 0), {}),
    (LOADED, 4, (2, 0), {"misaligned": (0, 2)}),
    (LOADED, 1, (16, 0), {}),
    (LOADED, 1, (8, 0), {"misaligned": (0, 8)}),
    *((STORED, 2, at, {}) for at in ((0, 0), (8, 3), (32, 0), (0, 4), (1000, 1000))),
    (STORED, 2, (5, 1), {"misaligned": (0, 5)}),
    (STORED, 2, (-8, 0), {"out_of_bounds": (0, -8)}),
    (STORED, 2, (0, -2), {"out_of_bounds": (1, -2)}),
    (STORED, 2, (-3, 0), {"misaligned": (0, -3), "out_of_bounds": (0, -3)}),
]


@pytest.mark.parametrize(("body", "size", "at", "found"), FORBIDDEN)
def test_where_a_box_may_begin(
    body: str, size: int, at: tuple[int, int], found: dict[str, tuple[int, int]]
) -> None:
    """The map, and behind it its tensor: 4 rows of 64 bytes, and boxes of 2 rows of 32."""
    out = np.zeros(128 + 4 * 64, np.uint8)
    sizes, box = (64 // size, 4), (32 // size, 2)
    map_ = encode_tensor_map(BASE + 128, sizes, [64], box, size)
    out[:128] = np.frombuffer(map_, np.uint8)
    for schedule in SCHEDULES:
        text = body.replace("X, Y", f"{at[0]}, {at[1]}")
        told = run(text, out, schedule=schedule).findings
        assert {f.kind: f.detail for f in told} == found
        assert all(f.address == BASE + 128 for f in told)


# --- what cannot be ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("frob.u32 %r1, %r2;", "does not know frob.u32"),
        ("add.u32 %r1, %r2, %r99;", "%r99 is not declared"),
        ("bra NOWHERE;", "no label NOWHERE"),
        ("ld.global.u32 %r1, [%rd0;", "expected"),
    ],
)
def test_what_cannot_be_executed_is_told_with_its_line(line: str, words: str) -> None:
    with pytest.raises(Failed) as failed:
        run(line, np.zeros(1, np.uint32))
    (diagnostic,) = failed.value.diagnostics
    assert diagnostic.code == "FW831"
    assert words in diagnostic.message
    assert "PTX line 12:" in diagnostic.message


def test_a_schedule_that_is_none() -> None:
    with pytest.raises(ValueError, match="there are eager, lazy and random:SEED"):
        run("", np.zeros(1, np.uint32), schedule="sometimes")


# --- counts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("stride", "waves"), [(4, 1), (8, 2), (128, 32), (132, 1)])
def test_bank_conflicts_are_counted(stride: int, waves: int) -> None:
    body = f"""
    .shared .align 16 .b8 tile[8192];
    mov.u32 %r2, tile;
    mad.lo.u32 %r3, %r0, {stride}, %r2;
    st.shared.u32 [%r3], %r0;
"""
    result = run(body, np.zeros(1, np.uint32))
    row = result.counts[[n for n, c in enumerate(result.counts[:, 3]) if c]]
    assert row[0, 3:5].tolist() == [waves, 1]
    assert row[0, :3].tolist() == [1, 32, 128]


@pytest.mark.parametrize(("stride", "sectors"), [(4, 4), (32, 32), (0, 1)])
def test_sectors_are_counted(stride: int, sectors: int) -> None:
    out = np.zeros(32 * 8, np.uint32)
    body = f"mad.wide.u32 %rd1, %r0, {stride}, %rd0;\nld.global.u32 %r1, [%rd1];\n"
    counts = run(body, out).counts
    assert counts[:, 5:7].max(axis=0).tolist() == [sectors, 1]


NUMBERS = np.random.default_rng(0).integers(0, 2**32, (3, 32), dtype=np.uint32)


def bytes_of(word: int, kind: str, size: int) -> list[int]:
    whole = np.array([word], np.uint32)
    return [int(x) for x in whole.view(f"{kind.replace('s', 'i')}{size}")]


@pytest.mark.parametrize("second", ["u", "s"])
@pytest.mark.parametrize("first", ["u", "s"])
@pytest.mark.parametrize("opcode", ["dp4a", "dp2a.lo", "dp2a.hi"])
def test_products_of_bytes(opcode: str, first: str, second: str) -> None:
    wanted = []
    for a, b, c in NUMBERS.T.tolist():
        if opcode == "dp4a":
            pairs = zip(bytes_of(a, first, 1), bytes_of(b, second, 1), strict=True)
        else:
            half = bytes_of(b, second, 1)[2 * (opcode == "dp2a.hi") :][:2]
            pairs = zip(bytes_of(a, first, 2), half, strict=True)
        wanted.append((c + sum(x * y for x, y in pairs)) % 2**32)
    assert computed(f"{opcode}.{first}32.{second}32 %r1, %r1, %r2, %r3;", *NUMBERS) == wanted


def test_masks_of_bits() -> None:
    """Clamped at the top; else place and number wrap around."""
    first = np.array([0, 3, 31, 32, 40, 4, 0, 8] * 4, np.uint32)
    count = np.array([5, 4, 2, 1, 3, 0, 32, 40] * 4, np.uint32)
    clamped = [0x1F, 0x78, 0x80000000, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFF00]
    wrapped = [0x1F, 0x78, 0x80000000, 1, 0x700, 0, 0, 0xFF00]
    for mode, wanted in (("clamp", clamped), ("wrap", wrapped)):
        assert computed(f"bmsk.{mode}.b32 %r1, %r1, %r2;", first, count, first) == wanted * 4


def computed(body: str, *given: Any) -> list[int]:
    """%r1 in each lane, behind an instruction that has three words in %r1, %r2 and %r3."""
    out = np.concatenate([*given, np.zeros(32, np.uint32)])
    loads = [f"ld.global.u32 %r{n + 1}, [%rd9+{128 * n}];" for n in range(3)]
    where = "mad.wide.u32 %rd9, %r0, 4, %rd0;"
    result = run("\n".join([where, *loads, body, "st.global.u32 [%rd9+384], %r1;"]), out)
    assert not result.findings
    return [int(x) for x in out[96:]]
