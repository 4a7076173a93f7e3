"""Snippets: barriers in shared memory, copies that complete on them, and barriers with numbers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.hardware.formats import Array
from tests.hardware.operands import draw
from tests.hardware.snippet import WARP, WARPGROUP, Model, Operands, Snippet

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


# --- barriers with numbers ----------------------------------------------------------------------

_ROUNDS = 3


def named() -> Iterator[Snippet]:
    """One half of a block arrives, the other one waits; both in turns, as our kernels' do."""
    yield _halves("bar.arrive handed over", 1)
    yield _halves("bar.arrive there and back", _ROUNDS)
    yield _turns()


def _halves(name: str, rounds: int) -> Snippet:
    """The first half writes, the second reads; what is to be written again waits for that."""
    half, threads = 2 * WARP, 4 * WARP
    writer, reader = ["@%second bra reader;"], ["reader:"]
    for n in range(rounds):
        last = n == rounds - 1
        writer += [f"bar.sync 2, {threads};"] if n else []
        writer += [f"add.s32 %o{n}, %i0, {n};", f"st.shared.b32 [%at], %o{n};"]
        writer += [f"bar.arrive 1, {threads};"]
        reader += [f"bar.sync 1, {threads};", f"ld.shared.b32 %o{n}, [%at];"]
        reader += [] if last else [f"bar.arrive 2, {threads};"]
    # From the other end: each cell is read by another warp's lane than the writer's.
    start = [f"and.b32 %at, %t, {half - 1};", f"setp.ge.u32 %second, %t, {half};"]
    start += [f"@%second xor.b32 %at, %at, {half - 1};", "mov.u32 %tile, tile;"]
    start += ["mad.lo.s32 %at, %at, 4, %tile;"]
    lines = [*start, *writer, "bra.uni done;", *reader, "done:"]

    def model(a: Array) -> Operands:
        written = a.reshape(-1, 2, half)[:, 0]
        both = np.concatenate([written, written[:, ::-1]], axis=1).reshape(-1)
        return [both + np.uint32(n) for n in range(rounds)]

    return _named(name, lines, threads, rounds, model)


def _turns() -> Snippet:
    """Two warpgroups, each with a barrier whose number is in a register; the last begins."""
    lines = ["shr.u32 %own, %t, 7;", "setp.ne.u32 %second, %own, 0;", "sub.s32 %next, 2, %own;"]
    lines += ["add.s32 %own, %own, 1;", "mov.u32 %tile, tile;", "and.b32 %at, %t, 127;"]
    lines += ["mad.lo.s32 %at, %at, 4, %tile;", "@%second st.shared.b32 [%at], %i0;"]
    lines += ["@%second bar.arrive %next, 256;"]
    for n in range(_ROUNDS):
        lines += ["bar.sync %own, 256;", f"ld.shared.b32 %o{n}, [%at];"]
        lines += [f"mad.lo.s32 %tile, %o{n}, 5, %i0;", "st.shared.b32 [%at], %tile;"]
        lines += ["bar.arrive %next, 256;"]  # the last one nobody waits for

    def model(a: Array) -> Operands:
        groups = a.reshape(-1, 2, WARPGROUP)
        cells, seen = groups[:, 1], []
        for _ in range(_ROUNDS):
            both = []
            for group in range(2):
                both.append(cells)
                cells = cells * np.uint32(5) + groups[:, group]
            seen.append(np.stack(both, axis=1).reshape(-1))
        return seen

    return _named("bar.arrive in turns", lines, 2 * WARPGROUP, _ROUNDS, model)


def _named(name: str, lines: list[str], threads: int, results: int, model: Model) -> Snippet:
    return Snippet(
        name,
        "barriers",
        "\n".join(lines),
        ("b32",),
        ("b32",) * results,
        lambda: [draw(name, 2 * threads).astype(np.uint32)],
        threads=threads,
        declares=".shared .align 4 .b8 tile[512];\n"
        ".reg .b32 %tile, %at, %own, %next;\n.reg .pred %second;",
        model=model,
    )
