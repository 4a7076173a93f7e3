"""The machine's pure instructions, one at a time, against integers, fractions and NumPy."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import math
import operator
import shutil
import subprocess
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashwright

MACHINE = Path(flashwright.__file__).parent / "emulate" / "machine"
SOURCES = (
    *(
        MACHINE / f"{name}.cpp"
        for name in ("arithmetic", "exchange", "undefined", "convert", "matrix")
    ),
    Path(__file__).with_name("emulate_single.cpp"),
)
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror")
COMPILER = shutil.which("g++") or shutil.which("c++")
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in cast"),  # of NaNs, as is meant
]

LANES, ALL, SLOT = 32, 0xFFFFFFFF, 256
SOME = 0x8F00_31A5  # lanes that are neither all nor in one piece
FILLER = 0xA5
BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
PRED = "pred"
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers, whichever ran before."""
    global RNG
    RNG = np.random.default_rng(5)


class Ops:
    """One instruction at a time on a register file of its own."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        size = library.fw_names(None, 0)
        text = ctypes.create_string_buffer(size)
        library.fw_names(text, size)
        self.names = text.value.decode().split()

    def raw(self, name: str, registers: np.ndarray, slots: list[int], mask: int, count: int) -> int:
        operands = np.array(slots, dtype=np.int32)
        pointers = (a.ctypes.data_as(ctypes.c_void_p) for a in (registers, operands))
        found: int = self.library.fw_single(name.encode(), *pointers, count, ctypes.c_uint32(mask))
        return found

    def __call__(self, name: str, to: Any, *sources: Any, mask: int = ALL, extra: Any = ()) -> Any:
        """What it leaves in registers of the types `to`.

        A source is an array of 32 lanes, or an integer, which is a predicate. Lanes that are not
        in the mask must keep what was there.
        """
        targets = to if isinstance(to, tuple) else (to,)
        registers = np.full((len(targets) + len(sources)) * SLOT, FILLER, dtype=np.uint8)
        for number, source in enumerate(sources, len(targets)):
            value = np.uint32(source) if isinstance(source, int) else source
            data = np.ascontiguousarray(value).view(np.uint8).reshape(-1)
            registers[number * SLOT :][: len(data)] = data
        slots = [SLOT * i for i in range(len(targets) + len(sources))] + list(extra)
        assert self.raw(name, registers, slots, mask, len(slots)) == 0, name
        results = [self._result(registers[SLOT * i :], t, mask) for i, t in enumerate(targets)]
        return results if isinstance(to, tuple) else results[0]

    def _result(self, slot: np.ndarray, kind: Any, mask: int) -> Any:
        filler = int.from_bytes([FILLER] * 4, "little")
        if kind == PRED:
            value = int(slot[:4].view(np.uint32)[0])
            assert value & ~mask == filler & ~mask
            return value & mask
        size = np.dtype(kind).itemsize
        lanes = slot[: LANES * size].reshape(LANES, size).copy()
        assert (lanes[~lanes_of(mask)] == FILLER).all()
        assert (slot[LANES * size : SLOT] == FILLER).all()
        return lanes.reshape(-1).view(kind)


@pytest.fixture(scope="session")
def ops(tmp_path_factory: pytest.TempPathFactory) -> Ops:
    folder = tmp_path_factory.getbasetemp()
    if folder.name.startswith("popen-"):  # several workers: one of them compiles
        folder = folder.parent
    target = folder / "emulate_ops.so"
    with (folder / "emulate_ops.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            build(folder, target)
    return Ops(ctypes.CDLL(str(target)))


def build(folder: Path, target: Path) -> None:
    objects = [folder / f"{source.stem}.o" for source in SOURCES]
    commands = [
        [COMPILER, *FLAGS, "-I", str(MACHINE), "-c", str(source), "-o", str(made)]
        for source, made in zip(SOURCES, objects, strict=True)
    ]
    running = [subprocess.Popen(c, stderr=subprocess.PIPE, text=True) for c in commands]
    complaints = [process.communicate()[1] for process in running]
    assert not any(process.returncode for process in running), "".join(complaints)
    subprocess.run([COMPILER, "-shared", *map(str, objects), "-o", str(target)], check=True)


def lanes_of(mask: int) -> np.ndarray:
    return (mask >> np.arange(LANES) & 1).astype(bool)


def mask_of(lanes: Any) -> int:
    return sum(1 << i for i, lane in enumerate(lanes) if lane)


def same(found: Any, wanted: Any, mask: int = ALL) -> None:
    """Bit for bit, in the lanes of the mask."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype == wanted.dtype, (found.dtype, wanted.dtype)
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[found.dtype.itemsize]
    inside = lanes_of(mask) if found.size == LANES else slice(None)
    np.testing.assert_array_equal(found.view(bits)[inside], wanted.view(bits)[inside])


# --- integers -----------------------------------------------------------------------------------

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")


def numpy_type(name: str) -> np.dtype[Any]:
    small = {"f16": np.float16, "bf16": BF16, "f32": np.float32, "f64": np.float64}
    letters = {"u": "u", "s": "i", "b": "u"}
    if name in small:
        return np.dtype(small[name])
    return np.dtype(f"{letters[name[0]]}{int(name[1:]) // 8}")


def wrapped(value: int, kind: np.dtype[Any]) -> int:
    bits = 8 * kind.itemsize
    value %= 1 << bits
    return value - (1 << bits) if kind.kind == "i" and value >> (bits - 1) else value


def some_integers(kind: Any) -> np.ndarray:
    """Random ones of every size, and the edges in shuffled places."""
    kind = np.dtype(kind)
    bits = 8 * kind.itemsize
    values = []
    for _ in range(LANES):
        whole = int.from_bytes(RNG.bytes(8), "little") >> int(RNG.integers(0, 64))
        values.append(wrapped(-whole if RNG.integers(2) else whole, kind))
    edges = [0, 1, -1, 2, 1 << (bits - 1), (1 << (bits - 1)) - 1, (1 << bits) - 1, 3]
    values[: len(edges)] = [wrapped(edge, kind) for edge in edges]
    RNG.shuffle(values)
    return np.array(values, dtype=kind)


def divided(a: int, b: int) -> int:
    return -1 if b == 0 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def remaining(a: int, b: int) -> int:
    return -1 if b == 0 else a - b * divided(a, b)


INTEGER_RULES: dict[str, Callable[..., int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul.lo": operator.mul,
    "div": divided,  # by 0, unspecified in PTX: all ones
    "rem": remaining,
    "min": min,
    "max": max,
    "sad": lambda a, b, c: c + abs(a - b),
    "mad.lo": lambda a, b, c: a * b + c,
}


@pytest.mark.parametrize("type_", INTEGERS)
@pytest.mark.parametrize("rule", INTEGER_RULES)
def test_integer_arithmetic(ops: Ops, rule: str, type_: str) -> None:
    kind = numpy_type(type_)
    count = 3 if rule in ("sad", "mad.lo") else 2
    for mask in (ALL, SOME):
        sources = [some_integers(kind) for i in range(count)]
        lanes = zip(*(s.tolist() for s in sources), strict=True)
        wanted = np.array([wrapped(INTEGER_RULES[rule](*v), kind) for v in lanes], dtype=kind)
        same(ops(f"{rule}.{type_}", kind, *sources, mask=mask), wanted, mask)


@pytest.mark.parametrize("type_", INTEGERS)
def test_high_and_wide_products(ops: Ops, type_: str) -> None:
    kind = numpy_type(type_)
    a, b, c = (some_integers(kind) for i in range(3))
    bits = 8 * kind.itemsize
    products = [x * y for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    high = np.array([wrapped(p >> bits, kind) for p in products], dtype=kind)
    same(ops(f"mul.hi.{type_}", kind, a, b), high)
    total = [wrapped((p >> bits) + z, kind) for p, z in zip(products, c.tolist(), strict=True)]
    same(ops(f"mad.hi.{type_}", kind, a, b, c), np.array(total, dtype=kind))
    if bits < 64:
        twice = np.dtype(f"{kind.kind}{bits // 4}")
        same(ops(f"mul.wide.{type_}", twice, a, b), np.array(products, dtype=twice))
        d = some_integers(twice)
        total = [wrapped(p + z, twice) for p, z in zip(products, d.tolist(), strict=True)]
        same(ops(f"mad.wide.{type_}", twice, a, b, d), np.array(total, dtype=twice))


@pytest.mark.parametrize("type_", ["s16", "s32", "s64"])
def test_signs(ops: Ops, type_: str) -> None:
    kind = numpy_type(type_)
    a = some_integers(kind)
    same(ops(f"neg.{type_}", kind, a), np.array([wrapped(-x, kind) for x in a.tolist()], kind))
    same(ops(f"abs.{type_}", kind, a), np.array([wrapped(abs(x), kind) for x in a.tolist()], kind))


def test_saturating_and_packed_integers(ops: Ops) -> None:
    s32 = np.dtype(np.int32)
    a, b = some_integers(s32), some_integers(s32)
    limits = np.iinfo(np.int32)
    for name, rule in (("add.sat.s32", np.add), ("sub.sat.s32", np.subtract)):
        wanted = rule(a.astype(np.int64), b.astype(np.int64)).clip(limits.min, limits.max)
        same(ops(name, s32, a, b), wanted.astype(np.int32))
    same(ops("max.relu.s32", s32, a, b), np.maximum(np.maximum(a, b), 0))
    same(ops("min.relu.s32", s32, a, b), np.maximum(np.minimum(a, b), 0))
    for type_, half in (("s16x2", np.int16), ("u16x2", np.uint16)):
        for name, rule in (("add", np.add), ("min", np.minimum), ("max", np.maximum)):
            wanted = rule(a.view(half), b.view(half)).view(np.int32)
            same(ops(f"{name}.{type_}", s32, a, b, mask=SOME), wanted, SOME)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_bits(ops: Ops, bits: int) -> None:
    kind = numpy_type(f"b{bits}")
    a, b = some_integers(kind), some_integers(kind)
    for name, rule in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        same(ops(f"{name}.b{bits}", kind, a, b, mask=SOME), rule(a, b), SOME)
    same(ops(f"not.b{bits}", kind, a), ~a)
    same(ops(f"cnot.b{bits}", kind, a), (a == 0).astype(kind))
    amounts = np.array([0, 1, bits - 1, bits, bits + 1, 255, 256, ALL] * 4, dtype=np.uint32)
    left = [
        wrapped(x << n if n < bits else 0, kind)
        for x, n in zip(a.tolist(), amounts.tolist(), strict=True)
    ]
    same(ops(f"shl.b{bits}", kind, a, amounts), np.array(left, dtype=kind))
    for letter in "bus":
        signed = numpy_type(f"{letter}{bits}")
        right = [
            x >> min(n, 70) for x, n in zip(a.view(signed).tolist(), amounts.tolist(), strict=True)
        ]
        same(ops(f"shr.{letter}{bits}", signed, a, amounts), np.array(right, dtype=signed))
    if bits == 16:
        return
    texts = [f"{x:0{bits}b}" for x in a.tolist()]
    counts = np.array([t.count("1") for t in texts], dtype=np.uint32)
    same(ops(f"popc.b{bits}", np.uint32, a), counts)
    zeros = np.array([len(t) - len(t.lstrip("0")) for t in texts], dtype=np.uint32)
    same(ops(f"clz.b{bits}", np.uint32, a), zeros)
    same(ops(f"brev.b{bits}", kind, a), np.array([int(t[::-1], 2) for t in texts], dtype=kind))
    for letter in "us":
        values = a.view(numpy_type(f"{letter}{bits}")).tolist()
        tops = [(~x if x < 0 else x).bit_length() - 1 for x in values]
        found = np.array([t % (1 << 32) for t in tops], dtype=np.uint32)
        same(ops(f"bfind.{letter}{bits}", np.uint32, a), found)
        shift = [bits - 1 - t if t >= 0 else ALL for t in tops]
        same(ops(f"bfind.shiftamt.{letter}{bits}", np.uint32, a), np.array(shift, dtype=np.uint32))


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields(ops: Ops, bits: int) -> None:
    kind = numpy_type(f"b{bits}")
    for _ in range(8):
        a, b = some_integers(kind), some_integers(kind)
        places = RNG.choice([0, 1, 7, bits - 1, bits, 200, 255, 256 + 3], LANES).astype(np.uint32)
        sizes = RNG.choice([0, 1, 5, 8, bits - 1, bits, 255, 256 + 4], LANES).astype(np.uint32)
        for letter in "us":
            wanted = []
            for x, place, size in zip(a.tolist(), places.tolist(), sizes.tolist(), strict=True):
                place, size, top = place & 255, size & 255, bits - 1
                sign = letter == "s" and size and x >> min(place + size - 1, top) & 1
                field = [
                    x >> (place + i) & 1 if i < size and place + i <= top else int(bool(sign))
                    for i in range(bits)
                ]
                wanted.append(sum(bit << i for i, bit in enumerate(field)))
            signed = numpy_type(f"{letter}{bits}")
            found = ops(f"bfe.{letter}{bits}", signed, a, places, sizes)
            same(found.view(kind), np.array(wanted, dtype=kind))
        wanted = []
        for x, y, place, size in zip(
            a.tolist(), b.tolist(), places.tolist(), sizes.tolist(), strict=True
        ):
            for i in range(size & 255):
                if (place & 255) + i < bits:
                    at = (place & 255) + i
                    y = y & ~(1 << at) | (x >> i & 1) << at
            wanted.append(y)
        found = ops(f"bfi.b{bits}", kind, a, b, places, sizes)
        same(found, np.array(wanted, dtype=kind))


def words(number: int) -> list[np.ndarray]:
    return [RNG.integers(0, 1 << 32, LANES, dtype=np.uint32) for _ in range(number)]


def test_prmt(ops: Ops) -> None:
    a, b, c = words(3)
    both = [x | y << 32 for x, y in zip(a.tolist(), b.tolist(), strict=True)]

    def byte(whole: int, which: int) -> int:
        value = whole >> 8 * (which & 7) & 255
        return (255 if value & 128 else 0) if which & 8 else value

    def picked(modes: Callable[[int], list[int]]) -> np.ndarray:
        rows = [[byte(w, k) for k in modes(n)] for w, n in zip(both, c.tolist(), strict=True)]
        return np.array(rows, dtype=np.uint8).view(np.uint32).reshape(-1)

    same(ops("prmt.b32", np.uint32, a, b, c), picked(lambda n: [n >> 4 * i & 15 for i in range(4)]))
    modes: dict[str, Callable[[int], list[int]]] = {
        "f4e": lambda n: [n + i for i in range(4)],
        "b4e": lambda n: [(n - i) & 7 for i in range(4)],
        "rc8": lambda n: [n] * 4,
        "ecl": lambda n: [max(i, n) for i in range(4)],
        "ecr": lambda n: [min(i, n) for i in range(4)],
        "rc16": lambda n: [2 * (n & 1) + (i & 1) for i in range(4)],
    }
    for name, mode in modes.items():
        wanted = picked(lambda n, mode=mode: mode(n & 3))  # type: ignore[misc]
        same(ops(f"prmt.b32.{name}", np.uint32, a, b, c), wanted)


def test_lop3_and_funnel_shifts(ops: Ops) -> None:
    a, b, c = words(3)
    for rule, lut in ((a & b & c, 0x80), (a ^ b ^ c, 0x96), (a & b | ~a & c, 0xCA), (~c, 0x55)):
        same(ops("lop3.b32", np.uint32, a, b, c, np.full(LANES, lut, dtype=np.uint32)), rule)
    amounts = np.array([0, 1, 31, 32, 33, 63, 64, ALL] * 4, dtype=np.uint32)
    for mode, limit in (("wrap", lambda n: n & 31), ("clamp", lambda n: min(n, 32))):
        rows = [
            (y << 32 | x, limit(n))
            for x, y, n in zip(*(v.tolist() for v in (a, b, amounts)), strict=True)
        ]
        left = np.array([(w << n >> 32) & ALL for w, n in rows], dtype=np.uint32)
        right = np.array([w >> n & ALL for w, n in rows], dtype=np.uint32)
        same(ops(f"shf.l.{mode}.b32", np.uint32, a, b, amounts), left)
        same(ops(f"shf.r.{mode}.b32", np.uint32, a, b, amounts), right)


# --- floating point -----------------------------------------------------------------------------

# A format's precision, the exponent of its smallest normal number, its largest number, its NaN.
FORMATS = {
    "f16": (np.float16, 11, -14, Fraction(65504), 0x7FFF),
    "bf16": (BF16, 8, -126, Fraction(255 * 2**120), 0x7FFF),
    "f32": (np.float32, 24, -126, Fraction((2**24 - 1) * 2**104), 0x7FFFFFFF),
    "f64": (np.float64, 53, -1022, Fraction((2**53 - 1) * 2**971), 0xFFF8 << 48),
    "e4m3": (E4M3, 4, -6, Fraction(448), 0x7F),
    "e5m2": (E5M2, 3, -14, Fraction(57344), 0x7F),
    "tf32": (np.float32, 11, -126, Fraction((2**11 - 1) * 2**117), 0x7FFFE000),
}


def rounded(x: Fraction, type_: str, mode: str = "rn", satfinite: bool = False) -> float:
    """A fraction in a format: the definition, in whole numbers."""
    _, precision, least, largest, _ = FORMATS[type_]
    if x == 0:
        return 0.0
    size, negative = abs(x), x < 0
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    unit = Fraction(2) ** (max(exponent, least) - precision + 1)
    count, rest = divmod(size, unit)
    up = {
        "rn": rest > unit / 2 or (rest == unit / 2 and count % 2 == 1),
        "rna": rest >= unit / 2,
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
    }[mode]
    size = (count + up) * unit
    if size > largest:
        inward = mode == "rz" or mode == ("rp" if negative else "rm")
        size = largest if inward or satfinite else None  # type: ignore[assignment]
    value = math.inf if size is None else float(size)
    return -value if negative else value


def numbers(type_: str, special: bool = True) -> np.ndarray:
    """32 of a format: random bits of every exponent, small ones, and the edges."""
    kind, *_ = FORMATS[type_]
    size = np.dtype(kind).itemsize
    bits = np.frombuffer(RNG.bytes(LANES * size), dtype=f"u{size}").copy()
    values = bits.view(kind).copy()
    near = RNG.normal(size=LANES).astype(np.float32).astype(kind)
    values = np.where(RNG.integers(0, 3, LANES) > 0, near, values)
    if special:
        tiny, one = np.array([1, 0x10], dtype=f"u{size}").view(kind)
        edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, tiny, -one, 65504, 1, -1, 0.5])
        values[RNG.permutation(LANES)[: len(edges)]] = edges.astype(kind)
    else:
        values = np.where(np.isfinite(values.astype(np.float64)), values, kind(1.5))
    return values.astype(kind)


def flushed(value: float, type_: str) -> float:
    least = 2.0 ** FORMATS[type_][2]
    return math.copysign(0.0, value) if abs(value) < least else value


def root(x: Fraction) -> Fraction:
    """Its square root, cut off far behind any rounding, and a trace of the rest."""
    scaled = x * (1 << 2400)
    whole = math.isqrt(scaled.numerator // scaled.denominator)
    exact = Fraction(whole) ** 2 == scaled
    return Fraction(2 * whole + (not exact), 1 << 1201)


EXACT: dict[str, Callable[..., Fraction]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "fma": lambda a, b, c: a * b + c,
    "div": operator.truediv,
    "rcp": lambda a: 1 / a,
    "sqrt": root,
}


def float_result(
    op: str, type_: str, mode: str, values: tuple[float, ...], ftz: bool = False
) -> float:
    """IEEE 754's answer: exactly where all is finite, by double's rules where it is not.

    What .ftz flushes is what is too small when rounded as if exponents went on below.
    """
    wide = [np.float64(v) for v in values]
    with np.errstate(all="ignore"):
        rough = {
            "add": lambda: wide[0] + wide[1],
            "sub": lambda: wide[0] - wide[1],
            "mul": lambda: wide[0] * wide[1],
            "fma": lambda: wide[0] * wide[1] + wide[2],
            "div": lambda: wide[0] / wide[1],
            "rcp": lambda: np.float64(1) / wide[0],
            "sqrt": lambda: np.sqrt(wide[0]),
        }[op]()
    finite = all(math.isfinite(v) for v in values)
    if not finite or math.isnan(rough) or (op in ("div", "rcp") and wide[-1] == 0):
        return float(rough)
    exact = EXACT[op](*(Fraction(v) for v in values))
    if exact == 0:  # its sign is that of the terms, where they agree
        terms = [rough]
        if op in ("add", "sub", "fma"):
            last = -wide[-1] if op == "sub" else wide[-1]
            terms = [wide[0] * wide[1] if op == "fma" else wide[0], last]
        signs = {math.copysign(1, t) for t in terms}
        return -0.0 if signs == {-1.0} or (mode == "rm" and len(signs) == 2) else 0.0
    higher = rounded(exact * 2**20, type_, mode)
    if ftz and abs(higher) < 2.0 ** (FORMATS[type_][2] + 20):
        return math.copysign(0.0, exact)
    return rounded(exact, type_, mode)


def encoded(values: Any, type_: str) -> np.ndarray:
    """Doubles that the format has, as its bits; every NaN as the hardware's."""
    kind, *_, nan = FORMATS[type_]
    wide = np.array(values, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        out = wide.astype(kind)
    out.view(f"u{out.dtype.itemsize}")[np.isnan(wide)] = nan
    return out


def check_floats(
    ops: Ops, name: str, op: str, type_: str, mode: str = "rn", mask: int = ALL
) -> None:
    kind = FORMATS[type_][0]
    count = {"fma": 3, "rcp": 1, "sqrt": 1}.get(op, 2)
    parts = name.split(".")
    sources = [numbers(type_) for _ in range(count)]
    if count > 1:
        sources[1][:4] = -sources[0][:4]  # exact zeros
        sources[0][4:8], sources[1][4:8] = (0.0, -0.0, 0.0, -0.0), (0.0, 0.0, -0.0, -0.0)
    rows = [tuple(float(v) for v in row) for row in zip(*sources, strict=True)]
    if "ftz" in parts:
        rows = [tuple(flushed(v, type_) for v in row) for row in rows]
    wanted = [float_result(op, type_, mode, row, "ftz" in parts) for row in rows]
    if "sat" in parts:
        wanted = [0.0 if not v > 0 else min(v, 1.0) for v in wanted]
    if "relu" in parts:
        wanted = [0.0 if v <= 0 else v for v in wanted]
    same(ops(name, kind, *sources, mask=mask), encoded(wanted, type_), mask)


@pytest.mark.parametrize("op", EXACT)
@pytest.mark.parametrize("tail", ["f32", "ftz.f32", "sat.f32", "ftz.sat.f32", "f64"])
@pytest.mark.parametrize("mode", ["", "rn", "rz", "rm", "rp"])
def test_single_and_double(ops: Ops, op: str, tail: str, mode: str) -> None:
    name = ".".join(filter(None, (op, mode, tail)))
    if not mode and op not in ("add", "sub", "mul"):
        return  # these must say how they round
    if ("sat" in tail and op in ("div", "rcp", "sqrt")) or (
        tail == "f64" and mode not in ("", "rn")
    ):
        assert name not in ops.names
        return
    for mask in (ALL, SOME, ALL):
        check_floats(ops, name, op, tail.rpartition(".")[2], mode or "rn", mask)


@pytest.mark.parametrize("type_", ["f32", "f16"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_what_is_flushed_would_round_up_to_the_smallest_number(
    ops: Ops, type_: str, mode: str
) -> None:
    """As an H200 does it: all that is left of it in as many bits as others have is too small."""
    kind, precision, exponent, *_ = FORMATS[type_]
    least, below = kind(2.0**exponent), kind(1 - 2.0**-precision)
    a = np.array([least, -least] * 16, dtype=kind)
    zeros = np.array([0.0, -0.0] * 16, dtype=kind)
    if type_ == "f32" or mode == "rn":
        name = f"mul.{mode}.ftz.{type_}"
        same(ops(name, kind, a, np.full(LANES, below)), zeros)
        same(ops(name, kind, a, np.full(LANES, kind(1))), a)
    if type_ == "f32":
        above = np.full(LANES, 1 + 2.0**-23, dtype=kind)
        same(ops(f"div.{mode}.ftz.f32", kind, a, above), zeros)
        less = np.full(LANES, -(2.0**-24), dtype=kind)
        same(ops(f"fma.{mode}.ftz.f32", kind, a, less, a), zeros)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_what_lacks_less_than_a_bit_is_not_flushed(ops: Ops, mode: str) -> None:
    """Where it is rounded away from zero: as an H200 has it in fma and cvt."""
    a = np.array([2.0**-126, -(2.0**-126)] * 16, np.float32)
    up = {"rn": (1, 1), "rz": (0, 0), "rm": (0, 1), "rp": (1, 0)}[mode]
    wanted = np.copysign(abs(a) * np.array(up * 16, np.float32), a)
    for bits in (25, 26, 30, 52, 53, 54, 90):
        less = np.full(LANES, -(2.0**-bits), np.float32)
        same(ops(f"fma.{mode}.ftz.f32", np.float32, a, less, a), wanted)
        name = f"cvt.{mode}.ftz.f32.f64"
        if name in ops.names and bits <= 53:
            wide = a.astype(np.float64) * (1 - 2.0**-bits)
            same(ops(name, np.float32, wide), wanted)
    more = np.full(LANES, (1 + 2.0**-23) * 2.0**-63, np.float32)
    less = np.copysign(np.float32((1 - 2.0**-23) * 2.0**-63), a)
    same(ops(f"mul.{mode}.ftz.f32", np.float32, more, less), wanted)


SMALL = [
    f"{op}{mode}{ftz}{clamp}.{type_}"
    for type_ in ("f16", "bf16")
    for op in ("add", "sub", "mul", "fma")
    for mode in (("", ".rn") if op != "fma" else (".rn",))
    for ftz in (("", ".ftz") if type_ == "f16" else ("",))
    for clamp in ("", *([".sat"] if type_ == "f16" else []), *([".relu"] if op == "fma" else []))
]


def test_half_and_bfloat(ops: Ops) -> None:
    for name in SMALL:
        op, type_ = name.split(".")[0], name.rpartition(".")[2]
        for mask in (ALL, ALL, SOME):
            check_floats(ops, name, op, type_, "rn", mask)


@pytest.mark.parametrize("type_", ["f16", "bf16"])
def test_packed_is_twice_the_plain(ops: Ops, type_: str) -> None:
    packed = [n for n in ops.names if n.endswith(f".{type_}x2") and n[:-2] in ops.names]
    packed = [n for n in packed if n.split(".")[0] not in ("cvt", "setp", "set")]
    assert len(packed) >= 20
    kind = FORMATS[type_][0]
    for name in packed:
        first = name.split(".")[0]
        count = 3 if first == "fma" else 1 if first in ("neg", "abs", "ex2", "tanh") else 2
        low, high = ([numbers(type_) for _ in range(count)] for _ in range(2))
        both = [
            np.stack(pair, axis=1).copy().view(np.uint32) for pair in zip(low, high, strict=True)
        ]
        found = ops(name, np.uint32, *both, mask=SOME).view(np.uint16)
        for half, sources in enumerate((low, high)):
            wanted = ops(name[:-2], kind, *sources, mask=SOME).view(np.uint16)
            same(found[half::2], wanted, SOME)


def chosen(name: str, type_: str, a: float, b: float) -> float:
    parts = name.split(".")
    if "ftz" in parts:
        a, b = flushed(a, type_), flushed(b, type_)
    sign = math.copysign(1, a) * math.copysign(1, b)
    if "xorsign" in parts:
        a, b = abs(a), abs(b)
    if math.isnan(a) or math.isnan(b):
        result = (
            math.nan
            if "NaN" in parts or math.isnan(a) == math.isnan(b)
            else b
            if math.isnan(a)
            else a
        )
    else:
        key = {"key": lambda v: (v, math.copysign(1, v))}
        result = (min if parts[0] == "min" else max)((a, b), **key)
    return math.copysign(result, sign) if "xorsign" in parts and not math.isnan(result) else result


@pytest.mark.parametrize("type_", ["f16", "bf16", "f32", "f64"])
def test_min_and_max(ops: Ops, type_: str) -> None:
    names = [n for n in ops.names if n.startswith(("min.", "max.")) and n.endswith(f".{type_}")]
    assert len(names) == {"f64": 2, "bf16": 8}.get(type_, 16)
    kind = FORMATS[type_][0]
    for name in names:
        a, b = numbers(type_), numbers(type_)
        a[:4] = np.array([0.0, -0.0, np.nan, np.nan]).astype(kind)
        b[:4] = np.array([-0.0, 0.0, np.nan, 1.0]).astype(kind)
        wanted = [chosen(name, type_, float(x), float(y)) for x, y in zip(a, b, strict=True)]
        same(ops(name, kind, a, b, mask=SOME), encoded(wanted, type_), SOME)


@pytest.mark.parametrize("type_", ["f16", "bf16", "f32", "f64"])
def test_float_signs(ops: Ops, type_: str) -> None:
    kind = FORMATS[type_][0]
    a = numbers(type_)
    wide = a.astype(np.float64)
    same(ops(f"neg.{type_}", kind, a), encoded(-wide, type_))
    same(ops(f"abs.{type_}", kind, a), encoded(abs(wide), type_))
    if type_ in ("f16", "f32"):
        wide = np.array([flushed(v, type_) for v in wide])
        same(ops(f"neg.ftz.{type_}", kind, a), encoded(-wide, type_))
        same(ops(f"abs.ftz.{type_}", kind, a), encoded(abs(wide), type_))


FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rcp": lambda x: 1 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_approximations(ops: Ops, function: str) -> None:
    """Within an ulp of the true value, which is less than PTX allows; flushed where it says so."""
    for type_, ftz in itertools.product(("f32", "f16", "bf16"), (False, True)):
        name = f"{function}.approx{'.ftz' if ftz else ''}.{type_}"
        if name not in ops.names:
            continue
        kind, precision, least, *_ = FORMATS[type_]
        for _ in range(8):
            a = numbers(type_)
            wide = a.astype(np.float64)
            if ftz:
                wide = np.array([flushed(v, type_) for v in wide])
            with np.errstate(all="ignore"):
                true = FUNCTIONS[function](wide)
                found = ops(name, kind, a).astype(np.float64)
            if ftz:
                assert not ((found != 0) & (abs(found) < 2.0**least)).any()
                tiny = abs(true) < 2.0**least * (1 - 2.0**-precision)
                true = np.where(tiny, np.copysign(0, true), true)
            assert (np.isnan(found) == np.isnan(true)).all()
            with np.errstate(all="ignore"):
                near = abs(found - true) <= np.maximum(abs(true), 2.0**least) * 2.0 ** (
                    1 - precision
                )
            large = abs(true) > float(FORMATS[type_][3])
            assert (near | np.isnan(true) | (found == true) | (large & np.isinf(found))).all(), name
    names = {"rcp.approx.ftz.f32", "ex2.approx.ftz.f32", "tanh.approx.f16x2", "ex2.approx.ftz.bf16"}
    assert names <= set(ops.names)


def test_approximate_division(ops: Ops) -> None:
    for name in ("div.full.f32", "div.approx.f32", "div.full.ftz.f32", "div.approx.ftz.f32"):
        a, b = numbers("f32", special=False), numbers("f32", special=False)
        b = np.where(abs(b) > 2.0**126, np.float32(3), b).astype(np.float32)
        if "ftz" in name:
            rows = [[flushed(float(v), "f32") for v in x] for x in (a, b)]
        else:
            rows = [a.tolist(), b.tolist()]
        wanted = [float_result("div", "f32", "rn", v) for v in zip(*rows, strict=True)]
        wanted = [flushed(v, "f32") for v in wanted] if "ftz" in name else wanted
        same(ops(name, np.float32, a, b), encoded(wanted, "f32"))
    huge = np.full(LANES, 2.0**127, dtype=np.float32)
    top = np.array([np.inf, 1e38] * 16, dtype=np.float32)
    found = ops("div.approx.f32", np.float32, top, huge)
    assert np.isnan(found[0])
    assert found[1] == 0


# --- conversions --------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["u8", "s8", *INTEGERS])
def test_cvt_among_integers(ops: Ops, to: str) -> None:
    for source, sat in itertools.product(["u8", "s8", *INTEGERS], (False, True)):
        name = f"cvt{'.sat' if sat else ''}.{to}.{source}"
        if name not in ops.names:
            assert sat  # where nothing can saturate, PTX does not have it
            continue
        narrow, kind = numpy_type(source), numpy_type(to)
        a = some_integers(narrow)
        holder = np.dtype(f"{narrow.kind}{max(2, narrow.itemsize)}")
        target = np.dtype(f"{kind.kind}{max(2, kind.itemsize)}")
        limits = np.iinfo(kind)
        values = [
            min(max(x, limits.min), limits.max) if sat else wrapped(x, kind) for x in a.tolist()
        ]
        found = ops(name, target, a.astype(holder), mask=SOME)
        same(found, np.array(values, dtype=target), SOME)
        # In wider registers, whose upper bits are not read, and are written with the sign.
        dirty = np.full(LANES, 0x5A5A_5A5A_5A5A_5A5A, dtype=np.uint64)
        bits = np.uint64((1 << 8 * narrow.itemsize) - 1)
        dirty = dirty & ~bits | a.astype(np.int64).view(np.uint64) & bits
        if narrow.itemsize == 8:
            dirty = a
        long = np.dtype(f"{kind.kind}8")
        found = ops(name, long, dirty, extra=(8, 8))
        same(found, np.array(values, dtype=long))


WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@pytest.mark.parametrize("source", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("mode", WHOLE)
def test_cvt_to_integer(ops: Ops, source: str, mode: str) -> None:
    kind = FORMATS[source][0]
    for to, ftz in itertools.product(["u8", "s8", *INTEGERS], (False, True)):
        name = f"cvt.{mode}{'.ftz' if ftz else ''}.{to}.{source}"
        if name not in ops.names:
            assert (ftz and source != "f32") or (source == "bf16" and to in ("u8", "s8"))
            continue
        target = numpy_type(to)
        limits = np.iinfo(target)
        a = numbers(source)
        with np.errstate(over="ignore"):
            spread = np.array(
                [2.5, -2.5, 0.5, 1.5, limits.max, limits.min, 2.0**63, 2.0**64, -(2.0**63)]
            )
            a[: len(spread)] = spread.astype(kind)
        wanted = []
        for value in a.astype(np.float64).tolist():
            value = flushed(value, "f32") if ftz else value
            if math.isnan(value):  # PTX: 0, but where 64 bits are involved the top bit
                wide = target.itemsize == 8 or source == "f64"
                wanted.append(wrapped(1 << (8 * target.itemsize - 1), target) if wide else 0)
            elif math.isinf(value):
                wanted.append(limits.max if value > 0 else limits.min)
            else:
                wanted.append(min(max(int(WHOLE[mode](value)), limits.min), limits.max))
        register = np.dtype(f"{target.kind}{max(2, target.itemsize)}")
        same(ops(name, register, a, mask=SOME), np.array(wanted, dtype=register), SOME)


@pytest.mark.parametrize("source", ["u8", "s8", *INTEGERS])
def test_cvt_from_integer(ops: Ops, source: str) -> None:
    narrow = numpy_type(source)
    for to, mode in itertools.product(("f16", "bf16", "f32", "f64"), ("rn", "rz", "rm", "rp")):
        name = f"cvt.{mode}.{to}.{source}"
        if name not in ops.names:
            assert (to == "f64" and mode != "rn") or (to == "bf16" and narrow.itemsize == 1)
            continue
        a = some_integers(narrow)
        holder = a.astype(f"{narrow.kind}{max(2, narrow.itemsize)}")
        wanted = [rounded(Fraction(x), to, mode) for x in a.tolist()]
        same(ops(name, FORMATS[to][0], holder, mask=SOME), encoded(wanted, to), SOME)


NARROWING = [("f64", "f32"), ("f64", "f16"), ("f64", "bf16"), ("f32", "f16"), ("f32", "bf16")]


@pytest.mark.parametrize(("source", "to"), [*NARROWING, ("f16", "bf16"), ("bf16", "f16")])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_cvt_to_a_narrower_float(ops: Ops, source: str, to: str, mode: str) -> None:
    for ftz, sat in itertools.product((False, True), (False, True)):
        name = f"cvt.{mode}{'.ftz' if ftz else ''}{'.sat' if sat else ''}.{to}.{source}"
        if name not in ops.names:
            assert ftz or sat
            continue
        a = numbers(source)
        with np.errstate(all="ignore"):
            a[:8] = numbers(to)[:8].astype(FORMATS[source][0]) * FORMATS[source][0](1 + 2**-8)
        wanted = []
        for value in a.astype(np.float64).tolist():
            value = flushed(value, "f32") if ftz and source == "f32" else value
            value = (0.0 if not value > 0 else min(value, 1.0)) if sat else value
            if math.isfinite(value) and value:
                value = rounded(Fraction(value), to, mode)
                value = value or math.copysign(0.0, 1.0)
            wanted.append(flushed(value, "f32") if ftz and to == "f32" else value)
        signs = np.copysign(1, a.astype(np.float64))
        wanted = [
            math.copysign(w, s) if w == 0 and not sat else w
            for w, s in zip(wanted, signs, strict=True)
        ]
        same(ops(name, FORMATS[to][0], a, mask=SOME), encoded(wanted, to), SOME)


def test_every_half_and_bfloat_widens(ops: Ops) -> None:
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).reshape(-1, LANES)
    for bits in every:
        half = bits.view(np.float16)
        same(ops("cvt.f32.f16", np.float32, half), encoded(half.astype(np.float64), "f32"))
        shifted = (bits.astype(np.uint32) << 16).view(
            np.float32
        )  # NaN too, as the hardware does it
        same(ops("cvt.f32.bf16", np.float32, bits), shifted)


def test_cvt_to_whole_and_wider_floats(ops: Ops) -> None:
    for type_, (mode, rule) in itertools.product(("f16", "f32", "f64"), WHOLE.items()):
        a = numbers(type_)
        a[:6] = np.array([0.5, -0.5, 1.5, -0.2, 2.5, 0.7]).astype(a.dtype)
        wanted = encoded(rule(a.astype(np.float64)), type_)
        wanted.view(f"u{a.dtype.itemsize}")[np.isnan(a)] = ops(
            f"cvt.{mode}.{type_}.{type_}", a.dtype, a
        ).view(f"u{a.dtype.itemsize}")[np.isnan(a)]
        same(ops(f"cvt.{mode}.{type_}.{type_}", a.dtype, a), wanted)
    a = numbers("f32")
    finite = np.where(np.isnan(a), np.float32(2), a)
    same(ops("cvt.f64.f32", np.float64, finite), finite.astype(np.float64))
    clipped = np.where(np.isnan(a) | (a <= 0), 0, np.minimum(a, 1)).astype(np.float32)
    same(ops("cvt.sat.f32.f32", np.float32, a), clipped)


# The types that have .relu and .satfinite, and their order in a name.
REDUCED = [
    (f"cvt.{mode}{relu}{sat}.{to}{two}.f32", to, mode, bool(two))
    for to, two in itertools.product(("f16", "bf16"), ("", "x2"))
    for mode, relu, sat in itertools.product(("rn", "rz"), ("", ".relu"), ("", ".satfinite"))
] + [
    (f"cvt.rn.satfinite{relu}.{to}x2.f32", to, "rn", True)
    for to, relu in itertools.product(("e4m3", "e5m2"), ("", ".relu"))
]
REDUCED += [
    (f"cvt.{mode}{sat}{relu}.tf32.f32", "tf32", mode, False)
    for mode, sat, relu in itertools.product(("rn", "rz", "rna"), ("", ".satfinite"), ("", ".relu"))
    if not (mode == "rna" and relu)
]


def reduced(values: np.ndarray, name: str, to: str, mode: str) -> np.ndarray:
    wanted = []
    for value in values.astype(np.float64).tolist():
        if ".relu" in name and value <= 0:
            value = 0.0
        if math.isinf(value) and ".satfinite" in name:
            value = math.copysign(float(FORMATS[to][3]), value)
        elif math.isfinite(value) and value:
            result = rounded(Fraction(value), to, mode, ".satfinite" in name)
            value = math.copysign(result, value)
        wanted.append(value)
    out = encoded(wanted, to)
    if mode == "rna":  # as Hopper has it: NaN's bits are cut off, and with .satfinite one less
        cut = (values.view(np.uint32) & 0xFFFFE000) - (0x2000 if ".satfinite" in name else 0)
        out.view(np.uint32)[np.isnan(values)] = cut[np.isnan(values)]
    return out


@pytest.mark.parametrize(("name", "to", "mode", "two"), REDUCED, ids=[r[0] for r in REDUCED])
def test_cvt_with_relu_and_satfinite(ops: Ops, name: str, to: str, mode: str, two: bool) -> None:
    for mask in (ALL, SOME, ALL):
        a, b = numbers("f32"), numbers("f32")
        a[:8] = [448, 464, 465, 480, 57344, 61440, 2.0**-9, -(2.0**-10)]
        wanted = reduced(a, name, to, mode)
        if not two:
            same(ops(name, wanted.dtype, a, mask=mask), wanted, mask)
            continue
        lower = reduced(b, name, to, mode)
        pair = np.stack([lower, wanted], axis=1).copy()  # a is the upper half
        found = ops(name, f"u{2 * wanted.dtype.itemsize}", a, b, mask=mask)
        same(found, pair.view(found.dtype).reshape(-1), mask)


def test_cvt_rn_to_16_bits_is_numpys(ops: Ops) -> None:
    for _ in range(300):
        a = np.frombuffer(RNG.bytes(128), dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            half, brain = a.astype(np.float16), a.astype(BF16)
        half.view(np.uint16)[np.isnan(a)] = 0x7FFF
        brain.view(np.uint16)[np.isnan(a)] = 0x7FFF
        same(ops("cvt.rn.f16.f32", np.float16, a), half)
        same(ops("cvt.rn.bf16.f32", BF16, a), brain)


@pytest.mark.parametrize(("name", "kind"), [("e4m3", E4M3), ("e5m2", E5M2)])
def test_eight_bits_and_halves(ops: Ops, name: str, kind: Any) -> None:
    every = np.arange(256, dtype=np.uint8)
    for high in range(0, 256, 5):
        for low in every.reshape(-1, LANES):
            pair = low.astype(np.uint16) | np.uint16(high << 8)
            halves = encoded(pair.view(kind).astype(np.float64), "f16")
            found = ops(f"cvt.rn.f16x2.{name}x2", np.uint32, pair)
            same(found, halves.view(np.uint32))
    for _ in range(60):
        halves = numbers("f16"), numbers("f16")
        both = np.stack(halves, axis=1).copy().view(np.uint32)
        parts = [reduced(h, ".satfinite", name, "rn") for h in halves]
        wanted = np.stack(parts, axis=1).copy().view(np.uint16).reshape(-1)
        same(ops(f"cvt.rn.satfinite.{name}x2.f16x2", np.uint16, both, mask=SOME), wanted, SOME)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(width=32), min_size=LANES, max_size=LANES),
    st.sampled_from(["f16", "bf16", "e4m3", "e5m2"]),
)
def test_rounding_by_hypothesis(ops: Ops, values: list[float], to: str) -> None:
    a = np.array(values, dtype=np.float32)
    eight = to in ("e4m3", "e5m2")
    name = f"cvt.rn{'.satfinite' if eight else ''}.{to}x2.f32"
    wanted = reduced(a, name, to, "rn")
    pair = np.stack([wanted, wanted], axis=1).copy()
    found = ops(name, f"u{2 * wanted.dtype.itemsize}", a, a)
    same(found, pair.view(found.dtype).reshape(-1))


# --- comparisons, selections, moves -------------------------------------------------------------

ORDERED: dict[str, Callable[[Any, Any], Any]] = {
    **{n: getattr(operator, n) for n in ("eq", "lt", "le", "gt", "ge")},
    "ne": lambda a, b: (a < b) | (a > b),
}
ALIASES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def compared(name: str, a: np.ndarray, b: np.ndarray) -> int:
    wide = np.float64 if a.dtype.kind not in "iu" else a.dtype
    x, y = a.astype(wide), b.astype(wide)
    nan = (x != x) | (y != y)
    if name in ("num", "nan"):
        return mask_of(nan if name == "nan" else ~nan)
    unordered = len(name) == 3
    return mask_of(ORDERED[ALIASES.get(name, name[:2])](x, y) | (nan & unordered))


@pytest.mark.parametrize("type_", [*INTEGERS, "b16", "b32", "b64", "f16", "bf16", "f32", "f64"])
def test_setp(ops: Ops, type_: str) -> None:
    names = [n for n in ops.names if n.startswith("setp.") and n.endswith(f".{type_}")]
    forms = {"b": 8, "u": 40, "s": 24}.get(type_[0], 56 * (2 if type_ in ("f32", "f16") else 1))
    assert len(names) == (56 if type_ == "bf16" else forms)
    floating = type_ in FORMATS
    kind = numpy_type(type_)
    for name in names:
        parts = name.split(".")
        a, b = (numbers(type_) if floating else some_integers(kind) for i in range(2))
        b[:12] = a[:12]
        x, y = a, b
        if "ftz" in parts:
            x, y = (np.array([flushed(float(v), type_) for v in z]) for z in (a, b))
        truth = compared(parts[1], x, y)
        c = int(RNG.integers(0, 1 << 32))
        combine = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}.get(parts[2])
        rest = (c,) if combine else ()
        first = combine(truth, c) if combine else truth
        second = combine(truth ^ ALL, c) if combine else truth ^ ALL
        assert ops(name, PRED, a, b, *rest, mask=SOME) == first & SOME
        assert ops(name, (PRED, PRED), a, b, *rest, mask=SOME) == [first & SOME, second & SOME], (
            name
        )


def test_setp_of_packed_halves(ops: Ops) -> None:
    for type_, compare in itertools.product(("f16", "bf16"), ("lt", "geu", "eq", "nan")):
        low, high = ((numbers(type_), numbers(type_)) for _ in range(2))
        a, b = (np.stack(p, axis=1).copy().view(np.uint32) for p in zip(low, high, strict=True))
        wanted = [compared(compare, *low), compared(compare, *high)]
        assert ops(f"setp.{compare}.{type_}x2", (PRED, PRED), a, b) == wanted
        c = 0x0FF0_1234
        wanted = [w | c for w in wanted]
        assert ops(f"setp.{compare}.or.{type_}x2", (PRED, PRED), a, b, c) == wanted


def test_set_and_testp(ops: Ops) -> None:
    a, b = numbers("f32"), numbers("f32")
    b[:5] = a[:5]
    truth = lanes_of(compared("le", a, b))
    same(ops("set.le.u32.f32", np.uint32, a, b), np.where(truth, ALL, 0).astype(np.uint32))
    same(ops("set.le.f32.f32", np.float32, a, b), truth.astype(np.float32))
    tests = {
        "finite": np.isfinite(a),
        "infinite": np.isinf(a),
        "number": a == a,
        "notanumber": a != a,
        "subnormal": (a != 0) & (abs(a) < 2.0**-126),
        "normal": np.isfinite(a) & ((a == 0) | (abs(a) >= 2.0**-126)),
    }
    for name, wanted in tests.items():
        assert ops(f"testp.{name}.f32", PRED, a, mask=SOME) == mask_of(wanted) & SOME


def test_predicates_and_sinks(ops: Ops) -> None:
    a, b = 0x1234_5678, 0x0F0F_FF00
    assert ops("and.pred", PRED, a, b, mask=SOME) == a & b & SOME
    assert ops("or.pred", PRED, a, b, mask=SOME) == (a | b) & SOME
    assert ops("xor.pred", PRED, a, b, mask=SOME) == (a ^ b) & SOME
    assert ops("not.pred", PRED, a, mask=SOME) == ~a & SOME
    assert ops("mov.pred", PRED, a, mask=SOME) == a & SOME
    registers = np.zeros(4 * SLOT, dtype=np.uint8)
    registers[SLOT : SLOT + 4].view(np.uint32)[0] = a
    assert ops.raw("mov.pred", registers, [0, ~SLOT], ALL, 2) == 0  # the complement
    assert registers[:4].view(np.uint32)[0] == a ^ ALL
    before = registers.copy()
    assert ops.raw("setp.lt.s32", registers, [-1, -1, SLOT, SLOT], ALL, 4) == 0  # into nothing
    assert ops.raw("elect.sync", registers, [-1, -1, SLOT], ALL, 3) == 0
    np.testing.assert_array_equal(registers, before)


@pytest.mark.parametrize("type_", [*INTEGERS, "b16", "b32", "b64", "f32", "f64"])
def test_moves(ops: Ops, type_: str) -> None:
    kind = numpy_type(type_)
    unsigned = np.dtype(f"u{kind.itemsize}")
    a, b = some_integers(unsigned), some_integers(unsigned)
    choice = 0xF012_3C5A
    same(ops(f"mov.{type_}", unsigned, a, mask=SOME), a, SOME)
    same(
        ops(f"selp.{type_}", unsigned, a, b, choice, mask=SOME),
        np.where(lanes_of(choice), a, b),
        SOME,
    )
    c = some_integers(np.int32)
    same(ops(f"slct.{type_}.s32", unsigned, a, b, c), np.where(c >= 0, a, b))
    f = numbers("f32")
    same(ops(f"slct.{type_}.f32", unsigned, a, b, f), np.where(f >= 0, a, b))
    near = np.array([flushed(v, "f32") for v in f.tolist()])
    same(ops(f"slct.ftz.{type_}.f32", unsigned, a, b, f), np.where(near >= 0, a, b))


def test_packing(ops: Ops) -> None:
    for whole, part, count in (("u4", "u2", 2), ("u8", "u4", 2), ("u8", "u2", 4)):
        a = some_integers(whole)
        parts = list(a.view(part).reshape(LANES, count).T.copy())
        name = f"b{8 * int(whole[1])}"
        same(ops(f"mov.pack.{name}", whole, *parts, mask=SOME), a, SOME)
        for found, wanted in zip(
            ops(f"mov.unpack.{name}", (part,) * count, a, mask=SOME), parts, strict=True
        ):
            same(found, wanted, SOME)
    a = some_integers("u8")
    for name in ("cvta.to.global.u64", "cvta.shared.u64", "cvta.to.shared::cta.u64"):
        same(ops(name, "u8", a), a)
    x, y = numbers("f32"), numbers("f32")
    same(ops("copysign.f32", np.float32, x, y), np.copysign(y, x))


# --- between lanes ------------------------------------------------------------------------------


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """PTX's own words: the lane that is read, and whether it was in range."""
    bval, cval, mask = b & 31, c & 31, c >> 8 & 31
    max_lane = lane & mask | cval & ~mask & 31
    min_lane = lane & mask
    if mode == "up":
        j = lane - bval
        valid = j >= max_lane
    elif mode == "down":
        j = lane + bval
        valid = j <= max_lane
    elif mode == "bfly":
        j = lane ^ bval
        valid = j <= max_lane
    else:
        j = min_lane | bval & ~mask & 31
        valid = j <= max_lane
    return (j if valid else lane), valid


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shfl(ops: Ops, mode: str) -> None:
    (a,) = words(1)
    members = np.full(LANES, ALL, dtype=np.uint32)
    clamps = [
        0x1F,
        0x0,
        0x181F,
        0x1C00,
        0x100F,
        0x1E1F,
        0x1801,
    ]  # whole warp, segments of 8, 4, ...
    cases = [
        (np.full(LANES, s), np.full(LANES, c)) for s in (0, 1, 2, 4, 16, 31, 33) for c in clamps
    ]
    cases += [(RNG.integers(0, 64, LANES), RNG.integers(0, 1 << 13, LANES)) for _ in range(20)]
    for steps, clamp in cases:
        rows = [shuffled(mode, i, int(steps[i]), int(clamp[i])) for i in range(LANES)]
        wanted = np.array([a[j] for j, _ in rows], dtype=np.uint32)
        sources = (a, steps.astype(np.uint32), clamp.astype(np.uint32), members)
        same(ops(f"shfl.sync.{mode}.b32", np.uint32, *sources, mask=SOME), wanted, SOME)
        found, valid = ops(f"shfl.sync.{mode}.b32", (np.uint32, PRED), *sources, mask=SOME)
        same(found, wanted, SOME)
        assert valid == mask_of(v for _, v in rows) & SOME


def test_shfl_in_place(ops: Ops) -> None:
    registers = np.zeros(4 * SLOT, dtype=np.uint8)
    slots = registers.view(np.uint32).reshape(4, -1)
    slots[0, :LANES] = np.arange(LANES)
    slots[1, :LANES], slots[2, :LANES] = 1, 0x1F
    assert ops.raw("shfl.sync.bfly.b32", registers, [0, 0, SLOT, 2 * SLOT, 3 * SLOT], ALL, 5) == 0
    np.testing.assert_array_equal(slots[0, :LANES], np.arange(LANES) ^ 1)


def test_votes(ops: Ops) -> None:
    for votes, member in itertools.product(
        (0, ALL, 0xFF, 0xF0F0_0000), (ALL, 0xFF, 0xF000_0000, 1)
    ):
        members = np.full(LANES, member, dtype=np.uint32)
        here = member & SOME  # lanes that have exited have no vote
        yes = votes & here
        wanted = {"all": yes == here, "any": yes != 0, "uni": yes in (0, here)}
        for name, truth in wanted.items():
            assert ops(f"vote.sync.{name}.pred", PRED, votes, members, mask=SOME) == SOME * truth
        ballot = ops("vote.sync.ballot.b32", np.uint32, votes, members, mask=SOME)
        same(ballot, np.full(LANES, yes, dtype=np.uint32), SOME)


def test_match_redux_elect_and_activemask(ops: Ops) -> None:
    member = 0x0FFF_F0FF
    members = np.full(LANES, member, dtype=np.uint32)
    inside = lanes_of(member)
    for kind in (np.uint32, np.uint64):
        a = RNG.integers(0, 5, LANES).astype(kind)
        name = f"b{8 * np.dtype(kind).itemsize}"
        here = inside & lanes_of(SOME)  # lanes that have exited are left out
        wanted = np.array([mask_of((a == x) & here) for x in a], dtype=np.uint32)
        same(ops(f"match.any.sync.{name}", np.uint32, a, members, mask=SOME), wanted, SOME)
        found, every = ops(f"match.all.sync.{name}", (np.uint32, PRED), a, members)
        assert every == 0
        assert not found.any()
        alike = np.where(inside, 7, a).astype(kind)
        found, every = ops(f"match.all.sync.{name}", (np.uint32, PRED), alike, members, mask=member)
        assert every == member
        same(found, members, member)
    (a,) = words(1)
    b = a.view(np.int32)
    reductions = {
        "add.u32": a[inside].sum(dtype=np.uint32),
        "add.s32": a[inside].sum(dtype=np.uint32),
        "min.u32": a[inside].min(),
        "max.u32": a[inside].max(),
        "min.s32": b[inside].min().view(np.uint32),
        "max.s32": b[inside].max().view(np.uint32),
        "and.b32": np.bitwise_and.reduce(a[inside]),
        "or.b32": np.bitwise_or.reduce(a[inside]),
        "xor.b32": np.bitwise_xor.reduce(a[inside]),
    }
    for name, value in reductions.items():
        found = ops(f"redux.sync.{name}", np.uint32, a, members, mask=member)
        same(found, np.full(LANES, value, dtype=np.uint32), member)
    leader, elected = ops("elect.sync", (np.uint32, PRED), members, mask=0x0FFF_0000)
    assert elected == 1 << 16
    same(leader, np.full(LANES, 16, dtype=np.uint32), 0x0FFF_0000)
    same(ops("activemask.b32", np.uint32, mask=SOME), np.full(LANES, SOME, dtype=np.uint32), SOME)


# --- matrices -----------------------------------------------------------------------------------

# Where element i of a lane's fragment lies, as the PTX ISA writes it for each shape.
G, T = np.arange(LANES) // 4, np.arange(LANES) % 4


def place_a(k: int, bits: int, i: int) -> tuple[np.ndarray, np.ndarray]:
    if bits == 16 and k == 16:
        return (G if i < 2 or 4 <= i < 6 else G + 8), T * 2 + (i & 1) + (8 if i >= 4 else 0)
    if bits == 16 and k == 8:
        return (G if i < 2 else G + 8), T * 2 + (i & 1)
    if bits == 8 and k == 32:
        return (G if i < 4 or 8 <= i < 12 else G + 8), T * 4 + (i & 3) + (16 if i >= 8 else 0)
    if bits == 8 and k == 16:
        return (G if i < 4 else G + 8), T * 4 + (i & 3)
    if bits == 32 and k == 8:
        return (G if i in (0, 2) else G + 8), (T if i < 2 else T + 4)
    assert (bits, k) == (32, 4)
    return (G if i == 0 else G + 8), T


def place_b(k: int, bits: int, i: int) -> tuple[np.ndarray, np.ndarray]:
    if bits == 16 and k == 16:
        return T * 2 + (i & 1) + (8 if i >= 2 else 0), G
    if bits == 16 and k == 8:
        return T * 2 + i, G
    if bits == 8 and k == 32:
        return T * 4 + (i & 3) + (16 if i >= 4 else 0), G
    if bits == 8 and k == 16:
        return T * 4 + i, G
    if bits == 32 and k == 8:
        return (T if i == 0 else T + 4), G
    assert (bits, k) == (32, 4)
    return T, G


def place_c(i: int) -> tuple[np.ndarray, np.ndarray]:
    return (G if i < 2 else G + 8), T * 2 + (i & 1)


def registers_of(
    matrix: np.ndarray, places: list[tuple[np.ndarray, np.ndarray]]
) -> list[np.ndarray]:
    """The matrix' fragments as 32-bit registers, in order."""
    lanes = np.stack([matrix[rows, columns] for rows, columns in places], axis=1).copy()
    return list(lanes.view(np.uint32).T.copy())


ELEMENTS: dict[str, Any] = {
    **{name: kind for name, (kind, *_) in FORMATS.items()},
    "s8": np.int8,
    "u8": np.uint8,
    "s32": np.int32,
}


def run_mma(
    ops: Ops, name: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, mask: int = ALL
) -> np.ndarray:
    k, bits = a.shape[1], 8 * a.dtype.itemsize
    count = 32 // bits
    sources = registers_of(a, [place_a(k, bits, i) for i in range(16 * k // LANES)])
    sources += registers_of(b, [place_b(k, bits, i) for i in range(8 * k // LANES)])
    sources += registers_of(c, [place_c(i) for i in range(4)])
    assert len(sources) == k // (2 * count) + k // (4 * count) + c.dtype.itemsize
    found = ops(name, (np.uint32,) * c.dtype.itemsize, *sources, mask=mask)
    lanes = np.stack(found, axis=1).copy().view(c.dtype)
    d = np.zeros((16, 8), dtype=c.dtype)
    for i in range(4):
        d[place_c(i)] = lanes[:, i]
    return d


def mma_names() -> list[str]:
    shapes = [(8, "f16.f16", "f32 f16"), (8, "bf16.bf16", "f32"), (16, "f16.f16", "f32 f16")]
    shapes += [(16, "bf16.bf16", "f32"), (4, "tf32.tf32", "f32"), (8, "tf32.tf32", "f32")]
    for k, a, b in itertools.product((16, 32), ("e4m3", "e5m2"), ("e4m3", "e5m2")):
        shapes.append((k, f"{a}.{b}", "f32 f16"))
    for k, a, b in itertools.product((16, 32), ("s8", "u8"), ("s8", "u8")):
        shapes.append((k, f"{a}.{b}", "s32 satfinite.s32"))
    return [
        f"mma.sync.m16n8k{k}.row.col.{d}.{ab}.{d.rpartition('.')[2]}"
        for k, ab, accumulators in shapes
        for d in accumulators.split()
    ]


def test_all_mma_shapes_are_here(ops: Ops) -> None:
    assert {n for n in ops.names if n.startswith("mma.")} == set(mma_names())


@pytest.mark.parametrize("name", mma_names())
def test_mma(ops: Ops, name: str) -> None:
    parts = name.split(".")
    k, kinds = int(parts[2][6:]), [ELEMENTS[p] for p in parts[-3:]]
    if parts[-1] == "s32":
        a, b = (
            RNG.integers(np.iinfo(t).min, np.iinfo(t).max, s, endpoint=True).astype(t)
            for t, s in zip(kinds, ((16, k), (k, 8)), strict=False)
        )
        c = RNG.integers(-(2**31), 2**31, (16, 8))
        c[:, :2] = 2**31 - 1, -(2**31)
        exact = a.astype(np.int64) @ b.astype(np.int64) + c
        limits = np.iinfo(np.int32)
        wanted = exact.clip(limits.min, limits.max) if "satfinite" in parts else exact
        assert (exact != exact.clip(limits.min, limits.max)).any()
        found = run_mma(ops, name, a, b, c.astype(np.int32))
        np.testing.assert_array_equal(found, wanted.astype(np.int32))
        return
    # Small whole numbers, where every order of summation is exact: the layout alone counts.
    a, b, c = (
        RNG.integers(-4, 5, shape).astype(np.float32).astype(t)
        for t, shape in zip(kinds, ((16, k), (k, 8), (16, 8)), strict=True)
    )
    wide = [m.astype(np.float64) for m in (a, b, c)]
    same(run_mma(ops, name, a, b, c), (wide[0] @ wide[1] + wide[2]).astype(kinds[2]))
    # Of any size: the sum in double, rounded once.
    a, b, c = (
        (RNG.normal(size=shape) * 2.0 ** RNG.integers(-6, 3, shape)).astype(np.float32).astype(t)
        for t, shape in zip(kinds, ((16, k), (k, 8), (16, 8)), strict=True)
    )
    if parts[-2] == "tf32":  # whose lower bits are not looked at
        a, b = ((m.view(np.uint32) & 0xFFFFE000).view(np.float32) for m in (a, b))
    wide = [m.astype(np.float64) for m in (a, b, c)]
    terms = np.concatenate([wide[2][..., None], wide[0][:, None, :] * wide[1].T[None]], axis=2)
    wanted = np.array([[math.fsum(cell) for cell in row] for row in terms]).astype(kinds[2])
    if parts[-2] == "tf32":
        a, b = ((m.view(np.uint32) | 0x1FFF).view(np.float32) for m in (a, b))
    same(run_mma(ops, name, a, b, c), wanted)


def test_mma_special_numbers_and_masks(ops: Ops) -> None:
    name = "mma.sync.m16n8k16.row.col.f32.f16.f16.f32"
    a, b = np.ones((16, 16), dtype=np.float16), np.ones((16, 8), dtype=np.float16)
    c = np.zeros((16, 8), dtype=np.float32)
    a[1, 3], a[2, 3], a[2, 4], a[3, 0] = np.inf, np.inf, -np.inf, np.nan
    found = run_mma(ops, name, a, b, c)
    assert (found[0] == 16).all()
    assert (found[1] == np.inf).all()
    assert (found[2:4].view(np.uint32) == 0x7FFFFFFF).all()
    tiny = np.full((16, 16), 2.0**-24, dtype=np.float16)  # subnormal operands count
    assert (run_mma(ops, name, tiny, b, c) == 2.0**-20).all()
    half = name.replace("f32", "f16")
    large = np.full((16, 16), 8192, dtype=np.float16)
    assert (run_mma(ops, half, large, b, c.astype(np.float16)) == np.inf).all()
    masked = run_mma(ops, name, np.ones_like(a), b, c, mask=0x0000_FFFF)  # checks the other lanes
    assert (masked[:4] == 16).all()
    registers = np.zeros(14 * SLOT, dtype=np.uint8)  # D may be C, as it is in every kernel
    registers.view(np.uint32)[:] = 0x3F80_0000
    slots = [SLOT * i for i in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3)]
    assert ops.raw(name, registers, slots, ALL, 14) == 0
    halves = float(np.array([0x3F80], dtype=np.uint16).view(np.float16)[0])
    assert (registers.view(np.float32)[:LANES] == np.float32(1 + 8 * halves**2)).all()


def test_movmatrix(ops: Ops) -> None:
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8)
    places = [(G, T * 2), (G, T * 2 + 1)]
    found = ops("movmatrix.sync.m8n8.trans.b16", np.uint32, *registers_of(matrix, places))
    same(found, registers_of(matrix.T, places)[0])


# --- the table ----------------------------------------------------------------------------------

# What our kernels use.
EMITTED = """
add.f32 add.s32 add.s64 and.b32 and.b64 and.pred bfi.b32 cvt.f32.f16 cvt.rn.f16.f32 cvt.rn.f32.s32
cvt.rn.bf16x2.f32 cvt.rn.f16x2.f32 cvt.rn.satfinite.e4m3x2.f32 cvt.u32.u64 cvt.u64.u32
cvta.to.global.u64 div.s32 ex2.approx.ftz.f32 fma.rn.f32 mad.lo.s32 max.f32 min.s32 mov.b32
mov.b64 mov.f32 mov.u32 mul.f32 mul.lo.s32 mul.lo.s64 mul.wide.u32 not.b32 or.b32 or.pred prmt.b32
rcp.approx.ftz.f32 selp.b32 selp.f32 setp.eq.b32 setp.eq.f32 setp.eq.s64 setp.ge.s32 setp.gt.f32
setp.lt.u32 shfl.sync.bfly.b32 shl.b32 shl.b64 shr.s32 shr.u32 sub.f32 sub.s32 xor.b32 elect.sync
vote.sync.ballot.b32 vote.sync.pred lop3.b32
"""


def test_what_our_kernels_use_is_there(ops: Ops) -> None:
    assert set(EMITTED.split()) <= set(ops.names)
    registers, slots = np.zeros(SLOT, dtype=np.uint8), [0] * 4
    assert ops.raw("add.q32", registers, slots, ALL, 3) == 1


def test_every_instruction_keeps_to_its_mask(ops: Ops) -> None:
    """No lane: nothing is written. The last lane: nothing but its bytes."""
    last = {3, *range(62, 64), *range(124, 128), *range(248, 256)}  # of a predicate, 2, 4, 8 bytes
    slots = [SLOT * i for i in range(16)]
    for name in ops.names:
        before = np.frombuffer(RNG.bytes(16 * SLOT), dtype=np.uint8)
        registers = before.copy()
        assert ops.raw(name, registers, slots, 0, 3) == 0
        assert (registers == before).all(), name
        assert ops.raw(name, registers, slots, 1 << 31, 3) == 0
        changed = set((np.nonzero(registers != before)[0] % SLOT).tolist())
        # 16 bytes of each lane are two slots
        assert changed <= (last | {*range(240, 256)} if name.endswith("b128") else last), name
