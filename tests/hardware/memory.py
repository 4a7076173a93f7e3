"""Snippets: loads, stores, asynchronous copies, matrices between shared memory and registers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.hardware.formats import Array
from tests.hardware.operands import below, draw
from tests.hardware.snippet import WARP, Operands, Snippet

SHARED = ".shared .align 128 .b8 tile[{size}];\n.reg .b32 %tile, %at, %more<4>;\n.reg .b64 %wide;"
TRIALS = 2


def _words(key: str, count: int, trials: int = TRIALS) -> Operands:
    return [draw(f"{key} {n}", trials * WARP).astype(np.uint32) for n in range(count)]


# --- loads and stores ---------------------------------------------------------------------------


def globals_() -> Iterator[Snippet]:
    """Every width from global memory: the first operands, read once more."""
    for kind in ("u8", "s8", "b8", "u16", "s16", "b16", "u32", "s32", "b32", "f32", "u64", "b64"):
        bits = int(kind.lstrip("usbf"))
        wide = "b64" if bits == 64 else "b32" if kind != "b16" and kind != "u16" else "b16"
        body = f"mul.wide.u32 %wide, %index, {bits // 8};\nadd.s64 %wide, %in, %wide;\n"
        body += f"ld.global.{kind} %o0, [%wide+{bits // 8}];"
        yield Snippet(
            f"ld.global.{kind}",
            "memory",
            body,
            ("b32",) * 3,
            (wide,),
            lambda: _words("ld", 3),
            declares=".reg .b64 %wide;",
        )
    for spelling, count, bits in (
        *(("v2.u32", 2, 32), ("v4.u32", 4, 32), ("v2.b32", 2, 32), ("v4.b32", 4, 32)),
        *(("v2.f32", 2, 32), ("v4.f32", 4, 32), ("v2.u64", 2, 64), ("v2.b64", 2, 64)),
        *(("v2.u16", 2, 16), ("v4.u16", 4, 16), ("v4.b16", 4, 16), ("nc.v4.u32", 4, 32)),
        *(("nc.u32", 1, 32), ("nc.L1::no_allocate.v4.u32", 4, 32), ("L2::128B.v4.u32", 4, 32)),
    ):
        yield _vector_load(spelling, count, bits)
        if "nc" not in spelling and "L2" not in spelling:
            yield _vector_store(spelling, count, bits)
    for kind in ("u8", "u16", "b16", "u32", "f32", "u64"):
        yield _store(kind)
    for kind, body in (
        ("v2.u32", "ld.param.v2.u32 {%o0, %o1}, [more+8];"),
        ("u32", "ld.param.u32 %o0, [more+8];\nld.param.u32 %o1, [more+4];"),
        ("f32", "ld.param.f32 %o0, [more];\nld.param.f32 %o1, [more+12];"),
        ("v4.u32", "ld.param.v4.u32 {%o0, %more0, %o1, %more1}, [more];"),
    ):
        yield Snippet(
            f"ld.param.{kind}",
            "memory",
            body,
            ("b32",),
            ("b32", "b32"),
            lambda: _words("param", 1),
            declares=".reg .b32 %more<2>;",
            parameters=bytes(range(1, 17)),
        )


def _listed(letter: str, count: int) -> str:
    names = ", ".join(f"%{letter}{n}" for n in range(count))
    return f"{{{names}}}" if count > 1 else names


def _vector_load(spelling: str, count: int, bits: int) -> Snippet:
    """A lane reads what its fellows wrote as plain words."""
    size = count * bits // 8
    body = f"mul.wide.u32 %wide, %index, {size};\nadd.s64 %wide, %in, %wide;\n"
    body += f"ld.global.{spelling} {_listed('o', count)}, [%wide];"
    name = f"ld.global.{spelling}"
    return Snippet(
        name,
        "memory",
        body,
        ("b32",) * max(1, size // 4),
        (f"b{bits}",) * count,
        lambda: _words("vector", max(1, size // 4)),
        declares=".reg .b64 %wide;",
        model=lambda *ops: _read(ops, count, bits),
    )


def _read(ops: tuple[Array, ...], count: int, bits: int) -> Operands:
    data = b"".join(o.tobytes() for o in ops)
    lanes = len(ops[0])
    table = np.frombuffer(data, f"u{bits // 8}")[: lanes * count].reshape(lanes, count)
    return [table[:, n].copy() for n in range(count)]


def _vector_store(spelling: str, count: int, bits: int) -> Snippet:
    """Through shared memory: written as vectors, read as words."""
    size = count * bits // 8
    words = size // 4
    lines = ["mov.u32 %tile, tile;", f"mad.lo.s32 %at, %t, {size}, %tile;"]
    lines += [f"st.shared.{spelling} [%at], {_listed('i', count)};", "bar.sync 0;"]
    lines += [f"ld.shared.b32 %o{n}, [%at+{4 * n}];" for n in range(words)]
    name = f"st.shared.{spelling}"
    return Snippet(
        name,
        "memory",
        "\n".join(lines),
        (f"b{bits}",) * count,
        ("b32",) * words,
        lambda: [draw(f"{name} {n}", WARP).astype(f"u{bits // 8}") for n in range(count)],
        declares=SHARED.format(size=WARP * size),
    )


def shared() -> Iterator[Snippet]:
    """Every width from shared memory, and through generic addresses."""
    for spelling, count, bits in (
        *(("u8", 1, 8), ("u16", 1, 16), ("u32", 1, 32), ("f32", 1, 32), ("u64", 1, 64)),
        *(("v2.u32", 2, 32), ("v2.f32", 2, 32), ("v4.u32", 4, 32), ("v4.f32", 4, 32)),
        *(("v2.b32", 2, 32), ("v4.b32", 4, 32), ("v2.u64", 2, 64), ("v4.u16", 4, 16)),
    ):
        for space in (".shared", ""):
            yield _shared_load(space, spelling, count, bits)


def _shared_load(space: str, spelling: str, count: int, bits: int) -> Snippet:
    size = count * bits // 8
    words = max(1, size // 4)
    lines = ["mov.u32 %tile, tile;", "mad.lo.s32 %at, %t, 4, %tile;"]
    lines += [f"st.shared.b32 [%at+{4 * WARP * n}], %i{n};" for n in range(words)]
    lines += ["bar.sync 0;", f"mad.lo.s32 %at, %t, {size}, %tile;"]
    if not space:
        lines += ["cvt.u64.u32 %wide, %at;", "cvta.shared.u64 %wide, %wide;"]
    lines += [f"ld{space}.{spelling} {_listed('o', count)}, [{'%at' if space else '%wide'}];"]
    return Snippet(
        f"ld{space}.{spelling}",
        "memory",
        "\n".join(lines),
        ("b32",) * words,
        (f"b{max(16, bits)}",) * count,
        lambda: _words("shared", words, 1),
        declares=SHARED.format(size=4 * WARP * words),
        model=lambda *ops: [r.astype(f"u{max(2, bits // 8)}") for r in _read(ops, count, bits)],
    )


def _store(kind: str) -> Snippet:
    bits = int(kind.lstrip("usbf"))
    given = f"b{max(16, bits)}"
    lines = ["mov.u32 %tile, tile;", f"mad.lo.s32 %at, %t, {bits // 8}, %tile;"]
    lines += [f"st.shared.{kind} [%at], %i0;", "bar.sync 0;", f"ld.shared.{kind} %o0, [%at];"]
    return Snippet(
        f"st.shared.{kind}",
        "memory",
        "\n".join(lines),
        (given,),
        (given,),
        lambda: [draw(kind, WARP).astype(f"u{max(2, bits // 8)}")],
        declares=SHARED.format(size=WARP * bits // 8),
    )


def outputs() -> Iterator[Snippet]:
    """Every width to global memory.

    Into the results' place, where there are zeros; what is there then is read as words, and stored
    again as results are: the same words.
    """
    for spelling, count in (
        *(("u32", 1), ("f32", 1), ("v2.u32", 2), ("v2.f32", 2), ("v4.u32", 4), ("v4.f32", 4)),
        *(("b16", 1), ("u16", 1), ("u8", 1), ("u64", 1), ("v2.u64", 2), ("v4.b32", 4)),
    ):
        bits = int(spelling.rpartition(".")[2].lstrip("ubf"))
        size = count * bits // 8
        given = f"b{max(16, bits)}"
        words = max(1, size // 4)
        lines = ["mul.wide.u32 %word, %t, 4;", "add.s64 %word, %out, %word;"]
        lines += [f"st.global.b32 [%word+{4 * WARP * n}], 0;" for n in range(words)]
        lines += ["bar.sync 0;", f"mul.wide.u32 %wide, %t, {size};", "add.s64 %wide, %out, %wide;"]
        lines += [f"st.global.{spelling} [%wide], {_listed('i', count)};", "bar.sync 0;"]
        lines += [f"ld.global.b32 %o{n}, [%word+{4 * WARP * n}];" for n in range(words)]
        yield Snippet(
            f"st.global.{spelling}",
            "memory",
            "\n".join([*lines, "bar.sync 0;"]),
            (given,) * count,
            ("b32",) * words,
            lambda given=given, count=count: [
                draw(f"st {n}", WARP).astype(f"u{int(given[1:]) // 8}") for n in range(count)
            ],
            declares=".reg .b64 %wide, %word;",
        )


# --- asynchronous copies ------------------------------------------------------------------------


def copies() -> Iterator[Snippet]:
    """cp.async of every size, whole and in part: what is not read becomes zero."""
    for spelling, size in (
        *(("ca.shared.global", 4), ("ca.shared.global", 8), ("ca.shared.global", 16)),
        *(("cg.shared.global", 16), ("cg.shared.global.L2::128B", 16)),
    ):
        for part in (False, True):
            taken = ", %i0" if part else ""
            words = size // 4
            lines = ["mov.u32 %tile, tile;", f"mad.lo.s32 %at, %t, {size}, %tile;"]
            lines += [f"mul.wide.u32 %wide, %index, {size};", "add.s64 %wide, %in, %wide;"]
            lines += [f"cp.async.{spelling} [%at], [%wide], {size}{taken};"]
            lines += ["cp.async.commit_group;", "cp.async.wait_group 0;", "bar.sync 0;"]
            lines += [f"ld.shared.b32 %o{n}, [%at+{4 * n}];" for n in range(words)]
            name = f"cp.async.{spelling} {size}" + (" in part" if part else "")

            def given(size: int = size, words: int = words) -> Operands:
                found = _words("cp.async", words)
                found[0] = below("taken", TRIALS * WARP, size + 1).astype(np.uint32)
                return found

            yield Snippet(
                name,
                "memory",
                "\n".join(lines),
                ("u32",) * words,
                ("b32",) * words,
                given,
                declares=SHARED.format(size=WARP * size),
            )
    lines = ["mov.u32 %tile, tile;", "mad.lo.s32 %at, %t, 4, %tile;"]
    lines += ["cp.async.ca.shared.global [%at], [%in4], 4;", "cp.async.wait_all;", "bar.sync 0;"]
    lines += ["ld.shared.b32 %o0, [%at];"]
    yield Snippet(
        "cp.async.wait_all",
        "memory",
        "\n".join(lines),
        ("b32",),
        ("b32",),
        lambda: _words("wait_all", 1),
        declares=SHARED.format(size=4 * WARP),
        model=lambda a: a,
    )


# --- matrices -----------------------------------------------------------------------------------


def matrices() -> Iterator[Snippet]:
    """ldmatrix and stmatrix: rows lie anywhere; movmatrix."""
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            for state in ("shared", "shared::cta"):
                if state == "shared::cta" and (count != 4 or trans):
                    continue
                yield _load_matrix(count, trans, state)
            yield _store_matrix(count, trans)
    yield Snippet(
        "movmatrix",
        "memory",
        "movmatrix.sync.aligned.m8n8.trans.b16 %o0, %i0;",
        ("b32",),
        ("b32",),
        lambda: _words("movmatrix", 1),
        model=_transposed,
    )


def _rows() -> Array:
    """Where each lane's row is: all apart, in some order."""
    order = np.argsort(draw("rows", WARP), kind="stable")
    return np.tile(order.astype(np.uint32) * 16, TRIALS)


def _load_matrix(count: int, trans: str, state: str) -> Snippet:
    opcode = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.{state}.b16"
    lines = ["mov.u32 %tile, tile;", "mad.lo.s32 %at, %t, 4, %tile;"]
    lines += [f"st.shared.b32 [%at+{128 * n}], %i{n};" for n in range(4)]
    lines += ["bar.sync 0;", "add.s32 %at, %tile, %i4;"]
    lines += [f"{opcode} {{{', '.join(f'%o{n}' for n in range(count))}}}, [%at];"]
    return Snippet(
        opcode,
        "memory",
        "\n".join(lines),
        ("b32",) * 4 + ("u32",),
        ("b32",) * count,
        lambda: [*_words("matrix", 4), _rows()],
        declares=SHARED.format(size=512),
        model=lambda *ops: _loaded(ops, count, bool(trans)),
    )


def _loaded(ops: tuple[Array, ...], count: int, trans: bool) -> Operands:
    results = [np.zeros_like(ops[0]) for _ in range(count)]
    for trial in range(len(ops[0]) // WARP):
        lanes = slice(trial * WARP, (trial + 1) * WARP)
        tile = np.concatenate([o[lanes] for o in ops[:4]]).view(np.uint16)
        for m in range(count):
            starts = ops[4][lanes][8 * m : 8 * m + 8] // 2
            matrix = np.stack([tile[s : s + 8] for s in starts])
            matrix = matrix.T if trans else matrix
            results[m][lanes] = np.ascontiguousarray(matrix).view(np.uint32).reshape(-1)
    return results


def _store_matrix(count: int, trans: str) -> Snippet:
    opcode = f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
    lines = ["mov.u32 %tile, tile;", "mad.lo.s32 %at, %t, 4, %tile;"]
    lines += [f"st.shared.b32 [%at+{128 * n}], 0;" for n in range(4)]
    lines += ["bar.sync 0;", "add.s32 %at, %tile, %i4;"]
    lines += [f"{opcode} [%at], {{{', '.join(f'%i{n}' for n in range(count))}}};", "bar.sync 0;"]
    lines += ["mad.lo.s32 %at, %t, 4, %tile;"]
    lines += [f"ld.shared.b32 %o{n}, [%at+{128 * n}];" for n in range(4)]
    return Snippet(
        opcode,
        "memory",
        "\n".join(lines),
        ("b32",) * 4 + ("u32",),
        ("b32",) * 4,
        lambda: [*_words("stmatrix", 4), _rows()],
        arch="sm_90",
        declares=SHARED.format(size=512),
        model=lambda *ops: _stored(ops, count, bool(trans)),
    )


def _stored(ops: tuple[Array, ...], count: int, trans: bool) -> Operands:
    results = [np.zeros_like(ops[0]) for _ in range(4)]
    for trial in range(len(ops[0]) // WARP):
        lanes = slice(trial * WARP, (trial + 1) * WARP)
        tile = np.zeros(256, np.uint16)
        for m in range(count):
            matrix = np.ascontiguousarray(ops[m][lanes]).view(np.uint16).reshape(8, 8)
            matrix = matrix.T if trans else matrix
            for row, start in zip(matrix, ops[4][lanes][8 * m : 8 * m + 8] // 2, strict=True):
                tile[start : start + 8] = row
        for n, part in enumerate(tile.view(np.uint32).reshape(4, WARP)):
            results[n][lanes] = part
    return results


def _transposed(a: Array) -> Array:
    turned = a.reshape(-1, WARP).view(np.uint16).reshape(-1, 8, 8).transpose(0, 2, 1)
    return np.ascontiguousarray(turned).view(np.uint32).reshape(-1)
