"""From sketch to code: the parameter stage of the built-in author.

It does not know the variants. From the axes of the tensors and the order of the statements it
derives the tiles and coordinates of every Copy, the allocations, the initial values of
accumulators, the Reshape between fused GEMMs and, on GPUs with one buffer per tile, the prefetch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from flashwright.author.builtin.choose import Decision
from flashwright.author.builtin.mods import KEY_BLOCK, KEY_TILE, ROW_BLOCK, Mods
from flashwright.author.builtin.needs import (
    holds_queries,
    takes_wgmma,
    tile_width,
    uses_wgmma,
)
from flashwright.author.builtin.variants import find
from flashwright.gpu import Gpu
from flashwright.lang.format import format_coord, format_expr
from flashwright.lang.nodes import (
    Binary,
    Call,
    Comment,
    Compute,
    Copy,
    Expr,
    For,
    If,
    Index,
    Let,
    Name,
    Statement,
    Transpose,
    Tree,
    Unary,
    expressions,
    statements,
)
from flashwright.lang.parse import parse
from flashwright.program.vocabulary import RESERVED_PARAMS, split
from flashwright.rewrite.tree import substituted
from flashwright.spec import AttentionSpec

RESHAPE = "Reshape {} from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)"
QUERIES_AHEAD = "the next block's Q comes while this one is computed"
NO_MODS = Mods()
_GRID_VARIABLES = {"batch": "batch_idx", "heads": "head_idx", "kv_heads": "kv_head"}


@dataclass(frozen=True)
class ParamChoice:
    """A number in the code, with the reason for its value."""

    name: str
    value: str
    reason: str

    @property
    def brief(self) -> str:
        """The first part of the reason, short enough for a comment beside the number."""
        return self.reason.split(";")[0]


@dataclass(frozen=True)
class Tensor:
    """A tensor in global memory: axis letters and sizes, and how many trailing axes a tile has."""

    name: str
    labels: tuple[str, ...]
    sizes: tuple[str, ...]
    dtype: str

    @property
    def tile_rank(self) -> int:
        """How many trailing axes a tile lies on."""
        whole = self.labels[-1] == "D" or self.sizes[-2:] == ("q_len", "kv_len")
        return min(2 if whole else 1, len(self.labels))


def _shared_by_batches(sizes: tuple[str, ...]) -> bool:
    """Whether a tensor has a number for each score of a head, the same in all batches."""
    return {"heads", "q_len", "kv_len"} <= {*sizes} and "batch" not in sizes


def _letters(sizes: tuple[str, ...]) -> tuple[str, ...]:
    """Letters for the axes of a tensor of the caller's own."""
    usual = {"batch": "B", "heads": "H", "kv_heads": "H", "q_len": "L", "kv_len": "L"}
    spare = iter("TMRUWXYZ")
    given: list[str] = []
    for size in sizes:
        letter = usual.get(size, "T")
        given.append(letter if letter not in given else next(c for c in spare if c not in given))
    return tuple(given)


def complete(
    sketch: Tree, spec: AttentionSpec, gpu: Gpu, decision: Decision, mods: Mods = NO_MODS
) -> tuple[Tree, tuple[ParamChoice, ...]]:
    """The code for a sketch, and the reasons for its numbers."""
    return _Completion(sketch, spec, gpu, decision, mods).run()


def line(text: str, comment: str | None = None, gap: bool = False) -> Statement:
    """One statement from its text."""
    return replace(_parsed(text), comment=comment, gap=gap)


@lru_cache(1024)
def _parsed(text: str) -> Statement:
    """The first statement of a text; programs have most of their lines in common."""
    return parse(text).body[0]


class _Completion:
    def __init__(
        self, sketch: Tree, spec: AttentionSpec, gpu: Gpu, decision: Decision, mods: Mods
    ) -> None:
        self.sketch = sketch
        self.mods = mods
        self.spec = spec
        self.gpu = gpu
        self.decision = decision
        self.tiling = decision.tiling
        self.tensors = {t.name: t for t in self._tensors()}
        self.widths = dict(self._widths())
        self.grid = self._grid()
        self.shapes: dict[str, tuple[str, ...]] = {}  # of tiles in registers, by base name
        self.parts = find(spec.variant).widths
        self.copied: dict[str, tuple[str, ...]] = {}  # of tiles in shared memory
        self.sources: dict[str, Tensor] = {}  # of these tiles, where they come from memory
        self.streamed: set[str] = set()  # copied inside a loop
        self.prefetches = gpu.reshape_in_place and self.tiling.stages == 1

    def run(self) -> tuple[Tree, tuple[ParamChoice, ...]]:
        body = self._body(self.sketch.body, None)
        body = self._initialised(body)
        if holds_queries(self.decision.workload, self.tiling, self.gpu):
            body = self._with_held_queries(body)
        if self.prefetches:
            body = tuple(self._prefetched(body))
        choices = self._choices(body)
        head: list[Statement] = [self._title()]
        for choice in choices:
            head.append(line(f"param {choice.name} = {choice.value}", choice.brief))
        head += [line(f"dim {d}", gap=True) for d in self._extra_dims(body)]
        head += self._where()
        head += self._allocations(body)
        rest = body[1:] if isinstance(body[0], Comment) else body
        rest = (replace(rest[0], gap=True), *rest[1:])
        return Tree((*head, *rest)), choices

    # --- tensors and grid -----------------------------------------------------------------

    def _tensors(self) -> Iterator[Tensor]:
        """The tensors of the sketch, with the spec's sizes."""
        spec = self.spec
        used = set(_global_names(self.sketch))
        for name, text in find(spec.variant).tensors.items():
            pairs = [part.split(":") for part in text.split()]
            sizes = tuple(self._size(size) for _, size in pairs)
            labels = tuple(label for label, _ in pairs)
            types = {"Q": spec.input_dtype, "O": spec.output_dtype, "Idx": "int32"}
            types |= dict.fromkeys("KV", spec.key_dtype)
            dtype = types.get(name, "fp32")
            if name in used:
                yield Tensor(name, labels, sizes, dtype)
        for operand in self.mods.tensors:
            yield Tensor(operand.name, _letters(operand.sizes), operand.sizes, operand.dtype)

    def _size(self, size: str) -> str:
        if size == "VDim" and self.spec.value_dim == self.spec.head_dim:
            return "HeadDim"
        if size == "kv_heads" and self.spec.kv_heads == self.spec.heads:
            return "heads"
        return size

    def _widths(self) -> Iterator[tuple[str, ParamChoice]]:
        """Widths of tensors that no tile has, and the ones that tiles have instead."""
        work = self.decision.workload
        for size, name, columns in (
            ("HeadDim", "HeadTile", self.spec.head_dim),
            ("VDim", "VTile", self.spec.value_dim),
        ):
            width = tile_width(columns, work, self.gpu)
            if width != columns and any(size in t.sizes for t in self.tensors.values()):
                why = f"{columns} columns and {width - columns} of zeros, so that a tile has whole "
                why += "swizzles" if takes_wgmma(work, self.gpu) else "MMA steps"
                yield size, ParamChoice(name, str(width), why)

    def _grid(self) -> dict[str, str]:
        """Grid variable -> extent: one block per tile of the output, the fastest axis first."""
        out = self.tensors["O"]
        first_tiled = len(out.sizes) - out.tile_rank
        grid: dict[str, str] = {}
        for position, size in reversed(list(enumerate(out.sizes))):
            if position >= first_tiled:
                if size == "q_len":
                    grid["block_idx"] = "q_len / BM"
            else:
                grid[_GRID_VARIABLES.get(size, "q_pos")] = size
        if any(_shared_by_batches(operand.sizes) for operand in self.mods.operands):
            # Blocks that read the same tiles follow each other: at once, or, where the rows say how
            # long a block takes, with those of its head.
            if not self._rows_bound_keys():
                grid = {"batch_idx": grid["batch_idx"], **grid}
            grid["head_idx"] = grid.pop("head_idx")
        return grid

    def _rows_bound_keys(self) -> bool:
        """Whether the keys that are visited depend on the block of queries."""
        loops = [s for s in self.sketch.body if isinstance(s, For)]
        bounds = [e for loop in loops for b in (loop.low, loop.high) for e in expressions(b)]
        return Name("block_idx") in bounds

    def _where(self) -> Iterator[Statement]:
        axes = ", ".join(f"{name} = 0:{extent}" for name, extent in self.grid.items())
        yield line(f"grid {axes}", gap=True)
        shared = any("kv_heads" in t.sizes for t in self.tensors.values())
        if shared and "kv_head" not in self.grid and self.spec.kv_heads > 1:
            text = "let kv_head = floor(head_idx * kv_heads / heads)"
            yield line(text, f"{self.spec.group} query heads share a kv head")

    def _coordinate(self, size: str, loop: str | None) -> str | None:
        """The coordinate of a tensor's axis for this thread block and iteration."""
        if size == "kv_heads" and self.spec.kv_heads == 1:
            return "0"
        if size == "q_len":
            return "block_idx" if "block_idx" in self.grid else "q_pos"
        if size == "kv_len":
            return KEY_TILE if loop is not None and self.mods.lists is not None else loop
        return _GRID_VARIABLES.get(size)

    # --- statements -----------------------------------------------------------------------

    def _body(self, body: tuple[Statement, ...], loop: str | None) -> tuple[Statement, ...]:
        done: list[Statement] = []
        for stmt in body:
            match stmt:
                case Copy() if "global" in (stmt.source, stmt.dest):
                    stmt = self._copy(stmt, loop)
                case Copy(source="register", dest="shared", target=Name(target)):
                    self.copied[target] = self.copied[split(stmt.name.id)[0]]
                case For():
                    inner = tuple(self._staged(stmt.body))
                    stmt = replace(stmt, body=self._body(inner, stmt.var.id))
                case If():
                    stmt = replace(stmt, then=self._body(stmt.then, loop))
                case Compute():
                    done += self._reshaped(stmt)
                    self._shape_of_result(stmt)
            done.append(stmt)
        return tuple(done)

    def _staged(self, body: tuple[Statement, ...]) -> Iterator[Statement]:
        """The loop with what it copies to registers sent by way of shared memory, where TMA and
        helper warps copy ahead: there behind K and V, and to registers when it is read first."""
        tiles = [s for s in body if isinstance(s, Copy) and self._copied_ahead(s)]
        staged = [replace(s, dest="shared") for s in tiles]
        for stmt in body:
            if stmt in tiles:
                continue
            if isinstance(stmt, Compute):
                yield from staged
                staged = []
            read = {e.id for e in expressions(stmt) if isinstance(e, Name)}
            for tile in [t for t in tiles if t.name.id in read]:
                yield replace(tile, source="shared")
                tiles.remove(tile)
            yield stmt

    def _copied_ahead(self, stmt: Copy) -> bool:
        """Whether a tile has a number for each score or each key, on Hopper."""
        if (stmt.source, stmt.dest) != ("global", "register"):
            return False
        sizes = self.tensors[split(stmt.name.id)[0]].sizes
        hopper = uses_wgmma(self.decision.workload, self.tiling, self.gpu)
        return sizes[-1] == "kv_len" and hopper

    def _copy(self, stmt: Copy, loop: str | None) -> Copy:
        tensor = self.tensors[split(stmt.name.id)[0]]
        rank = tensor.tile_rank
        tile = {"q_len": "BM", "Group": "BM", "kv_len": "BN"}
        tile |= {size: choice.name for size, choice in self.widths.items()}
        shape = tuple(tile.get(size, size) for size in tensor.sizes[-rank:])
        name = stmt.target.id if stmt.target is not None else tensor.name
        if name in self.parts:
            shape = (*shape[:-1], self.parts[name])
        given = {c.axis.id: c for c in stmt.coords or ()}
        coords = []
        for label, size in zip(tensor.labels, tensor.sizes, strict=True):
            place = self._coordinate(size, loop)
            if label in given:
                coords.append(format_coord(given[label]))
            elif place is not None:
                coords.append(f"{label} = {place}")
        if stmt.dest == "shared":
            self.copied[name], self.sources[name] = shape, tensor
            if loop is not None:
                self.streamed.add(name)
        text = (
            f"Copy {stmt.name.id} ({', '.join(shape)}) in coordinate [{', '.join(coords)}] "
            f"from {stmt.source} to {stmt.dest}{f' and get {name}' if stmt.target else ''}"
        )
        done = line(text, stmt.comment, stmt.gap)
        assert isinstance(done, Copy)
        return done

    def _reshaped(self, stmt: Compute) -> list[Statement]:
        """The Reshape before a GEMM whose operand is the result of another GEMM."""
        left = stmt.args[0]
        if stmt.operation != "gemm" or not isinstance(left, Name):
            return []
        base, space = split(left.id)
        return [line(RESHAPE.format(left.id))] if space != "shared" and base in self.shapes else []

    def _shape_of_result(self, stmt: Compute) -> None:
        if stmt.operation == "gemm":
            (rows, _), (_, cols) = (self._operand(a) for a in stmt.args)
            shape: tuple[str, ...] = (rows, cols)
        elif stmt.operation == "softmax":
            for name in stmt.state:
                self.shapes.setdefault(split(name.id)[0], (self._operand(stmt.args[0])[0],))
            return
        else:
            shape = self._widest(stmt.args)
        if stmt.target is not None:
            self.shapes.setdefault(split(stmt.target.id)[0], shape)

    def _operand(self, arg: Expr) -> tuple[str, ...]:
        name = arg.operand if isinstance(arg, Transpose) else arg
        assert isinstance(name, Name)
        base, space = split(name.id)
        shape = self.copied[base] if space == "shared" else self.shapes[base]
        return shape[::-1] if isinstance(arg, Transpose) else shape

    def _widest(self, args: tuple[Expr, ...]) -> tuple[str, ...]:
        """The shape of an elementwise result; a scalar one fills a vector of rows."""
        found = [s for arg in args for s in self._shapes_in(arg)]
        return max(found, key=len, default=("BM",))

    def _shapes_in(self, expr: Expr) -> Iterator[tuple[str, ...]]:
        match expr:
            case Name():
                base = split(expr.id)[0]
                if base in self.shapes:
                    yield self.shapes[base]
            case Unary(_, operand):
                yield from self._shapes_in(operand)
            case Binary(_, left, right):
                yield from self._shapes_in(left)
                yield from self._shapes_in(right)
            case Call(func, args):
                for arg in args:
                    for shape in self._shapes_in(arg):
                        yield shape[:1] if func.id.startswith("row") else shape

    # --- starting values ------------------------------------------------------------------

    def _initialised(self, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        """Initial values: 0 for accumulators, far below any score for a running maximum."""
        first = next(i for i, s in enumerate(body) if isinstance(s, For))
        set_before = {
            s.target.id for s in body[:first] if isinstance(s, Compute) and s.target is not None
        }
        starts: dict[str, str] = {}
        made: set[str] = set()
        """What the loop computes anew before it adds to it."""
        for stmt in statements((body[first],)):
            if not isinstance(stmt, Compute):
                continue
            for name, start in zip(stmt.state, ("-1e30", "0"), strict=False):
                starts.setdefault(name.id, start)
            if stmt.mode == "get" and stmt.target is not None:
                made.add(stmt.target.id)
            added = stmt.target if stmt.mode == "accumulate" else None
            if added is not None and added.id not in made:
                starts.setdefault(added.id, "0")
        lines = [
            line(f"Compute {start} and get {name}")
            for name, start in starts.items()
            if name not in set_before
        ]
        return (*body[:first], *lines, *body[first:])

    def _with_held_queries(self, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        """The same with Q copied on to registers, and multiplied from there."""
        place = next(n for n, s in enumerate(body) if isinstance(s, Copy)) + 1
        self.shapes["Q"] = self.copied["Q"]
        held: dict[Expr, Expr] = {Name("Q_shared"): Name("Q_register")}
        rest = tuple(substituted(stmt, held) for stmt in body[place:])
        return (*body[:place], line("Copy Q from shared to register"), *rest)

    # --- prefetch -------------------------------------------------------------------------

    def _prefetched(self, body: tuple[Statement, ...]) -> Iterator[Statement]:
        """With one buffer for K, copy its next block as soon as the GEMM has read this one, so that
        the copy overlaps the softmax and the second GEMM. Not where the caller's data say with
        which block the loop begins: the checker cannot follow that."""
        read = {s.name for s in body if isinstance(s, Let) and _reads(s.value)}
        for stmt in body:
            copy = _first_streamed(stmt) if isinstance(stmt, For) else None
            if isinstance(stmt, For) and read & set(expressions(stmt.low)):
                copy = None
            if copy is None or not isinstance(stmt, For):
                yield stmt
                continue
            low, high = format_expr(stmt.low), format_expr(stmt.high)
            yield line(f"let First = {low}")
            yield line(f"let Last = {high}")
            fetch = _at(copy, stmt.var.id, "First")
            guard = line("if First < Last\nend", "the first block, if there is any")
            assert isinstance(guard, If)
            yield replace(guard, then=(fetch,))
            loop = line(f"for {stmt.var.id} = First:Last\nend", stmt.comment, stmt.gap)
            assert isinstance(loop, For)
            yield replace(loop, body=tuple(self._rotated(stmt, copy)))

    def _rotated(self, loop: For, copy: Copy) -> Iterator[Statement]:
        shared = f"{split(copy.name.id)[0]}_shared"
        var = loop.var.id
        for stmt in loop.body:
            if stmt is copy:
                continue
            yield stmt
            converted = isinstance(stmt, Copy) and (stmt.name, stmt.source) == (
                copy.name,
                "register",
            )
            if converted or any(isinstance(e, Name) and e.id == shared for e in expressions(stmt)):
                following = line(f"if {var} < Last - 1\nend", "the next block, under the softmax")
                assert isinstance(following, If)
                yield replace(following, then=(_at(copy, var, f"{var} + 1"),))

    # --- declarations ---------------------------------------------------------------------

    def _title(self) -> Comment:
        spec = self.spec
        what = f"{spec.variant}, {spec.head_dim}"
        what += f"/{spec.value_dim}" if spec.value_dim != spec.head_dim else ""
        return Comment(f"{what} wide, {spec.input_dtype}, for {self.gpu.title}")

    def _extra_dims(self, body: tuple[Statement, ...]) -> list[str]:
        names = {e.id for s in statements(body) for e in expressions(s) if isinstance(e, Name)}
        return [*(["tokens"] if "tokens" in names else []), *self.mods.own_dims]

    def _allocations(self, body: tuple[Statement, ...]) -> Iterator[Statement]:
        first = True
        for tensor in self.tensors.values():
            labelled = tensor.labels != {4: tuple("BHLD"), 3: tuple("BHL"), 2: tuple("LD")}.get(
                len(tensor.labels)
            )
            pairs = zip(tensor.labels, tensor.sizes, strict=True)
            axes = ", ".join(f"{a}: {s}" if labelled else s for a, s in pairs)
            yield line(f"Allocate {tensor.name} in global ({axes}) as {tensor.dtype}", gap=first)
            first = False
        for name, shape in self.copied.items():
            number = "Stages" if name in self.streamed else "QStages"
            several = self.tiling.stages if name in self.streamed else self.tiling.q_stages
            source = self.sources.get(name)
            several = several if source else 1  # it is converted: the translator decides
            stages = f" with stages {number}" if several > 1 else ""
            dtype = source.dtype if source else self._multiplied(name)
            yield line(f"Allocate {name} in shared ({', '.join(shape)}) as {dtype}{stages}")
        for name, shape in self.shapes.items():
            dtype = self.spec.input_dtype if name == "Q" else "fp32"  # an operand as it comes
            yield line(f"Allocate {name} in register ({', '.join(shape)}) as {dtype}")

    def _multiplied(self, name: str) -> str:
        """The type that a tile is converted to: that of Q, and fp16 beside weights, which are at
        most 1 and have more digits in it than in bf16."""
        gemms = (s for s in statements(self.sketch.body) if isinstance(s, Compute))
        lefts = [s.args[0] for s in gemms if s.operation == "gemm" and _is_tile(s.args[1], name)]
        queries = any(isinstance(e, Name) and split(e.id)[1] == "shared" for e in lefts)
        return self.spec.input_dtype if queries else "fp16"

    def _choices(self, body: tuple[Statement, ...]) -> tuple[ParamChoice, ...]:
        used = {e.id for s in statements(body) for e in expressions(s) if isinstance(e, Name)}
        used |= {size for t in self.tensors.values() for size in t.sizes}
        used |= {ROW_BLOCK, KEY_BLOCK} if self.mods.lists is not None else set()
        used |= {"Stages", "QStages", *RESERVED_PARAMS, *(w.name for w in self.widths.values())}
        return tuple(c for c in self._numbers() if c.name in used)

    def _numbers(self) -> Iterator[ParamChoice]:
        spec, tiling, why = self.spec, self.tiling, self.decision.reasons
        yield ParamChoice("HeadDim", str(spec.head_dim), "given: the width of Q and K")
        yield ParamChoice("VDim", str(spec.value_dim), "given: the width of V")
        yield ParamChoice("RopeDim", "HeadDim - VDim", "the columns of K that are not V's")
        yield from self.widths.values()
        yield ParamChoice("Group", str(spec.group), "given: query heads that share a kv head")
        yield ParamChoice("TopK", str(spec.top_k), "given: blocks selected for each position")
        yield ParamChoice("BM", str(tiling.bm), why["BM"])
        yield ParamChoice("BN", str(tiling.bn), why["BN"])
        if tiling.stages > 1:
            yield ParamChoice("Stages", str(tiling.stages), why["Stages"])
        if tiling.q_stages > 1:
            yield ParamChoice("QStages", str(tiling.q_stages), QUERIES_AHEAD)
        yield ParamChoice("Warps", str(tiling.warps), why["Warps"])
        yield from (
            ParamChoice(name, "0", "faster without, where it was measured") for name in tiling.off
        )
        listed = self.mods.lists is not None and not self.mods.lists.full
        if listed and "SplitMasked" not in tiling.off:
            yield ParamChoice("SplitMasked", "0", "every block in the lists needs the mask")
        scale = "1 / sqrt(HeadDim)" if spec.scale is None else repr(spec.scale)
        yield ParamChoice("Scale", scale, "given: the softmax scale")
        yield ParamChoice(
            "WeightScale", "256", "the top of e4m3's range: weights times 256 still fit"
        )
        yield ParamChoice("Window", str(spec.window), "given: keys a query sees on one side")
        yield ParamChoice("SinkTokens", str(spec.sink_tokens), "given: keys that every query sees")
        yield ParamChoice("SinkBlocks", "ceil(SinkTokens / BN)", "the blocks that they lie in")
        yield ParamChoice("Softcap", repr(spec.softcap), "given: no score goes beyond it")
        if self.mods.lists is not None:
            lists = self.mods.lists
            yield ParamChoice(ROW_BLOCK, str(lists.rows), "given: queries of a block in the lists")
            yield ParamChoice(KEY_BLOCK, str(lists.columns), "given: keys of a block in the lists")
        yield ParamChoice("Block", str(spec.block), "given: tokens in a compressed block")
        yield ParamChoice("Stride", str(spec.stride), "given: tokens between compressed blocks")


def _global_names(tree: Tree) -> Iterator[str]:
    for stmt in statements(tree.body):
        if isinstance(stmt, Copy) and "global" in (stmt.source, stmt.dest):
            name = stmt.name if stmt.source == "global" else stmt.target or stmt.name
            yield split(name.id)[0]
        yield from (e.tensor.id for e in expressions(stmt) if isinstance(e, Index))


def _is_tile(operand: Expr, name: str) -> bool:
    """Whether the operand of a GEMM is a tile of that base name."""
    tile = operand.operand if isinstance(operand, Transpose) else operand
    return isinstance(tile, Name) and split(tile.id)[0] == name


def _reads(expr: Expr) -> bool:
    return any(isinstance(e, Index) for e in expressions(expr))


def _first_streamed(loop: For) -> Copy | None:
    """The first Copy to shared memory that depends on the loop variable: the one to prefetch."""
    for stmt in loop.body:
        if isinstance(stmt, Copy) and (stmt.source, stmt.dest) == ("global", "shared"):
            walks = [c for c in stmt.coords or () if loop.var in expressions(c.value)]
            return stmt if walks else None
    return None


def _at(copy: Copy, var: str, place: str) -> Copy:
    """The same Copy at another value of the loop variable."""

    def there(value: Expr) -> Expr:
        text = re.sub(rf"\b{var}\b", f"({place})", format_expr(value))
        stmt = _parsed(f"let x = {text}")
        assert isinstance(stmt, Let)
        return stmt.value

    coords = tuple(
        replace(c, value=there(c.value)) if Name(var) in expressions(c.value) else c
        for c in copy.coords or ()
    )
    return replace(copy, coords=coords, gap=False)
