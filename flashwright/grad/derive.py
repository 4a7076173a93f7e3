"""The backward pass as steps: the gauge is fixed, the epilogue and the body are differentiated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from flashwright.grad.adjoint import Grads, Leaf, Reverse
from flashwright.grad.algebra import (
    ONE,
    ZERO,
    Step,
    add,
    call,
    div,
    gemm_operands,
    inlined,
    mul,
    neg,
    number,
    per_element,
    renamed,
    split_scalars,
    sub,
    total,
    values_in,
)
from flashwright.grad.gauge import Gauge, find_gauge
from flashwright.grad.normalise import QUERY, Forward, Store, normalise, refuse, unused_name
from flashwright.lang import nodes as tl
from flashwright.program.program import Program
from flashwright.program.vocabulary import POSITIONS


@dataclass
class Backward:
    """The backward pass, before it is written as kernels.

    `saved` are the forward's outputs that it reads, `given` the gradients of outputs, both as
    stores of the forward by the name of their value. `again` are values that no output has, in
    terms of what the loop carries: the forward's loop computes them again. `rows` are the steps of
    the preprocess kernel, `scratch` the values among them that the main kernel reads, `body` the
    steps of the main kernel. The gradients of each part are by load or element.
    """

    forward: Forward
    saved: dict[str, Store] = field(default_factory=dict)
    given: dict[str, Store] = field(default_factory=dict)
    again: dict[str, tl.Expr] = field(default_factory=dict)
    rows: list[Step] = field(default_factory=list)
    scratch: list[str] = field(default_factory=list)
    body: list[Step] = field(default_factory=list)
    row_grads: Grads = field(default_factory=dict)
    grads: Grads = field(default_factory=dict)


def derive(
    program: Program, of: Collection[str] = (), wrt: Collection[str] | None = None
) -> Backward:
    """The backward pass of a checked program, for gradients of the outputs `of` with respect to
    the inputs `wrt`, or to all; Failed with FW908 if it has none."""
    forward = normalise(program)
    return _Derivation(forward, find_gauge(forward), wrt).run(of)


class _Derivation:
    """Derives a backward pass.

    `shifts` has for each reference the value in its place, the log-sum-exp in its units; `sums` the
    reference of each sum that is 1 then, `ones` the names of these sums after the loop; `summed`
    says whether a gradient is a sum over the elements of tiles.
    """

    def __init__(self, forward: Forward, gauge: Gauge, wrt: Collection[str] | None) -> None:
        self.forward, self.gauge, self.carried = forward, gauge, forward.carried
        self.wrt = wrt
        self.result = Backward(forward)
        self.summed = False
        several = len(gauge.references) > 1
        self.marks = {r: str(n) if several else "" for n, r in enumerate(gauge.references, 1)}
        self.shifts = {r: tl.Name(self._name(f"Shift{mark}")) for r, mark in self.marks.items()}
        self.sums = {acc: r for r, (acc, _) in gauge.norms.items()}
        self.ones: dict[str, tl.Expr] = {self.carried[acc]: ONE for acc in self.sums}
        rows = (*(shift.id for shift in self.shifts.values()), *self.ones)
        forward.axes |= dict.fromkeys(rows, (QUERY,))

    def _name(self, base: str) -> str:
        """The name of a value for which the forward has no name."""
        return f"{unused_name(self.forward.program, base)}.0"

    def run(self, of: Collection[str]) -> Backward:
        """The whole backward pass."""
        names = {self.carried[r]: shift for r, shift in self.shifts.items()}
        epilogue = [replace(s, value=renamed(s.value, names)) for s in self.forward.epilogue]
        known = self._solve(epilogue)
        known |= self._again(known)
        reverse = Reverse(self.forward)
        reverse.run(epilogue, self._given(of))
        seeds = self._row_results(reverse, epilogue, known)
        self._initial_grads(seeds)
        self._body(seeds)
        used = [s.value for s in self.result.rows]
        used += [d for ds in self.result.row_grads.values() for d in ds]
        read = {v for value in used for v in values_in(value)}
        self.result.again = {n: v for n, v in self.result.again.items() if n in read}
        return self.result

    def _solve(self, epilogue: list[Step]) -> dict[str, tl.Expr]:
        """What the epilogue reads of the loop, references and sums that are not 1, in terms of the
        outputs, as far as the outputs determine it."""
        fixed = self.shifts.keys() | self.sums.keys()
        unknown = [shift.id for shift in self.shifts.values()]
        unknown += [end for begin, end in self.carried.items() if begin not in fixed]
        values = dict(self.ones)
        for step in epilogue:
            values[step.target] = renamed(step.value, values)
        known: dict[str, tl.Expr] = {}
        for _ in unknown:
            for store in self.forward.stores:
                value = renamed(values.get(store.value, tl.Name(store.value)), known)
                open_ = [v for v in values_in(value) if v in unknown and v not in known]
                name = f"{store.tensor.name}.saved"
                found = _solved(value, open_[0], tl.Name(name)) if len(open_) == 1 else None
                if found is not None:
                    known[open_[0]] = found
                    self.result.saved[name] = store
                    self.forward.axes[name] = self.forward.axes[store.value]
        return known

    def _again(self, known: dict[str, tl.Expr]) -> dict[str, tl.Expr]:
        """What the outputs do not determine: log-sum-exps, and sums as they are with these."""
        found: dict[str, tl.Expr] = {}
        for begin, end in self.carried.items():
            unknown = self.shifts[begin].id if begin in self.shifts else end
            if unknown in known or begin in self.sums:
                continue
            if begin in self.shifts:
                name = f"LSE{self.marks[begin]}"
                value = add(tl.Name(begin), self._risen(begin))
            else:
                name, value = begin.split(".")[0], self._normalised(begin)
            while name in self.forward.program.tensors:
                name += "_"
            found[unknown] = tl.Name(f"{name}.again")
            self.result.again[f"{name}.again"] = value
            self.forward.axes[f"{name}.again"] = self.forward.axes[end]
        return found

    def _risen(self, reference: str) -> tl.Expr:
        """How far the log-sum-exp is above the reference."""
        acc, factor = self.gauge.norms[reference]
        return div(call("log", tl.Name(acc)), ONE if factor == 1 else number(factor))

    def _normalised(self, begin: str) -> tl.Expr:
        """A sum of the loop as it is if the log-sum-exps are the references; 0 without keys."""
        value: tl.Expr = tl.Name(begin)
        for reference, weight in self.gauge.kinds[begin].by.items():
            acc, factor = self.gauge.norms[reference]
            plain = abs(weight + factor) < 1e-9
            grown = call("exp", mul(self._risen(reference), number(weight)))
            value = div(value, tl.Name(acc)) if plain else mul(value, grown)
            value = call("where", tl.Binary(">", tl.Name(acc), ZERO), value, ZERO)
        return value

    def _given(self, of: Collection[str]) -> dict[str, tl.Expr]:
        """The seeds: the gradients of the outputs `of`, and that of O, or of each tile if no output
        is called O."""
        seeds: dict[str, tl.Expr] = {}
        tiles = [s for s in self.forward.stores if len(self.forward.axes[s.value]) == 2]
        asked = [s for s in tiles if s.tensor.name == "O"] or tiles
        asked += [s for s in self.forward.stores if s.tensor.name in of and s not in asked]
        for store in asked:
            name = f"d{store.tensor.name}.0"
            self.result.given[name] = store
            self.forward.axes[name] = self.forward.axes[store.value]
            seeds[store.value] = tl.Name(name)
        return seeds

    def _row_results(
        self, reverse: Reverse, epilogue: list[Step], known: dict[str, tl.Expr]
    ) -> dict[str, tl.Expr]:
        """The adjoints of what the loop sums, and the preprocess steps that compute them."""
        steps = {s.target: s.value for s in (*epilogue, *reverse.steps)}
        seeds: dict[str, tl.Expr] = {}

        def row(expr: tl.Expr) -> tl.Expr:
            return renamed(renamed(inlined(expr, steps), self.ones), known)

        for begin, end in self.carried.items():
            if begin in self.shifts:
                self._keep(self.shifts[begin].id, self._visible(begin, known), end)
                continue
            value = row(total(reverse.grads.pop(end, [])))
            if value == ZERO:
                continue
            if begin in self.sums:
                delta = self._name(f"Delta{self.marks[self.sums[begin]]}")
                seeds[end] = neg(self._keep(delta, neg(value), end))
            else:
                seeds[end] = self._keep(f"dA{begin.split('.')[0].removeprefix('O')}.0", value, end)
        self._add_row_grads(reverse.grads, row)
        return seeds

    def _add_row_grads(self, grads: Grads, change: Callable[[tl.Expr], tl.Expr]) -> None:
        """Add gradients of loads and elements to those of the preprocess kernel."""
        for leaf, ds in grads.items():
            known = not isinstance(leaf, str) or leaf in self.forward.loads
            if known and self._wanted(leaf):
                found = [change(d) for d in ds]
                self._check_known(total(found))
                self.result.row_grads.setdefault(leaf, []).extend(found)

    def _wanted(self, leaf: Leaf) -> bool:
        """Whether the gradient of a load or an element is wanted."""
        loads = self.forward.loads
        name = loads[leaf].tensor.name if isinstance(leaf, str) else leaf.tensor.id
        return self.wrt is None or name in self.wrt

    def _keep(self, name: str, value: tl.Expr, end: str) -> tl.Expr:
        """A value of the preprocess kernel that the main kernel reads, if it is no tensor yet."""
        self._check_known(value)
        tile, _ = split_scalars(value)
        if isinstance(tile, tl.Name) and tile.id in self.result.given:
            return value
        self.forward.axes[name] = self.forward.axes[end]
        self.result.rows.append(Step(name, value))
        self.result.scratch.append(name)
        return tl.Name(name)

    def _check_known(self, value: tl.Expr) -> None:
        """Refuse a program whose preprocess kernel would need a value that no output has."""
        result = self.result
        ready = {*result.saved, *result.given, *result.again, *result.scratch, *self.forward.loads}
        for name in values_in(value):
            if name not in ready:
                base = name.split(".")[0]
                raise refuse(
                    self.forward.loop.span,
                    f"the gradient needs `{base}` as it is after the loop, and no output has it",
                    "store it as an output of its own",
                )

    def _visible(self, reference: str, known: dict[str, tl.Expr]) -> tl.Expr:
        """The reference of each row; inf in a row that saw no key, so that its weights are 0."""
        value = known[self.shifts[reference].id]
        low = tl.Unary("-", tl.Num("1e29"))
        return call("where", tl.Binary(">", value, low), value, tl.Name("inf"))

    def _initial_grads(self, seeds: dict[str, tl.Expr]) -> None:
        """The gradients of what the loop begins with (a sink): a key of its own in each row."""
        steps: list[Step] = []
        ends: dict[str, tl.Expr] = {}
        for begin, end in self.carried.items():
            value = self.forward.first[begin]
            if begin in self.shifts or value == ZERO or end not in seeds:
                continue
            for reference, weight in self.gauge.kinds[begin].by.items():
                shift = sub(self.forward.first[reference], self.shifts[reference])
                factor = call("exp", mul(shift, number(-weight)))
                steps.append(Step(f"Weight.{begin}", factor))
                self.forward.axes[steps[-1].target] = (QUERY,)
                value = mul(value, tl.Name(steps[-1].target))
            steps.append(Step(f"First.{begin}", value))
            self.forward.axes[steps[-1].target] = self.forward.axes[end]
            ends[steps[-1].target] = seeds[end]
        reverse = Reverse(self.forward)
        reverse.run(steps, ends)
        values = {s.target: s.value for s in (*steps, *reverse.steps)}
        self._add_row_grads(reverse.grads, lambda d: inlined(d, values))

    def _body(self, seeds: dict[str, tl.Expr]) -> None:
        """The body with the references fixed, and its adjoint."""
        names: dict[str, tl.Expr] = {v: self.shifts[r] for v, r in self.gauge.fixed.items()}
        steps: list[Step] = []
        for step in self.forward.body:
            if step.target in names:
                continue
            value = renamed(step.value, names)
            if per_element(value):
                steps.append(replace(step, value=value))
            else:
                names[step.target] = value
        reverse = Reverse(self.forward)
        reverse.run(steps, seeds)
        for begin, end in self.carried.items():
            passed = total(reverse.grads.pop(begin, []))
            if begin not in self.shifts and passed != seeds.get(end, ZERO):
                raise refuse(
                    self.forward.loop.span,
                    f"`{begin.split('.')[0]}` is not a plain sum over the keys: it decays",
                )
        for shift in self.shifts.values():
            reverse.grads.pop(shift.id, None)
        self.result.grads = {v: ds for v, ds in reverse.grads.items() if self._wanted(v)}
        grads = [d for ds in self.result.grads.values() for d in ds]
        elements = [leaf for leaf in self.result.grads if isinstance(leaf, tl.Index)]
        calls = [e for d in grads for e in tl.expressions(d) if isinstance(e, tl.Call)]
        self.summed = bool(elements) or any(e.func.id == "sum" for e in calls)
        grads += elements  # an index may need values too
        roots = {v for d in grads for v in values_in(d)}
        tidied = tidy([*steps, *reverse.steps], roots)
        self.result.body = [replace(s, value=self._without_tail(s.value)) for s in tidied]

    def _without_tail(self, value: tl.Expr) -> tl.Expr:
        """A Mask that also hides the queries past the end, where a score may be large: those are
        loaded as zeros, but a bias or a slope is added all the same. A sum over queries needs it
        in any case."""
        match value:
            case tl.Call(tl.Name("mask"), (scores, condition)) if self.summed or _biased(scores):
                return call("mask", scores, tl.Binary("and", condition, self.forward.inside))
        return value


def _solved(expr: tl.Expr, unknown: str, result: tl.Expr) -> tl.Expr | None:
    """The unknown value in `expr = result`; None if it is inside of a function."""
    if expr == tl.Name(unknown):
        return result
    if isinstance(expr, tl.Unary):
        return _solved(expr.operand, unknown, neg(result))
    if not isinstance(expr, tl.Binary):
        return None
    left = unknown in values_in(expr.left)
    part, other = (expr.left, expr.right) if left else (expr.right, expr.left)
    if expr.op == "-" and not left:
        return _solved(part, unknown, sub(other, result))
    if expr.op in _INVERSE and (left or expr.op != "/"):
        return _solved(part, unknown, _INVERSE[expr.op](result, other))
    return None


_INVERSE = {"+": sub, "-": add, "*": div, "/": mul}


def _biased(scores: tl.Expr) -> bool:
    """Whether scores have terms by position or from a table."""
    parts = tl.expressions(scores)
    return any(
        isinstance(e, tl.Index) or (isinstance(e, tl.Name) and e.id in POSITIONS) for e in parts
    )


def tidy(steps: list[Step], roots: set[str]) -> list[Step]:
    """The steps that the roots need, with those that are used once put into their use.

    GEMMs and masked tiles stay statements of their own, and so do the operands of GEMMs.
    """
    while True:
        uses = Counter(v for s in steps for v in values_in(s.value))
        uses.update(roots)
        alive = [s for s in steps if uses[s.target]]
        fixed = roots | {v for s in alive for v in gemm_operands(s.value)}
        inline: dict[str, tl.Expr] = {}
        kept: list[Step] = []
        for step in alive:
            step = replace(step, value=renamed(step.value, inline))
            if step.target not in fixed and _fits(step.value, uses[step.target]):
                inline[step.target] = step.value
            else:
                kept.append(step)
        if len(kept) == len(steps):
            return kept
        steps = kept


def _fits(value: tl.Expr, uses: int) -> bool:
    """Whether a step is put into its uses."""
    if isinstance(value, tl.Call) and value.func.id in ("gemm", "mask"):
        return False
    return uses == 1 or isinstance(value, tl.Name | tl.Num)
