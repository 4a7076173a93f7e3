"""The lengths that a kernel is tried with: both sides of every length at which it changes path.

A goal is such a length: a whole tile, one key more, a full ring of stages, two blocks of keys that
a causal mask skips, one key more than a window. The goals come from the program's sizes, its spec
and the classes of its package. `cover` chooses a few problems that reach as many goals as a budget
allows. The verdict lists the goals that no problem reached.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flashwright.judge.tiling import Served, Tiling
from flashwright.spec import AttentionSpec

Pair = tuple[int, int]
"""q_len and kv_len."""

LENGTHS = ((1, 1), (17, 17), (64, 64), (100, 100), (257, 257), (100, 257), (257, 100))
"""Pairs of q_len and kv_len for a candidate whose tiles are not known: one position, ragged, exact,
several blocks, unequal both ways."""
BOUNDED = 257
"""Keys of the longest problem of a spec that declares dims. Such a dim may bound the keys, as the
pages of a table do."""
SKIPPED = 2
"""Skipped key blocks in a row. One skipped block may still be in a buffer; a second one shows
whether the kernel reads it."""
FEW = 33
"""The least number of queries at which a mask that is off by one shows in the RMS error."""
LONG = 1025
"""Keys of one problem for a spec with a reference: the reference may have a window that the program
does not show."""
OVERHEAD = 20_000
"""The fixed cost of a problem, in positions."""
MANY = (2, 2)
"""Batches and KV heads of the problem with many blocks: see `many_blocks`."""


@dataclass(frozen=True)
class Budget:
    """How many positions (queries times keys, in whole tiles) one head may have."""

    one: int
    """The limit of a single problem."""
    total: int
    why: str
    """The reason reported for a goal that does not fit."""
    longest: int | None = None
    """Keys that no problem may exceed."""


@dataclass(frozen=True)
class Goal:
    """A pair of lengths, or a range of them, that some problem should have."""

    name: str
    reached: Callable[[int, int], bool]


@dataclass(frozen=True)
class Coverage:
    """The goals of a trial, and the lengths that were chosen to reach them."""

    goals: tuple[Goal, ...]
    pairs: tuple[Pair, ...]
    """`many`, and those behind it ordered by goals reached per cost."""
    beyond: frozenset[str]
    """Goals that no affordable problem reaches."""
    why: str
    many: Pair | None = None
    """The lengths of the problem with several batches and heads, if the trial has one."""

    def unreached(self, done: Iterable[Mapping[str, int]], out_of_time: str = "") -> list[str]:
        """The names of the goals that no problem in `done` reached, each with the reason."""
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
    with_many: bool = False,
) -> Coverage:
    """The goals of a trial and the lengths to add to the `given` ones; `with_many` those of
    `many_blocks` first.

    A callable does not show its tiles. Without `kernels`, small tiles are assumed.
    """
    served = tuple(kernels) or (Served(Tiling(diagonal=spec.causal, assumed=True)),)
    many = many_blocks(served[0].tiling, spec) if with_many else None
    first = [many] if many else []
    given = [*given, *first]
    several = len(served) > 1
    goals: list[Goal] = list(_common_goals(spec))
    queries, keys = {1, FEW}, {1}
    for kernel in served:
        places = _KernelGoals(kernel, spec)
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
    if spec.decode is not None:
        queries = {min(n, spec.decode) for n in (*queries, spec.decode)}
        given = [(min(q, spec.decode), kv) for q, kv in given]
    everything = [(q, kv) for q in sorted(queries) for kv in sorted(keys) if q > 0 and kv > 0]
    goals = [g for g in goals if any(g.reached(*pair) for pair in everything)]
    table = {pair: frozenset(g.name for g in goals if g.reached(*pair)) for pair in everything}
    costs = {pair: _cost(served, pair) for pair in everything}
    affordable = [p for p in everything if _is_affordable(p, costs[p], budget)]
    beyond = {g.name for g in goals}.difference(*(table[p] for p in affordable))
    already = {g.name for g in goals if any(g.reached(*pair) for pair in given)}
    pairs = _greedy({p: table[p] for p in affordable}, costs, budget.total, already)
    return Coverage(tuple(goals), (*first, *pairs), frozenset(beyond), budget.why, many)


def many_blocks(tiling: Tiling, spec: AttentionSpec) -> Pair:
    """The shortest lengths with two blocks of queries, and two of keys that all of them may see.

    The problem with these lengths has several batches and heads. In a problem with one of each, or
    with one block, a wrong stride or coordinate of one axis reads what the right one reads.
    """
    queries = min(tiling.rows + 1, spec.decode or tiling.rows + 1)
    keys = max(tiling.keys, queries - 1) + 1
    return queries, min(keys, BOUNDED) if spec.dims else keys


def _is_affordable(pair: Pair, cost: int, budget: Budget) -> bool:
    return cost <= budget.one + OVERHEAD and (budget.longest is None or pair[1] <= budget.longest)


def _cost(served: Sequence[Served], pair: Pair) -> int:
    q_len, kv_len = pair
    tiling = next((s.tiling for s in served if s.serves(kv_len)), served[-1].tiling)
    return OVERHEAD + _round_up(q_len, tiling.rows) * _round_up(kv_len, tiling.keys)


def _round_up(length: int, tile: int) -> int:
    return -(-length // tile) * tile


def _greedy(
    table: Mapping[Pair, frozenset[str]],
    costs: Mapping[Pair, int],
    total: int,
    already: Iterable[str],
) -> list[Pair]:
    """Choose the pair with the most new goals for its cost until the budget is spent. Then drop the
    pairs whose goals the others reach."""
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


def _common_goals(spec: AttentionSpec) -> Iterator[Goal]:
    """The goals of every kernel, whatever its tiles."""
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


class _KernelGoals:
    """The goals of one kernel, and the lengths that reach them."""

    def __init__(self, kernel: Served, spec: AttentionSpec) -> None:
        self.kernel, self.spec = kernel, spec
        self.rows, self.tile = kernel.tiling.rows, kernel.tiling.keys
        self.few = min(FEW, spec.decode or FEW)
        self.queries: set[int] = set()
        self.keys: set[int] = set()
        self.goals: list[Goal] = []
        self._add_tile_goals()
        self._add_ring_goals()
        self.constants = _constants(kernel.tiling, spec)
        self._add_constant_goals()
        self._add_skip_goals()
        base = _round_up(kernel.above, self.tile)
        self.keys |= {base + n for n in (self.tile - 1, self.tile, self.tile + 1)}
        if kernel.above:
            self.keys |= {kernel.above + 1, kernel.above + keys_with_skips(self.rows, self.tile)}

    def named(self, several: bool) -> list[Goal]:
        """The goals; with `several` kernels, restricted to the lengths that this one serves."""
        if not several:
            return self.goals
        end = f"up to {self.kernel.up_to}" if self.kernel.up_to else f"above {self.kernel.above}"
        serves = self.kernel.serves
        return [
            Goal(f"{g.name}, kernel for {end} keys", _in_class(serves, g.reached))
            for g in self.goals
        ]

    def _add(self, name: str, reached: Callable[[int, int], bool]) -> None:
        self.goals.append(Goal(name, reached))

    def _add_tile_goals(self) -> None:
        rows, tile, few = self.rows, self.tile, self.few
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
                lambda q, kv: q >= min(few, rows) and kv > 2 * tile and kv % tile > 0,
            )
            self.keys |= {2 * tile + 1, 3 * tile - 1}

    def _add_ring_goals(self) -> None:
        """Numbers of key blocks around the number of stages, and enough to use the ring twice."""
        tile, stages = self.tile, self.kernel.tiling.stages
        if tile < 2 or stages < 2 or self.spec.branch == "selected":
            return
        for count in (stages - 1, stages, stages + 1, 2 * stages + 1):
            name = f"{count} key block{'s' * (count > 1)} in a ring of {stages}"
            self._add(name, lambda q, kv, n=count: -(-kv // tile) == n)  # type: ignore[misc]
            self.keys |= {count * tile, count * tile - 1, (count - 1) * tile + 1}

    def _add_constant_goals(self) -> None:
        for name, value in self.constants.items():
            told = name if name == str(value) else f"{name} {value}"
            enough = min(self.few, max(2, value // 2))
            for more in (0, 1):
                label = f"kv_len = {told}" + (" + 1" if more else "")
                count = value + more
                self._add(label, lambda q, kv, n=count, m=enough: kv == n and q >= m)  # type: ignore[misc]
                self.keys.add(count)

    def _add_skip_goals(self) -> None:
        """Key blocks that no query of a thread block sees, on both sides; blocks that all see."""
        spec, rows, tile, few = self.spec, self.rows, self.tile, self.few
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
                lambda q, kv: q >= few and kv - min(q, rows) >= many,
            )
            self.keys |= {many + rows, many + FEW, many + rows + 1}
        if behind:
            names = " + ".join(self.constants)
            self._add(
                f"{SKIPPED} key blocks past {names}",
                lambda q, kv: q >= few and kv - min(q, rows) - behind >= many,
            )
            self._add(
                f"two query blocks and a key block past {names}",
                lambda q, kv: q > rows and kv - min(q, rows) - behind >= tile,
            )
            self.keys |= {behind + many + n for n in (FEW, rows, rows + 1)}
            self.keys |= {behind + tile + rows, behind + tile + rows + 1}
            self.queries.add(rows + 1)


def keys_with_skips(rows: int, tile: int) -> int:
    """Keys of a problem with key blocks that are skipped, fully visible and partly visible."""
    return rows + SKIPPED * tile


def _constants(tiling: Tiling, spec: AttentionSpec) -> dict[str, int]:
    """The constants of the program and of the spec by name, each value once."""
    asked = {"window": spec.window, "sink_tokens": spec.sink_tokens}
    every = itertools.chain(
        tiling.constants.items(), ((n, v) for n, v in asked.items() if v is not None and v > 1)
    )
    found: dict[int, str] = {}
    for name, value in every:
        found.setdefault(value, name)
    return {name: value for value, name in found.items()}


def _in_class(
    serves: Callable[[int], bool], reached: Callable[[int, int], bool]
) -> Callable[[int, int], bool]:
    return lambda q, kv: serves(kv) and reached(q, kv)
