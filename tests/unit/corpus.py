"""Launches of the kernels in tests/corpus, and the bugs that are planted in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import flashwright.emulate
from flashwright.build.compile import NAME, build
from flashwright.emulate.own import EmulatedKernel, LaunchReport

Array = np.ndarray[Any, Any]
FOLDER = Path(__file__).parents[1] / "corpus"


@dataclass(frozen=True)
class Bug:
    """A change of a kernel's text, and what is found then."""

    kind: str
    """The class of the bug."""
    old: str
    new: str
    found: str
    """A finding of one of these kinds, separated by `|`, ..."""
    at: str
    """... at a statement with one of these texts, separated by `|`."""


@dataclass(frozen=True)
class Launch:
    grid: Sequence[int]
    block: Sequence[int]
    args: Sequence[Any]
    wanted: Mapping[int, Array]
    """By argument, what the kernel makes of it."""
    shared: int = 0
    symbols: Mapping[str, Array] = field(default_factory=dict)
    tolerance: float = 1e-4


@dataclass(frozen=True)
class Case:
    launch: Callable[[], Launch]
    bugs: Sequence[Bug] = ()
    arch: str = "sm_80"


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.cu").read_text()


def compiled(name: str, case: Case) -> list[EmulatedKernel]:
    """The kernel as it is, and with each of its bugs: one compilation, a namespace for each."""
    source = text_of(name)
    variants = [source, *(planted(source, bug) for bug in case.bugs)]
    includes = "\n".join(re.findall("^#include.*", source, re.MULTILINE))
    parts = [
        f'namespace v{n} {{\n#line 1 "kernel.cu"\n{_named(variant, name, n)}\n}}'
        for n, variant in enumerate(variants)
    ]
    ptx = build("\n".join([includes, *parts]), case.arch, may_spill=True, line_info=True).ptx
    return [EmulatedKernel(_alone(ptx, f"{name}_{n}"), None, NAME) for n in range(len(variants))]


def _alone(ptx: str, name: str) -> str:
    """The PTX with one of its kernels."""
    header, *entries = re.split(r"(?=^\.visible \.entry|^\.entry)", ptx, flags=re.MULTILINE)
    (entry,) = [one for one in entries if f"{len(name)}{name}" in one[: one.index("(")]]
    files = entries[-1][entries[-1].rindex("\n}\n") + 3 :]
    bodies = entry[: entry.rindex("\n}\n") + 3]
    return header + bodies + files


def planted(source: str, bug: Bug) -> str:
    assert source.count(bug.old) >= 1, bug.old
    return source.replace(bug.old, bug.new, 1)


def _named(source: str, name: str, n: int) -> str:
    """The text of a variant: its kernel has a name of its own; the includes are elsewhere."""
    source = re.sub("^#include.*", "", source, flags=re.MULTILINE)
    return re.sub(rf"\b{name}(?=\()", f"{name}_{n}", source)


def launched(kernel: EmulatedKernel, launch: Launch, schedule: str = "eager") -> LaunchReport:
    used = {word for one in kernel.program.source for word in re.findall(r"_Z\w+", str(one))}
    for name, value in launch.symbols.items():
        for symbol in used:
            if name in symbol and symbol in kernel.program.variables:
                kernel.copy_to_symbol(symbol, value)
    return kernel(launch.grid, launch.block, *launch.args, shared=launch.shared, schedule=schedule)


def differences(launch: Launch) -> dict[int, float]:
    """By argument the largest difference from what is wanted, where it is too large."""
    found = {}
    for number, wanted in launch.wanted.items():
        given = launch.args[number]
        array = given if isinstance(given, np.ndarray) else given.array
        largest = float(np.max(np.abs(array.astype(np.float64) - wanted)))
        if not largest <= launch.tolerance:
            found[number] = largest
    return found


def is_found(bug: Bug, report: LaunchReport, source: str) -> bool:
    """Whether a finding of the right kind names a line with the text of the bug."""
    lines = source.splitlines()
    for one in report.diagnostics:
        kind = one.message.partition(" ")[0]
        named = [int(n) for n in re.findall(r"kernel\.cu:(\d+)", f"{one.message} {one.help}")]
        places = [_statement(lines, n) for n in named]
        right = any(at in place for at in bug.at.split("|") for place in places)
        if kind in bug.found.split("|") and right:
            return True
    return False


def _statement(lines: Sequence[str], number: int) -> str:
    """The text of a line, with the lines before it that belong to its statement."""
    first = number - 1
    while first and not lines[first - 1].rstrip().endswith((";", "{", "}", ":")):
        first -= 1
    return "\n".join(lines[first:number])


# --- the launches ---------------------------------------------------------------------------------


def _random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _whole(most: int, *shape: int, dtype: Any = np.int32, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, most, shape).astype(dtype)


def _empty(*shape: int, dtype: Any = np.float32) -> Any:
    return flashwright.emulate.empty(np.zeros(shape, dtype))


def _zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


def _softmax_of(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def _softmax() -> Launch:
    x = _random(3, 333)
    return Launch([3], [128], [x, _empty(3, 333), 333], {1: _softmax_of(x)})


def _layernorm() -> Launch:
    x, weight = _random(6, 128), _random(128, seed=1)
    wanted = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * weight
    return Launch([2], [32, 4], [x, weight, _empty(6, 128), 6, 128], {2: wanted}, shared=512)


def _matmul() -> Launch:
    a, b = _random(96, 96), _random(96, 96, seed=1)
    return Launch([3, 3], [256], [a, b, _empty(96, 96), 96], {2: a @ b})


def _warp_sum() -> Launch:
    x = _random(1000)
    args = [x, _empty(3), _empty(1), 1000]
    return Launch([3], [128], args, {2: x.sum(dtype=np.float64)})


def _scan() -> Launch:
    x = _whole(9, 2, 128)
    wanted = {1: x.cumsum(1).ravel(), 2: x.sum(1)}
    return Launch([2], [128], [x, _empty(256, dtype=np.int32), _empty(2, dtype=np.int32)], wanted)


def _histogram() -> Launch:
    data = _whole(256, 3000, dtype=np.uint8)
    wanted = np.bincount(data, minlength=256)
    return Launch([2], [128], [data, _zeros(256, dtype=np.uint32), 3000], {1: wanted})


def _transpose() -> Launch:
    x = _random(40, 70)
    return Launch([3, 2], [32, 8], [x, _empty(70, 40), 70, 40], {1: x.T})


def _radix_step() -> Launch:
    keys = _whole(1 << 20, 2, 256, dtype=np.uint32)
    wanted = np.stack([k[np.argsort(k >> 3 & 1, kind="stable")] for k in keys])
    return Launch([2], [256], [keys, _empty(2, 256, dtype=np.uint32), 3], {1: wanted})


def _convolution() -> Launch:
    x, weights = _random(20, 40), _random(5, 5, seed=1)
    padded = np.pad(x, 2)
    wanted = sum(weights[r, c] * padded[r : r + 20, c : c + 40] for r in range(5) for c in range(5))
    args = [x, _empty(20, 40), 40, 20]
    return Launch([3, 2], [16, 16], args, {1: np.asarray(wanted)}, symbols={"weights": weights})


def _spmv() -> Launch:
    dense = _random(10, 60) * (_whole(4, 10, 60) == 0)
    columns = np.concatenate([np.flatnonzero(row) for row in dense]).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum((dense != 0).sum(1))]).astype(np.int32)
    x = _random(60, seed=1)
    args = [starts, columns, dense[dense != 0], x, _empty(10), 10]
    return Launch([3], [128], args, {4: dense @ x})


def _top_k() -> Launch:
    x = _random(2, 400)
    places = np.argsort(-x, axis=1)[:, :5]
    args = [x, _empty(2, 5), _empty(2, 5, dtype=np.int32), 400, 5]
    return Launch([2], [128], args, {1: np.take_along_axis(x, places, 1), 2: places})


def _attention_forward() -> Launch:
    q, k, v = _random(50, 16), _random(70, 16, seed=1), _random(70, 16, seed=2)
    scores = q @ k.T
    lse = np.log(np.exp(scores - scores.max(1, keepdims=True)).sum(1)) + scores.max(1)
    args = [q, k, v, _empty(50, 16), _empty(50), 50, 70]
    return Launch([1], [64], args, {3: _softmax_of(scores) @ v, 4: lse})


def _attention_backward() -> Launch:
    q, k, v, g = (_random(64, 16, seed=s) * np.float32(0.5) for s in range(4))
    p = _softmax_of(q @ k.T)
    lse = (q @ k.T)[:, 0] - np.log(p[:, 0])
    delta = (g * (p @ v)).sum(1)
    slope = p * (g @ v.T - delta[:, None])
    wanted = {6: slope @ k, 7: slope.T @ q, 8: p.T @ g}
    args = [q, k, v, g, lse, delta, _zeros(64, 16), _empty(64, 16), _empty(64, 16), 64]
    return Launch([2], [32], args, wanted)


def _mma_matmul() -> Launch:
    a, b = _random(16, 128).astype(np.float16), _random(32, 128, seed=1).astype(np.float16)
    wanted = a.astype(np.float32) @ b.astype(np.float32).T
    return Launch([1], [128], [a, b, _empty(16, 32), 128], {2: wanted}, tolerance=1e-3)


def _bulk_pipeline() -> Launch:
    x = _random(8, 256)
    return Launch([1], [96], [x, _empty(256), 8], {1: x.sum(0)})


def _wgmma_matmul() -> Launch:
    a, b = (np.asarray(_whole(9, n, 48) - 4, np.float32) for n in (64, 8))
    given = [(m.view(np.uint32) >> 16).astype(np.uint16) for m in (a, b)]
    return Launch([1], [128], [*given, _empty(64, 8), 48], {2: a @ b.T})


def _bitonic_sort() -> Launch:
    x = _whole(999, 256)
    return Launch([1], [128], [x, _empty(256, dtype=np.int32), 256], {1: np.sort(x)}, shared=1024)


def _mailbox() -> Launch:
    x = _whole(99, 3, 32)
    return Launch([1], [64], [x, _empty(3, 32, dtype=np.int32), 3], {1: x[:, ::-1]})


def _rotate_local() -> Launch:
    x, angles = _random(70, 16), _random(8, seed=1)
    a, b, c, s = x[:, ::2], x[:, 1::2], np.cos(angles), np.sin(angles)
    wanted = np.stack([a * c - b * s, a * s + b * c], axis=2).reshape(70, 16)
    return Launch([2], [64], [x, angles, _empty(70, 16), 70, 5], {2: wanted})


# --- the bugs -------------------------------------------------------------------------------------

BARRIER, BOUNDS, UNWRITTEN, MASK = "missing barrier", "out of bounds", "unwritten memory", "mask"
SYNC = "  __syncthreads();\n"
HALF = "  if (threadIdx.x % 32 < 16) __syncthreads();\n"

CASES: dict[str, Case] = {
    "softmax": Case(
        _softmax,
        [
            Bug(BARRIER, "= value;\n  __syncthreads();", "= value;", "race|unwritten", "parts[0]"),
            Bug(BARRIER, "  __syncthreads();\n  return", "  return", "race", "parts["),
            Bug(MASK, "0xffffffff", "0xffff", "divergent", "__shfl"),
            Bug(BOUNDS, "parts[4]", "parts[3]", "out_of_bounds", "parts[threadIdx.x / 32]"),
            Bug(BOUNDS, "w < blockDim", "w <= blockDim", "out_of_bounds", "parts[w]"),
            Bug(
                BOUNDS,
                "i < columns; i += blockDim.x) y",
                "i <= columns; i += blockDim.x) y",
                "out_of_bounds",
                "y[i] =",
            ),
            Bug("divergent barrier", SYNC, HALF, "divergent", "__syncthreads"),
        ],
    ),
    "layernorm": Case(
        _layernorm,
        [
            Bug(BARRIER, SYNC, "", "race|unwritten", "w = weights[i]"),
            Bug(BOUNDS, "if (row >= rows) return;", "", "out_of_bounds", "from[i]"),
            Bug(BOUNDS, "if (row >= rows)", "if (row > rows)", "out_of_bounds", "from[i]"),
            Bug("misaligned", "(x + row", "(x + 1 + row", "misaligned", "from[i]"),
            Bug("misaligned", "(y + row", "(y + 2 + row", "misaligned", "to[i] ="),
            Bug(
                UNWRITTEN,
                "i = threadIdx.y * 32 + lane; i <",
                "i = 32 + lane; i <",
                "unwritten",
                "w = weights[i]",
            ),
            Bug(
                "read only",
                "to[i] =",
                "weights[0].x = ((float*)weight)[0] = 0; to[i] =",
                "read_only|race",
                "to[i] =",
            ),
            Bug(MASK, "0xffffffff", "0x7fffffff", "divergent", "__shfl"),
        ],
    ),
    "matmul_cp_async": Case(
        _matmul,
        [
            Bug(
                BARRIER,
                "    __syncthreads();  // all have",
                "    // all have",
                "race|unwritten",
                "sums[j] +=",
            ),
            Bug(
                BARRIER, "    __syncthreads();  // all are", "    // all are", "race", "cp.async.cg"
            ),
            Bug(
                "missing wait",
                '    asm volatile("cp.async.wait_group 1;" ::: "memory");\n',
                "",
                "race|unwritten",
                "sums[j] +=",
            ),
            Bug("missing wait", "wait_group 1", "wait_group 2", "race|unwritten", "sums[j] +="),
            Bug(
                "missing commit",
                '    asm volatile("cp.async.commit_group;" ::: "memory");\n',
                "",
                "race|unwritten",
                "sums[j] +=",
            ),
            Bug(
                "number of stages",
                "stage = k / kTile % 2",
                "stage = k / kTile % 3",
                "race|unwritten|out_of_bounds",
                "sums[j] +=",
            ),
            Bug("number of stages", "as[1 - stage]", "as[stage]", "race|unwritten", "sums[j] +="),
            Bug("misaligned", "% 8 * 4;\n  copy", "% 8 * 4 + 1;\n  copy", "misaligned", "cp.async"),
            Bug(BOUNDS, "if (k + kTile < n)", "if (k < n)", "out_of_bounds", "cp.async"),
        ],
    ),
    "warp_sum": Case(
        _warp_sum,
        [
            Bug(
                BARRIER,
                SYNC + "  if (threadIdx.x < 32)",
                "  if (threadIdx.x < 32)",
                "race|unwritten",
                "parts[threadIdx.x]",
            ),
            Bug(BARRIER, SYNC + "  if (!last", "  if (!last", "race|unwritten", "!last"),
            Bug(BOUNDS, "i < n;", "i <= n;", "out_of_bounds", "sum += x[i]"),
            Bug(
                UNWRITTEN,
                "threadIdx.x < blockDim.x / 32 ?",
                "threadIdx.x <= blockDim.x / 32 ?",
                "unwritten",
                "parts[threadIdx.x]",
            ),
            Bug(
                BOUNDS,
                "i < gridDim.x; ++i",
                "i <= gridDim.x; ++i",
                "out_of_bounds|unwritten",
                "total +=",
            ),
            Bug(MASK, "if (threadIdx.x < 32) {", "if (threadIdx.x < 16) {", "divergent", "__shfl"),
            Bug(
                MASK,
                "  sum = over_warp(sum);\n  if",
                "  if (threadIdx.x >= 120) return;\n  sum = over_warp(sum);\n  if",
                "divergent",
                "__shfl",
            ),
        ],
    ),
    "scan": Case(
        _scan,
        [
            Bug(BARRIER, SYNC, "", "race|unwritten", "ends[lane]"),
            Bug(BARRIER, SYNC + "  y[i]", "  y[i]", "race|unwritten", "ends[warp - 1]"),
            Bug(MASK, "0xffffffff, sum", "0xfffffffe, sum", "divergent", "__shfl_up"),
            Bug(MASK, "if (warp == 0) {", "if (threadIdx.x < 4) {", "divergent", "__shfl_up"),
            Bug(BOUNDS, "ends[32]", "ends[16]", "out_of_bounds", "ends[lane] = end"),
            Bug(BOUNDS, "warp > 0 ?", "warp >= 0 ?", "out_of_bounds", "ends[warp - 1]"),
            Bug(
                UNWRITTEN,
                "if (lane == 31)",
                "if (lane == 31 && warp != 1)",
                "unwritten",
                "ends[lane] : 0",
            ),
            Bug("conflict of lanes", "if (lane == 31)", "if (lane >= 30)", "race", "ends[warp] ="),
        ],
    ),
    "histogram": Case(
        _histogram,
        [
            Bug(BARRIER, SYNC, "", "race|unwritten", "own[data[i]]"),
            Bug(BARRIER, "1);\n  __syncthreads();", "1);", "race", "own[bin]"),
            Bug(
                "missing atomic",
                "atomicAdd(&own[data[i]], 1)",
                "own[data[i]] += 1",
                "race",
                "own[data[i]]",
            ),
            Bug(
                "missing atomic",
                "atomicAdd(&counts[bin], own[bin])",
                "counts[bin / 32] += own[bin]",
                "race",
                "counts[bin",
            ),
            Bug(BOUNDS, "own[256]", "own[255]", "out_of_bounds", "own["),
            Bug(BOUNDS, "i < n;", "i <= n;", "out_of_bounds", "own[data[i]]"),
            Bug(
                UNWRITTEN,
                "bin < 256; bin += blockDim.x) own",
                "bin < 255; bin += blockDim.x) own",
                "unwritten",
                "own[",
            ),
        ],
    ),
    "transpose": Case(
        _transpose,
        [
            Bug(BARRIER, SYNC, "", "race|unwritten", "= tile["),
            Bug(
                BOUNDS,
                "column < width && row + i < height",
                "column < width",
                "out_of_bounds",
                "= x[",
            ),
            Bug(BOUNDS, "column < height && row", "row", "unwritten|out_of_bounds", "= tile["),
            Bug(
                BOUNDS, "row + i < width", "row + i <= width", "unwritten|out_of_bounds", "= tile["
            ),
            Bug(
                UNWRITTEN,
                "i += kRows)\n    if (column < width",
                "i += 2 * kRows)\n    if (column < width",
                "unwritten",
                "= tile[",
            ),
            Bug(
                BOUNDS,
                "tile[kTile][kTile + 1]",
                "tile[kTile - 1][kTile + 1]",
                "out_of_bounds",
                "tile[",
            ),
        ],
    ),
    "radix_step": Case(
        _radix_step,
        [
            Bug(BARRIER, SYNC, "", "race|unwritten", "all += zeros[w]"),
            Bug(BARRIER, SYNC + "  sorted", "  sorted", "race|unwritten", "sorted["),
            Bug(
                MASK,
                "__ballot_sync(0xffffffff",
                "__ballot_sync(__activemask() & ~1",
                "divergent",
                "__ballot",
            ),
            Bug(
                UNWRITTEN,
                "if (lane == 0) zeros",
                "if (lane == 0 && warp) zeros",
                "unwritten",
                "all += zeros[w]",
            ),
            Bug(BOUNDS, "placed[256]", "placed[128]", "out_of_bounds", "placed["),
            Bug(
                "conflict of lanes",
                "? all + (threadIdx.x - rank)",
                "? all",
                "race",
                "placed[place]",
            ),
            Bug(
                "conflict of lanes",
                "if (lane == 0) zeros[warp] = __popc(votes)",
                "zeros[warp] = before",
                "race",
                "zeros[warp] =",
            ),
        ],
    ),
    "convolution": Case(
        _convolution,
        [
            Bug(BARRIER, SYNC, "", "race|unwritten", "sum += weights"),
            Bug(BOUNDS, "left + c >= 0 && ", "", "out_of_bounds", "inside ?"),
            Bug(BOUNDS, "top + r < height;", "top + r <= height;", "out_of_bounds", "inside ?"),
            Bug(BOUNDS, "row < height && column", "column", "out_of_bounds", "= sum"),
            Bug(
                BOUNDS,
                "c < 5; ++c)",
                "c < 6; ++c)",
                "out_of_bounds|unwritten|race",
                "sum += weights",
            ),
            Bug(
                UNWRITTEN,
                "c < kWide; c += kTile",
                "c < kWide - 1; c += kTile",
                "unwritten",
                "sum += weights",
            ),
        ],
    ),
    "spmv": Case(
        _spmv,
        [
            Bug(BARRIER, SYNC, "", "race|unwritten", "results[threadIdx.x]"),
            Bug(BOUNDS, "if (row < rows)", "if (row <= rows)", "out_of_bounds", "starts[row"),
            Bug(
                BOUNDS,
                "blockIdx.x * 4 + threadIdx.x < rows",
                "true",
                "out_of_bounds",
                "results[threadIdx.x]",
            ),
            Bug(
                BOUNDS,
                "starts[row] + lane; i <",
                "starts[row] + lane; i <=",
                "out_of_bounds",
                "sum += values",
            ),
            Bug(
                "conflict of lanes",
                "if (lane == 0) results[warp] = sum",
                "results[warp] = sum",
                "race",
                "results[warp]",
            ),
            Bug(
                MASK,
                "by > 0; by /= 2) sum",
                "by > 0 && lane < 16; by /= 2) sum",
                "divergent",
                "__shfl",
            ),
            Bug(MASK, "0xffffffff", "0x1", "divergent", "__shfl"),
        ],
    ),
    "top_k": Case(
        _top_k,
        [
            Bug(BARRIER, "= best;\n    __syncthreads();", "= best;", "race|unwritten", "bests["),
            Bug(
                BARRIER,
                "    }\n    __syncthreads();\n    for",
                "    }\n    for",
                "race|unwritten",
                "taken",
            ),
            Bug(BOUNDS, "bests[8]", "bests[2]", "out_of_bounds|race", "bests["),
            Bug(BOUNDS, "at < columns ?", "at <= columns ?", "out_of_bounds", "x[at]"),
            Bug(BOUNDS, "w < blockDim.x / 32", "w <= blockDim.x / 32", "unwritten", "bests[w]"),
            Bug(BOUNDS, "n < k;", "n <= k;", "out_of_bounds", "values[blockIdx.x * k + n]"),
            Bug(
                "conflict of warps",
                "if (threadIdx.x == 0) {",
                "if (threadIdx.x % 32 == 0) {",
                "race",
                "taken = ",
            ),
        ],
    ),
    "attention_forward": Case(
        _attention_forward,
        [
            Bug(BARRIER, "    __syncthreads();\n    for", "    for", "race|unwritten", "score +="),
            Bug(BARRIER, "    __syncthreads();\n  }\n", "  }\n", "race", "ks[i / kDim]"),
            Bug(
                BOUNDS,
                "int many = min(kTile, keys - first)",
                "int many = kTile",
                "out_of_bounds",
                "[first * kDim + i]",
            ),
            Bug(BOUNDS, "if (query >= queries) return;", "", "out_of_bounds", "o[query"),
            Bug(BOUNDS, "j < many;", "j <= many;", "race|unwritten|out_of_bounds", "vs[j][d]"),
            Bug(
                "early return",
                "  float own[kDim], out",
                "  if (query >= queries) return;\n  float own[kDim], out",
                "unwritten",
                "ks[j][d]",
            ),
            Bug(
                "missing barrier for some",
                "    __syncthreads();\n  }",
                "    if (threadIdx.x < 32) __syncthreads();\n  }",
                "race|deadlock",
                "ks[i / kDim]|__syncthreads",
            ),
        ],
    ),
    "attention_backward": Case(
        _attention_backward,
        [
            Bug(
                BARRIER,
                "    __syncthreads();\n    for (int i = 0",
                "    for (int i = 0",
                "race|unwritten",
                "qs[i][d]",
            ),
            Bug(
                BARRIER,
                "    __syncthreads();\n    for (int d",
                "    for (int d",
                "race|unwritten",
                "ds[threadIdx.x][j]",
            ),
            Bug(
                "number of stages",
                "ds[i][threadIdx.x] = slope",
                "qs[i % kDim][i / 2] = slope",
                "race",
                "qs[",
            ),
            Bug(
                "missing atomic",
                "atomicAdd(&dq[(first + threadIdx.x) * kDim + d], sum)",
                "dq[first * kDim + d] += sum",
                "race",
                "dq[first * kDim",
            ),
            Bug(BOUNDS, "first < queries", "first <= queries", "out_of_bounds", "[first * kDim"),
            Bug(
                "unwritten memory",
                "i < kTile * kDim;",
                "i < kTile * kDim - 8;",
                "unwritten",
                "[i][d]",
            ),
        ],
    ),
    "mma_matmul": Case(
        _mma_matmul,
        [
            Bug(BARRIER, "    __syncthreads();\n    for", "    for", "race|unwritten", "ldmatrix"),
            Bug(BARRIER, "    __syncthreads();\n  }\n", "  }\n", "race", "ldmatrix"),
            Bug(
                "misaligned",
                "kWide = 64 + 8",
                "kWide = 64 + 4",
                "misaligned",
                "ldmatrix|const uint4*",
            ),
            Bug(UNWRITTEN, "i < 48 * 8", "i < 47 * 8", "unwritten", "ldmatrix"),
            Bug(
                BOUNDS,
                "row < 16 ? a + row * k",
                "row < 17 ? a + row * k",
                "out_of_bounds",
                "const uint4*",
            ),
            Bug(
                BOUNDS,
                "bs[32][kWide]",
                "bs[31][kWide]",
                "out_of_bounds|unwritten",
                "const uint4*|ldmatrix",
            ),
            Bug(
                "divergent warp",
                "    for (int i = 0; i < 64",
                "    for (int i = lane & 16; i < 64",
                "divergent",
                "ldmatrix",
            ),
        ],
    ),
    "bulk_pipeline": Case(
        _bulk_pipeline,
        [
            Bug(BARRIER, SYNC, "", "race|barrier", "mbarrier"),
            Bug(
                "number of arrivals",
                "init(&empty[s], kConsumers)",
                "init(&empty[s], 32)",
                "barrier|race|deadlock",
                "mbarrier|bulk",
            ),
            Bug(
                "number of arrivals",
                "init(&empty[s], kConsumers)",
                "init(&empty[s], kConsumers + 1)",
                "deadlock",
                "mbarrier",
            ),
            Bug(
                "number of bytes",
                "expect(&full[s], sizeof(stages[s]))",
                "expect(&full[s], sizeof(stages[s]) - 16)",
                "transaction",
                "cp.async.bulk",
            ),
            Bug(
                "number of bytes",
                "expect(&full[s], sizeof(stages[s]))",
                "expect(&full[s], sizeof(stages[s]) + 16)",
                "deadlock",
                "mbarrier",
            ),
            Bug(
                "missing wait",
                "    wait(&full[s], n / kStages & 1);\n",
                "",
                "race|unwritten",
                "sums[i] +=",
            ),
            Bug(
                "missing wait",
                "      wait(&empty[s], (n / kStages & 1) ^ 1);\n",
                "",
                "race|barrier|transaction",
                "cp.async.bulk|expect_tx",
            ),
            Bug(
                "wrong phase",
                "wait(&full[s], n / kStages & 1)",
                "wait(&full[s], 1)",
                "race|unwritten|deadlock",
                "sums[i] +=",
            ),
            Bug(
                "misaligned",
                "copy(stages[s], x",
                "copy(stages[s] + 1, x",
                "misaligned",
                "cp.async.bulk",
            ),
            Bug(
                "number of stages",
                "s = n % kStages;\n      wait",
                "s = n % (kStages + 1);\n      wait",
                "barrier|out_of_bounds|deadlock|race",
                "mbarrier|bulk",
            ),
        ],
        "sm_90a",
    ),
    "wgmma_matmul": Case(
        _wgmma_matmul,
        [
            Bug(
                BARRIER,
                "    __syncthreads();\n    asm",
                "    asm",
                "race|unwritten|proxy",
                "wgmma.mma",
            ),
            Bug(
                "missing proxy fence",
                '    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");\n',
                "",
                "proxy",
                "wgmma.mma",
            ),
            Bug(
                "missing wgmma fence",
                '    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");\n',
                "",
                "fence",
                "wgmma.mma",
            ),
            Bug(
                "missing wait",
                'asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");',
                "",
                "register|race",
                "wgmma|to[row / 8|c[",
            ),
            Bug(
                "missing commit",
                '    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");\n',
                "",
                "register|race",
                "wgmma|to[row / 8|c[",
            ),
            Bug(UNWRITTEN, "i < rows * 16", "i < rows * 16 - 1", "unwritten", "wgmma.mma"),
            Bug(BOUNDS, "bs[kN * 16]", "bs[kN * 8]", "out_of_bounds", "to[row / 8|wgmma.mma"),
        ],
        "sm_90a",
    ),
    "bitonic_sort": Case(
        _bitonic_sort,
        [
            Bug(BARRIER, "      __syncthreads();\n", "", "race|unwritten", "values["),
            Bug(
                "barrier only within a warp",
                "      __syncthreads();\n",
                "      __syncwarp();\n",
                "race|unwritten",
                "values[",
            ),
            Bug(BARRIER, SYNC + "  y[t]", "  y[t]", "race", "= values["),
            Bug(BOUNDS, "size <= n;", "size <= 2 * n;", "out_of_bounds", "values[high]"),
            Bug(UNWRITTEN, "  values[t + n / 2] = x[t + n / 2];\n", "", "unwritten", "values["),
        ],
    ),
    "mailbox": Case(
        _mailbox,
        [
            Bug(
                "missing fence",
                "      __threadfence_block();\n      if (lane == 0) turn = 2 * n + 1",
                "      if (lane == 0) turn = 2 * n + 1",
                "race|unwritten",
                "box[",
            ),
            Bug(
                "missing fence",
                "{}\n      __threadfence_block();\n      y",
                "{}\n      y",
                "race|unwritten",
                "box[",
            ),
            Bug(
                "missing fence",
                "      __threadfence_block();\n      if (lane == 0) turn = 2 * n + 2",
                "      if (lane == 0) turn = 2 * n + 2",
                "race",
                "box[",
            ),
            Bug(BARRIER, SYNC, "", "race|unwritten", "turn"),
            Bug(BARRIER, "lane];\n      __syncwarp();", "lane];", "race", "box["),
            Bug(BOUNDS, "x[n * 32 + lane]", "x[(n + 1) * 32 + lane]", "out_of_bounds", "box["),
            Bug(BOUNDS, "box[31 - lane]", "box[32 - lane]", "out_of_bounds|unwritten|race", "box["),
        ],
    ),
    "rotate_local": Case(
        _rotate_local,
        [
            Bug(BARRIER, SYNC, "", "race|unwritten", "turns[i]"),
            Bug(BOUNDS, "if (row >= rows) return;", "", "out_of_bounds", "own[(i + offset)"),
            Bug(
                BOUNDS,
                "own[(i + offset) % kDim] =",
                "own[i + offset] =",
                "out_of_bounds",
                "own[i + offset]",
            ),
            Bug(UNWRITTEN, "i < kDim; ++i) own", "i < kDim - 1; ++i) own", "unwritten", "own["),
            Bug(
                "misaligned",
                "&y[row * kDim + 2 * i]",
                "&y[row * kDim + 2 * i + 1]",
                "misaligned",
                "float2",
            ),
            Bug(
                UNWRITTEN,
                "if (threadIdx.x < kDim / 2)",
                "if (threadIdx.x < kDim / 2 - 1)",
                "unwritten",
                "turns[i]",
            ),
        ],
    ),
}
BUGS = {
    f"{name}-{number}": (name, number) for name in CASES for number in range(len(CASES[name].bugs))
}
