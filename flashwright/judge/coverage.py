"""Which lengths a kernel is tried with: both sides of every length at which it does something else.

A goal is such a place: a whole tile, one key more, a full ring of stages, two blocks of keys that a
causal mask skips, one key more than a window. The goals come from the program's own sizes, its spec
and the classes of its package. A few problems that reach as many goals as a budget allows are
chosen; the goals that no problem reached are told by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flashwright.judge.tiling import Served, Tiling
from flashwright.spec import AttentionSpec

Pair = tuple[int, int]
"""q_len and kv_len, as the kernel has them."""

LENGTHS = ((1, 1), (17, 17), (64, 64), (100, 100), (257, 257), (100, 257), (257, 100))
"""Pairs of q_len and kv_len for a candidate whose tiles are not known: one position, ragged, exact,
several blocks, unequal both ways."""
BOUNDED = 257
"""Keys of the longest problem of a spec with dims of its own: they may bound the keys, as the pages
of a table do."""
SKIPPED = 2
"""Blocks: one that is skipped may still be in a buffer, the second shows what is done with it."""
FEW = 33
"""Queries from which on a mask that is off by one shows in the RMS error, whatever the weights."""
LONG = 1025
"""Keys of one problem for a reference, whose window no program may have."""
OVERHEAD = 20_000
"""What a problem costs beside its positions, in positions."""


@dataclass(frozen=True)
class Budget:
    """Positions (queries times keys, in whole tiles) that are affordable for one head."""

    one: int
    """Of a single problem."""
    total: int
    why: str
    """What is said of a goal that does not fit."""
    longest: int | None = None
    """Keys that no problem may exceed."""


@dataclass(frozen=True)
class Goal:
    """Something that a problem should reach."""

    name: str
    reached: Callable[[int, int], bool]


@dataclass(frozen=True)
class Coverage:
    """The goals of a trial, and the lengths that were chosen to reach them."""

    goals: tuple[Goal, ...]
    pairs: tuple[Pair, ...]
    """The most telling first."""
    beyond: frozenset[str]
    """Goals that no affordable problem reaches."""
    why: str

    def unreached(self, done: Iterable[Mapping[str, int]], out_of_time: str = "") -> list[str]:
        """The goals that no problem of these dims reached, each with the reason."""
        pairs = [(d["q_len"], d["kv_len"]) for d in done if d.get("batch", 1)]
        found = []
        for goal in self.goals:
            if not any(goal.reached(*pair) for pair in pairs):
                why = self.why if goal.name in self.beyond else out_of_time or self.why
                found.append(f"{goal.name} ({why})")
        return found


def cover(
    kernels: Sequence[Served],
    spec: AttentionSpec,
    budget: Budget,
    given: Iterable[Pair] = (),
    at_bounds: bool = True,
) -> Coverage:
    """Goals and problems of a trial that has the `given` lengths in any case.

    A callable does not show its tiles: without kernels small ones are assumed.
    """
    served = tuple(kernels) or (Served(Tiling(diagonal=spec.causal, assumed=True)),)
    several = len(served) > 1
    goals: list[Goal] = list(_everywhere(spec))
    queries, keys = {1, FEW}, {1}
    for kernel in served:
        places = _Places(kernel, spec)
        goals += places.named(several)
        if several and at_bounds and kernel.up_to is not None:
            bound = kernel.up_to
            goals.append(Goal(f"kv_len {bound}, the last of its kernel", _keys_are(bound)))
            keys |= {bound, bound + 1}
        queries |= places.queries
        keys |= places.keys
    if spec.reference and not spec.dims:
        goals.append(Goal(f"kv_len {LONG} or more", lambda q, kv: kv >= LONG and q >= FEW))
        keys.add(LONG)
    everything = [(q, kv) for q in sorted(queries) for kv in sorted(keys) if q > 0 and kv > 0]
    goals = [g for g in goals if any(g.reached(*pair) for pair in everything)]
    table = {pair: frozenset(g.name for g in goals if g.reached(*pair)) for pair in everything}
    costs = {pair: _cost(served, pair) for pair in everything}
    affordable = [p for p in everything if _fits(p, costs[p], budget)]
    beyond = {g.name for g in goals}.difference(*(table[p] for p in affordable))
    already = {g.name for g in goals if any(g.reached(*pair) for pair in given)}
    pairs = _greedy({p: table[p] for p in affordable}, costs, budget.total, already)
    return Coverage(tuple(goals), tuple(pairs), frozenset(beyond), budget.why)


def _fits(pair: Pair, cost: int, budget: Budget) -> bool:
    return cost <= budget.one + OVERHEAD and (budget.longest is None or pair[1] <= budget.longest)


def _cost(served: Sequence[Served], pair: Pair) -> int:
    q_len, kv_len = pair
    tiling = next((s.tiling for s in served if s.serves(kv_len)), served[-1].tiling)
    return OVERHEAD + _whole(q_len, tiling.rows) * _whole(kv_len, tiling.keys)


def _whole(length: int, tile: int) -> int:
    return -(-length // tile) * tile


def _greedy(
    table: Mapping[Pair, frozenset[str]],
    costs: Mapping[Pair, int],
    total: int,
    already: Iterable[str],
) -> list[Pair]:
    """The pair that reaches most for its cost, again and again; then those that all others make
    up for are left out."""
    reached, chosen, spent = set(already), list[Pair](), 0
    while True:
        new = {p: len(names - reached) for p, names in table.items() if p not in chosen}
        able = [p for p, n in new.items() if n and spent + costs[p] <= total + OVERHEAD]
        if not able:
            break
        best = max(able, key=lambda p: (new[p] / costs[p] ** 0.5, -costs[p], p))
        chosen.append(best)
        reached |= table[best]
        spent += costs[best]
    for pair in sorted(chosen, key=lambda p: -costs[p]):
        others = set(already).union(*(table[p] for p in chosen if p != pair))
        if table[pair] <= others:
            chosen.remove(pair)
    return chosen


# --- goals ------------------------------------------------------------------------------------


def _keys_are(count: int) -> Callable[[int, int], bool]:
    return lambda q, kv: kv == count


def _everywhere(spec: AttentionSpec) -> Iterator[Goal]:
    """What any kernel is asked, whatever its tiles."""
    yield Goal("q_len 1, kv_len 1", lambda q, kv: q == kv == 1)
    yield Goal("q_len = kv_len", lambda q, kv: q == kv > 1)
    yield Goal("q_len < kv_len", lambda q, kv: 1 < q < tokens_of(spec, kv))
    yield Goal("q_len > kv_len", lambda q, kv: q > tokens_of(spec, kv))
    yield Goal("q_len 1 of several keys", lambda q, kv: q == 1 and kv > 2)


def tokens_of(spec: AttentionSpec, kv_len: int) -> int:
    """The position behind the last key; NSA's compressed keys stand for several tokens each."""
    if spec.branch == "compressed":
        return (kv_len - 1) * spec.stride + spec.block
    return kv_len


class _Places:
    """Goals of one kernel, and the lengths with which they can be reached."""

    def __init__(self, kernel: Served, spec: AttentionSpec) -> None:
        self.kernel, self.spec = kernel, spec
        self.rows, self.tile = kernel.tiling.rows, kernel.tiling.keys
        self.queries: set[int] = set()
        self.keys: set[int] = set()
        self.goals: list[Goal] = []
        self._tiles()
        self._ring()
        self.constants = _constants(kernel.tiling, spec)
        self._around_constants()
        self._skipped()
        base = _whole(kernel.above, self.tile)
        self.keys |= {base + n for n in (self.tile - 1, self.tile, self.tile + 1)}
        if kernel.above:
            self.keys |= {kernel.above + 1, kernel.above + n_blocks(self.rows, self.tile)}

    def named(self, several: bool) -> list[Goal]:
        """The goals, of this kernel's own lengths only."""
        if not several:
            return self.goals
        end = f"up to {self.kernel.up_to}" if self.kernel.up_to else f"above {self.kernel.above}"
        serves = self.kernel.serves
        return [
            Goal(f"{g.name}, kernel for {end} keys", _both(serves, g.reached)) for g in self.goals
        ]

    def _add(self, name: str, reached: Callable[[int, int], bool]) -> None:
        self.goals.append(Goal(name, reached))

    def _tiles(self) -> None:
        rows, tile = self.rows, self.tile
        if self.kernel.tiling.assumed:
            return
        if rows > 1:
            self._add(f"q_len a multiple of {rows}", lambda q, kv: q % rows == 0)
            self._add(f"q_len 1 past a multiple of {rows}", lambda q, kv: q % rows == 1 < q)
            self._add(f"q_len 1 short of a multiple of {rows}", lambda q, kv: q % rows == rows - 1)
            self._add(
                "3 query blocks, the last ragged", lambda q, kv: q > 2 * rows and q % rows > 0
            )
            self.queries |= {rows - 1, rows, rows + 1, 2 * rows + 1}
            self.keys |= {rows - 1, rows, rows + 1}  # as many keys as queries
        if tile > 1:
            self._add(f"kv_len a multiple of {tile}", lambda q, kv: kv % tile == 0)
            self._add(f"kv_len 1 past a multiple of {tile}", lambda q, kv: kv % tile == 1 < kv)
            self._add(f"kv_len 1 short of a multiple of {tile}", lambda q, kv: -kv % tile == 1)
            self._add(
                "3 key blocks, the last ragged",
                lambda q, kv: q >= min(FEW, rows) and kv > 2 * tile and kv % tile > 0,
            )
            self.keys |= {2 * tile + 1, 3 * tile - 1}

    def _ring(self) -> None:
        """Blocks of keys around the number of stages, and so many that the ring is used twice."""
        tile, stages = self.tile, self.kernel.tiling.stages
        if tile < 2 or stages < 2 or self.spec.branch == "selected":
            return
        for count in (stages - 1, stages, stages + 1, 2 * stages + 1):
            name = f"{count} key block{'s' * (count > 1)} in a ring of {stages}"
            self._add(name, lambda q, kv, n=count: -(-kv // tile) == n)  # type: ignore[misc]
            self.keys |= {count * tile, count * tile - 1, (count - 1) * tile + 1}

    def _around_constants(self) -> None:
        for name, value in self.constants.items():
            told = name if name == str(value) else f"{name} {value}"
            enough = min(FEW, max(2, value // 2))
            for more in (0, 1):
                label = f"kv_len = {told}" + (" + 1" if more else "")
                count = value + more
                self._add(label, lambda q, kv, n=count, m=enough: kv == n and q >= m)  # type: ignore[misc]
                self.keys.add(count)

    def _skipped(self) -> None:
        """Blocks that no query of a thread block sees, on both sides, and blocks that all see."""
        spec, rows, tile = self.spec, self.rows, self.tile
        if spec.branch == "selected" or tile < 2:
            return
        many, per_key = SKIPPED * tile, spec.stride if spec.branch == "compressed" else 1
        known = spec.reference is None
        diagonal = spec.causal or spec.window is not None or self.kernel.tiling.diagonal
        ahead = (spec.window or 0) if known and not spec.causal else 0
        behind = sum(self.constants.values())
        if diagonal:
            first = rows + ahead + many * per_key
            self._add(
                f"{SKIPPED} key blocks skipped after a query block",
                lambda q, kv: q >= first and kv >= many,
            )
            self._add(
                "a query block before the first key", lambda q, kv: q - tokens_of(spec, kv) >= rows
            )
            self.queries |= {first, first + 1, rows + 2}
            self.keys |= {many, first, many + 1}
            if rows > 1 and not ahead:
                self.queries |= {tokens_of(spec, n) + rows for n in (1, 2)}
        if diagonal and not behind:
            self._add(
                f"{SKIPPED} key blocks that a query block sees whole",
                lambda q, kv: q >= FEW and kv - min(q, rows) >= many,
            )
            self.keys |= {many + rows, many + FEW, many + rows + 1}
        if behind:
            names = " + ".join(self.constants)
            self._add(
                f"{SKIPPED} key blocks past {names}",
                lambda q, kv: q >= FEW and kv - min(q, rows) - behind >= many,
            )
            self._add(
                f"two query blocks and a key block past {names}",
                lambda q, kv: q > rows and kv - min(q, rows) - behind >= tile,
            )
            self.keys |= {behind + many + n for n in (FEW, rows, rows + 1)}
            self.keys |= {behind + tile + rows, behind + tile + rows + 1}
            self.queries.add(rows + 1)


def n_blocks(rows: int, tile: int) -> int:
    """Keys of a problem with blocks that are skipped, seen whole and seen in part."""
    return rows + SKIPPED * tile


def _constants(tiling: Tiling, spec: AttentionSpec) -> dict[str, int]:
    """Those of the program and of the spec, each value once."""
    asked = {"window": spec.window, "sink_tokens": spec.sink_tokens}
    every = itertools.chain(
        tiling.constants.items(), ((n, v) for n, v in asked.items() if v is not None and v > 1)
    )
    found: dict[int, str] = {}
    for name, value in every:
        found.setdefault(value, name)
    return {name: value for value, name in found.items()}


def _both(
    serves: Callable[[int], bool], reached: Callable[[int, int], bool]
) -> Callable[[int, int], bool]:
    return lambda q, kv: serves(kv) and reached(q, kv)
