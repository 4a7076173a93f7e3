"""Who waits for what: commits, waits and barriers around shared memory, as few as are needed.

Shared tiles are written by all threads and read by all. A read needs the tile's copy to have
arrived (wait) and every thread to have seen that (barrier); a write needs every thread to be done
with what was there (barrier). Whenever a barrier is due anyway, copies that will be read in the
same iteration are waited for at once, so that it serves for them too: two barriers an iteration for
a K and a V of one stage each.

Where there is no cp.async a copy travels in registers. It goes ahead of its reader, and touches
shared memory only when it is put there, right before the reader's barrier; or, where registers are
short, it is put there at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from flashwright.lower import ir
from flashwright.lower.term import ZERO
from flashwright.program.program import Buffer, Key


@dataclass
class Tile:
    """What is known of a shared tile at some point of the program."""

    flying: tuple[int, ...] = ()  # for each copy under way, oldest first: groups begun after it
    arrived: bool = False  # written, but other threads do not know yet
    visible: bool = False
    read: bool = False  # since the last barrier

    def join(self, other: Tile) -> Tile:
        """What holds whichever way one came."""
        flying = tuple(map(min, zip(self.flying, other.flying, strict=False)))
        if len(self.flying) != len(other.flying):
            flying = (0,) * max(len(self.flying), len(other.flying))
        return Tile(
            flying,
            self.arrived or other.arrived,
            self.visible and other.visible,
            self.read or other.read,
        )


State = dict[Key, Tile]
Travel = Literal["async", "ahead", "at once"]


ROUNDS = 8  # of a loop, until what is known at its start does not change any more


def place_barriers(
    body: tuple[ir.Statement, ...], buffers: Mapping[Key, Buffer], travel: Travel
) -> tuple[ir.Statement, ...]:
    """The body with all that its shared tiles need to be right."""
    placer = _Placer(buffers, travel)
    placer.run(body)
    return tuple(placer.out)


class _Placer:
    def __init__(self, buffers: Mapping[Key, Buffer], travel: Travel) -> None:
        self.asynchronous = travel == "async"
        self.at_once = travel == "at once"
        self.state: State = {k: Tile() for k, b in buffers.items() if b.space == "shared"}
        self.puts: dict[Key, ir.Put] = {}  # of the copies that wait in registers
        self.late: list[ir.Put] | None = None  # those of the next iteration; None: in no loop
        self.open: set[Key] = set()
        self.out: list[ir.Statement] = []

    def run(self, body: tuple[ir.Statement, ...]) -> None:
        for position, node in enumerate(body):
            self._node(node, body[position:])
        self._commit()

    def _node(self, node: ir.Statement, rest: tuple[ir.Statement, ...]) -> None:
        loads = list(_loads(node))
        if loads and _only_loads(node):
            self._load(node, loads, rest)
            return
        if isinstance(node, ir.Define):
            self.out.append(node)
            return
        self._commit()
        if isinstance(node, ir.Commit):
            return
        if isinstance(node, ir.Loop):
            self._loop(node)
        elif isinstance(node, ir.Branch):
            self._branch(node)
        else:
            reads, writes = _touched(node)
            self._ensure(reads, rest)
            if any(self.state[k].read for k in writes):
                self._barrier(rest)
            self.out.append(node)
            for key in reads:
                self.state[key].read = True
            for key in writes:
                self.state[key].arrived, self.state[key].visible = True, False

    # --- copies ---------------------------------------------------------------------------

    def _load(
        self, node: ir.Statement, loads: list[ir.Load], rest: tuple[ir.Statement, ...]
    ) -> None:
        keys = [load.dest for load in loads]
        elements = any(not load.window.chunked for load in loads)
        first = self.late is None and any(load.stage is not None for load in loads)
        at_once = self.at_once or (first and not self.asynchronous)
        direct = self.asynchronous or at_once or elements
        if self.asynchronous:  # of two copies on their way to one place either may come last
            again = [load.dest for load in loads if load.stage is None]
            if self.open.intersection(again):
                self._commit()
            again += [load.dest for load in loads if first and load.stage == ZERO]
            while any(self.state[key].flying for key in again):  # what a loop before began, too
                self._arrive(again)
        if direct and any(self.state[k].read or self.state[k].arrived for k in keys):
            self._commit()
            self._barrier(rest)
        self.out += _put_at_once(node) if at_once else [node]
        for load in loads:
            self._started(load, at_once)

    def _started(self, load: ir.Load, at_once: bool) -> None:
        tile = self.state[load.dest]
        put = ir.Put(load.dest, load.stage, origin=load.origin.untitled)
        if load.stage is None:
            tile.visible = False
        if not load.window.chunked or at_once:  # done when it returns
            tile.arrived = True
        elif self.asynchronous:
            self.open.add(load.dest)
        elif load.stage is not None and self.late is not None:
            self.late.append(put)
        else:
            tile.flying, tile.arrived, self.puts[load.dest] = (0,), False, put

    def _commit(self) -> None:
        if not self.open:
            return
        for key, tile in self.state.items():
            tile.flying = tuple(n + 1 for n in tile.flying)
            if key in self.open:
                tile.flying = (*tile.flying, 0)
        self.open = set()
        self.out.append(ir.Commit())

    def _ensure(self, keys: set[Key], rest: tuple[ir.Statement, ...]) -> None:
        missing = [k for k in keys if not self.state[k].visible]
        if not missing:
            return
        self._arrive(missing)
        self._barrier(rest)

    def _arrive(self, keys: list[Key]) -> None:
        """Wait for the oldest copies of these tiles."""
        flying = [k for k in keys if self.state[k].flying]
        if not flying:
            return
        if not self.asynchronous:
            for key in flying:
                if self.state[key].read:
                    self._meet()
                self.out.append(self.puts[key])
                self.state[key].flying = self.state[key].flying[1:]
                self.state[key].arrived = True
            return
        left = min(self.state[k].flying[0] for k in flying)
        if self.out and isinstance(before := self.out[-1], ir.Wait):
            left = min(left, before.left)
            self.out.pop()
        self.out.append(ir.Wait(left))
        for tile in self.state.values():
            if tile.flying and tile.flying[0] >= left:
                tile.flying, tile.arrived = tile.flying[1:], True

    def _barrier(self, rest: tuple[ir.Statement, ...]) -> None:
        """A barrier, and before it whatever makes it serve for later readers of this body too."""
        soon = [
            k
            for k in _read_before_refill(rest)
            if self.state[k].flying
            and not self.state[k].visible
            and not self.state[k].arrived
            and (self.asynchronous or not self.state[k].read)
        ]
        self._arrive(soon)
        self._meet()

    def _meet(self) -> None:
        self.out.append(ir.Barrier())
        for tile in self.state.values():
            tile.visible = tile.visible or tile.arrived
            tile.arrived = tile.read = False

    # --- control --------------------------------------------------------------------------

    def _loop(self, loop: ir.Loop) -> None:
        filled = {load.dest for load in _loads(loop)}
        ahead = {load.dest for load in _loads(loop) if load.stage is not None}
        if ahead or not self.asynchronous:  # what is there before the loop is not waited for in it
            self._ensure(_reads(loop) - filled, ())
        entry = _copied(self.state)
        body: tuple[ir.Statement, ...] = ()
        for _ in range(ROUNDS):
            start = _copied(self.state)
            body = self._iteration(loop.body)
            for key in ahead:  # the next iteration reads another stage
                self.state[key].visible = False
            joined = {k: entry[k].join(t) for k, t in self.state.items()}
            self.state = joined
            if joined == start:
                break
        self.out.append(replace(loop, body=body))

    def _iteration(self, body: tuple[ir.Statement, ...]) -> tuple[ir.Statement, ...]:
        """A loop's body; what it fetches through registers for the next one is put at its end."""
        out, late = self.out, self.late
        self.out, self.late = [], []
        self.run(body)
        for put in self.late:
            self.out.append(put)
            self.state[put.dest].arrived = True
        done = tuple(self.out)
        self.out, self.late = out, late
        return done

    def _branch(self, node: ir.Branch) -> None:
        before = _copied(self.state)
        parts, ends = [], []
        for part in (node.then, node.orelse):
            self.state = _copied(before)
            outer, self.out = self.out, []
            self.run(part)
            parts.append(tuple(self.out))
            self.out = outer
            ends.append(self.state)
        self.state = {k: ends[0][k].join(ends[1][k]) for k in before}
        self.out.append(replace(node, then=parts[0], orelse=parts[1]))


def _put_at_once(node: ir.Statement) -> list[ir.Statement]:
    """A copy, or a branch of copies, each followed by its way into shared memory."""
    if isinstance(node, ir.Branch):
        return [replace(node, then=tuple(n for inner in node.then for n in _with_put(inner)))]
    return _with_put(node)


def _with_put(node: ir.Statement) -> list[ir.Statement]:
    if isinstance(node, ir.Load) and node.window.chunked:
        return [node, ir.Put(node.dest, node.stage, origin=node.origin.untitled)]
    return [node]


def _copied(state: State) -> State:
    return {k: replace(t) for k, t in state.items()}


def _loads(node: ir.Statement) -> Iterator[ir.Load]:
    for inner in ir.flat((node,)):
        if isinstance(inner, ir.Load):
            yield inner


def _only_loads(node: ir.Statement) -> bool:
    """A copy, or a branch with nothing but copies in it."""
    if isinstance(node, ir.Branch):
        return not node.orelse and all(isinstance(n, (ir.Load, ir.Define)) for n in node.then)
    return isinstance(node, ir.Load)


def _touched(node: ir.Statement) -> tuple[set[Key], set[Key]]:
    """The shared tiles that a statement reads and writes."""
    reads: set[Key] = set()
    writes: set[Key] = set()
    if isinstance(node, ir.Gemm):
        reads = {k for k in (node.left, node.right) if k[1] == "shared"}
    elif isinstance(node, ir.Move):
        reads = {node.source} if node.source[1] == "shared" else set()
        writes = {node.dest} if node.dest[1] == "shared" else set()
    elif isinstance(node, ir.Restage):
        reads, writes = {node.source}, {node.dest}
    elif isinstance(node, ir.Store) and node.source[1] == "shared":
        reads = {node.source}
    return reads, writes


def _reads(node: ir.Statement) -> set[Key]:
    return {k for n in ir.flat((node,)) for k in _touched(n)[0]}


def _read_before_refill(rest: tuple[ir.Statement, ...]) -> list[Key]:
    """The tiles read in the rest of a body before another copy goes into them."""
    found: list[Key] = []
    filled: set[Key] = set()
    for node in rest:
        found += [k for k in sorted(_reads(node)) if k not in filled and k not in found]
        filled |= {load.dest for load in _loads(node) if load.stage is None}
    return found
