"""Snippets: cvt."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.hardware.formats import BF16, E4M3, E5M2, F16, KINDS, Array, nearest, together, value
from tests.hardware.integers import plain, signed, wrapped
from tests.hardware.operands import operands
from tests.hardware.snippet import Model, Operands, Snippet

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOATS = ("f16", "f32", "f64")
FEW, SOME = 128, 256


def _register(kind: str) -> str:
    """Bytes are in registers of two."""
    return "b16" if kind in ("u8", "s8") else kind


def _limits(kind: str) -> tuple[int, int]:
    bits = 8 * KINDS[kind].bytes
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if KINDS[kind].signed else (0, (1 << bits) - 1)


def integers() -> Iterator[Snippet]:
    """Integer to integer."""
    for to in INTEGERS:
        for of in INTEGERS:
            for sat in ("", ".sat"):
                if sat and not _may_saturate(to, of):
                    continue
                model = _whole(to, of, bool(sat))
                opcode = f"cvt{sat}.{to}.{of}"
                yield plain(opcode, (of,), _register(to), "cvt", cases=FEW, model=model)
    for opcode, takes, gives in (  # registers may be wider than what is converted
        ("cvt.u8.u32", "u32", "u32"),
        ("cvt.s8.s32", "s32", "s32"),
        ("cvt.u16.u64", "u64", "u32"),
        ("cvt.s32.s8", "b32", "s32"),
        ("cvt.u64.u16", "b32", "u64"),
        ("cvt.s16.s64", "s64", "s64"),
    ):
        name = f"{opcode} in {takes} and {gives}"
        body = f"{opcode} %o0, %i0;"
        yield Snippet(
            name, "cvt", body, (takes,), (gives,), lambda t=takes: operands((t,), "wide", FEW)
        )


def _may_saturate(to: str, of: str) -> bool:
    low, high = _limits(to)
    least, most = _limits(of)
    return least < low or most > high


def _whole(to: str, of: str, sat: bool) -> Model:
    low, high = _limits(to)

    def model(a: Array) -> Array:
        values = [int(v) for v in signed(a, of)]
        if sat:
            values = [min(max(v, low), high) for v in values]
        bits = wrapped(values, to)
        if to in ("u8", "s8"):  # the register's other half repeats the sign
            return wrapped(signed(bits, to), "s16")
        return bits

    return model


def between() -> Iterator[Snippet]:
    """Floats to integers and back."""
    for of in (*FLOATS, "bf16"):
        arch = "sm_90" if of == "bf16" else "sm_80"
        for to in INTEGERS if of != "bf16" else INTEGERS[2:]:
            for way in "nzmp":
                for ftz in ("", ".ftz") if of == "f32" else ("",):
                    cases = 512 if of == "f32" and not ftz else SOME if of == "f32" else FEW
                    opcode = f"cvt.r{way}i{ftz}.{to}.{of}"
                    yield plain(opcode, (of,), _register(to), "cvt", arch=arch, cases=cases)
        if of != "bf16":
            yield plain(f"cvt.rzi.sat.s32.{of}", (of,), "s32", "cvt", cases=FEW)
    for to in (*FLOATS, "bf16"):
        arch = "sm_90" if to == "bf16" else "sm_80"
        for of in INTEGERS if to != "bf16" else INTEGERS[2:]:
            for way in "nzmp" if to != "f64" else "n":
                cases = SOME if to == "f32" else FEW
                opcode = f"cvt.r{way}.{to}.{of}"
                model = _exactly(to, of) if way == "n" and to in ("f32", "f64") else None
                yield plain(opcode, (of,), to, "cvt", arch=arch, cases=cases, model=model)


def _exactly(to: str, of: str) -> Model:
    """Whole numbers to the nearest that there is."""
    target = {"f32": np.float32, "f64": np.float64}[to]
    return lambda a: (
        a.view(f"{'i' if KINDS[of].signed else 'u'}{KINDS[of].bytes}")
        .astype(target)
        .view(KINDS[to].word)
    )


def floats() -> Iterator[Snippet]:
    """From one format to another."""
    for ftz in ("", ".ftz"):
        for sat in ("", ".sat"):
            yield plain(f"cvt{ftz}{sat}.f32.f16", ("f16",), "f32", "cvt", cases=SOME)
            yield plain(f"cvt{ftz}{sat}.f64.f32", ("f32",), "f64", "cvt", cases=SOME)
            yield plain(f"cvt{ftz}{sat}.f32.f32", ("f32",), "f32", "cvt", cases=SOME)
            yield plain(f"cvt.rn{ftz}{sat}.f16.f32", ("f32",), "f16", "cvt", cases=768)
            yield plain(f"cvt.rn{ftz}{sat}.f32.f64", ("f64",), "f32", "cvt", cases=SOME)
        yield plain(f"cvt.rz{ftz}.f16.f32", ("f32",), "f16", "cvt", cases=768)
        yield plain(f"cvt.rz{ftz}.f32.f64", ("f64",), "f32", "cvt", cases=SOME)
        for way in "nzmp":
            yield plain(f"cvt.r{way}i{ftz}.f32.f32", ("f32",), "f32", "cvt", cases=SOME)
    for way in "nz":
        opcode = f"cvt.r{way}.ftz.f32.f64"
        name = f"{opcode} below the smallest"
        yield plain(opcode, ("f64",), "f32", "cvt", name=name, fix=_just_below, cases=FEW)
    for way in "mp":
        yield plain(f"cvt.r{way}.f16.f32", ("f32",), "f16", "cvt", cases=768)
        yield plain(f"cvt.r{way}.f32.f64", ("f64",), "f32", "cvt", cases=SOME)
    for way in "nzmp":
        yield plain(f"cvt.r{way}i.f16.f16", ("f16",), "f16", "cvt", cases=SOME)
        yield plain(f"cvt.r{way}i.f64.f64", ("f64",), "f64", "cvt", cases=SOME)
        yield plain(f"cvt.r{way}.f16.f64", ("f64",), "f16", "cvt", cases=SOME)
    yield plain("cvt.f64.f16", ("f16",), "f64", "cvt", cases=SOME)
    for sat in ("", ".sat"):
        yield plain(f"cvt{sat}.f16.f16", ("f16",), "f16", "cvt", cases=SOME)
    yield plain("cvt.f32.bf16", ("bf16",), "f32", "cvt", arch="sm_90", cases=SOME)
    yield plain("cvt.f64.bf16", ("bf16",), "f64", "cvt", arch="sm_90", cases=SOME)
    for way in "nzmp":
        yield plain(f"cvt.r{way}.bf16.f16", ("f16",), "bf16", "cvt", arch="sm_90", cases=SOME)
        yield plain(f"cvt.r{way}.f16.bf16", ("bf16",), "f16", "cvt", arch="sm_90", cases=SOME)
        yield plain(f"cvt.r{way}.bf16.f64", ("f64",), "bf16", "cvt", arch="sm_90", cases=SOME)


def _just_below(found: Operands) -> None:
    """f32's smallest normal number less 2^-n of it: is that flushed?"""
    n = np.arange(FEW)
    x = np.ldexp(1 - np.ldexp(1.0, -(1 + n % 53)), -126)
    found[0][:] = np.where(n % 2, -x, x).view(np.uint64)


# --- to the formats of tensor cores -------------------------------------------------------------


def reductions() -> Iterator[Snippet]:
    """f32 to f16, bf16, tf32 and fp8, with .relu and .satfinite; fp8 to f16."""
    for to in ("f16", "bf16", "f16x2", "bf16x2"):
        takes = ("f32",) * KINDS[to].per
        for way in ("rn", "rz"):
            for relu in ("", ".relu"):
                for finite in ("", ".satfinite"):
                    if (to, way, relu, finite) == ("f16", way, "", ""):
                        continue  # among the plain ones
                    model = _rounded(to) if (way, relu, finite) == ("rn", "", "") else None
                    yield plain(
                        f"cvt.{way}{relu}{finite}.{to}.f32", takes, to, "narrow", model=model
                    )
    yield plain("cvt.rm.bf16.f32", ("f32",), "bf16", "narrow", arch="sm_90")
    yield plain("cvt.rp.bf16.f32", ("f32",), "bf16", "narrow", arch="sm_90")
    for way in ("rn", "rn.relu", "rz", "rz.relu"):
        yield plain(f"cvt.{way}.tf32.f32", ("f32",), "tf32", "narrow", arch="sm_90")
    for way in ("rna", "rna.satfinite"):
        yield plain(f"cvt.{way}.tf32.f32", ("f32",), "tf32", "narrow")
    for to in ("e4m3x2", "e5m2x2"):
        for relu in ("", ".relu"):
            model = None if relu else _rounded(to)
            opcode = f"cvt.rn.satfinite{relu}.{to}"
            yield plain(f"{opcode}.f32", ("f32",) * 2, to, "narrow", arch="sm_89", model=model)
            yield plain(f"{opcode}.f16x2", ("f16x2",), to, "narrow", arch="sm_89")
            back = _halves(to) if not relu else None
            opcode = f"cvt.rn{relu}.f16x2.{to}"
            yield plain(opcode, (to,), "f16x2", "narrow", arch="sm_89", cases=512, model=back)


def _rounded(to: str) -> Model:
    """Without NaN: that one is whatever NaN."""
    kind = KINDS[to]
    form = kind.float
    assert form is not None

    def one(a: Array) -> Array:
        x = value(a, KINDS["f32"].float)  # type: ignore[arg-type]
        with np.errstate(all="ignore"):
            if form is F16:
                return x.astype(np.float32).astype(np.float16).view(np.uint16)
            if form is BF16:
                up = (a.astype(np.uint64) + 0x7FFF + (a >> 16 & 1)) >> np.uint64(16)
                return np.where(np.isnan(x), 0x7FFF, up).astype(np.uint16)
            assert form in (E4M3, E5M2)
            bits = nearest(np.clip(np.nan_to_num(x), -1e9, 1e9), form)
        return np.where(np.isnan(x), 0x7F, bits).astype(np.uint8)

    def model(*ops: Array) -> Array:
        if kind.per == 1:
            return one(ops[0])
        return together([one(o) for o in reversed(ops)], kind)

    return model


def _halves(of: str) -> Model:
    form = KINDS[of].float
    assert form is not None

    def model(a: Array) -> Array:
        parts = [a & 0xFF, a >> 8]
        wide = [value(p, form).astype(np.float16).view(np.uint16) for p in parts]
        return together(wide, KINDS["f16x2"])

    return model
