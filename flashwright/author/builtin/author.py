"""The built-in author: a sketch from a spec, then code from the sketch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources

from flashwright.author.builtin import tuned
from flashwright.author.builtin.choose import Decision, choose
from flashwright.author.builtin.complete import ParamChoice, complete
from flashwright.author.builtin.mask import START, MaskText, mask_text
from flashwright.author.builtin.mods import BlockLists, Mods, Placed, placed
from flashwright.author.builtin.needs import Workload
from flashwright.author.builtin.retile import name_of, retiled
from flashwright.author.builtin.variants import find
from flashwright.gpu import Gpu
from flashwright.lang.format import format_expr, format_tree
from flashwright.lang.nodes import (
    Call,
    Compute,
    Coord,
    Copy,
    Expr,
    For,
    If,
    Let,
    Name,
    Statement,
    Tree,
    expressions,
    statements,
)
from flashwright.lang.parse import parse
from flashwright.program.vocabulary import DTYPES
from flashwright.rewrite.tree import substituted
from flashwright.spec import AttentionSpec

# Options that add work to every score (counted in the cost model).
_PRICED_OPTIONS = ("softcap", "alibi")


@dataclass(frozen=True)
class Written:
    """TL code with the reason for every number in it."""

    code: str
    choices: tuple[ParamChoice, ...]
    decision: Decision | None = None
    """None if the built-in author did not write the code."""
    further: Mapping[str, str] = field(default_factory=dict)
    """The same program with other tiles, by name: those that are faster up to some lengths."""

    def alone(self) -> Written:
        """The same without tilings for some lengths."""
        decision = replace(self.decision, further=()) if self.decision is not None else None
        return replace(self, decision=decision, further={})

    @property
    def chosen(self) -> tuple[tuned.Choice, ...]:
        """The tilings that are faster up to some lengths."""
        return self.decision.further if self.decision else ()

    @property
    def classes(self) -> list[tuple[int | None, str]]:
        """Up to how many keys each tiling is used, ascending; the main one has no name."""
        named = [(c.up_to, name_of(c.tiling)) for c in self.chosen]
        return [*((up_to, n if n in self.further else "") for up_to, n in named), (None, "")]


def write_sketch(spec: AttentionSpec, mods: Mods | None = None) -> str:
    """The variant's sketch with the spec's mask and options, then a score and mask of one's own."""
    variant = find(spec.variant)
    body = _load(variant.sketch)
    own = placed(mods) if mods is not None else None
    if own is not None:
        assert mods is not None
        body = _with_own_mask(body, own, mask_text(spec), mods.lists)
    elif spec.branch != "selected":  # the mask is part of the algorithm, so the sketch has it
        body = _masked(body, mask_text(spec))
    for option, wanted in (("softcap", spec.softcap is not None), ("alibi", spec.alibi)):
        if wanted:
            body = _insert(body, _is_mask, _load(f"options/{option}.tl"), ())
    if own is not None and own.score is not None:
        body = _insert(body, _is_mask, (own.score,), ())
    if spec.dtype == "fp8":
        body = _insert(body, _is_softmax, (), _load("options/fp8_weights.tl"))
        body = _insert(body, lambda s: isinstance(s, For), (), _load("options/fp8_sum.tl"))
    if spec.kv_dtype is not None:
        body = _with_converted_keys(body, spec)
    if spec.sink:
        body = (body[0], *_load("options/sink.tl"), *body[1:])
    if not spec.lse:
        body = tuple(stmt for stmt in body if not _is_of_lse(stmt))
    return format_tree(Tree(body))


def write_code(
    sketch: str,
    spec: AttentionSpec,
    gpu: Gpu,
    mods: Mods | None = None,
    headroom: int | None = None,
    few: tuple[int, int] | None = None,
    keys: int | None = None,
) -> Written:
    """The code for a spec on a GPU. Raises choose.NothingFits if no tiling fits.

    For `headroom` and `keys` see `choose`. `few` is how many rows of a tile have work,
    where they are few, and how many keys lie behind each other: a step divides them.
    """
    work = workload(spec) if mods is None else _with_extras(workload(spec), mods)
    if few is not None:  # the heads of a group are rows of one tile
        rows, behind = few
        work = replace(work, q_len=rows, heads=spec.kv_heads, kv_heads=spec.kv_heads)
        work = replace(work, listed=(0, behind))
    decision = choose(work, gpu, headroom, keys)
    tree, choices = complete(parse(sketch), spec, gpu, decision, mods or Mods())
    further = {
        name_of(c.tiling): retiled(tree, c.tiling, c.reason)
        for c in decision.further
        if c.tiling != decision.tiling
    }
    return Written(format_tree(tree), choices, decision, further)


def workload(spec: AttentionSpec) -> Workload:
    """The spec as the cost model sees it, on the reference problem of 16k tokens."""
    selected = spec.branch == "selected"
    keys = 4096
    if selected:
        keys = spec.top_k * spec.selected_block
    elif spec.branch == "compressed":
        keys = max(keys // spec.stride, 1)
    return Workload(
        qk_dim=spec.head_dim,
        v_dim=spec.value_dim,
        latent=spec.latent,
        dtype=spec.input_dtype,
        kv_dtype=None if spec.kv_dtype is None else spec.key_dtype,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        kv_len=keys,
        causal=spec.causal and spec.branch not in ("selected", "compressed"),
        window=spec.window,
        sinks=spec.sink_tokens or 0,
        options=tuple(option for option in _PRICED_OPTIONS if getattr(spec, option)),
        rows_fixed=-(-spec.group // 16) * 16 if selected else None,
        cols_fixed=spec.selected_block if selected else None,
    )


# --- composing the sketch ---------------------------------------------------------------------


@cache
def _load(name: str) -> tuple[Statement, ...]:
    folder = resources.files("flashwright.author.builtin") / "sketches"
    return parse((folder / name).read_text(encoding="utf-8")).body


def _expr(text: str) -> Expr:
    stmt = parse(f"let x = {text}").body[0]
    assert isinstance(stmt, Let)
    return stmt.value


def _is_mask(stmt: Statement) -> bool:
    return isinstance(stmt, Compute) and stmt.operation == "mask"


def _is_of_lse(stmt: Statement) -> bool:
    if isinstance(stmt, Compute):
        return stmt.target == Name("LSE_register")
    return isinstance(stmt, Copy) and stmt.name == Name("LSE")


def _is_softmax(stmt: Statement) -> bool:
    return isinstance(stmt, Compute) and stmt.operation == "softmax"


def _is_scaling(stmt: Statement) -> bool:
    return isinstance(stmt, Compute) and Name("Scale") in stmt.args


def _masked(body: tuple[Statement, ...], mask: MaskText) -> tuple[Statement, ...]:
    """Set the condition of the Mask, the bounds of the loop around it, and what it copies."""
    done: list[Statement] = []
    for stmt in body:
        if isinstance(stmt, For):
            if mask.start:
                done.append(Let(Name(START), _expr(mask.start)))
            inner = tuple(_placed(s, mask) for s in stmt.body)
            stmt = replace(stmt, low=_expr(mask.low), high=_expr(mask.high), body=inner)
        done.append(stmt)
    return tuple(done)


def _with_own_mask(
    body: tuple[Statement, ...], mods: Placed, given: MaskText, lists: BlockLists | None
) -> tuple[Statement, ...]:
    """The sketch with a mask on top of the spec's, and with all reads of the mods. Lists of blocks
    say which keys are visited; without them the masks do."""
    low, high, condition = given.low, given.high, given.condition
    if mods.keys.low is not None:
        own = f"floor(max(0, {mods.keys.low}) / BN)"
        low = own if low == "0" else f"max({low}, {own})"
    if mods.keys.high is not None:
        own = f"min(kv_len, {mods.keys.high}) / BN"
        high = own if high == "kv_len / BN" else f"min({high}, {own})"
    if mods.mask is not None:
        own = format_expr(mods.mask)
        condition += f" and ({own if lists is None else lists.masked(own)})"
    before, inside = mods.before_loop, mods.in_loop
    if lists is not None:
        low, high = "0", lists.end
        before, inside = (*before, *lists.before_loop()), (lists.in_loop(), *inside)
    mask = replace(given, condition=condition, low=low, high=high)
    body = _masked(body, mask)
    first = next(i for i, s in enumerate(body) if isinstance(s, For))
    loop = body[first]
    assert isinstance(loop, For)
    loop = replace(loop, body=(*inside, *loop.body))
    return (*body[:first], *before, loop, *body[first + 1 :])


def _with_converted_keys(body: Body, spec: AttentionSpec) -> Body:
    """The sketch with K and V of 8 bits, converted in shared memory right before the first GEMM
    that reads them. Their scales are factors of the scores and of O."""
    head = "head_idx" if spec.kv_heads == spec.heads else "kv_head" if spec.kv_heads > 1 else "0"

    def scaled(tile: str, name: str) -> Body:
        scale = spec.scales[name]
        return parse(f"Compute {tile} * {scale}[batch_idx, {head}] and get new {tile}").body

    kept = ("K", "V")
    loaded = [s for s in statements(body) if isinstance(s, Copy) and s.name.id in kept]
    for name in [(s.target or s.name).id for s in loaded]:
        copies = f"Copy {name} from shared to register\n"
        copies += f"Copy {name} from register to shared and get {name}16"
        tile, converted = Name(f"{name}_shared"), Name(f"{name}16_shared")
        body = _before_reader(body, tile, parse(copies).body)
        body = tuple(substituted(stmt, {tile: converted}) for stmt in body)
    body = _insert(body, _is_scaling, scaled("S", "K"), ())
    after = scaled("O_register", "K" if spec.latent else "V")
    return _insert(body, lambda s: isinstance(s, For), (), after)


def _before_reader(body: Body, tile: Expr, inserted: Body) -> Body:
    """Put statements before the first Compute of each block that reads a tile."""
    done: list[Statement] = []
    found = False
    for stmt in body:
        if isinstance(stmt, For):
            stmt = replace(stmt, body=_before_reader(stmt.body, tile, inserted))
        elif isinstance(stmt, If):
            stmt = replace(stmt, then=_before_reader(stmt.then, tile, inserted))
        elif not found and isinstance(stmt, Compute) and tile in expressions(stmt):
            done += inserted
            found = True
        done.append(stmt)
    return tuple(done)


def _with_extras(work: Workload, mods: Mods) -> Workload:
    """The workload with what the mods add to every score."""
    made = placed(mods)
    called = (
        {e.func.id for e in expressions(mods.score) if isinstance(e, Call)} if mods.score else ()
    )
    priced = () if mods.score is None else ("softcap",) if "tanh" in called else ("alibi",)
    types = {o.name: o.dtype for o in mods.operands}
    copied = [s.name.id for s in made.in_loop if isinstance(s, Copy)]
    return replace(
        work,
        causal=work.causal or "block_idx" in (made.keys.high or ""),
        options=tuple(dict.fromkeys((*work.options, *priced))),
        score_bytes=sum(DTYPES[types[name]] for name in copied if name in made.tiles),
        key_vectors=sum(name not in made.tiles for name in copied),
        listed=(mods.lists.rows, mods.lists.columns) if mods.lists is not None else None,
    )


def _placed(stmt: Statement, mask: MaskText) -> Statement:
    if isinstance(stmt, Compute) and stmt.operation == "mask":
        return replace(stmt, where=_expr(mask.condition))
    if isinstance(stmt, Copy) and mask.place:
        return replace(stmt, coords=(Coord(Name("L"), _expr(mask.place)),))
    return stmt


Body = tuple[Statement, ...]


def _insert(body: Body, place: Callable[[Statement], bool], before: Body, after: Body) -> Body:
    """Put statements around every statement that `place` picks, inside loops and branches too."""
    done: list[Statement] = []
    for stmt in body:
        here = place(stmt)
        if isinstance(stmt, For):
            stmt = replace(stmt, body=_insert(stmt.body, place, before, after))
        elif isinstance(stmt, If):
            stmt = replace(stmt, then=_insert(stmt.then, place, before, after))
        done += [*before, stmt, *after] if here else [stmt]
    return tuple(done)
