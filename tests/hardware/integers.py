"""Snippets: integers, bits, words, moves, comparisons of integers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.hardware.formats import KINDS, Array
from tests.hardware.operands import CASES, draw, operands
from tests.hardware.snippet import Bound, Model, Operands, Snippet

TYPES = ("u16", "s16", "u32", "s32", "u64", "s64")
FEW = 512


def plain(
    opcode: str,
    takes: tuple[str, ...],
    gives: str | tuple[str, ...],
    group: str,
    *,
    arch: str = "sm_80",
    tail: str = "",
    given: tuple[str, ...] | None = None,
    cases: int = CASES,
    fix: Callable[[Operands], None] | None = None,
    model: Model | None = None,
    bound: Bound | None = None,
    name: str = "",
    version: str = "8.4",
) -> Snippet:
    """`opcode results, operands tail;`. `given`: what operands are drawn as, if not as they are."""
    gives = gives if isinstance(gives, tuple) else (gives,)
    results = "|".join(f"%o{n}" for n in range(len(gives)))
    words = ", ".join([results, *(f"%i{n}" for n in range(len(takes)))])

    def drawn() -> Operands:
        found = operands(given or takes, name or opcode, cases)
        if fix:
            fix(found)
        return found

    body = f"{opcode} {words}{tail};"
    return Snippet(
        name or opcode,
        group,
        body,
        takes,
        gives,
        drawn,
        arch,
        bound=bound,
        model=model,
        version=version,
    )


def signed(x: Array, kind: str) -> Array:
    """As Python's whole numbers."""
    of = KINDS[kind]
    return x.view(f"{'i' if of.signed else 'u'}{of.bytes}").astype(object)


def wrapped(values: Any, kind: str) -> Array:
    """Whole numbers as bits."""
    size = KINDS[kind].bytes
    listed = [int(v) % (1 << 8 * size) for v in values]
    return np.array(listed, np.uint64).astype(KINDS[kind].word)


def whole(kind: str, f: Callable[..., Any], gives: str | None = None) -> Model:
    """A model of whole numbers, case by case."""
    return lambda *ops: wrapped(
        [f(*(int(v) for v in row)) for row in zip(*(signed(o, kind) for o in ops), strict=True)],
        gives or kind,
    )


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _no_zero(kind: str) -> Callable[[Operands], None]:
    """What a division by zero, or the least number by -1, gives is nobody's promise."""

    def fix(found: Operands) -> None:
        found[1][found[1] == 0] = 3
        if KINDS[kind].signed:
            found[1][found[1] == found[1].dtype.type(-1 % (1 << 8 * KINDS[kind].bytes))] = 5

    return fix


def arithmetic() -> Iterator[Snippet]:
    """add to sad, in every type."""
    for t in TYPES:
        bits, sign = 8 * KINDS[t].bytes, KINDS[t].signed
        two: dict[str, Callable[[int, int], int]] = {
            "add": operator.add,
            "sub": operator.sub,
            "mul.lo": operator.mul,
            "mul.hi": lambda a, b, bits=bits: a * b >> bits,  # type: ignore[misc]
            "min": min,
            "max": max,
        }
        for name, f in two.items():
            yield plain(f"{name}.{t}", (t, t), t, "integers", cases=FEW, model=whole(t, f))
        for name, f in {"div": _quotient, "rem": lambda a, b: a - b * _quotient(a, b)}.items():
            yield plain(
                f"{name}.{t}", (t, t), t, "integers", cases=FEW, fix=_no_zero(t), model=whole(t, f)
            )
        for name in ("mad.lo", "mad.hi", "sad"):
            shift = bits if name == "mad.hi" else 0
            model = (
                whole(t, lambda a, b, c: abs(a - b) + c)
                if name == "sad"
                else whole(t, lambda a, b, c, shift=shift: (a * b >> shift) + c)
            )
            yield plain(f"{name}.{t}", (t, t, t), t, "integers", cases=FEW, model=model)
        if sign:
            yield plain(f"neg.{t}", (t,), t, "integers", cases=128, model=whole(t, operator.neg))
            yield plain(f"abs.{t}", (t,), t, "integers", cases=128, model=whole(t, abs))
        if bits < 64:
            wide = f"{t[0]}{2 * bits}"
            model = whole(t, operator.mul, wide)
            yield plain(f"mul.wide.{t}", (t, t), wide, "integers", cases=FEW, model=model)
            yield plain(f"mad.wide.{t}", (t, t, wide), wide, "integers", cases=FEW)
    limits = (-(2**31), 2**31 - 1)
    for name, f in {"add": operator.add, "sub": operator.sub}.items():
        model = whole("s32", lambda a, b, f=f: min(max(f(a, b), limits[0]), limits[1]))
        yield plain(f"{name}.sat.s32", ("s32", "s32"), "s32", "integers", cases=FEW, model=model)
    yield plain("mad.hi.sat.s32", ("s32",) * 3, "s32", "integers", cases=FEW)
    for name in ("min", "max"):
        of = {"min": min, "max": max}[name]
        model = whole("s32", lambda a, b, of=of: max(of(a, b), 0))
        yield plain(
            f"{name}.relu.s32",
            ("s32",) * 2,
            "s32",
            "integers",
            cases=FEW,
            arch="sm_90",
            model=model,
        )
        for t in ("u16x2", "s16x2"):
            yield plain(f"{name}.{t}", (t, t), t, "integers", cases=FEW, arch="sm_90")
    for t in ("u16x2", "s16x2"):
        yield plain(f"add.{t}", (t, t), t, "integers", cases=FEW, arch="sm_90")


def bits() -> Iterator[Snippet]:
    """Logic, shifts, fields."""
    for n in (16, 32, 64):
        t = f"b{n}"
        for name, f in {"and": operator.and_, "or": operator.or_, "xor": operator.xor}.items():
            yield plain(f"{name}.{t}", (t, t), t, "bits", cases=256, model=whole(t, f))
        yield plain(f"not.{t}", (t,), t, "bits", cases=64, model=whole(t, operator.invert))
        yield plain(f"cnot.{t}", (t,), t, "bits", cases=64, model=whole(t, lambda a: a == 0))
        for name, of in (("shl", "b"), ("shr", "b"), ("shr", "u"), ("shr", "s")):
            kind = f"{of}{n}"
            yield plain(
                f"{name}.{kind}",
                (kind, "u32"),
                kind,
                "bits",
                given=(kind, "amount"),
                cases=FEW,
                model=_shift(name, kind),
            )
    for n in (32, 64):
        t = f"b{n}"
        yield plain(f"popc.{t}", (t,), "u32", "bits", cases=128, model=_count(t, int.bit_count))
        lead = _count(t, lambda a, n=n: n - a.bit_length())  # type: ignore[misc]
        yield plain(f"clz.{t}", (t,), "u32", "bits", cases=128, model=lead)
        yield plain(f"brev.{t}", (t,), t, "bits", cases=128)
        field = (t, t, "field", "field")
        yield plain(f"bfi.{t}", (t, t, "u32", "u32"), t, "bits", given=field, cases=FEW)
        for s in "us":
            t = f"{s}{n}"
            yield plain(f"bfind.{t}", (t,), "u32", "bits", cases=128)
            yield plain(f"bfind.shiftamt.{t}", (t,), "u32", "bits", cases=128)
            given = (t, "field", "field")
            yield plain(f"bfe.{t}", (t, "u32", "u32"), t, "bits", given=given, cases=FEW)


def _count(kind: str, f: Callable[[int], int]) -> Model:
    return lambda a: np.array([f(int(x)) for x in a], np.uint32)


def _shift(name: str, kind: str) -> Model:
    width = 8 * KINDS[kind].bytes

    def model(a: Array, n: Array) -> Array:
        by = [min(int(x), width) for x in n]
        if name == "shl":
            moved = [int(x) << s for x, s in zip(a, by, strict=True)]
        else:
            moved = [int(x) >> s for x, s in zip(signed(a, kind), by, strict=True)]
        return wrapped(moved, kind)

    return model


# --- words --------------------------------------------------------------------------------------

TRUTHS = (0x00, 0xFF, 0x80, 0x96, 0xE8, 0xCA, 0x1B, 0x6A)


def words() -> Iterator[Snippet]:
    """prmt, lop3, shf."""
    three = ("b32",) * 3
    yield plain("prmt.b32", three, "b32", "words")
    for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        yield plain(f"prmt.b32.{mode}", three, "b32", "words", cases=128)
    lines = (f"lop3.b32 %o{n}, %i0, %i1, %i2, {t:#x};" for n, t in enumerate(TRUTHS))
    yield Snippet(
        "lop3.b32",
        "words",
        "\n".join(lines),
        three,
        ("b32",) * len(TRUTHS),
        lambda: operands(three, "lop3.b32", 64),
        model=_lop3,
    )
    for way in "lr":
        for mode in ("wrap", "clamp"):
            yield plain(
                f"shf.{way}.{mode}.b32",
                ("b32", "b32", "u32"),
                "b32",
                "words",
                given=("b32", "b32", "amount"),
                model=_funnel(way, mode),
                cases=FEW,
            )


def _lop3(a: Array, b: Array, c: Array) -> Operands:
    results = []
    for truth in TRUTHS:
        found = np.zeros_like(a)
        for i in range(8):
            if truth >> i & 1:
                found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        results.append(found)
    return results


def _funnel(way: str, mode: str) -> Model:
    def one(low: int, high: int, n: int) -> int:
        n = n & 31 if mode == "wrap" else min(n, 32)
        both = high << 32 | low
        return both << n >> 32 if way == "l" else both >> n

    return whole("u32", one)


# --- moves and choices --------------------------------------------------------------------------


def moves() -> Iterator[Snippet]:
    """mov, selp, slct, cvta, packing."""
    for t in ("b16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"):
        raw = f"b{8 * KINDS[t].bytes}"  # bits: a NaN's too
        if t != "b16":
            yield plain(f"mov.{t}", (raw,), raw, "moves", given=(t,), cases=64, model=lambda a: a)
        yield plain(
            f"selp.{t}",
            (raw, raw, "pred"),
            raw,
            "moves",
            given=(t, t, "pred"),
            cases=128,
            model=lambda a, b, p: np.where(p != 0, a, b),
        )
        for by in ("s32", "f32"):
            if t == "b16" and by == "f32":
                continue
            takes = (raw, raw, by)
            yield plain(f"slct.{t}.{by}", takes, raw, "moves", given=(t, t, by), cases=256)
    yield plain("mov.pred", ("pred",), "pred", "moves", cases=64, model=lambda a: a)
    yield plain("not.pred", ("pred",), "pred", "moves", cases=64, model=lambda a: 1 - a)
    for name, f in {"and": operator.and_, "or": operator.or_, "xor": operator.xor}.items():
        yield plain(f"{name}.pred", ("pred",) * 2, "pred", "moves", cases=64, model=f)
    yield plain("cvta.to.global.u64", ("u64",), "u64", "moves", cases=64, model=lambda a: a)
    for size, part, count in ((32, 16, 2), (64, 32, 2), (64, 16, 4)):
        yield _pack(size, part, count)
        yield _unpack(size, part, count)


def _pack(size: int, part: int, count: int) -> Snippet:
    kinds = (f"b{part}",) * count
    inside = ", ".join(f"%i{n}" for n in range(count))

    def model(*parts: Array) -> Array:
        word = KINDS[f"b{size}"].word
        return np.bitwise_or.reduce(
            [p.astype(word) << word(part * n) for n, p in enumerate(parts)], axis=0
        )

    name = f"mov.b{size} from {count}"
    return Snippet(
        name,
        "moves",
        f"mov.b{size} %o0, {{{inside}}};",
        kinds,
        (f"b{size}",),
        lambda: operands(kinds, name, 64),
        model=model,
    )


def _unpack(size: int, part: int, count: int) -> Snippet:
    inside = ", ".join(f"%o{n}" for n in range(count))

    def model(a: Array) -> Operands:
        to = KINDS[f"b{part}"].word
        return [(a >> a.dtype.type(part * n)).astype(to) for n in range(count)]

    name = f"mov.b{size} to {count}"
    return Snippet(
        name,
        "moves",
        f"mov.b{size} {{{inside}}}, %i0;",
        (f"b{size}",),
        (f"b{part}",) * count,
        lambda: operands((f"b{size}",), name, 64),
        model=model,
    )


# --- comparisons --------------------------------------------------------------------------------

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def comparisons() -> Iterator[Snippet]:
    """setp and set of integers; all comparisons of a type in one kernel each."""
    for t in (*TYPES, "b16", "b32", "b64"):
        names = list(COMPARISONS) if t[0] != "b" else ["eq", "ne"]
        aliases = {n: n for n in names} | (_UNSIGNED if t[0] == "u" else {})
        for name, real in aliases.items():
            yield plain(
                f"setp.{name}.{t}",
                (t, t),
                "pred",
                "comparisons",
                cases=256,
                model=_comparison(t, COMPARISONS[real]),
            )
    for t in ("s32", "u32"):
        for to in ("u32", "s32", "f32"):
            yield plain(f"set.lt.{to}.{t}", (t, t), to, "comparisons", cases=256)
    for how in ("and", "or", "xor"):
        yield Snippet(
            f"setp.lt.{how}.s32",
            "comparisons",
            f"setp.lt.{how}.s32 %o0|%o1, %i0, %i1, %i2;",
            ("s32", "s32", "pred"),
            ("pred", "pred"),
            lambda: operands(("s32", "s32", "pred"), "setp with a predicate", 256),
        )
    yield Snippet(
        "setp.gt.and.s32 not",
        "comparisons",
        "setp.gt.and.s32 %o0, %i0, %i1, !%i2;",
        ("s32", "s32", "pred"),
        ("pred",),
        lambda: operands(("s32", "s32", "pred"), "setp with a turned predicate", 256),
    )


def _comparison(kind: str, f: Callable[[Any, Any], Any]) -> Model:
    view = f"{'i' if KINDS[kind].signed else 'u'}{KINDS[kind].bytes}"
    return lambda a, b: f(a.view(view), b.view(view)).astype(np.uint32)


def specials() -> Iterator[Snippet]:
    """Special registers."""

    def none() -> Operands:
        return [draw("specials", 3 * 96).astype(np.uint32)]

    names = (
        "%tid.x",
        "%tid.y",
        "%ntid.x",
        "%ntid.y",
        "%ctaid.x",
        "%ctaid.y",
        "%nctaid.x",
        "%laneid",
    )
    body = "\n".join(f"mov.u32 %o{n}, {name};" for n, name in enumerate(names))
    gives = ("u32",) * len(names)
    yield Snippet("special registers", "moves", body, ("u32",), gives, none, threads=96)
