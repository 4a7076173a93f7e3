"""Snippets: floating-point arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.hardware.compare import approximate
from tests.hardware.formats import KINDS, Array, value
from tests.hardware.integers import COMPARISONS, plain
from tests.hardware.operands import operands, uniform
from tests.hardware.snippet import Model, Operands, Snippet

ROUNDINGS = ("", ".rn", ".rz", ".rm", ".rp")
FLUSHES = ("", ".ftz")
FEW, MORE = 512, 768
TINY = 2.0**-126  # the smallest normal number of f32


def native(kind: str, f: Callable[..., Any], ftz: bool = False) -> Model:
    """A model that NumPy rounds; of f16 in f32, which is wide enough for one operation."""
    to: Any = {"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind]

    def model(*ops: Array) -> Array:
        word = KINDS[kind].word
        given = [_flushed(o) if ftz else np.ascontiguousarray(o) for o in ops]
        shape, given = given[0].dtype, [g.view(word) for g in given]  # f16x2: the halves alone
        wide = np.float32 if kind == "f16" else to
        with np.errstate(all="ignore"):
            result = np.asarray(f(*(g.view(to).astype(wide) for g in given))).astype(to)
            if ftz:  # what is too small even when it is rounded where there are smaller numbers
                higher = f(*(g.view(to).astype(np.float64) for g in given)) * 2.0**30
                tiny = np.abs(higher.astype(to)) < TINY * 2.0**30
                result = np.where(tiny, np.copysign(0, result), result).astype(to)
        return result.view(shape)

    return model


def _flushed(bits: Array) -> Array:
    tiny = bits & 0x7F800000 == 0
    return np.where(tiny, bits & 0x80000000, bits).astype(bits.dtype)


BASIC: dict[str, Callable[..., Any]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def singles() -> Iterator[Snippet]:
    """f32, exact."""
    for ftz in FLUSHES:
        for rounding in ROUNDINGS:
            nearest = rounding in ("", ".rn")
            for sat in ("", ".sat"):
                for name, f in BASIC.items():
                    model = native("f32", f, bool(ftz)) if nearest and not sat else None
                    opcode = f"{name}{rounding}{ftz}{sat}.f32"
                    cases = MORE if nearest and not sat else 256
                    yield plain(opcode, ("f32",) * 2, "f32", "f32", model=model, cases=cases)
                if rounding:
                    opcode = f"fma{rounding}{ftz}{sat}.f32"
                    yield plain(opcode, ("f32",) * 3, "f32", "f32", cases=256 if sat else MORE)
            if not rounding:
                continue
            model = native("f32", np.divide, bool(ftz)) if nearest else None
            yield plain(f"div{rounding}{ftz}.f32", ("f32",) * 2, "f32", "f32", model=model)
            model = native("f32", lambda a: np.float32(1) / a, bool(ftz)) if nearest else None
            yield plain(f"rcp{rounding}{ftz}.f32", ("f32",), "f32", "f32", model=model, cases=FEW)
            model = native("f32", np.sqrt, bool(ftz)) if nearest else None
            yield plain(f"sqrt{rounding}{ftz}.f32", ("f32",), "f32", "f32", model=model, cases=FEW)
        yield from _choices("f32", ftz, "sm_80")
        for name in ("neg", "abs"):
            yield plain(f"{name}{ftz}.f32", ("f32",), "f32", "f32", cases=FEW)
    for rounding in ROUNDINGS[1:]:
        opcode = f"fma{rounding}.ftz.f32"
        name = f"{opcode} below the smallest"
        yield plain(opcode, ("f32",) * 3, "f32", "f32", name=name, fix=_just_below, cases=128)
    yield plain("copysign.f32", ("b32",) * 2, "b32", "f32", given=("f32",) * 2, cases=256)
    for name in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
        yield plain(f"testp.{name}.f32", ("f32",), "pred", "f32", cases=128)
    yield Snippet(
        "fma.rn.f32 with constants",
        "f32",
        "fma.rn.f32 %o0, %i0, 0f3FB8AA3B, 0fBF000000;",
        ("f32",),
        ("f32",),
        lambda: operands(("f32",), "fma with constants", FEW),
    )


def _just_below(found: Operands) -> None:
    """The smallest normal number less a product that is 2^-n of it: is that flushed?"""
    n = np.arange(128, dtype=np.uint32)
    sign = (n // 64) << np.uint32(31)
    found[0][:] = (127 - 63) << 23
    found[1][:] = (np.uint32(127 - 63) - n % 64 << np.uint32(23)) | sign ^ np.uint32(1 << 31)
    found[2][:] = np.uint32(1 << 23) | sign


def _choices(kind: str, ftz: str, arch: str) -> Iterator[Snippet]:
    for name in ("min", "max"):
        for how in ("", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs"):
            needed = "sm_86" if "xorsign" in how and arch == "sm_80" else arch
            yield plain(f"{name}{ftz}{how}.{kind}", (kind,) * 2, kind, kind, arch=needed, cases=FEW)


def doubles() -> Iterator[Snippet]:
    """f64: no kernel of ours has it, but a kernel of one's own may."""
    for name, f in BASIC.items():
        yield plain(f"{name}.f64", ("f64",) * 2, "f64", "f64", model=native("f64", f), cases=FEW)
    yield plain("fma.rn.f64", ("f64",) * 3, "f64", "f64", cases=FEW)
    model = native("f64", np.divide)
    yield plain("div.rn.f64", ("f64",) * 2, "f64", "f64", model=model, cases=FEW)
    for name in ("min", "max"):
        yield plain(f"{name}.f64", ("f64",) * 2, "f64", "f64", cases=256)
    model = native("f64", np.sqrt)
    yield plain("sqrt.rn.f64", ("f64",), "f64", "f64", model=model, cases=256)
    for name in ("rcp.rn", "neg", "abs"):
        yield plain(f"{name}.f64", ("f64",), "f64", "f64", cases=128)


# --- f16 and bf16 -------------------------------------------------------------------------------


def halves() -> Iterator[Snippet]:
    """Two bytes, alone or two in a register."""
    for kind in ("f16", "f16x2", "bf16", "bf16x2"):
        brain = kind.startswith("b")
        arch = "sm_90" if brain else "sm_80"
        for ftz in FLUSHES[: 1 if brain else 2]:
            for name, f in BASIC.items():
                model = native("f16", f) if not brain and not ftz else None
                for rounding in ("", ".rn"):
                    opcode = f"{name}{rounding}{ftz}.{kind}"
                    yield plain(opcode, (kind,) * 2, kind, kind, arch=arch, model=model, cases=FEW)
                if not brain:
                    yield plain(f"{name}{ftz}.sat.{kind}", (kind,) * 2, kind, kind, cases=256)
            for how in ("", ".relu") if brain else ("", ".sat", ".relu"):
                yield plain(f"fma.rn{ftz}{how}.{kind}", (kind,) * 3, kind, kind, cases=FEW)
            yield from _choices(kind, ftz, "sm_80")
            for name in ("neg", "abs"):
                yield plain(f"{name}{ftz}.{kind}", (kind,), kind, kind, cases=256)


# --- approximate --------------------------------------------------------------------------------


def approximations() -> Iterator[Snippet]:
    """Bounds as the PTX ISA states them."""
    for ftz in FLUSHES:
        floor = TINY if ftz else 0.0  # one may be flushed, and the other not
        for name, f, ulps, relative in (
            ("rcp.approx", lambda a: 1 / a, 1, 0.0),
            ("sqrt.approx", np.sqrt, 0, 2.0**-23),
            ("rsqrt.approx", lambda a: 1 / np.sqrt(a), 0, 2.0**-22.9),
            ("ex2.approx", np.exp2, 2, 0.0),
        ):
            bound = approximate("f32", ulps, relative, floor)
            model = _double(f, bool(ftz))
            opcode = f"{name}{ftz}.f32"
            yield plain(opcode, ("f32",), "f32", "approximate", bound=bound, model=model)
        bound, model = approximate("f32", 0, 2.0**-22, 2.0**-22), _double(np.log2, bool(ftz))
        yield plain(
            f"lg2.approx{ftz}.f32", ("f32",), "f32", "approximate", bound=bound, model=model
        )
        for name in ("sin", "cos"):
            yield _circle(f"{name}.approx{ftz}.f32", getattr(np, name), bool(ftz))
        for name in ("div.full", "div.approx"):
            yield plain(
                f"{name}{ftz}.f32",
                ("f32",) * 2,
                "f32",
                "approximate",
                fix=_far if name == "div.full" else _near,
                bound=approximate("f32", 2, 0.0, floor),
            )
    bound = approximate("f32", 0, 2.0**-11, 0.0)
    model = _double(np.tanh, False)
    yield plain("tanh.approx.f32", ("f32",), "f32", "approximate", bound=bound, model=model)
    for kind, ex2, tanh, arch in (
        ("f16", 2.0**-9.9, 2.0**-10.987, "sm_80"),
        ("bf16", 2.0**-7, 2.0**-8, "sm_90"),
    ):
        for of in (kind, f"{kind}x2"):
            ftz = ".ftz" if kind == "bf16" else ""
            yield plain(
                f"ex2.approx{ftz}.{of}",
                (of,),
                of,
                "approximate",
                arch=arch,
                cases=FEW,
                bound=approximate(of, 0, ex2, 2.0**-133 if ftz else 2.0**-24),
            )
            yield plain(
                f"tanh.approx.{of}",
                (of,),
                of,
                "approximate",
                arch=arch,
                cases=FEW,
                bound=approximate(of, 0, 0.0, tanh),
            )


def _double(f: Callable[[Any], Any], ftz: bool) -> Model:
    def model(a: Array) -> Array:
        given = _flushed(a) if ftz else a
        with np.errstate(all="ignore"):
            result = np.asarray(f(value(given, KINDS["f32"].float))).astype(np.float32)  # type: ignore[arg-type]
        return _flushed(result.view(np.uint32)) if ftz else result.view(np.uint32)

    return model


def _circle(opcode: str, f: Callable[[Any], Any], ftz: bool) -> Snippet:
    """Within two pi either way, which is where a bound is stated; and zeros, infinities, NaN."""

    def fix(found: Operands) -> None:
        x = uniform(opcode, (len(found[0]),), -2 * np.pi, 2 * np.pi).astype(np.float32)
        plain_number = (found[0] & 0x7FFFFFFF != 0) & (found[0] & 0x7F800000 != 0x7F800000)
        found[0][plain_number] = x.view(np.uint32)[plain_number]

    bound = approximate("f32", 0, 0.0, 2.0**-20.5)
    return plain(
        opcode,
        ("f32",),
        "f32",
        "approximate",
        fix=fix,
        bound=bound,
        cases=FEW,
        model=_double(f, ftz),
    )


def _far(found: Operands) -> None:
    """All that div.full promises of numbers above 2^126 is said in words: they are left out."""
    size = found[1] & 0x7FFFFFFF
    found[1][(size > 0x7E800000) & (size < 0x7F800000)] ^= 0x20000000


def _near(found: Operands) -> None:
    """div.approx promises nothing for divisors that are subnormal either."""
    _far(found)
    size = found[1] & 0x7FFFFFFF
    found[1][(size > 0) & (size < 0x00800000)] ^= 0x20000000


def _comparison(kind: str, name: str) -> Model:
    """Of numbers; with a NaN those hold that end in u, and nan itself."""
    form = KINDS[kind].float
    assert form is not None

    def model(a: Array, b: Array) -> Array:
        x, y = value(a, form), value(b, form)
        ordered = ~(np.isnan(x) | np.isnan(y))
        if name in ("num", "nan"):
            return (ordered == (name == "num")).astype(np.uint32)
        truth = COMPARISONS[name[:2]](x, y)
        return np.where(ordered, truth, name.endswith("u")).astype(np.uint32)

    return model


def compared() -> Iterator[Snippet]:
    """setp of floats: every comparison in every format."""
    ordered = ("eq", "ne", "lt", "le", "gt", "ge")
    names = (*ordered, *(f"{n}u" for n in ordered), "num", "nan")
    for kind in ("f32", "f64", "f16", "bf16"):
        arch = "sm_90" if kind == "bf16" else "sm_80"
        for name in names:
            for ftz in FLUSHES if kind in ("f32", "f16") else ("",):
                cases = MORE if kind == "f32" else 256
                opcode = f"setp.{name}{ftz}.{kind}"
                yield plain(
                    opcode,
                    (kind,) * 2,
                    "pred",
                    "compared",
                    arch=arch,
                    cases=cases,
                    model=None if ftz else _comparison(kind, name),
                )
    for kind, arch in (("f16x2", "sm_80"), ("bf16x2", "sm_90")):
        for name in ("eq", "lt", "geu", "nan"):
            opcode = f"setp.{name}.{kind}"
            yield plain(opcode, (kind,) * 2, ("pred",) * 2, "compared", arch=arch, cases=256)
    for name in ("lt", "neu"):
        for to in ("u32", "f32"):
            yield plain(f"set.{name}.{to}.f32", ("f32",) * 2, to, "compared", cases=256)
