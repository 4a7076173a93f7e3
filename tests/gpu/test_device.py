"""The device vocabulary (flashwright/device/fw), word by word, against PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from flashwright.lower.targets.atoms import ATOMS
from tests.gpu.on_device import (
    NAN,
    Code,
    dtype_of,
    element,
    framed,
    inside,
    listed,
    normal,
    run,
    same,
    size_of,
)

INF = float("inf")
MANTISSA = {"fp16": 10, "bf16": 7, "e4m3": 3, "e5m2": 2}


@pytest.fixture(autouse=True)
def seeded() -> None:
    import torch

    torch.manual_seed(0)


# --- shared.cuh -------------------------------------------------------------------------------

ROWS = (8, 16, 24, 128)
COLS = {2: (16, 32, 48, 64, 96, 128, 256), 1: (32, 64, 96, 128, 256)}
SHARED = Code(
    "shared",
    "sm_75",
    (listed("ROWS", ROWS), listed("COLS_1", COLS[1]), listed("COLS_2", COLS[2])),
)


@pytest.mark.parametrize(("size", "cols"), [(s, c) for s in COLS for c in COLS[s]])
def test_addresses_of_chunks(size: int, cols: int) -> None:
    import torch

    eight = torch.arange(8, device="cuda")[:, None]
    chunks, names = cols * size // 16, ("expected", "last", "found", "walked", "staged")
    for rows in ROWS:
        out = {n: torch.full((rows, chunks), -1, device="cuda", dtype=torch.int32) for n in names}
        given = {"any": normal(1)}
        run(SHARED, given, out, threads=128, shared=1024, bytes=size, rows=rows, cols=cols)
        expected = out["expected"]
        for name, further in (("found", 0), ("walked", 0), ("staged", rows * cols * size)):
            assert torch.equal(out[name], expected + further), (name, rows)
        assert torch.equal(out["last"], expected + 16 - size), rows  # a chunk is contiguous
        assert expected.unique().numel() == expected.numel()
        banks = (expected // 16 % 8).view(-1, 8, chunks)  # four at a time, as ldmatrix reads
        assert bool((banks.sort(dim=1).values == eight).all()), rows


# --- copy.cuh ---------------------------------------------------------------------------------

THREADS, TILE_ROWS = (32, 64, 128, 256), (16, 48, 64, 128)
MOST_STAGED = 256  # bytes of a tile to each thread: 64 registers
WAYS = ("copy_async", "Staged", "copy_elements")
COPIES = [
    ("sm_75", "fp16", 64),  # without cp.async
    *(("sm_80", "fp16", cols) for cols in (32, 48, 64, 96, 128, 256)),
    *(("sm_80", "e4m3", cols) for cols in (64, 128)),
]


def copy_code(arch: str, dtype: str, cols: int) -> Code:
    numbers = f"constexpr int Cols = {cols}, MOST_STAGED = {MOST_STAGED};"
    lists = listed("THREADS", THREADS), listed("ROWS", TILE_ROWS)
    return Code("copy", arch, (element(dtype), numbers, *lists))


def copies(arch: str, tile: int, threads: int) -> list[int]:
    """The ways that there are to copy so many bytes."""
    there = {0: arch != "sm_75", 1: tile <= MOST_STAGED * threads, 2: True}
    return [way for way in there if there[way]]


@pytest.mark.parametrize(("arch", "dtype", "cols"), COPIES)
def test_a_copied_tile_is_where_its_layout_says(arch: str, dtype: str, cols: int) -> None:
    code, wrong = copy_code(arch, dtype, cols), []
    for threads, rows in itertools.product(THREADS, TILE_ROWS):
        tile = rows * cols * size_of(dtype)
        for way, short in itertools.product(copies(arch, tile, threads), (0, 1, 13, rows)):
            valid, right = rows - short, cols - 5 if way == 2 else cols
            src, out = framed(rows, cols, dtype)[1], framed(rows, cols, dtype)[1]
            src[:valid, :right] = normal(valid, right, dtype=dtype)
            dims = {"way": way, "rows": rows, "valid": valid, "cols": right}
            run(code, {"src": src}, {"out": out}, threads=threads, shared=tile, **dims)
            if not same(out, inside(src, valid, right, 0.0)):
                wrong.append((WAYS[way], threads, rows, valid))
    assert not wrong


def test_elements_are_copied_from_columns() -> None:
    code = copy_code("sm_75", "fp16", 64)
    src, out = (framed(48, 64, "fp16", turned=True)[1] for _ in range(2))
    src[:40, :63] = normal(40, 63, dtype="fp16")
    dims = {"way": 2, "rows": 48, "valid": 40, "cols": 63}
    run(code, {"src": src}, {"out": out}, threads=64, shared=48 * 64 * 2, **dims)
    assert same(out, inside(src, 40, 63, 0.0))


# --- mma.cuh ----------------------------------------------------------------------------------

BYTES = ("e4m3", "e5m2")
Shape = tuple[int, int, int, int]  # warps, M, N, K
PRODUCTS: dict[int, tuple[Shape, ...]] = {
    2: (
        (1, 16, 16, 16),
        (1, 32, 48, 96),
        (4, 64, 64, 128),
        (4, 128, 32, 64),
        (8, 128, 32, 192),
        (8, 256, 96, 32),
    ),
    1: (
        (1, 16, 32, 32),
        (1, 32, 64, 96),
        (4, 64, 64, 128),
        (4, 128, 32, 64),
        (8, 128, 32, 256),
        (8, 256, 96, 32),
    ),
}
TURNED = ("gemm", "gemm_rolled", "load_operand")  # of left() or in place of it
RESULT = 6  # after the same three without the transpose


def product_code(since: int, dtype: str) -> Code:
    shapes = PRODUCTS[1 if dtype in BYTES else 2]
    cases = [f"Case<{', '.join(map(str, shape))}>" for shape in shapes]
    atom = f"using Atom = cute::{ATOMS[since, dtype]};"
    return Code("mma", f"sm_{since}", (element(dtype), atom, listed("CASES", cases)))


def whole(*shape: int) -> Any:
    """Numbers whose products every atom sums up without an error."""
    import torch

    return torch.randint(-4, 5, shape, device="cuda").double()


def unrounded(x: Any, dtype: str) -> Any:
    """Numbers that rounding to the nearest takes to `x`, and nothing else does."""
    import torch

    return (x * (1 + (torch.rand_like(x) - 0.5) * 1.8 * 2.0 ** -(MANTISSA[dtype] + 2))).float()


def multiply(since: int, dtype: str, way: int) -> None:
    """1 + A B in one of the ways of mma.cu, in all shapes."""
    import torch

    turned, wrong = way < len(TURNED), []
    for which, shape in enumerate(PRODUCTS[size_of(dtype)]):
        warps, m, n, k = shape
        a, b = whole(m, k), whole(k, n)
        given = {
            "A": (a if way < RESULT else torch.zeros_like(a)).to(dtype_of(dtype)),
            "B": (b.T if turned else b).to(dtype_of(dtype)).contiguous(),
            "P": unrounded(a, dtype),
        }
        around, out = framed(m, n)
        shared = (m * k + k * n) * size_of(dtype) + 1024
        dims = {"way": way, "which": which}
        run(
            product_code(since, dtype), given, {"C": out}, threads=32 * warps, shared=shared, **dims
        )
        if not same(out, 1 + a @ b) or int((~around.isnan()).sum()) != m * n:
            wrong.append(shape)
    assert not wrong


@pytest.mark.parametrize("way", range(len(TURNED)), ids=TURNED)
@pytest.mark.parametrize(("since", "dtype"), ATOMS)
def test_left_by_right_transposed(since: int, dtype: str, way: int) -> None:
    multiply(since, dtype, way)


@pytest.mark.parametrize("way", range(len(TURNED)), ids=TURNED)
@pytest.mark.parametrize(("since", "dtype"), [a for a in ATOMS if a[1] not in BYTES])
def test_left_by_right(since: int, dtype: str, way: int) -> None:
    """Not for bytes: right() gives them in the order of k of a result, not of a tile."""
    multiply(since, dtype, len(TURNED) + way)


@pytest.mark.parametrize(("since", "dtype"), ATOMS)
def test_result_by_right(since: int, dtype: str) -> None:
    multiply(since, dtype, RESULT)


# --- fragment.cuh -----------------------------------------------------------------------------

TILES = ((1, 16, 32), (1, 32, 64), (4, 64, 96), (4, 128, 32), (8, 128, 64))  # warps, M, N
FRAGMENTS = (("sm_75", "fp16"), ("sm_80", "bf16"), ("sm_89", "e4m3"))


def fragment_code(arch: str, dtype: str) -> Code:
    cases = [f"Case<{', '.join(map(str, shape))}>" for shape in TILES]
    return Code("fragment", arch, (element(dtype), listed("CASES", cases)))


@pytest.mark.parametrize("short", [(0, 0), (5, 3), (16, 32)], ids=str)
@pytest.mark.parametrize("which", range(len(TILES)), ids=[str(t) for t in TILES])
@pytest.mark.parametrize(("arch", "dtype"), FRAGMENTS)
def test_tiles_in_registers(arch: str, dtype: str, which: int, short: tuple[int, int]) -> None:
    import torch

    warps, m, n = TILES[which]
    rows, cols = m - short[0], n - short[1]
    src = framed(m, n, turned=True)[1]
    src[:] = normal(m, n)
    rounded = inside(src.to(dtype_of(dtype)), rows, cols, NAN).to(dtype_of(dtype))
    row, col = normal(m), normal(n)
    numbers = torch.randint(0, 1000, (m,), device="cuda", dtype=torch.int32)
    given = {"src": src, "rounded": rounded, "row": row, "col": col, "whole": numbers}
    names = ("stored", "stored_wide", "elements", "elements_wide", "held", "held_wide")
    frames = {x: framed(m, n, dtype, turned=x.startswith("elements")) for x in names}
    frames |= {x: framed(m, n) for x in ("loaded", "loaded_wide", "back", "back_wide", "sums")}
    out = {x: inner for x, (_, inner) in frames.items()}
    out["rows_out"], out["cols_out"] = torch.full_like(row, NAN), torch.full_like(col, NAN)
    out["whole_out"] = torch.full_like(numbers, -1)
    dims = {"rows": rows, "cols": cols, "which": which}
    launch = {"threads": 32 * warps, "blocks": 7, "shared": m * n * size_of(dtype)}
    run(fragment_code(arch, dtype), given, out, **launch, **dims)

    exact = src.to(dtype_of(dtype))
    kept, edged = row.clone(), col.clone()
    kept[rows:], edged[cols:] = 0, 0
    stored = inside(exact, rows if size_of(dtype) == 2 else 0, n, NAN)
    expected = {
        "stored": stored,
        "elements": inside(exact, rows, cols, NAN),
        "held": exact,
        "loaded": inside(exact, rows, cols, 0.0),
        "back": exact,
    }
    expected |= {f"{name}_wide": value for name, value in expected.items()}
    expected["sums"] = kept[:, None] + edged[None, :]
    expected["rows_out"] = torch.where(torch.arange(m, device="cuda") < rows, row, NAN)
    expected["cols_out"] = torch.where(torch.arange(n, device="cuda") < cols, col, NAN)
    expected["whole_out"] = torch.where(torch.arange(m, device="cuda") < rows, numbers, -1)
    assert [name for name in out if not same(out[name], expected[name])] == []
    for name, (around, inner) in frames.items():  # nothing is written beside a tile
        written = [int((~x.float().isnan()).sum()) for x in (around, inner)]
        assert written[0] == written[1], name


# --- math.cuh ---------------------------------------------------------------------------------

MATH = Code("math", "sm_75")
SMALLEST, LARGEST = 2.0**-126, 2.0**128  # normal numbers lie between
Function = tuple[str, Callable[[Any], Any], Callable[[Any, Any], Any]]


def functions() -> list[Function]:
    """Each function in fp64, and how far from that it may be."""
    import torch

    def relative(error: float, argument: float = 0.0) -> Callable[[Any, Any], Any]:
        """To the result; and so much for each unit of the argument, as its product is rounded."""
        return lambda x, true: (error + argument * x.abs().clamp(max=200)) * true.abs() + SMALLEST

    def absolute(error: float) -> Callable[[Any, Any], Any]:
        return lambda x, true: error

    return [
        ("exp2", torch.exp2, relative(2.0**-22)),
        ("exp", torch.exp, relative(2.0**-22, 2.0**-23.5)),
        ("log2", torch.log2, relative(2.0**-22)),
        ("log", torch.log, relative(2.0**-22)),
        ("sqrt", torch.sqrt, relative(2.0**-23)),
        ("reciprocal", torch.reciprocal, relative(2.0**-23)),
        ("sigmoid", torch.sigmoid, relative(2.0**-21, 2.0**-23.5)),
        ("tanh", torch.tanh, absolute(3e-7)),
        ("abs", torch.abs, absolute(0)),
        ("floor", torch.floor, absolute(0)),
        ("ceil", torch.ceil, absolute(0)),
    ]


def arguments() -> Any:
    """Fine near 0, where exp2 and tanh bend, coarse up to the ends of fp32; special ones."""
    import torch

    special = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, -126.0, -127.0, -150.0, 127.0, 130.0, -1e30]
    powers = torch.logspace(-37, 38, 20_000, dtype=torch.float64)
    parts = [
        torch.linspace(-10, 10, 100_001, dtype=torch.float64),
        torch.linspace(-160, 160, 100_001, dtype=torch.float64),
        *(powers, -powers),
        torch.tensor(special, dtype=torch.float64),
    ]
    x = torch.cat(parts).float()
    return torch.cat([x, x.new_zeros(-x.numel() % 128)])


def computed() -> dict[str, Any]:
    """All that math.cu computes, on the CPU, with its arguments."""
    import torch

    x = arguments()
    n = x.numel()
    lanes = torch.randint(-100, 101, (n,)).float()
    lanes[::7] = -INF
    lanes[:128] = -INF  # whole rows of it
    a, b = torch.randint(-50, 51, (n,)), torch.randint(1, 9, (n,))
    a[::3], b[::5] = torch.randint(-(2**30), 2**30, a[::3].shape), 2**20 - 1
    given = {"x": x, "lanes": lanes, "a": a.int(), "b": b.int()}
    shapes = {"found": 11, "rows": 5}
    out = {name: torch.full((count, n), NAN, device="cuda") for name, count in shapes.items()}
    out["whole"] = torch.zeros(6, n, device="cuda", dtype=torch.int32)
    on_device = {name: value.cuda() for name, value in given.items()}
    run(MATH, on_device, out, threads=128, blocks=n // 128)
    return given | {name: value.cpu() for name, value in out.items()}


def test_functions_of_one_element() -> None:
    """Within what math.cuh says, for all of fp32; results that fp32 does not hold are 0 or inf."""
    got = computed()
    x, worst = got["x"].double(), {}
    for (name, exact, allowed), found in zip(functions(), got["found"].double(), strict=True):
        true = exact(x)
        finite = true.abs() < LARGEST * (1 - 2.0**-10)
        beyond = true.abs() > LARGEST * (1 + 2.0**-10)
        assert same(found[beyond], true[beyond].sign() * INF), name
        assert same(found[true.isnan()], true[true.isnan()]), name
        excess = ((found - true).abs() - allowed(x, true))[finite].nan_to_num(INF)
        if float(excess.max()) > 0:
            at = int(excess.argmax())
            worst[name] = [float(values[finite][at]) for values in (x, found, true)]
    assert not worst  # name: argument, found, true


def test_functions_at_the_ends() -> None:
    got = computed()
    names = [name for name, _, _ in functions()]

    def at(name: str, x: float) -> float:
        return float(got["found"][names.index(name)][(got["x"] == x).nonzero()[0, 0]])

    below = got["found"][names.index("exp2")][got["x"] < -126.01]
    assert bool((below == 0).all())
    assert [at("exp2", x) for x in (-INF, -127.0, 130.0, INF)] == [0.0, 0.0, INF, INF]
    assert [at("exp", x) for x in (-INF, -1e30, INF)] == [0.0, 0.0, INF]
    assert [at("sigmoid", x) for x in (-INF, -1e30)] == [0.0, 0.0]
    assert [at("reciprocal", x) for x in (INF, -INF)] == [0.0, 0.0]
    assert [at("log", x) for x in (0.0, INF)] == [-INF, INF]


def test_rows_of_four_threads() -> None:
    import torch

    got = computed()
    rows = got["lanes"].view(-1, 4)
    top, total, parts, larger, smaller = got["rows"]
    assert same(top.view(-1, 4), rows.amax(1, keepdim=True).expand_as(rows))
    assert same(total.view(-1, 4), rows.sum(1, keepdim=True).expand_as(rows))
    assert same(parts.view(-1, 4), rows[:, :1].expand_as(rows))
    assert same(larger, torch.fmax(got["lanes"], got["x"]))
    assert same(smaller, torch.fmin(got["lanes"], got["x"]))


def test_whole_numbers() -> None:
    import torch

    got = computed()
    a, b = got["a"].long(), got["b"].long()
    down = torch.div(a, b, rounding_mode="floor")
    up = -torch.div(-a, b, rounding_mode="floor")
    expected = [down, up, a - down * b, a.abs(), torch.maximum(a, b), torch.minimum(a, b)]
    assert torch.equal(got["whole"].long(), torch.stack(expected))
