"""Rules of the consumers' asynchronous work on every path: tiles are waited for before they are
read and handed back once; products under way are not disturbed."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from flashwright.lower import ir
from flashwright.lower.names import operand_name, tile_name
from flashwright.lower.passes.bad_ir import BadIR
from flashwright.lower.passes.effects import effects
from flashwright.program.program import Key

Body = tuple[ir.Statement, ...]
RING = (ir.Await, ir.Release, ir.Refill, ir.Drain)


def verify_rings(body: Body, stage: str, shared: Set[Key]) -> None:
    """Raise BadIR where a tile of a ring is read without having been waited for, or is handed back
    too often, too early or never. A tile is structured if it is handed back by Release."""
    nodes = list(ir.flat(body))
    ring = {n.key for n in nodes if isinstance(n, RING)}
    loose = {n.key for n in nodes if isinstance(n, (ir.Refill, ir.Drain))}
    if not ring <= shared:
        raise BadIR(stage, None, f"no shared tiles: {sorted(ring - shared)}")
    for node in nodes:
        if isinstance(node, ir.Release) and node.key in loose:
            raise BadIR(stage, node, f"{node.key[0]} is handed back in two ways")
    walk = _Rings(stage, ring, loose)
    walk.body(body)
    held = walk.here - loose
    if held:
        raise BadIR(stage, None, f"{min(held)[0]} is still held at the end of a block")
    drained = {n.key for n in body if isinstance(n, ir.Drain)}
    if loose - drained:
        raise BadIR(stage, None, f"{min(loose - drained)[0]} is not handed back at the end")


@dataclass
class _Rings:
    stage: str
    ring: set[Key]
    loose: set[Key]
    here: set[Key] = field(default_factory=set)
    """Tiles that have been waited for and not been handed back."""
    two: set[Key] = field(default_factory=set)
    """Those of which two values are held."""

    def body(self, body: Body) -> None:
        for node in body:
            self._node(node)

    def _node(self, node: ir.Statement) -> None:
        match node:
            case ir.Loop():
                self._loop(node)
            case ir.Branch():
                self._branch(node)
            case ir.Await(key, ahead=True):
                if key not in self.here - self.loose or key in self.two:
                    raise BadIR(self.stage, node, f"{key[0]} is waited for ahead of no value")
                self.two.add(key)
            case ir.Await(key):
                if key in self.here and key not in self.loose:
                    raise BadIR(self.stage, node, f"{key[0]} is waited for twice")
                self.here.add(key)
            case ir.Release(key):
                if key not in self.here:
                    raise BadIR(self.stage, node, f"{key[0]} is handed back, but not held")
                (self.two if key in self.two else self.here).discard(key)
            case ir.Refill(key) | ir.Drain(key):
                self.here.discard(key)
            case ir.Gemm(right=key, ahead=True) | ir.Start(ir.Gemm(right=key, ahead=True)) if (
                key not in self.two
            ):
                raise BadIR(self.stage, node, f"{key[0]} is read ahead and was not waited for")
            case ir.Gemm() | ir.Start() | ir.Move() | ir.Store() | ir.Compute():
                missing = (effects(node).reads & self.ring) - self.here
                if missing:
                    text = f"{sorted(missing, key=repr)[0][0]} is read and was not waited for"
                    raise BadIR(self.stage, node, text)

    def _loop(self, node: ir.Loop) -> None:
        before, two = set(self.here), set(self.two)
        loosely = {n.key for n in ir.flat(node.body) if isinstance(n, ir.Refill)}
        self.here -= loosely  # of the iteration before
        self.body(node.body)
        differ = ((self.here ^ before) - self.loose) | (self.two ^ two)
        if differ:
            text = f"{min(differ)[0]} is held at one end of the loop only"
            raise BadIR(self.stage, node, text)
        self.here = {*(before - self.loose), *(before & self.here)}

    def _branch(self, node: ir.Branch) -> None:
        before, two = set(self.here), set(self.two)
        self.body(node.then)
        then, self.here = self.here, before
        both, self.two = self.two, two
        self.body(node.orelse)
        differ = ((then ^ self.here) - self.loose) | (both ^ self.two)
        if differ:
            raise BadIR(self.stage, node, f"{min(differ)[0]} is held behind one arm only")
        self.here &= then


def verify_groups(body: Body, stage: str) -> None:
    """Raise BadIR where a product under way is disturbed, is not waited for, or begins unfenced."""
    open: list[ir.Gemm] = []
    fenced: set[Key] = set()
    for node in body:
        match node:
            case ir.Open(targets):
                _undisturbed(node, open, stage)
                fenced |= set(targets)
                continue
            case ir.Start(gemm):
                if gemm.target not in fenced and gemm.target not in {g.target for g in open}:
                    raise BadIR(stage, node, f"{gemm.target[0]} is not open for products")
                open.append(gemm)
                continue
            case ir.Finish(left, targets):
                if left >= len(open):
                    raise BadIR(stage, node, f"it waits until {left} of {len(open)} are under way")
                done, open = open[: len(open) - left], open[len(open) - left :]
                ended = {g.target for g in done} - {g.target for g in open}
                if set(targets) - ended:
                    raise BadIR(stage, node, f"{targets[0][0]} is not among what has ended")
            case ir.Gemm():
                raise BadIR(stage, node, "a product is neither started nor waited for")
            case ir.Loop() | ir.Branch():
                if open and any(isinstance(n, ir.Start) for n in ir.flat((node,))):
                    raise BadIR(
                        stage, node, f"{open[0].target[0]} is under way at a loop or branch"
                    )
                _undisturbed(node, open, stage)
                bodies = (node.body,) if isinstance(node, ir.Loop) else (node.then, node.orelse)
                for part in bodies:
                    verify_groups(part, stage)
            case _:
                _undisturbed(node, open, stage)
        if not isinstance(node, (ir.Await, ir.PingPong)):
            fenced = set()
    if open:
        raise BadIR(stage, None, f"{open[0].target[0]} is under way at the end of a body")


def _undisturbed(node: ir.Statement, open: list[ir.Gemm], stage: str) -> None:
    if not open or isinstance(node, ir.Await):
        return
    found = effects(node)
    opened = {tile_name(k) for k in node.targets} if isinstance(node, ir.Open) else set()
    for gemm in open:
        left = operand_name(gemm.left) if gemm.left[1] == "register" else gemm.left
        if tile_name(gemm.target) in found.all | opened:
            raise BadIR(stage, node, f"{gemm.target[0]} is touched while a product is under way")
        older = isinstance(node, ir.Release) and gemm.ahead  # it reads the stage behind that
        if found.writes & ({left} if older else {gemm.right, left}):
            raise BadIR(stage, node, f"an operand of {gemm.target[0]} is given away or rewritten")
