"""The counts of an emulated launch: by kind of instruction, by level of memory, by line."""

from __future__ import annotations

import numpy as np
import pytest

from flashwright.emulate.emulate import COUNTS
from flashwright.emulate.places import Origin
from flashwright.emulate.profile import KINDS, kind, levels, operations, profile
from flashwright.emulate.ptx import Instruction, SourceLine
from flashwright.lower.source_map import SourceMap, Stretch

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
WGMMA = "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16"
LOAD = "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group"


def one(opcode: str, line: int = 0) -> Instruction:
    return Instruction(opcode, (), None, 1, (SourceLine("kernel.cu", line),) if line else ())


@pytest.mark.parametrize(
    ("opcode", "wanted"),
    [
        (MMA, "mma"),
        (WGMMA, "wgmma"),
        ("wgmma.wait_group.sync.aligned", "wait"),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "ldmatrix"),
        ("cp.async.cg.shared.global", "cp.async"),
        ("cp.async.wait_group", "wait"),
        (LOAD, "tma"),
        (STORE, "tma"),
        ("cp.async.bulk.commit_group", "wait"),
        ("ld.global.nc.v4.u32", "global"),
        ("st.volatile.global.f32", "global"),
        ("ld.shared.f32", "shared"),
        ("ld.param.u64", "parameters"),
        ("bar.sync", "barrier"),
        ("mbarrier.init.shared::cta.b64", "barrier"),
        ("mbarrier.try_wait.parity.shared::cta.b64", "wait"),
        ("fence.proxy.async", "barrier"),
        ("shfl.sync.bfly.b32", "exchange"),
        ("cvt.rn.bf16x2.f32", "conversion"),
        ("cvta.to.global.u64", "move"),
        ("ex2.approx.ftz.f32", "special"),
        ("rcp.approx.ftz.f32", "special"),
        ("bra.uni", "control"),
        ("ret", "control"),
        ("mov.b32", "move"),
        ("fma.rn.f32", "arithmetic"),
        ("max.f32", "arithmetic"),
        ("setp.lt.f32", "arithmetic"),
        ("mad.lo.s32", "integer"),
        ("shl.b32", "integer"),
        ("setp.lt.s32", "integer"),
        ("and.pred", "integer"),
        ("red.global.add.f32", "atomic"),
    ],
)
def test_kinds(opcode: str, wanted: str) -> None:
    assert kind(one(opcode)) == wanted
    assert wanted in KINDS


def test_the_operations_of_a_product_come_from_its_shape() -> None:
    assert operations(one(MMA)) == 2 * 16 * 8 * 16
    assert 4 * operations(one(WGMMA)) == 2 * 64 * 128 * 16, "four warps share one"
    assert operations(one("wgmma.fence.sync.aligned")) == 0
    assert operations(one("ldmatrix.sync.aligned.m8n8.x4.shared.b16")) == 0


@pytest.mark.parametrize(
    ("opcode", "wanted"),
    [
        ("ld.global.f32", {"global_read"}),
        ("st.global.f32", {"global_written"}),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", {"shared_read"}),
        ("stmatrix.sync.aligned.m8n8.x4.shared.b16", {"shared_written"}),
        ("cp.async.ca.shared.global", {"global_read", "shared_written"}),
        (LOAD, {"global_read", "shared_written"}),
        (STORE, {"shared_read", "global_written"}),
        ("mov.b32", set()),
    ],
)
def test_levels(opcode: str, wanted: set[str]) -> None:
    assert set(levels(one(opcode))) == wanted


def counts(**told: int) -> list[int]:
    return [told.get(name, 0) for name in COUNTS]


def test_lines_add_up_to_the_whole() -> None:
    map = SourceMap(lines=(Stretch(cu=(10, 12), tl=(2, 2)), Stretch(cu=(20, 20), tl=(1, 1))))
    source = [one(MMA, 11), one(MMA, 12), one("ld.shared.f32", 20), one("mov.b32"), one("ret", 11)]
    table = np.array(
        [
            counts(executed=3),
            counts(executed=5),
            counts(executed=2, bytes=256, wavefronts=8, ideal=2),
            counts(executed=7),
            counts(),
        ]
    )
    found = profile(source, table, Origin(map=map, tl="Copy K\nCompute GEMM\n"))
    assert found.of == "code.tl"
    assert [(row.line, row.text, row.executed) for row in found.lines] == [
        (1, "Copy K", 2),
        (2, "Compute GEMM", 8),
        (None, "", 7),
    ]
    assert found.total.executed == 17
    assert found.lines[1].operations == found.total.operations == 8 * 4096
    assert found.lines[0].conflicts == 4.0
    assert found.lines[1].conflicts is None
    record = found.record()
    assert record["lines"][0]["bytes"]["shared_read"] == 256
    assert record["lines"][1]["instructions"] == {"mma": 8}
