"""Snippets: what the lanes of a warp tell each other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.hardware.formats import Array
from tests.hardware.integers import plain
from tests.hardware.operands import below, draw, operands
from tests.hardware.snippet import WARP, Operands, Snippet

ALL = 0xFFFFFFFF
TRIALS = 8


def _lanes(trials: int = TRIALS) -> Array:
    return np.tile(np.arange(WARP, dtype=np.uint32), trials)


def shuffles() -> Iterator[Snippet]:
    """Steps and segments of all sizes; with constants, and from registers."""
    for mode in ("up", "down", "bfly", "idx"):
        opcode = f"shfl.sync.{mode}.b32"
        yield Snippet(
            opcode,
            "warp",
            f"{opcode} %o0|%o1, %i0, %i1, %i2, {ALL:#x};",
            ("b32", "u32", "u32"),
            ("b32", "pred"),
            lambda mode=mode: _steps(mode),
            model=lambda a, b, c, mode=mode: _shuffled(mode, a, b, c),
        )
        clamp = 0 if mode == "up" else 0x1F
        lines = [f"{opcode} %o{n}, %i0, {1 << n}, {clamp:#x}, -1;" for n in range(5)]
        yield Snippet(
            f"{opcode} by constants",
            "warp",
            "\n".join(lines),
            ("b32",),
            ("b32",) * 5,
            lambda: [draw("shfl", WARP).astype(np.uint32)],
        )
        # Half a warp alone. What a lane gets from one that is not there PTX leaves open: for down
        # the half is a segment of its own.
        edge = 0x101F if mode == "down" else clamp
        yield Snippet(
            f"{opcode} of half",
            "warp",
            "setp.lt.u32 %p, %t, 16;\nmov.b32 %o0, %i0;\n"
            f"@%p {opcode} %o0, %i0, 1, {edge:#x}, 0xffff;",
            ("b32",),
            ("b32",),
            lambda: [draw("half", WARP).astype(np.uint32)],
            declares=".reg .pred %p;",
        )


def _steps(mode: str) -> Operands:
    """Within a trial the segments are alike; the steps differ by lane."""
    trials = 24
    count = trials * WARP
    segments = np.repeat(np.array([0, 16, 24, 28, 30, 31] * 4, np.uint32), WARP)
    clamps = np.repeat(np.array([0, 31, 15, 7] * 6, np.uint32), WARP)
    if mode != "up":
        clamps = np.where(clamps == 0, 31, clamps).astype(np.uint32)
    step = below(f"shfl {mode}", count, 33).astype(np.uint32)
    # A lane that is asked must be there: all are, whichever step.
    return [draw(f"shfl values {mode}", count).astype(np.uint32), step, clamps | segments << 8]


def _shuffled(mode: str, a: Array, b: Array, c: Array) -> Operands:
    result, valid = a.copy(), np.zeros_like(a)
    for i in range(len(a)):
        lane, start = i % WARP, i - i % WARP
        segment, step = int(c[i]) >> 8 & 31, int(b[i]) & 31
        most = (lane & segment) | (int(c[i]) & 31 & ~segment)
        least = lane & segment
        source = {
            "up": lane - step,
            "down": lane + step,
            "bfly": lane ^ step,
            "idx": least | (step & ~segment),
        }[mode]
        inside = source >= most if mode == "up" else source <= most
        valid[i] = inside
        result[i] = a[start + source] if inside else a[i]
    return [result, valid]


def votes() -> Iterator[Snippet]:
    """All, some and none of the lanes; and half of them."""

    def ballots() -> Operands:
        few = [0, ALL, 1, 0x80000000, 0xFFFF, 0xFFFF0000, 0xAAAAAAAA, 0x12345678]
        bits = np.repeat(np.array(few, np.uint64), WARP)
        return [(bits >> _lanes(len(few)).astype(np.uint64) & np.uint64(1)).astype(np.uint32)]

    for name in ("all", "any", "uni"):
        opcode = f"vote.sync.{name}.pred"
        yield Snippet(opcode, "warp", f"{opcode} %o0, %i0, -1;", ("pred",), ("pred",), ballots)
    yield Snippet(
        "vote.sync.ballot.b32",
        "warp",
        "vote.sync.ballot.b32 %o0, %i0, -1;",
        ("pred",),
        ("b32",),
        ballots,
    )
    yield Snippet(
        "votes of half",
        "warp",
        """setp.ge.u32 %p, %t, 16;
        mov.b32 %o0, 0;
        setp.ne.b32 %o1, 0, 0;
        @%p vote.sync.ballot.b32 %o0, %i0, 0xffff0000;
        @%p vote.sync.all.pred %o1, !%i0, 0xffff0000;""",
        ("pred",),
        ("b32", "pred"),
        ballots,
        declares=".reg .pred %p;",
    )
    yield Snippet(
        "activemask.b32",
        "warp",
        "setp.ge.u32 %p, %t, 11;\nmov.b32 %o0, 0;\n@%p bra more;\nbra done;\n"
        "more:\nactivemask.b32 %o0;\ndone:\nbar.warp.sync -1;",
        ("b32",),
        ("b32",),
        lambda: [_lanes(1)],
        declares=".reg .pred %p;",
    )
    yield Snippet(
        "elect.sync",
        "warp",
        "elect.sync %o0|%o1, -1;",
        ("b32",),
        ("b32", "pred"),
        lambda: [_lanes(1)],
        arch="sm_90",
    )
    yield Snippet(
        "elect.sync of some",
        "warp",
        "setp.ge.u32 %p, %t, 9;\nmov.b32 %o0, 77;\nsetp.ne.b32 %o1, 0, 0;\n"
        "@%p elect.sync %o0|%o1, 0xfffffe00;",
        ("b32",),
        ("b32", "pred"),
        lambda: [_lanes(1)],
        arch="sm_90",
        declares=".reg .pred %p;",
    )


def matches() -> Iterator[Snippet]:
    """match and redux."""
    for size in (32, 64):
        kind = f"b{size}"

        def alike(kind: str = kind) -> Operands:
            words = below(kind, TRIALS * WARP, 5).astype(np.uint64) * np.uint64(0x100000001)
            words[: 2 * WARP] = 3
            words[WARP + 5] = 4
            return [words.astype(np.uint32 if kind == "b32" else np.uint64)]

        yield Snippet(
            f"match.any.sync.{kind}",
            "warp",
            f"match.any.sync.{kind} %o0, %i0, -1;",
            (kind,),
            ("b32",),
            alike,
            model=_same,
        )
        yield Snippet(
            f"match.all.sync.{kind}",
            "warp",
            f"match.all.sync.{kind} %o0|%o1, %i0, -1;",
            (kind,),
            ("b32", "pred"),
            alike,
        )
    for name in ("add", "min", "max"):
        for kind in ("u32", "s32"):
            opcode = f"redux.sync.{name}.{kind}"
            yield plain(opcode, (kind,), kind, "warp", tail=", -1", cases=256)
    for name in ("and", "or", "xor"):
        yield plain(f"redux.sync.{name}.b32", ("b32",), "b32", "warp", tail=", -1", cases=256)
    yield Snippet(
        "redux.sync of half",
        "warp",
        "setp.lt.u32 %p, %t, 16;\nmov.b32 %o0, 0;\n@%p redux.sync.add.u32 %o0, %i0, 0xffff;",
        ("u32",),
        ("u32",),
        lambda: operands(("u32",), "redux half", 64),
        declares=".reg .pred %p;",
    )


def _same(a: Array) -> Array:
    groups = a.reshape(-1, WARP)
    alike = groups[:, :, None] == groups[:, None, :]
    weights = np.uint64(1) << np.arange(WARP, dtype=np.uint64)
    return (alike @ weights).astype(np.uint32).reshape(-1)
