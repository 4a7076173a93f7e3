"""Rules of the hardware that kernels of other people break, or rely on."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import flashwright.emulate
from flashwright.emulate.places import Origin, diagnostics
from flashwright.lang.diagnostic import Failed
from tests.unit.ptx_kernels import HEAD, SCHEDULES, kinds, run, store

# --- predicates that are constants ------------------------------------------------------------

ONES = """
    .shared .align 128 .b8 tile[4096];
    mov.u32 %r2, tile;
    mad.lo.u32 %r3, %r0, 16, %r2;
    mov.u32 %r4, 0x3f803f80;
    st.shared.v4.u32 [%r3], {%r4, %r4, %r4, %r4};
    st.shared.v4.u32 [%r3+2048], {%r4, %r4, %r4, %r4};
    fence.proxy.async;
    bar.sync 0;
    shr.u32 %r5, %r2, 4;
    cvt.u64.u32 %rd1, %r5;
    or.b64 %rd1, %rd1, 0x1000080000;
    mov.f32 %f0, 0f41000000;
    mov.f32 %f1, %f0;
    mov.f32 %f2, %f0;
    mov.f32 %f3, %f0;
    wgmma.fence.sync.aligned;
    PRODUCT
    PRODUCT
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
"""
PRODUCT = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd1, %rd1,"
    " SCALE, 1, 1, 0, 0;"
)


@pytest.mark.parametrize(("scale", "wanted"), [("1", 8 + 2 * 16), ("-1", 8 + 2 * 16), ("0", 16)])
def test_wgmma_with_a_constant_scale_d(scale: str, wanted: float) -> None:
    """D begins at 8; each product of ones adds 16 to it, or replaces it."""
    out = np.zeros(128, np.float32)
    body = ONES.replace("PRODUCT", PRODUCT.replace("SCALE", scale))
    result = run(body + store("%f3"), out, threads=128)
    assert not result.findings
    assert (out == wanted).all()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("mov.pred %p1, 1;\nselp.u32 %r1, 3, 4, %p1;", 3),
        ("mov.pred %p1, 0;\nselp.u32 %r1, 3, 4, %p1;", 4),
        ("selp.u32 %r1, 3, 4, 1;", 3),
        ("setp.eq.and.u32 %p1, %r0, %r0, 1;\nselp.u32 %r1, 3, 4, %p1;", 3),
        ("and.pred %p1, %p0, 1;\nselp.u32 %r1, 3, 4, %p1;", 3),
        ("vote.sync.ballot.b32 %r1, 1, -1;", 0xFFFFFFFF),
    ],
)
def test_a_constant_predicate_holds_for_all_lanes(text: str, wanted: int) -> None:
    out = np.zeros(32, np.uint32)
    assert not run("setp.eq.u32 %p0, %r0, %r0;\n" + text + store(), out).findings
    assert (out == wanted).all()


def test_another_block_of_the_cluster_is_out_of_bounds() -> None:
    text = "mov.u32 %r2, 0;\nmapa.shared::cluster.u32 %r1, %r2, {};"
    assert not run(text.format(0), np.zeros(32, np.uint32)).findings
    assert kinds(run(text.format(1), np.zeros(32, np.uint32))) == {"out_of_bounds"}


# --- launches that are refused ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("directives", "words"),
    [
        (".explicitcluster\n.reqnctapercluster 2, 1, 1", "not a whole number of clusters of 2, 1"),
        (".reqnctapercluster 1, 20", "a cluster of 1, 20, 1 blocks is not one of 1 to 16"),
        (".maxntid 128\n.explicitcluster", "demands a cluster size of its launch"),
        (".explicitcluster\n.reqnctapercluster 1, 1, 1", ""),
    ],
)
def test_clusters_that_no_gpu_launches_are_refused(directives: str, words: str) -> None:
    out = np.zeros(32, np.uint32)
    if not words:
        assert not run(store("%r0"), out, directives=directives).findings
        return
    with pytest.raises(Failed, match=f"k cannot be launched: .*{words}"):
        run(store("%r0"), out, directives=directives)
    assert not out.any(), "nothing has run"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"grid": 2**31}, "grid.x is 2147483648, and a GPU takes at most 2147483647"),
        ({"grid": (1, 65536)}, "grid.y is 65536, and a GPU takes at most 65535"),
        ({"grid": (1, 1, 65536)}, "grid.z is 65536"),
        ({"grid": (2**20, 2**12)}, "4294967296 blocks are more than can be emulated"),
        ({"threads": 1025}, "block.x is 1025, and a GPU takes at most 1024"),
        ({"threads": (2, 1025)}, "block.y is 1025"),
        ({"threads": (1, 1, 65)}, "block.z is 65, and a GPU takes at most 64"),
        ({"threads": (32, 33)}, "a block has 1056 threads, and a GPU takes at most 1024"),
        ({"threads": 160, "directives": ".maxntid 128, 1, 1"}, "__launch_bounds__ allows 128"),
        ({"threads": 64, "directives": ".reqntid 128"}, "the block is 64, 1, 1, and .reqntid"),
        ({"shared": 227 * 1024 + 1}, "232449 bytes of shared memory, and sm_90a allows 232448"),
        ({"shared": -1}, "-1 bytes of shared memory"),
        ({"body": ".shared .b8 tile[49153];"}, "declares 49153 bytes of shared memory"),
        ({"body": ".local .b8 own[524289];"}, "524289 bytes of local memory"),
    ],
)
def test_launches_beyond_the_limits_of_a_gpu_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(Failed, match=re.escape(words)):
        run(out=np.zeros(1, np.uint32), **{"body": "", **given})


@pytest.mark.parametrize(
    "given",
    [
        {"threads": (1, 16, 64), "shared": 227 * 1024},
        {"threads": 128, "directives": ".maxntid 64, 2"},
        {"threads": (64, 2), "directives": ".reqntid 64, 2, 1"},
        {"body": ".shared .b8 tile[49152];", "shared": 1024, "grid": (1, 3, 2)},
    ],
)
def test_launches_within_the_limits_run(given: dict[str, Any]) -> None:
    assert not run(out=np.zeros(1, np.uint32), **{"body": "", **given}).findings


# --- races ------------------------------------------------------------------------------------

SUM = """
    .shared .align 4 .b32 sum;
    setp.eq.u32 %p0, %r0, 0;
    and.b32 %r3, %r0, 31;
    setp.eq.u32 %p1, %r3, 0;
    @%p0 st.shared.u32 [sum], 5;
    BEFORE
    @%p1 atom.shared.add.u32 %r4, [sum], 1;
    AFTER
    @%p0 ld.shared.u32 %r1, [sum];
"""
MEET = "bar.sync 0;"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("before", "after", "found"),
    [(MEET, MEET, set()), ("", MEET, {"race", "unwritten"}), (MEET, "", {"race"})],
)
def test_atomics_in_shared_memory_race_with_plain_accesses(
    schedule: str, before: str, after: str, found: set[str]
) -> None:
    """One lane of each of three warps adds to a sum that thread 0 sets and reads."""
    out = np.zeros(96, np.uint32)
    body = SUM.replace("BEFORE", before).replace("AFTER", after)
    told = kinds(run(body, out, 96, schedule))
    assert ("race" in told) == bool(found)
    assert told <= found


def test_an_atomic_changes_only_what_was_written() -> None:
    body = ".shared .align 4 .b32 sum;\natom.shared.OP.b32 %r1, [sum], %r0;"
    out = np.zeros(32, np.uint32)
    assert kinds(run(body.replace("OP", "or"), out)) == {"unwritten"}
    assert not kinds(run(body.replace("OP", "exch"), out))


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("st.shared.u32 [tile], %r0;", {"race"}),
        ("st.shared.u32 [tile], 7;", set()),
        ("st.global.u32 [%rd0], %r0;", {"race"}),
        ("st.global.u32 [%rd0], 7;", set()),
        ("xor.b32 %r1, %r0, 5;\nshl.b32 %r2, %r1, 2;\nst.shared.u32 [%r2], %r0;", set()),
        ("and.b32 %r1, %r0, 30;\nshl.b32 %r2, %r1, 2;\nst.shared.u32 [%r2], %r0;", {"race"}),
        ("and.b32 %r1, %r0, 30;\nshl.b32 %r2, %r1, 2;\nst.shared.u32 [%r2], %r1;", set()),
        ("mov.u32 %r2, tile;\nstmatrix.sync.aligned.m8n8.x1.shared.b16 [%r2], {%r0};", {"race"}),
    ],
)
def test_lanes_that_store_different_values_to_one_address(body: str, found: set[str]) -> None:
    out = np.zeros(32, np.uint32)
    result = run(".shared .align 16 .b8 tile[512];\n" + body, out)
    assert kinds(result) == found
    if found:
        (diagnostic,) = diagnostics(result.findings, Origin())
        assert "writes another value at the same time" in diagnostic.message


# --- lanes that execute an instruction together -----------------------------------------------

HALF = "setp.lt.u32 %p0, %r0, 16;\n"
MASKED = (
    "shfl.sync.bfly.b32 %r1, %r0, 1, 31, MASK;",
    "vote.sync.ballot.b32 %r1, %p1, MASK;",
    "bar.warp.sync MASK;",
    "match.any.sync.b32 %r1, %r0, MASK;",
    "redux.sync.add.u32 %r1, %r0, MASK;",
    "elect.sync _|%p1, MASK;",
)


@pytest.mark.parametrize("text", MASKED)
@pytest.mark.parametrize(
    ("form", "mask", "words"),
    [
        ("{}", "-1", ""),
        ("{}", "0xfffffffe", "thread 0 .* with the mask 0xfffffffe, without itself"),
        ("@%p0 {}", "0xffff", ""),
        ("@%p0 {}", "-1", "warp 0 .* with only a part of its warp"),
        ("@%p0 bra OVER;\n{}\nOVER:\n", "0xffff0000", ""),
        ("@%p0 bra OVER;\n{}\nOVER:\nbar.sync 0;", "-1", "with only a part of its warp"),
        ("@%p0 ret;\n{}", "-1", ""),
    ],
)
def test_masks_name_the_lanes_that_execute_an_instruction(
    text: str, form: str, mask: str, words: str
) -> None:
    body = HALF + "mov.pred %p1, %p0;\n" + form.format(text.replace("MASK", mask))
    result = run(body, np.zeros(32, np.uint32))
    assert kinds(result) == ({"divergent"} if words else set())
    if words:
        assert re.search(words, diagnostics(result.findings, Origin())[0].message)


# A sum over 16 lanes in %r4, by shuffles with a mask; `offset` is the first step.
def summed(offset: int, mask: str) -> str:
    steps = []
    while offset:
        steps.append(f"shfl.sync.down.b32 %r3, %r4, {offset}, 31, {mask};\nadd.u32 %r4, %r4, %r3;")
        offset //= 2
    return "mov.b32 %r4, %r0;\n" + "\n".join(steps) + "\n"


LOWER = HALF + "@!%p0 bra OVER;\n"
FIRST = "setp.eq.u32 %p1, %r0, 0;\n"
TILE = ".shared .align 4 .b8 tile[128];\nshl.b32 %r5, %r0, 2;\nst.shared.u32 [%r5], %r4;\n"


@pytest.mark.parametrize(
    ("body", "undefined"),
    [
        (summed(8, "0xffff") + FIRST + "@%p1 st.global.u32 [%rd0], %r4;", False),
        (summed(16, "-1") + FIRST + "@%p1 st.global.u32 [%rd0], %r4;", True),
        (summed(16, "0xffff") + FIRST + "@%p1 st.global.u32 [%rd0], %r4;", True),
        (summed(16, "-1") + FIRST + "@%p1 red.global.add.u32 [%rd0], %r4;", True),
        (summed(8, "0xffff") + "st.global.u32 [%rd0], 5;", False),
        (summed(8, "0xffff") + TILE + "ld.shared.u32 %r6, [tile];", False),
        (summed(8, "0xffff") + TILE + "ld.shared.u32 %r6, [tile+4];", True),
        (summed(8, "0xffff") + TILE + "st.shared.u32 [%r5], 1;\nld.shared.u32 %r6, [%r5];", False),
        (summed(16, "-1") + "selp.u32 %r4, %r4, 1, %p1;\nst.global.u32 [%rd0], %r4;", True),
        (summed(16, "-1") + "selp.u32 %r4, 1, %r4, %p0;\nst.global.u32 [%rd0], %r4;", False),
        (summed(16, "-1") + "mov.u32 %r4, 5;\nst.global.u32 [%rd0], %r4;", False),
        (summed(16, "-1") + "setp.gt.u32 %p2, %r4, 3;\n@%p2 bra OVER;", False),
        (summed(16, "-1") + "mul.wide.u32 %rd1, %r4, 4;\nld.shared.u32 %r6, [%rd1];", True),
        (summed(16, "-1") + "vote.sync.any.pred %p2, %p0, -1;\nst.global.u32 [%rd0], 5;", False),
    ],
)
def test_what_a_shuffle_reads_from_an_absent_lane_must_not_be_used(
    body: str, undefined: bool
) -> None:
    result = run(LOWER + FIRST + body + "\nOVER:\n", np.zeros(32, np.uint32))
    assert ("divergent" in kinds(result)) == undefined
    if undefined:
        (found,) = [one for one in result.findings if one.kind == "divergent"]
        assert found.instruction.opcode.startswith("shfl")
        message = diagnostics([found], Origin())[0].message
        assert re.search("reads the register of lane 1[6-9], which does not execute", message)


def test_votes_and_reductions_go_without_lanes_that_have_exited() -> None:
    text = """
    @!%p0 bra OVER;
    vote.sync.all.pred %p1, %p0, -1;
    selp.u32 %r2, 1000, 0, %p1;
    redux.sync.add.u32 %r1, 1, -1;
    add.u32 %r1, %r1, %r2;
"""
    out = np.zeros(32, np.uint32)
    body = "mov.u32 %r1, 1;\n" + HALF + text + store() + "OVER:\n"
    assert not run(body, out).findings
    assert (out[:16] == 1016).all()


BY_TMA = """
    .shared .align 8 .b64 bar;
    .shared .align 128 .b8 tile[128];
    mov.u32 %r2, bar;
    mov.u32 %r3, tile;
    setp.eq.u32 %p0, %r0, 0;
    setp.eq.u32 %p1, %r0, 32;
    @%p0 mbarrier.init.shared::cta.b64 [%r2], 1;
    MEET
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 64;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd0], 64, [%r2];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
    @!%p2 bra WAIT;
    ld.shared.u32 %r1, [tile+4];
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("meet", "ordered"),
    [
        ("bar.sync 0;", True),
        ("fence.mbarrier_init.release.cluster;\nbar.sync 0;", True),
        ("fence.proxy.async;", False),
        ("fence.mbarrier_init.release.cluster;", False),
    ],
)
def test_a_barrier_shows_the_initialisation_of_an_mbarrier_to_tma(
    meet: str, ordered: bool, schedule: str
) -> None:
    """A bulk copy accesses its mbarrier by the generic proxy (PTX ISA): it needs no proxy fence."""
    out = np.arange(64, dtype=np.uint32)
    result = run(BY_TMA.replace("MEET", meet) + store(), out, 64, schedule)
    if not ordered:  # thread 32 may also come before the initialisation
        assert kinds(result) & {"race", "barrier"}
        return
    assert not result.findings
    assert (out == 1).all()


def test_an_mbarrier_may_be_initialised_any_number_of_times() -> None:
    again = """
    mov.u32 %r5, 33000;
AGAIN:
    @%p0 mbarrier.init.shared::cta.b64 [%r2], 1;
    sub.u32 %r5, %r5, 1;
    setp.ne.u32 %p3, %r5, 0;
    @%p3 bra AGAIN;
    bar.sync 0;
"""
    out = np.arange(64, dtype=np.uint32)
    assert not kinds(run(BY_TMA.replace("MEET", again) + store(), out, 64))
    out = np.arange(64, dtype=np.uint32)
    early = BY_TMA.replace("MEET", again).replace("WAIT:", "ld.shared.u32 %r4, [tile+4];\nWAIT:")
    assert "race" in kinds(run(early + store(), out, 64))


# --- memory that was never written ------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "found"),
    [("", {"unwritten"}), ("st.local.u8 [own+4], %r0;", set()), ("st.local.u32 [own], %r0;", None)],
)
def test_local_memory_that_was_never_written(first: str, found: set[str] | None) -> None:
    """A copy of a struct may read its padding."""
    body = f".local .align 8 .b8 own[8];\n{first}\nld.local.u32 %r1, [own+4];\n"
    result = run(body, np.zeros(32, np.uint32))
    assert kinds(result) == ({"unwritten"} if found is None else found)
    if result.findings:
        message = diagnostics(result.findings, Origin())[0].message
        assert "reads local address 0x4, which nothing has written" in message


ADD = f"""{HEAD}.visible .entry k(.param .u64 x, .param .u64 y)
{{
.reg .b32 %r<4>;
.reg .b64 %rd<4>;
ld.param.u64 %rd0, [x];
ld.param.u64 %rd1, [y];
FIRST
ld.global.u32 %r1, [%rd0];
atom.global.add.u32 %r2, [%rd1], %r1;
ret;
}}
"""


def test_an_empty_array_has_to_be_written_first() -> None:
    add = flashwright.emulate.kernel(ADD.replace("FIRST", ""))
    x, y = np.full((2, 4), 3, np.uint32)
    empty = flashwright.emulate.empty
    assert add(1, 1, x, y).ok
    assert y[0] == 6
    assert kinds(add(1, 1, empty(x), y)) == {"unwritten"}
    assert kinds(add(1, 1, x, empty(y))) == {"unwritten"}
    stores = "st.global.u32 [%rd0], 1;\nst.global.u32 [%rd1], 1;\nbar.sync 0;"
    add = flashwright.emulate.kernel(ADD.replace("FIRST", stores))
    assert add(1, 1, empty(x), empty(y)).ok
    x.flags.writeable = False
    assert kinds(add(1, 1, empty(x), y)) == {"read_only", "unwritten"}, "the store is not made"


# --- special registers ------------------------------------------------------------------------


def test_clocks_go_on_and_other_registers_are_known() -> None:
    body = """
    mov.u32 %r1, WARP_SZ;
    mov.u64 %rd1, %clock64;
    mov.u32 %r2, %clock;
    mov.u64 %rd2, %globaltimer;
    sub.u64 %rd3, %rd2, %rd1;
    cvt.u32.u64 %r3, %rd3;
    mov.u32 %r4, %globaltimer_hi;
    mov.u64 %rd4, %gridid;
    cvt.u32.u64 %r5, %rd4;
WAIT:
    mov.u64 %rd5, %clock64;
    sub.u64 %rd6, %rd5, %rd1;
    setp.lt.u64 %p1, %rd6, 1000;
    @%p1 bra WAIT;
"""
    stores = [f"add.u32 %r9, %r0, {32 * n};\n" + store(f"%r{n + 1}", "%r9") for n in (0, 2, 3, 4)]
    out = np.zeros((5, 32), np.uint32)
    assert not run(body + "\n".join(stores), out).findings
    np.testing.assert_array_equal(out[[0, 2, 3, 4], 7], [32, 2, 0, 1])
