"""Rules of the hardware that kernels of other people break, or rely on."""

from __future__ import annotations

import numpy as np
import pytest

from flashwright.lang.diagnostic import Failed
from tests.unit.ptx_kernels import kinds, run, store

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
        (".explicitcluster\n.reqnctapercluster 2, 1, 1", "its clusters have 2, 1, 1 blocks"),
        (".reqnctapercluster 1, 4", "its clusters have 1, 4 blocks"),
        (".maxntid 128\n.explicitcluster", "demands a cluster size of its launch"),
        (".explicitcluster\n.reqnctapercluster 1, 1, 1", ""),
    ],
)
def test_clusters_of_several_blocks_are_refused(directives: str, words: str) -> None:
    out = np.zeros(32, np.uint32)
    if not words:
        assert not run(store("%r0"), out, directives=directives).findings
        return
    with pytest.raises(Failed, match=f"k cannot be launched: .*{words}"):
        run(store("%r0"), out, directives=directives)
    assert not out.any(), "nothing has run"
