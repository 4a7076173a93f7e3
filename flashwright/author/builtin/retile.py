"""New sizes for an existing program, of the built-in author or any other.

A tuner needs the same program with other tiles, stages, warps and schedules. All of these are
params, or clauses of an Allocate, and the result does not depend on them. They are set in the tree,
and the rest stays as written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flashwright.author.builtin.choose import enumerate_tilings
from flashwright.author.builtin.cost import estimate
from flashwright.author.builtin.needs import Tiling, Workload, footprint, uses_wgmma
from flashwright.gpu import Gpu
from flashwright.lang.format import format_tree
from flashwright.lang.nodes import (
    Allocate,
    Copy,
    For,
    Name,
    Num,
    Param,
    Statement,
    Tree,
    statements,
)
from flashwright.program.program import Program
from flashwright.program.vocabulary import SCHEDULE_PARAMS, split

NEEDED = ("BM", "BN")
# The model does not price these. Among tilings this close, the schedules of a better one go first.
EACH_CHANGE = 0.02
USUAL_STAGES = 2


@dataclass(frozen=True)
class Offer:
    """A tiling to try, and the model's microseconds for each length."""

    tiling: Tiling
    microseconds: tuple[float, ...]

    @property
    def name(self) -> str:
        """The name of the tiling, such as `192x128-s2-w12-q2`; it is also a valid folder name."""
        return name_of(self.tiling)


def name_of(tiling: Tiling) -> str:
    """The name of a tiling, also valid for a folder."""
    t = tiling
    parts = [f"{t.bm}x{t.bn}", f"s{t.stages}", f"w{t.warps}"]
    parts += [f"q{t.q_stages}"] if t.q_stages > 1 else []
    return "-".join([*parts, *(f"no{name}" for name in t.off)])


def params_of(tiling: Tiling) -> dict[str, int]:
    """The params of a program that a tiling sets, with their values."""
    t = tiling
    sizes = {"BM": t.bm, "BN": t.bn, "Stages": t.stages, "Warps": t.warps, "QStages": t.q_stages}
    return {**sizes, **dict.fromkeys(t.off, 0)}


def tiling_of(program: Program) -> Tiling | None:
    """The present tiling of a program; None if it does not name its tiles BM and BN."""
    if any(name not in program.params for name in NEEDED):
        return None
    streamed, resident = _buffers(program.tree)
    bm, bn = (int(program.params[name]) for name in NEEDED)
    stages, q_stages = (
        max((b.stages for (n, space), b in program.buffers.items() if space == "shared" and n in s))
        if s
        else 1
        for s in (streamed, resident)
    )
    off = tuple(name for name in SCHEDULE_PARAMS if not program.params.get(name, 1))
    return Tiling(bm, bn, stages, program.warps, q_stages, off)


def retiled(tree: Tree, tiling: Tiling, why: str) -> str:
    """The program with these sizes, as text; each has the comment `why`."""
    streamed, resident = _buffers(tree)
    wanted = params_of(tiling)
    there = {s.name.id for s in tree.body if isinstance(s, Param)}
    # Schedules are on by default; one buffer needs no param.
    wanted |= {name: 1 for name in SCHEDULE_PARAMS if name in there and name not in tiling.off}
    usual = {"Stages": 1, "QStages": 1}
    wanted = {n: v for n, v in wanted.items() if n in there or usual.get(n) != v}
    body: list[Statement] = []
    for stmt in tree.body:
        if isinstance(stmt, Param) and stmt.name.id in wanted:
            value = Num(str(wanted[stmt.name.id]))
            stmt = replace(stmt, value=value, comment=why)  # the old reason was for other sizes
        elif isinstance(stmt, Allocate) and stmt.space == "shared":
            name = split(stmt.name.id)[0]
            number = "Stages" if name in streamed else "QStages" if name in resident else ""
            if number in wanted:
                stmt = replace(stmt, stages=Name(number))
        body.append(stmt)
    last = max(n for n, s in enumerate(body) if isinstance(s, Param)) + 1
    new = [
        Param(Name(name), Num(str(value)), comment=why)
        for name, value in wanted.items()
        if name not in there
    ]
    return format_tree(Tree((*body[:last], *new, *body[last:])))


def _buffers(tree: Tree) -> tuple[set[str], set[str]]:
    """The shared tiles that a loop fills, and those that are filled once."""

    def filled(found: Iterator[Statement]) -> set[str]:
        copies = (s for s in found if isinstance(s, Copy) and s.dest == "shared")
        return {split((c.target or c.name).id)[0] for c in copies}

    loops = [s for s in tree.body if isinstance(s, For)]
    streamed = filled(s for loop in loops for s in statements(loop.body))
    return streamed, filled(statements(tree.body)) - streamed


def _stageable(tree: Tree) -> bool:
    """Whether the copies of the loops may be prefetched: none is under a condition, as it is in a
    program with its own prefetch."""
    for loop in (s for s in tree.body if isinstance(s, For)):
        direct = {id(s) for s in loop.body}
        inside = (s for s in statements(loop.body) if isinstance(s, Copy) and s.dest == "shared")
        if any(id(s) not in direct for s in inside):
            return False
    return True


# --- what to try ------------------------------------------------------------------------------


def offers(program: Program, gpu: Gpu, problems: Sequence[Workload]) -> list[Offer]:
    """The program's own sizes first, then in turn the model's best for each problem.

    All tilings that fit are included, also those that fill the register file: a spill costs the
    tuner only one candidate.
    """
    present = tiling_of(program)
    assert present is not None
    stageable = _stageable(program.tree)
    alike = present.stages if not stageable else None
    resident = bool(_buffers(program.tree)[1])
    priced: dict[Tiling, tuple[float, ...]] = {}
    for plain in enumerate_tilings(problems[0], gpu):
        if (alike is not None and plain.stages != alike) or not _fits(plain, gpu, problems):
            continue
        price = tuple(estimate(w, plain, gpu).microseconds for w in problems)
        for tiling in _variants(problems[0], plain, gpu, resident):
            if _fits(tiling, gpu, problems):
                priced[tiling] = price
    first = Offer(present, priced.get(present) or _priced(present, gpu, problems))
    orders = [
        sorted(priced, key=lambda t: (priced[t][n] * (1 + EACH_CHANGE * _changes(w, t, gpu)), t))
        for n, w in enumerate(problems)
    ]
    in_turn = (tiling for rank in zip(*orders, strict=True) for tiling in rank)
    every = dict.fromkeys(t for t in in_turn if t != present)
    return [first, *(Offer(t, priced[t]) for t in every)]


def _fits(tiling: Tiling, gpu: Gpu, problems: Sequence[Workload]) -> bool:
    need = footprint(problems[0], tiling, gpu)
    return need.shared_bytes <= gpu.shared_per_block and need.registers <= need.register_limit


def _priced(tiling: Tiling, gpu: Gpu, problems: Sequence[Workload]) -> tuple[float, ...]:
    """The price of a program's own sizes, where the model has one."""
    if not _fits(tiling, gpu, problems):
        return ()
    return tuple(estimate(w, tiling, gpu).microseconds for w in problems)


def _variants(workload: Workload, plain: Tiling, gpu: Gpu, resident: bool) -> Iterator[Tiling]:
    """The same tiles with one thing changed about their schedule."""
    yield plain
    if not uses_wgmma(workload, plain, gpu):
        return
    ahead = replace(plain, q_stages=2) if resident else plain
    yield ahead
    yield replace(ahead, off=("Overlap",))
    if plain.warps > 4:  # ping-pong needs two warpgroups
        yield replace(ahead, off=("PingPong",))
    yield replace(ahead, off=("SplitMasked",))
    # Only a persistent block has a next Q to load.
    yield replace(plain, off=("Persistent",))


def _changes(workload: Workload, tiling: Tiling, gpu: Gpu) -> int:
    """The number of deviations from the usual tiling: the model prices more stages like two."""
    by_wgmma = uses_wgmma(workload, tiling, gpu)
    without = by_wgmma and tiling.q_stages == 1 and "Persistent" not in tiling.off
    return max(0, tiling.stages - USUAL_STAGES) + len(tiling.off) + without
