"""The programs that are mutated, and the trial of a mutant: the checker, then the CPU run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.backward import BackwardTiling, with_sizes
from flashwright.author.builtin.choose import NothingFits
from flashwright.author.builtin.variants import VARIANTS, make_spec
from flashwright.check.check import check, checked_program
from flashwright.gpu import GPUS, find
from flashwright.grad.grad import backward
from flashwright.judge.cpu import default_cases, judge
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.format import format_tree
from flashwright.lang.nodes import (
    Binary,
    Call,
    Comment,
    Expr,
    For,
    Let,
    Name,
    Num,
    Tree,
    Unary,
    statements,
)
from flashwright.lang.parse import parse
from flashwright.program.kernels import Kernels
from flashwright.program.scalars import evaluate
from flashwright.semantics.interpret import _UFUNCS
from flashwright.spec import AttentionSpec, BadSpec
from tests.mutation.effects import Site
from tests.mutation.mutants import Mutant, Subject

STRESS = ("opposed", "peaked", "shifted")
"""Kinds of inputs that a mutant must also survive, after normal ones, to count as a survivor."""

MASKS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window": 70},
    "window": {"causal": False, "window": 70},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi": True},
    "sink": {"sink": True},
    "all": {"softcap": 3.0, "alibi": True, "sink": True},
}


@dataclass(frozen=True)
class Case:
    """A built-in program: its spec and its GPU."""

    name: str
    gpu: str
    spec: AttentionSpec
    code: str = field(compare=False, repr=False)

    @cached_property
    def kernels(self) -> Kernels:
        return Kernels(check(parse(self.code)).kernels)

    @cached_property
    def subject(self) -> Subject:
        tree = parse(self.code)
        return Subject(
            tree,
            find(self.gpu),
            _every_row_sees(self.spec),
            _every_row_sees(self.spec) or self.spec.sink,
            self.spec.softcap is not None and self.spec.softcap <= 5 and not self.spec.alibi,
            lambda a, b, site: _same_condition(a, b, site, tree, self.spec),
            lambda other: _more_blocks(tree, other, self.spec),
            cache(lambda: not self.spec.backward and _first_inside(tree, self.spec)),
            self.spec.heads or 0,
        )


def make(variant: str, gpu: str, words: str = "", **options: Any) -> Case | None:
    """A program, or None where the spec, the author or the GPU does not have it."""
    small = {"head_dim": 64} if variant != "mla" else {}
    if variant == "nsa-selected":
        small |= {"top_k": 3}
    if variant == "nsa-window":
        small |= {"window": 70}
    try:
        spec = make_spec(variant, **{**small, **options})
        code = write_code(write_sketch(spec), spec, find(gpu)).code
    except (BadSpec, NothingFits, ValueError):
        return None
    name = " ".join(filter(None, (variant, words, gpu)))
    return Case(name, gpu, spec, code)


SMALL = {"t4": BackwardTiling(32, 32, 2, 2), "h200": BackwardTiling(64, 64, 4, 2, vectors=True)}
"""Sizes of backward passes, smaller than usual: they run faster on the CPU."""


def make_backward(variant: str, gpu: str, words: str, **options: Any) -> Case:
    """The derived backward pass of a program."""
    spec = make_spec(variant, heads=4, kv_heads=2, head_dim=64, **options)
    forward = write_code(write_sketch(spec), spec, find(gpu)).code
    derived = backward(checked_program(parse(forward))).tree
    code = format_tree(with_sizes(derived, SMALL[gpu]))
    return Case(f"{variant} {words} backward {gpu}", gpu, spec.differentiated(), code)


BACKWARD: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("gqa", "t4", "causal", MASKS["causal"]),
    ("gqa", "h200", "full", MASKS["full"]),
    ("gqa", "t4", "causal window", MASKS["causal window"]),
    ("gqa", "t4", "causal all", {**MASKS["causal"], **OPTIONS["all"]}),
)


@cache
def backward_suite() -> dict[str, Case]:
    """The backward passes that are mutated: both schedules, every option."""
    made = [
        make_backward(variant, gpu, words, **options) for variant, gpu, words, options in BACKWARD
    ]
    return {c.name: c for c in made}


def every(thorough: bool = False, variants: Iterable[str] = VARIANTS) -> list[Case]:
    """Every program: all masks, options and schedules; with `thorough` on every GPU and width."""
    gpus = tuple(GPUS) if thorough else ("t4", "a100", "h200")
    widths: tuple[dict[str, Any], ...] = ({},)
    if thorough:
        widths += tuple({"head_dim": width} for width in (96, 128, 256))
    made: list[Case | None] = []
    if "gqa" in variants:
        made.append(make("gqa", "h200", "causal 128", causal=True, head_dim=128))
    for variant, gpu, width in itertools.product(variants, gpus, widths):
        wide = str(width.get("head_dim", ""))
        for mask, options in MASKS.items():
            words = f"{mask} {wide}".strip()
            made.append(make(variant, gpu, words, **options, **width))
            for option, more in OPTIONS.items():
                words = f"{mask} {option} {wide}".strip()
                made.append(make(variant, gpu, words, **options, **more, **width))
        fast = "h200" if gpu == "h200" else "l40s"
        made.append(make(variant, fast, f"fp8 {wide}".strip(), dtype="fp8", **width))
        made.append(make(variant, fast, f"fp8 causal {wide}".strip(), dtype="fp8", causal=True))
    return [c for c in made if c is not None]


def covering(cases: list[Case]) -> list[Case]:
    """Few programs in which all that the programs are made of occurs: every line (numbers and
    element types left out) beside each of its neighbours. The first is the one with most of it."""
    features = {c.name: _features(c) for c in cases}
    left = set().union(*features.values())
    chosen: list[Case] = []
    while left:
        best = max(cases, key=lambda c: len(features[c.name] & left))
        left -= features[best.name]
        chosen.append(best)
    return chosen


def _features(case: Case) -> set[str]:
    kept = [s for s in statements(parse(case.code).body) if not isinstance(s, Comment)]
    lines = [repr(_blank(replace(s, body=()) if isinstance(s, For) else s)) for s in kept]
    whole = f"{case.spec.variant}, every row sees a key: {_every_row_sees(case.spec)}"
    return {whole, *map(" | ".join, itertools.pairwise(lines))}


def _blank(node: Any) -> Any:
    if isinstance(node, Num):
        return Num("0")
    if isinstance(node, tuple):
        return tuple(_blank(n) for n in node)
    if not is_dataclass(node):
        return node
    changes = {f.name: _blank(getattr(node, f.name)) for f in fields(node) if f.name != "span"}
    changes |= {k: None for k in ("comment", "dtype", "stages") if k in changes}
    return replace(node, **changes)


SUITE: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("mha", "t4", "full", MASKS["full"]),
    ("gqa", "h200", "causal all", {**MASKS["causal"], **OPTIONS["all"]}),
    ("mqa", "l40s", "fp8", {"dtype": "fp8"}),
    ("mla", "t4", "window", MASKS["window"]),
    ("nsa-compressed", "h200", "", {}),
    ("nsa-selected", "a100", "", {}),
    ("nsa-window", "h200", "", {}),
)
"""What the test suite mutates: every variant, both schedules, every option. The rest: report.py."""


@cache
def suite() -> dict[str, Case]:
    made = [make(variant, gpu, words, **options) for variant, gpu, words, options in SUITE]
    return {c.name: c for c in made if c is not None}


# --- the trial --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a mutant fared: found by the checker or the run, at the right line or not, or alive. The
    run of a backward pass names the gradient that is wrong, and no line is asked for."""

    by: str  # "check", "run" or ""
    named: bool
    diagnostics: tuple[Diagnostic, ...] = ()

    @property
    def killed(self) -> bool:
        return bool(self.by) and self.named


def try_mutant(mutant: Mutant, case: Case, thorough: bool = False) -> Outcome:
    """See test_mutants.py for what counts as the right line.

    A mutant that a rule calls equivalent runs on two problems only, unless `thorough`.
    """
    tree = parse(format_tree(mutant.tree))
    lines = {
        line
        for was, now in zip(statements(mutant.tree.body), statements(tree.body), strict=True)
        if was.span.line in mutant.right
        for line in range(now.span.line, now.span.end_line + 1)
    }
    verdict = check(tree, find(case.gpu))
    if not verdict.kernels:
        return Outcome("check", _names(verdict.errors, lines), verdict.errors)
    kernels, any_line = Kernels(verdict.kernels), case.spec.backward
    brief = bool(mutant.equal) and not thorough
    for kind in itertools.chain(("normal",), () if brief else _later(case)):
        cases = problems(case)[:2] if brief or kind != "normal" else problems(case)
        try:
            found = judge(kernels, case.spec, cases=cases, kind=kind)
        except Failed as failed:
            named = any_line or _names(failed.diagnostics, lines)
            return Outcome("run", named, failed.diagnostics)
        if not found.ok:
            named = any_line or _names(found.diagnostics, lines)
            return Outcome("run", named, found.diagnostics)
    return Outcome("", False)


def _later(case: Case) -> Iterator[str]:
    yield from stress(case)  # asked for only when normal inputs found nothing


@cache
def stress(case: Case) -> tuple[str, ...]:
    """The kinds of inputs on which the program itself is right: a row that is all sink is not."""
    few = problems(case)[:2]
    return tuple(k for k in STRESS if judge(case.kernels, case.spec, cases=few, kind=k).ok)


def _names(diagnostics: tuple[Diagnostic, ...], lines: set[int]) -> bool:
    for found in diagnostics:
        spans = [found.span, *(label.span for label in found.secondary)]
        for span in spans:
            if span is not None and lines & set(range(span.line, span.end_line + 1)):
                return True
    return False


@cache
def problems(case: Case) -> list[dict[str, int]]:
    """Cheap problems first; the last ones go over several of the program's own tiles."""
    sizes = {s.name.id: s.value for s in parse(case.code).body if type(s).__name__ == "Param"}
    rows, cols = (int(sizes[name].text) for name in ("BM", "BN"))
    if case.spec.backward:
        lengths = [(1, 1), (17, 17), (40, 25), (rows + 1, 2 * cols + 6), (2 * rows + 6, cols + 1)]
        lengths += [(9, 110)]  # beyond a window of 70
    elif case.spec.branch == "selected":
        lengths = [(1, 1), (5, 5), (3, 4 * cols + 1), (20, 12), (70, 70)]
    elif case.spec.branch == "compressed":
        step = case.spec.stride
        lengths = [(1, 1), (100, 100), (257, 257), (40, 400)]
        lengths += [(rows + 1, step * (2 * cols + 1) + case.spec.block), (300, 200)]
        lengths += [(rows, step * cols + case.spec.block)]  # the last key begins a tile
    else:
        lengths = [(1, 1), (17, 17), (100, 100), (40, 25), (100, 257), (257, 100)]
        lengths += [(2 * rows + 1, 2 * cols + 1), (rows + 1, 3 * cols + 70)]
    return default_cases(case.spec, lengths)


# --- when a change is none --------------------------------------------------------------------


def _every_row_sees(spec: AttentionSpec) -> bool:
    """Whether every query sees a key, whatever the lengths (which are at least 1)."""
    return spec.branch in (None, "compressed") and not spec.causal and spec.window is None


def _lengths(tree: Tree, spec: AttentionSpec) -> Iterator[dict[str, int]]:
    """Problems that the spec allows: all short ones, and some around the program's tiles."""
    short = range(1, 12)
    around = (1, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 192, 193, 257, 300)
    for q_len, kv_len in (*itertools.product(short, short), *itertools.product(around, around)):
        if spec.branch == "compressed":
            tokens = spec.stride * kv_len + spec.block - spec.stride + q_len % spec.stride
            yield {"q_len": q_len, "kv_len": spec.compressed_blocks(tokens), "tokens": tokens}
        else:
            yield {"q_len": q_len, "kv_len": kv_len}


def _same_condition(a: Expr, b: Expr, site: Site, tree: Tree, spec: AttentionSpec) -> bool:
    params = _params(tree)
    for dims in _lengths(tree, spec):
        rows = np.arange(dims["q_len"])[:, None]
        keys = np.arange(math.ceil(dims["kv_len"] / params["BN"]) * params["BN"])[None, :]
        env = {**params, **dims, "q_idx": rows, "q_pos": rows, "kv_idx": keys}
        if not np.array_equal(_seen(a, env), _seen(b, env)):
            return False
    return True


def _seen(expr: Expr, env: dict[str, Any]) -> Any:
    match expr:
        case Num(text):
            return float(text)
        case Name(name):
            return env[name]
        case Unary("-", operand):
            return -_seen(operand, env)
        case Binary(op, left, right):
            return np.broadcast_to(
                _UFUNCS[op](_seen(left, env), _seen(right, env)),
                np.broadcast_shapes(env["q_idx"].shape, env["kv_idx"].shape),
            )
        case Call(func, args):
            return _UFUNCS[func.id](*(_seen(a, env) for a in args))
    raise AssertionError(expr)


def _params(tree: Tree) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stmt in tree.body:
        if type(stmt).__name__ == "Param":
            found[stmt.name.id] = evaluate(stmt.value, found)
    return found


def _more_blocks(tree: Tree, other: Tree, spec: AttentionSpec) -> bool:
    """Whether the other's loop visits all the blocks of this one's, and none outside the keys."""
    params, sides = _params(tree), (("q_len", "BM"), ("kv_len", "BN"))
    (owned, rows), (visited, cols) = sides[::-1] if spec.backward else sides
    for dims in _lengths(tree, spec):
        every_block = math.ceil(dims[visited] / params[cols])
        for block in range(math.ceil(dims[owned] / params[rows])):
            env = {**params, **dims, "block_idx": block}
            (low, high), (low2, high2) = (_visited(t, env) for t in (tree, other))
            if low < high and not (low2 <= low and high <= high2):
                return False
            if low2 < high2 and not (low2 >= 0 and high2 <= every_block):
                return False
    return True


def _first_inside(tree: Tree, spec: AttentionSpec) -> bool:
    """Whether the first block of the loop begins inside the keys, even where there is no round."""
    if spec.branch == "selected":
        return False
    params = _params(tree)
    for dims in _lengths(tree, spec):
        for block in range(math.ceil(dims["q_len"] / params["BM"])):
            low, _ = _visited(tree, {**params, **dims, "block_idx": block})
            if not 0 <= low * params["BN"] < dims["kv_len"]:
                return False
    return True


def _visited(tree: Tree, env: dict[str, Any]) -> tuple[int, int]:
    env = dict(env)
    for stmt in tree.body:
        if isinstance(stmt, Let) and stmt.name.id in ("First", "Last", "Start", "Steps"):
            env[stmt.name.id] = evaluate(stmt.value, env)
        if isinstance(stmt, For) and "Start" in env:  # a backward pass
            return env["Start"], env["Start"] + env["Steps"]
        if isinstance(stmt, For):
            return math.ceil(evaluate(stmt.low, env)), math.ceil(evaluate(stmt.high, env))
    raise AssertionError("no loop")
