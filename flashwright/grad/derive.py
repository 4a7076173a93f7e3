"""The backward pass as steps: the gauge is fixed, the epilogue and the body are differentiated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from flashwright.grad.adjoint import Grads, Reverse
from flashwright.grad.algebra import (
    ONE,
    ZERO,
    Step,
    add,
    call,
    div,
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
from flashwright.grad.normalise import QUERY, Forward, Store, normalise, refuse
from flashwright.lang.nodes import Binary, Call, Expr, Index, Name, Num, Unary, expressions
from flashwright.program.program import Program
from flashwright.program.vocabulary import POSITIONS

OWN_STATEMENT = ("gemm", "mask")


@dataclass
class Backward:
    """The backward pass, before it is written as kernels.

    `saved` are the forward's outputs that it reads, `given` the gradients of outputs, both as
    stores of the forward by the name of their value. `rows` are the steps of the preprocess kernel,
    `scratch` the values among them that the main kernel reads, `body` the steps of the main kernel.
    The gradients of each part are by load or element.
    """

    forward: Forward
    saved: dict[str, Store] = field(default_factory=dict)
    given: dict[str, Store] = field(default_factory=dict)
    rows: list[Step] = field(default_factory=list)
    scratch: list[str] = field(default_factory=list)
    body: list[Step] = field(default_factory=list)
    row_grads: Grads = field(default_factory=dict)
    grads: Grads = field(default_factory=dict)


def derive(program: Program) -> Backward:
    """The backward pass of a checked program; Failed with FW908 if it has none."""
    forward = normalise(program)
    return _Derivation(forward, find_gauge(forward)).run()


class _Derivation:
    def __init__(self, forward: Forward, gauge: Gauge) -> None:
        self.forward, self.gauge = forward, gauge
        self.result = Backward(forward)
        several = len(gauge.references) > 1
        marks = [str(n + 1) if several else "" for n in range(len(gauge.references))]
        self.marks = dict(zip(gauge.references, marks, strict=True))
        self.sums = {acc: r for r, (acc, _) in gauge.norms.items()}

    def run(self) -> Backward:
        unknown = self._unknown()
        epilogue = self._fixed_epilogue()
        known = self._solve(epilogue, unknown)
        reverse = Reverse(self.forward)
        reverse.run(epilogue, self._given())
        seeds = self._row_results(reverse, epilogue, known)
        self._body(seeds)
        return self.result

    def _reference(self, name: str) -> Name:
        """The value that stands for a reference: the log-sum-exp in its units."""
        shift = f"Shift{self.marks[name]}.0"
        self.forward.axes[shift] = (QUERY,)
        return Name(shift)

    def _unknown(self) -> list[str]:
        """What the epilogue reads of the loop: references, and sums not normed to 1."""
        found = [self._reference(r).id for r in self.gauge.references]
        for begin, end in self.forward.carried.items():
            if begin not in self.gauge.references and begin not in self.sums:
                found.append(end)
        return found

    def _fixed_epilogue(self) -> list[Step]:
        """The epilogue's steps with each reference at the log-sum-exp, so that its sum is 1."""
        names: dict[str, Expr] = {}
        for begin, end in self.forward.carried.items():
            if begin in self.gauge.references:
                names[end] = self._reference(begin)
            elif begin in self.sums:
                names[end] = ONE
                self.forward.axes[end] = (QUERY,)
        self.ones = {e for e, x in names.items() if x == ONE}
        keep = {n: x for n, x in names.items() if n not in self.ones}
        return [replace(s, value=renamed(s.value, keep)) for s in self.forward.epilogue]

    def _at_one(self, expr: Expr) -> Expr:
        return renamed(expr, dict.fromkeys(self.ones, ONE))

    def _solve(self, epilogue: list[Step], unknown: list[str]) -> dict[str, Expr]:
        """The unknown values in terms of the outputs, as far as the outputs determine them."""
        values: dict[str, Expr] = {}
        for step in epilogue:
            values[step.target] = self._at_one(renamed(step.value, values))
        known: dict[str, Expr] = {}
        for _ in unknown:
            for store in self.forward.stores:
                name = f"{store.tensor.name}.saved"
                value = values.get(store.value, self._at_one(Name(store.value)))
                value = renamed(value, known)
                open_ = [v for v in values_in(value) if v in unknown and v not in known]
                found = _solved(value, open_[0], Name(name)) if len(open_) == 1 else None
                if found is not None:
                    known[open_[0]] = found
                    self.result.saved[name] = store
                    self.forward.axes[name] = self.forward.axes[store.value]
        return known

    def _given(self) -> dict[str, Expr]:
        """The seeds: the gradient of O, or of each tile if no output is called O."""
        seeds: dict[str, Expr] = {}
        tiles = [s for s in self.forward.stores if len(self.forward.axes[s.value]) == 2]
        for store in [s for s in tiles if s.tensor.name == "O"] or tiles:
            name = f"d{store.tensor.name}.0"
            self.result.given[name] = store
            self.forward.axes[name] = self.forward.axes[store.value]
            seeds[store.value] = Name(name)
        return seeds

    def _row_results(
        self, reverse: Reverse, epilogue: list[Step], known: dict[str, Expr]
    ) -> dict[str, Expr]:
        """The adjoints of what the loop sums, and the preprocess steps that compute them."""
        steps = {s.target: s.value for s in (*epilogue, *reverse.steps)}
        seeds: dict[str, Expr] = {}

        def row(expr: Expr) -> Expr:
            return renamed(self._at_one(inlined(expr, steps)), known)

        for begin, end in self.forward.carried.items():
            if begin in self.gauge.references:
                shift = self._reference(begin)
                self._keep(shift.id, self._visible(begin, known), end)
                continue
            value = row(total(reverse.grads.pop(end, [])))
            if value == ZERO:
                continue
            if begin in self.sums:
                delta = f"Delta{self.marks[self.sums[begin]]}.0"
                seeds[end] = neg(self._keep(delta, neg(value), end))
            else:
                seeds[end] = self._keep(f"dA{begin.split('.')[0].removeprefix('O')}.0", value, end)
        for leaf, ds in reverse.grads.items():
            if not isinstance(leaf, str) or leaf in self.forward.loads:
                self.result.row_grads[leaf] = [row(d) for d in ds]
                self._check_known(total(self.result.row_grads[leaf]))
        self._initial_grads(seeds)
        return seeds

    def _keep(self, name: str, value: Expr, end: str) -> Expr:
        """A value of the preprocess kernel that the main kernel reads, if it is no tensor yet."""
        self._check_known(value)
        tile, _ = split_scalars(value)
        if isinstance(tile, Name) and tile.id in self.result.given:
            return value
        self.forward.axes[name] = self.forward.axes[end]
        self.result.rows.append(Step(name, value))
        self.result.scratch.append(name)
        return Name(name)

    def _check_known(self, value: Expr) -> None:
        ready = {*self.result.saved, *self.result.given, *self.forward.loads, *self.result.scratch}
        for name in values_in(value):
            if name not in ready:
                base = name.split(".")[0]
                raise refuse(
                    self.forward.loop.span,
                    f"the gradient needs `{base}` as it is after the loop, and no output has it",
                    "store it as an output of its own",
                )

    def _visible(self, reference: str, known: dict[str, Expr]) -> Expr:
        """The reference of each row; inf in a row that saw no key, so that its weights are 0."""
        value = known.get(self._reference(reference).id)
        if value is None:
            acc, factor = self.gauge.norms[reference]
            high, weights = reference.split(".")[0], acc.split(".")[0]
            scaled = high if abs(factor - 1) < 1e-9 else f"{factor!r} * {high}"
            raise refuse(
                self.forward.loop.span,
                f"the gradient needs the log-sum-exp of `{high}`, and no output has it",
                "add the output: `Allocate LSE in global (batch, heads, q_len) as fp32`, "
                "`Allocate LSE in register (BM) as fp32`, "
                f"`Compute {scaled} + log({weights}) and get LSE_register`, "
                "`Copy LSE (BM) in coordinate [...] from register to global`",
            )
        low = Unary("-", Num("1e29"))
        return call("where", Binary(">", value, low), value, Name("inf"))

    def _initial_grads(self, seeds: dict[str, Expr]) -> None:
        """The gradients of what the loop begins with (a sink): a key of its own in each row."""
        reverse = Reverse(self.forward)
        steps: list[Step] = []
        ends: dict[str, Expr] = {}
        for begin, end in self.forward.carried.items():
            start = self.forward.first.get(begin, ZERO)
            if begin in self.gauge.references or start == ZERO or end not in seeds:
                continue
            for reference, weight in self.gauge.kinds[begin].by.items():
                shift = sub(self.forward.first[reference], self._reference(reference))
                steps.append(Step(f"Weight.{begin}", call("exp", mul(shift, number(-weight)))))
                self.forward.axes[steps[-1].target] = (QUERY,)
                start = mul(start, Name(steps[-1].target))
            steps.append(Step(f"First.{begin}", start))
            self.forward.axes[steps[-1].target] = self.forward.axes[end]
            ends[steps[-1].target] = seeds[end]
        reverse.run(steps, ends)
        values = {s.target: s.value for s in (*steps, *reverse.steps)}
        for leaf, ds in reverse.grads.items():
            if not isinstance(leaf, str) or leaf in self.forward.loads:
                found = [inlined(d, values) for d in ds]
                self.result.row_grads.setdefault(leaf, []).extend(found)

    def _body(self, seeds: dict[str, Expr]) -> None:
        """The body with the references fixed, and its adjoint."""
        fixed = self.gauge.fixed.items()
        names: dict[str, Expr] = {v: self._reference(r) for v, r in fixed}
        steps: list[Step] = []
        for step in self.forward.body:
            if step.target in names:
                continue
            value = renamed(step.value, names)
            if not per_element(value):
                names[step.target] = value
            else:
                steps.append(replace(step, value=value))
        reverse = Reverse(self.forward)
        reverse.run(steps, seeds)
        for begin, end in self.forward.carried.items():
            passed = total(reverse.grads.pop(begin, []))
            if begin not in self.gauge.references and passed != seeds.get(end, ZERO):
                raise refuse(
                    self.forward.loop.span,
                    f"`{begin.split('.')[0]}` is not a plain sum over the keys: it decays",
                )
        references = {self._reference(r).id for r in self.gauge.references}
        self.result.grads = {k: ds for k, ds in reverse.grads.items() if k not in references}
        roots = {v for ds in self.result.grads.values() for d in ds for v in values_in(d)}
        tidied = tidy([*steps, *reverse.steps], roots)
        self.result.body = [replace(s, value=self._without_tail(s.value)) for s in tidied]

    def _without_tail(self, value: Expr) -> Expr:
        """A Mask that also hides the queries past the end, where a score may be large: those are
        loaded as zeros, but a bias or a slope is added all the same."""
        match value:
            case Call(Name("mask"), (scores, condition)) if _biased(scores):
                length = self.forward.query.high
                assert isinstance(length, Binary)
                inside = Binary("<", Name("q_idx"), length.left)
                return call("mask", scores, Binary("and", condition, inside))
        return value


def _solved(expr: Expr, unknown: str, result: Expr) -> Expr | None:
    """The unknown value in `expr = result`; None if it is inside of a function."""
    if expr == Name(unknown):
        return result
    if isinstance(expr, Unary):
        return _solved(expr.operand, unknown, neg(result))
    if not isinstance(expr, Binary):
        return None
    left = unknown in values_in(expr.left)
    part, other = (expr.left, expr.right) if left else (expr.right, expr.left)
    match expr.op:
        case "+":
            return _solved(part, unknown, sub(result, other))
        case "-":
            rest = add(result, other) if left else sub(other, result)
            return _solved(part, unknown, rest)
        case "*":
            return _solved(part, unknown, div(result, other))
        case "/" if left:
            return _solved(part, unknown, mul(result, other))
    return None


def _biased(scores: Expr) -> bool:
    """Whether scores have terms by position or from a table."""
    parts = expressions(scores)
    return any(isinstance(e, Index) or (isinstance(e, Name) and e.id in POSITIONS) for e in parts)


def tidy(steps: list[Step], roots: set[str]) -> list[Step]:
    """The steps that the roots need, with those that are used once put into their use.

    GEMMs and masked tiles stay statements of their own, and so do the operands of GEMMs.
    """
    while True:
        uses = Counter(v for s in steps for v in values_in(s.value))
        uses.update(roots)
        alive = [s for s in steps if uses[s.target]]
        fixed = roots | {v for s in alive for v in _gemm_operands(s.value)}
        inline: dict[str, Expr] = {}
        kept: list[Step] = []
        for step in alive:
            step = replace(step, value=renamed(step.value, inline))
            if step.target not in fixed and _fits(step.value, uses[step.target]):
                inline[step.target] = step.value
            else:
                kept.append(step)
        done, steps = len(kept) == len(steps), kept
        if done:
            return steps


def _fits(value: Expr, uses: int) -> bool:
    if isinstance(value, Call) and value.func.id in OWN_STATEMENT:
        return False
    return uses == 1 or isinstance(value, Name | Num)


def _gemm_operands(expr: Expr) -> list[str]:
    return [
        a.id
        for e in expressions(expr)
        if isinstance(e, Call) and e.func.id == "gemm"
        for a in e.args
        if isinstance(a, Name)
    ]
