"""Snippets: barriers in shared memory, and copies that complete on them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.hardware.formats import Array
from tests.hardware.operands import draw
from tests.hardware.snippet import WARP, Operands, Snippet

DECLARES = """
.shared .align 8 .b64 barrier;
.reg .b32 %barrier, %tile, %at, %tries;
.reg .b64 %state, %wide;
.reg .pred %p, %first;
"""
START = """
mov.u32 %barrier, barrier;
setp.eq.u32 %first, %t, 0;
"""
READY = """
fence.mbarrier_init.release.cluster;
fence.proxy.async.shared::cta;
bar.sync 0;
"""
WAIT = """
mov.u32 %tries, 0;
again:
mbarrier.try_wait.parity.shared::cta.b64 %p, [%barrier], 0;
@%p bra there;
add.s32 %tries, %tries, 1;
setp.lt.u32 %p, %tries, 1000;
@%p bra again;
there:
"""  # not for ever: a wrong idea of the hardware must not hang it


def _words(key: str) -> Operands:
    return [draw(key, 2 * WARP).astype(np.uint32)]


class _Steps:
    """A body whose every question has a result."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.results = 0

    def say(self, text: str) -> None:
        self.lines += text.strip().split("\n")

    def ask(self, text: str, result: str) -> None:
        """`result` is PTX that makes an answer of it."""
        self.say(text)
        self.lines.append(result.format(f"%o{self.results}"))
        self.results += 1

    def passed(self, how: str, parity: int) -> None:
        opcode = f"mbarrier.{how}.parity.shared::cta.b64"
        self.ask(f"{opcode} %p, [%barrier], {parity};", "selp.b32 {}, 1, 0, %p;")


def phases() -> Iterator[Snippet]:
    """Two arrivals to a phase, by one lane; what waiting says before, between and after them."""
    for how in ("test_wait", "try_wait"):
        steps = _Steps()
        steps.say(START)
        steps.say("@%first mbarrier.init.shared::cta.b64 [%barrier], 2;\nbar.sync 0;")
        for _ in range(5):  # arrivals: two phases and a half
            for parity in (0, 1):
                # try_wait may wait a while where the answer is no: no matter.
                steps.passed(how, parity)
            steps.say("bar.warp.sync -1;")
            steps.say("@%first mbarrier.arrive.shared::cta.b64 %state, [%barrier];")
            steps.say("bar.warp.sync -1;")
        steps.passed(how, 0)
        steps.passed(how, 1)
        yield Snippet(
            f"mbarrier phases by {how}",
            "barriers",
            "\n".join(steps.lines),
            ("b32",),
            ("b32",) * steps.results,
            lambda: _words("phases"),
            arch="sm_90",
            declares=DECLARES,
            model=_passed,
        )


def _passed(a: Array) -> Operands:
    """After each arrival, for both parities: whether the phase under way is of the other one."""
    return [
        np.full_like(a, arrived // 2 % 2 != parity) for arrived in range(6) for parity in (0, 1)
    ]


def arrivals() -> Iterator[Snippet]:
    """Every lane arrives; arrivals of several; expected bytes that a bulk copy brings."""
    whole = "@%first mbarrier.init.shared::cta.b64 [%barrier], 32;\nbar.sync 0;\n"
    for name, arrive in (
        ("arrive", "mbarrier.arrive.shared::cta.b64 %state, [%barrier];"),
        ("arrive to nobody", "mbarrier.arrive.shared::cta.b64 _, [%barrier];"),
        ("arrive by count", "@%first mbarrier.arrive.shared::cta.b64 %state, [%barrier], 32;"),
        ("arrive release", "mbarrier.arrive.release.cta.shared::cta.b64 %state, [%barrier];"),
        (
            "arrive in a cluster of one",
            "mapa.shared::cluster.u32 %at, %barrier, 0;\n"
            "mbarrier.arrive.shared::cluster.b64 _, [%at];",
        ),
    ):
        steps = _Steps()
        steps.say(START + whole)
        steps.passed("test_wait", 0)
        steps.say("bar.warp.sync -1;\n" + arrive + "\nbar.warp.sync -1;")
        steps.passed("test_wait", 0)
        steps.passed("test_wait", 1)
        yield Snippet(
            f"mbarrier {name}",
            "barriers",
            "\n".join(steps.lines),
            ("b32",),
            ("b32",) * steps.results,
            lambda: _words("arrive"),
            arch="sm_90",
            declares=DECLARES,
        )


def tokens() -> Iterator[Snippet]:
    """Waiting by what an arrival gave back; bytes that are expected before anybody arrives."""
    steps = _Steps()
    steps.say(START + "@%first mbarrier.init.shared::cta.b64 [%barrier], 2;\nbar.sync 0;")
    steps.say("@%first mbarrier.arrive.shared::cta.b64 %state, [%barrier];")
    test = "mbarrier.test_wait.shared::cta.b64 %p, [%barrier], %state;"
    false = "setp.ne.b32 %p, 0, 0;\n"
    steps.ask(f"{false}@%first {test}", "selp.b32 {}, 1, 0, %p;")
    steps.say("@%first mbarrier.arrive.shared::cta.b64 _, [%barrier];")
    steps.ask(f"{false}@%first {test}", "selp.b32 {}, 1, 0, %p;")
    yield _of("mbarrier.test_wait by state", steps)
    steps = _Steps()
    steps.say(START + "@%first mbarrier.init.shared::cta.b64 [%barrier], 1;\nbar.sync 0;")
    steps.say("@%first mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%barrier], 64;")
    steps.say("@%first mbarrier.arrive.shared::cta.b64 _, [%barrier];\nbar.warp.sync -1;")
    steps.passed("test_wait", 0)
    steps.say("bar.warp.sync -1;")
    steps.say("@%first mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%barrier], 64;")
    steps.say("bar.warp.sync -1;")
    steps.passed("test_wait", 0)
    yield _of("mbarrier.expect_tx", steps)
    steps = _Steps()  # each lane arrives when its copy is there
    steps.say(START + "@%first mbarrier.init.shared::cta.b64 [%barrier], 32;\nbar.sync 0;")
    steps.say("mov.u32 %tile, tile;\nmad.lo.s32 %at, %t, 4, %tile;")
    steps.say("cp.async.ca.shared.global [%at], [%in4], 4;")
    steps.say("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%barrier];")
    steps.say(WAIT)
    steps.ask("xor.b32 %at, %at, 4;", "ld.shared.b32 {}, [%at];")
    yield _of("cp.async.mbarrier.arrive.noinc", steps)


def _of(name: str, steps: _Steps) -> Snippet:
    return Snippet(
        name,
        "barriers",
        "\n".join(steps.lines),
        ("b32",),
        ("b32",) * steps.results,
        lambda: _words(name),
        arch="sm_90",
        declares=DECLARES + ".shared .align 128 .b8 tile[128];",
    )


def bulk() -> Iterator[Snippet]:
    """cp.async.bulk without a tensor map, there and back."""
    declares = DECLARES + ".shared .align 128 .b8 tile[128];"
    start = START + "mov.u32 %tile, tile;\nmad.lo.s32 %at, %t, 4, %tile;\n"
    init = "@%first mbarrier.init.shared::cta.b64 [%barrier], 1;"
    expect = "@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%barrier], 128;\n"
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    load = f"@%first {copy} [%tile], [%in4], 128, [%barrier];"
    yield Snippet(
        "cp.async.bulk load",
        "barriers",
        start + init + READY + expect + load + WAIT + "ld.shared.b32 %o0, [%at];",
        ("b32",),
        ("b32",),
        lambda: _words("bulk"),
        arch="sm_90",
        declares=declares,
        model=lambda a: a,
    )
    store = "@%first cp.async.bulk.global.shared::cta.bulk_group [%out4], [%tile], 128;\n"
    yield Snippet(
        "cp.async.bulk store",
        "barriers",
        start
        + "st.shared.b32 [%at], %i0;\nfence.proxy.async.shared::cta;\nbar.sync 0;\n"
        + store
        + "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nbar.sync 0;\n"
        "fence.proxy.async;\nld.global.b32 %o0, [%out4];",
        ("b32",),
        ("b32",),
        lambda: _words("bulk"),
        arch="sm_90",
        declares=declares,
        model=lambda a: a,
    )
