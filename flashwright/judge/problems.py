"""The problems of a trial: fixed ones, and secret ones that no author has seen.

The secret problems' lengths, head counts and inputs are drawn from a seed. The judge chooses the
seed when the trial begins and reports it in the verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flashwright.judge.coverage import BOUNDED, MANY, Budget, Coverage, Pair, cover, tokens_of
from flashwright.judge.coverage import LENGTHS as SHORT
from flashwright.judge.inputs import KINDS
from flashwright.judge.sequences import sized
from flashwright.judge.tiling import Served
from flashwright.spec import AttentionSpec

USUAL = (256, 256)
"""What an author tries first: whole tiles, as many keys as queries."""
LENGTHS = (
    *((1, 1), (63, 63), (128, 128), (1000, 1000), (4097, 4097)),
    *((1, 4097), (63, 1000), (128, 4097), (1000, 128), (4097, 1000), (1000, 63)),
)
"""Pairs of q_len and kv_len: equal, fewer queries than keys, more queries than keys."""
COUNTS = ((2, 2), (1, 3), (3, 1), (2, 4))
"""Batch and kv heads of problems, in turn; the largest problems have one batch and two kv heads."""
LARGE = 2_000_000  # pairs of positions from which a problem is large
DRAWN = 6
LONGEST = {"cuda": 3000, "cpu": 300, "emulated": 200}
MANY_HEADS = {"cuda": 64, "cpu": 16}  # kv heads of the problem with many
MANY_BLOCKS = 1025  # batches times heads
OWN_HEADS = {
    "cuda": (200, 200),
    "cpu": (20, 40),
}  # lengths of the problem with the spec's own heads
LONG = ((130, 8193), (65, 65537))
"""Very long problems; few queries keep them affordable."""
EMULATED_USUAL = (128, 128)
REFERENCE_LENGTHS = (*SHORT, (1000, 1000), (130, 4097), (1000, 63))
"""On a GPU, for a reference in NumPy, which is slow."""
BUDGETS = {
    "cuda": Budget(20_000_000, 60_000_000, "too long for a trial"),
    "cpu": Budget(500_000, 1_000_000, "too long for a trial on the CPU"),
    "emulated": Budget(1_000_000, 1_600_000, "too long for emulation"),
}
"""The budgets of the lengths that are chosen from the kernel's tile sizes."""
REFERENCE_BUDGET = Budget(2_000_000, 6_000_000, "too long for the reference")
EMULATED_RATE = 300_000
"""Positions per second of one head, under all schedules: measured on one core, 16-bit types."""
AT_BOUNDS, FEW_AT_BOUNDS = 200, 50  # queries
MOST_AT_BOUNDS = {"cuda": 1 << 32, "cpu": 10_000_000, "emulated": 8_000_000}  # times keys
SHARED, FEW_SHARED = 4, 2  # query heads that share a kv head in a problem, in an expensive one
CPU_LONG, CPU_BATCHES = (1000, 9000), (6, 40)  # keys and batches of one problem each
CPU_PAIRS = 70_000  # a callable that is judged on the CPU gets no larger problems


@dataclass(frozen=True)
class Problem:
    """The sizes of one problem, its kind of inputs and their seed."""

    dims: Mapping[str, int]
    kind: str
    seed: int
    usual: bool = False
    """Whether an author would try this shape."""

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.dims.items())
        return sizes if self.kind == "normal" else f"{sizes}, {self.kind} inputs"


def problems(
    spec: AttentionSpec,
    seed: int,
    device: str = "cuda",
    lengths: Sequence[tuple[int, int]] | None = None,
    bounds: Sequence[int] = (),
    chosen: Coverage | None = None,
    whole_groups: bool = False,
) -> list[Problem]:
    """All problems of a trial, or only those of the given lengths.

    `device` is cuda, cpu or emulated. Under emulation they are fewer and smaller, and ordered by
    the goals they reach. `bounds` are the numbers of keys at which the candidate changes to another
    kernel; each gets its problems. `chosen` are the lengths for the candidate's tile sizes; they
    come from the spec by default. With `whole_groups` a kv head has as many query heads as the spec
    says, in all problems.
    """
    if lengths is not None:
        made = _from_lengths(spec, lengths)
    else:
        made = _full_set(spec, seed, device, chosen or coverage(spec, device))
    listed = list(made)
    if lengths is None:
        listed[1:1] = _at_bounds(spec, device, bounds)
    return [
        Problem({**spec.dims, **_grouped(spec, dims, whole_groups)}, kind, seed + number, usual)
        for number, (dims, kind, usual) in enumerate(listed)
    ]


def _grouped(spec: AttentionSpec, dims: dict[str, int], whole: bool) -> dict[str, int]:
    return {**dims, "heads": dims["kv_heads"] * spec.group} if whole else dims


def coverage(
    spec: AttentionSpec,
    device: str,
    kernels: Sequence[Served] = (),
    seconds: float | None = None,
) -> Coverage:
    """The lengths for the kernels' tile sizes, beside those of every trial.

    `seconds` bound the trial under emulation.
    """
    budget = BUDGETS[device]
    if spec.reference and device == "cuda":
        budget = REFERENCE_BUDGET
    if seconds is not None:
        budget = replace(budget, total=min(budget.total, int(seconds * EMULATED_RATE)))
    if spec.reference and spec.dims:
        budget = replace(budget, longest=BOUNDED)
    given = [(q_len, _keys(spec, kv_len)) for q_len, kv_len in _fixed_lengths(spec, device)]
    bounds = [k.up_to for k in kernels if k.up_to is not None]
    for dims, _, _ in _at_bounds(spec, device, bounds):
        given.append((dims["q_len"], dims["kv_len"]))
    return cover(kernels, spec, budget, given, with_many=device == "emulated")


def _fixed_lengths(spec: AttentionSpec, device: str) -> Sequence[Pair]:
    """The lengths of every trial, whatever the kernel; in tokens for NSA's compressed branch."""
    if device == "emulated":
        return () if spec.reference else (EMULATED_USUAL,)
    if spec.reference:
        return SHORT if spec.dims or device != "cuda" else REFERENCE_LENGTHS
    return (USUAL, *(LENGTHS if device == "cuda" else SHORT))


def _keys(spec: AttentionSpec, tokens: int) -> int:
    """The number of keys for a number of tokens."""
    if spec.branch == "compressed":
        return spec.compressed_blocks(max(tokens, spec.block))
    return tokens


def _in_tokens(spec: AttentionSpec, pairs: Sequence[Pair]) -> list[Pair]:
    return [(q_len, tokens_of(spec, kv_len)) for q_len, kv_len in pairs]


def _at_bounds(spec: AttentionSpec, device: str, bounds: Sequence[int]) -> Made:
    """Problems on both sides of each bound. Emulation is slow for so many keys: there, only beyond
    the bounds, as no other problem reaches those kernels. All have several blocks of queries or
    heads."""
    slow = device == "emulated"
    sides, queries, most = ((1,) if slow else (0, 1)), AT_BOUNDS, SHARED
    if slow and spec.group > 1:
        queries, most = FEW_AT_BOUNDS, FEW_SHARED
    for keys in (n for bound in bounds for side in sides if (n := bound + side)):
        if keys * queries > MOST_AT_BOUNDS[device]:
            continue  # the verdict says that this kernel did no problem
        tokens = tokens_of(spec, keys)
        yield sizes(spec, queries, tokens, 1, 1, most), "normal", False


Made = Iterator[tuple[dict[str, int], str, bool]]


def _emulated(spec: AttentionSpec, seed: int, chosen: Coverage) -> Made:
    many, *others = _in_tokens(spec, chosen.pairs)
    yield sizes(spec, *many, *MANY, FEW_SHARED), "normal", False
    if not spec.reference:
        yield sizes(spec, *EMULATED_USUAL, 1, 1, FEW_SHARED), "normal", True
    for number, (q_len, kv_len) in enumerate(others):
        batch, kv_heads = COUNTS[number % len(COUNTS)] if q_len * kv_len < 300 else (1, 1)
        yield sizes(spec, q_len, kv_len, batch, kv_heads, FEW_SHARED), "normal", False
    if spec.reference:
        return
    yield sizes(spec, 9, 40, 1, 1, spec.group), "normal", False
    for kind in _kinds(spec)[1:]:
        yield sizes(spec, 64, 96, 1, 1), kind, True
    rng = np.random.default_rng(seed)
    for _ in range(DRAWN):
        dims, kind, usual = _random_problem(spec, rng, "emulated")
        yield sized(spec, {**dims, "batch": 1}), kind, usual


def _from_lengths(spec: AttentionSpec, lengths: Sequence[tuple[int, int]]) -> Made:
    for number, (q_len, kv_len) in enumerate(lengths):
        yield _with_counts(spec, q_len, kv_len, number), "normal", False


def _full_set(spec: AttentionSpec, seed: int, device: str, chosen: Coverage) -> Made:
    if device == "emulated":
        yield from _emulated(spec, seed, chosen)
        return
    own = _in_tokens(spec, chosen.pairs)
    if spec.reference:
        yield from _from_lengths(spec, (*_fixed_lengths(spec, device), *own))
        return
    yield sizes(spec, *USUAL, 2, 2), "normal", True
    yield sizes(spec, *OWN_HEADS[device], 1, spec.kv_heads, spec.group), "normal", False
    for number, (q_len, kv_len) in enumerate((*_fixed_lengths(spec, device)[1:], *own)):
        yield _with_counts(spec, q_len, kv_len, number), "normal", False
    for kind in _kinds(spec)[1:]:
        yield sizes(spec, *USUAL, 1, 2), kind, True
    rng = np.random.default_rng(seed)
    for _ in range(DRAWN):
        yield _random_problem(spec, rng, device)
    yield sizes(spec, 37, 65, 2, MANY_HEADS[device]), "normal", False
    yield sizes(spec, 33, 70, 5, 1), "normal", False
    if device == "cuda":
        heads = sizes(spec, 1, 1, 1, 2)["heads"]
        yield sizes(spec, 17, 33, -(-MANY_BLOCKS // heads), 2), "normal", False
        for q_len, kv_len in LONG:
            yield sizes(spec, q_len, kv_len, 1, 1, FEW_SHARED), "normal", False
    if device == "cpu":  # no fixed bound behind which a callable may do as it likes
        keys = int(np.exp(rng.uniform(*np.log(CPU_LONG))))
        yield sizes(spec, 2, keys, 1, 1, FEW_SHARED), "normal", False
        yield sizes(spec, 5, 9, int(rng.integers(*CPU_BATCHES)), 1), "normal", False
    yield sizes(spec, *USUAL, 0, 2), "normal", False


def _random_problem(
    spec: AttentionSpec, rng: np.random.Generator, device: str
) -> tuple[dict[str, int], str, bool]:
    """A random problem: lengths of every magnitude, any kind of inputs."""
    most = np.log(LONGEST[device])
    q_len, kv_len = (int(np.exp(rng.uniform(1, most))) for _ in range(2))
    if device != "cuda":
        kv_len = max(1, min(kv_len, CPU_PAIRS // q_len))
    dims = sizes(spec, q_len, kv_len, int(rng.integers(1, 4)), int(rng.integers(1, 5)))
    return dims, str(rng.choice(_kinds(spec))), False


def _kinds(spec: AttentionSpec) -> list[str]:
    """The kinds of inputs that a spec can be tried with.

    With a sink, some kinds give weights too small for their type. With fp8, a weight in e4m3 has
    four bits and none is below 2^-9, and a sum keeps 13 bits.
    """
    lone = ("opposed", "shifted", "peaked", "outliers", "tail") if spec.sink else ()
    fine = ("spectrum", "cancelling") if spec.dtype == "fp8" else ()
    return [kind for kind in KINDS if kind not in (*lone, *fine)]


def _with_counts(spec: AttentionSpec, q_len: int, kv_len: int, number: int) -> dict[str, int]:
    large = q_len * kv_len >= LARGE
    return sizes(spec, q_len, kv_len, *((1, 2) if large else COUNTS[number % len(COUNTS)]))


def sizes(
    spec: AttentionSpec, q_len: int, kv_len: int, batch: int, kv_heads: int, most: int = SHARED
) -> dict[str, int]:
    """The dims of a problem with the spec's kind of head sharing, at most `most` heads per kv
    head."""
    kv_heads = min(spec.kv_heads, kv_heads)
    group = spec.group if spec.branch == "selected" else min(spec.group, most)
    dims = {"batch": batch, "heads": kv_heads * group, "kv_heads": kv_heads, "q_len": q_len}
    if spec.branch == "compressed":
        tokens = max(kv_len, spec.block)
        return dims | {"kv_len": spec.compressed_blocks(tokens), "tokens": tokens}
    return sized(spec, dims | {"kv_len": kv_len})
