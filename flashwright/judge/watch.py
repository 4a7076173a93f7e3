"""Watches one thread block run, statement by statement, for the first wrong one.

It compares the tiles with the truth: the scores on their way from products to logits, the mask, the
weights up to a factor per row, their running sum, and the accumulator as the weighted sum of the
values so far. How a program scales and which maximum it uses does not matter.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwright.judge.truth import Scores, Truth
from flashwright.lang.diagnostic import Diagnostic, Label
from flashwright.lang.format import format_stmt
from flashwright.lang.nodes import (
    Compute,
    Copy,
    Expr,
    For,
    Name,
    Statement,
    Transpose,
    expressions,
    statements,
)
from flashwright.program.program import Key, Program
from flashwright.program.scalars import Unknown, whole
from flashwright.semantics.machine import Machine
from flashwright.semantics.tiles import Tile, Where

Array = NDArray[Any]
Floats = NDArray[np.float64]

# Tiles carry the rounding of their operands. The watch looks for wrong values, not inexact ones.
_LOOSE = {"fp16": 0.05, "bf16": 0.05, "fp8": 0.13}
_SCORE = 2e-3  # scores are sums in fp32: only a tile in 16 bits is that far off
_UNITS = (1.0, float(np.log2(np.e)))  # scores may be scaled for exp or for exp2


class WrongStatement(Exception):
    """Raised at the first wrong statement, with its diagnostic."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__()
        self.diagnostic = diagnostic


class Watch:
    """Observes a machine. `after` raises WrongStatement at the first wrong statement."""

    def __init__(self, program: Program, truth: Truth, block: Mapping[str, int]) -> None:
        self.program, self.truth, self.block = program, truth, block
        self.loose = _LOOSE[truth.spec.dtype]
        self.history: dict[Key, list[Statement]] = {}  # the statements that changed a tile
        self.trail: dict[Key, list[tuple[Statement, Tile]]] = {}  # scores, step by step
        self.masked: dict[Key, Array] = {}  # scores as the mask left them
        self.rescaled: dict[Key, list[Statement]] = {}  # later changes of weights and sums
        self.weighed: list[int] = []  # keys that went through a Softmax
        self.seen: list[int] = []  # keys whose values were added
        self.adding: dict[Key, tuple[Statement, ...]] = {}  # the GEMM, and what made its weights
        self.suspect: WrongStatement | None = None  # wrong, but not yet seen to matter

    def after(self, stmt: Statement, machine: Machine) -> None:
        """Check the tile that a statement changed. Called after every statement."""
        if isinstance(stmt, Copy):
            if stmt.dest == "global":
                self._check_store(stmt, machine)
        elif isinstance(stmt, Compute):
            if _is_verb(stmt, "gemm"):
                self._gemm(stmt, machine)
            elif _is_verb(stmt, "mask", "softmax"):
                self._masked_or_weighed(stmt, machine)
            elif stmt.target is not None:
                self._changed(self._key(stmt.target), stmt, machine)

    def _key(self, arg: Expr) -> Key:
        name = arg.operand if isinstance(arg, Transpose) else arg
        key = self.program.tile(name) if isinstance(name, Name) else None
        assert key is not None
        return key

    def _changed(self, key: Key, stmt: Compute, machine: Machine) -> None:
        tile = machine.cells[key].tile
        self.history.setdefault(key, []).append(stmt)
        weighed = tile.kind is not None and tile.kind.name == "weights"
        if not weighed and key in self.trail:
            self.trail[key].append((stmt, tile))
        self.rescaled.setdefault(key, []).append(stmt)

    def _masked_or_weighed(self, stmt: Compute, machine: Machine) -> None:
        key = self._key(stmt.args[0])
        self.history.setdefault(key, []).append(stmt)
        tile = machine.cells[key].tile
        if _is_verb(stmt, "mask"):
            self.masked[key] = np.asarray(tile.data)
        elif stmt.state:
            self.rescaled[key] = []
            self._check_sum(key, tile, stmt, machine)

    # --- GEMMs ----------------------------------------------------------------------------

    def _gemm(self, stmt: Compute, machine: Machine) -> None:
        assert stmt.target is not None
        key, left = self._key(stmt.target), self._key(stmt.args[0])
        tile, operand = machine.cells[key].tile, machine.cells[left].tile
        if _is_scores(tile):
            self._check_head(tile, machine)
            if stmt.mode != "accumulate":
                self.history[key] = []
            self.history[key].append(stmt)
            self.trail[key] = [(stmt, tile)]  # several products: only their sum is a score
            self.masked.pop(key, None)
        elif _is_scores(operand):
            truth = self.truth.scores(operand)
            if truth is None:
                return
            self._check_weights(left, operand, truth, machine)
            if stmt.mode == "accumulate":
                self.adding[key] = (*self.rescaled.get(left, []), stmt)
                self.rescaled[key] = []
                self._check_accumulator(operand, tile, truth, stmt, machine)

    def _check_head(self, tile: Tile, machine: Machine) -> None:
        """Check that queries meet the keys of their own kv head."""
        head, kv_head = tile.at.get("heads"), tile.at.get("kv_heads")
        if head is None or kv_head is None:
            return
        h, found = whole(head.value), whole(kv_head.value)
        if h is None or found is None or found == self.truth.kv_head(h):
            return
        text = (
            f"query head {h} reads kv head {found} of `{kv_head.tensor}`, "
            f"it belongs to kv head {self.truth.kv_head(h)}"
        )
        raise self._finding_at(kv_head.copy, "FW802", text, machine)

    # --- scores and weights ---------------------------------------------------------------

    def _check_weights(self, key: Key, tile: Tile, truth: Scores, machine: Machine) -> None:
        """Check the weights, up to a factor per row."""
        cols = tile.axes[1]
        assert cols is not None
        found = np.asarray(tile.data, dtype=np.float64)[:, : truth.weights.shape[1]]
        hidden, rows = truth.scores == -np.inf, truth.valid[:, None]
        self._check_mask(key, found, hidden, rows, cols, machine)
        expected = truth.weights * _factor(found, truth.weights)
        most = np.abs(expected).max(axis=1, keepdims=True, initial=0)
        wrong = ~(np.abs(found - expected) <= self.loose * most + 1e-6) & rows
        suspect = self._wrong_score(key, truth, wrong if wrong.any() else rows, cols, machine)
        self.suspect = self.suspect or suspect
        if wrong.any():
            if suspect is not None:
                raise suspect
            place = self._place(machine, key, wrong, cols)
            text = f"the weight of {place} does not match its score and the others of its row"
            raise self._finding_at(self.history[key][-1], "FW802", text, machine)
        self._check_underflow(key, tile, found, truth, machine)

    def _check_mask(
        self, key: Key, found: Floats, hidden: Array, rows: Array, cols: Where, machine: Machine
    ) -> None:
        """Check that keys that the spec hides weigh 0 and that the mask hides no other."""
        shown = hidden & (found != 0) & np.isfinite(found) & rows
        after = self.masked.get(key)
        lost = np.zeros_like(shown)
        if after is not None:
            lost = ~hidden & (after[:, : found.shape[1]] == -np.inf) & rows
        for wrong, fact in ((shown, "hidden"), (lost, "visible")):
            if wrong.any():
                row, col = (int(i) for i in np.argwhere(wrong)[0])
                place = self._place(machine, key, wrong, cols)
                text = f"{place} is {fact} by the spec, but its weight is {found[row, col]:.4g}"
                unmasked = after is not None and after[row, col] == -np.inf and fact == "hidden"
                raise self._finding_at(self._mask_at_fault(key, unmasked), "FW803", text, machine)

    def _mask_at_fault(self, key: Key, unmasked: bool) -> Statement:
        """The statement at fault for a wrong mask: the mask itself, or a later one that unmasked a
        score. Without a mask, the statement that turned the scores into weights."""
        steps = self.history[key]
        masks = [i for i, s in enumerate(steps) if _is_verb(s, "mask")]
        if not masks:
            return steps[-1]
        later = [s for s in steps[masks[-1] + 1 :] if not _is_verb(s, "softmax")]
        return later[0] if unmasked and later else steps[masks[-1]]

    def _wrong_score(
        self, key: Key, truth: Scores, rows: Array, cols: Where, machine: Machine
    ) -> WrongStatement | None:
        """The first step at which the scores depart from the spec's."""
        shown = np.isfinite(truth.scores) & truth.valid[:, None] & rows.any(axis=1, keepdims=True)
        trail = self.trail.get(key, [])
        if not shown.any() or not trail:
            return None
        stage, fits = 0, [0]
        for step in trail:
            stmt, made = step[0], np.asarray(step[1].data, dtype=np.float64)[:, : shown.shape[1]]
            onward = range(stage, len(truth.stages))
            fits = [i for i in onward if _fits_scale(made, truth.stages[i], shown)]
            if not fits:
                break
            stage = fits[-1]
        if fits and stage == len(truth.stages) - 1:
            return None
        off = shown & ~_is_near(made, truth.scores)
        if not off.any():  # nothing but the units differ
            return None
        row, col = (int(i) for i in np.argwhere(off)[0])
        weighing = self._weighing(key, stmt) if fits else None
        text = (
            f"the score of {self._place(machine, key, off, cols)} is {made[row, col]:.6g} "
            f"{'before' if weighing else 'after'} this, the spec's is {truth.scores[row, col]:.6g}"
        )
        return self._finding_at(weighing or stmt, "FW802", text, machine)

    def _weighing(self, key: Key, last: Statement) -> Statement | None:
        """The statement that turns scores into weights, if it may also do a missing step."""
        steps = self.history[key]
        later = steps[steps.index(last) + 1 :]
        found = [s for s in later if not _is_verb(s, "mask")]
        return found[0] if found and not _is_verb(found[0], "softmax") else None

    def _check_underflow(
        self, key: Key, tile: Tile, found: Floats, truth: Scores, machine: Machine
    ) -> None:
        """Report rows whose weights all round to 0 because the maximum is far too large."""
        softmax = next((s for s in self.history[key][::-1] if _is_verb(s, "softmax")), None)
        places = self.truth.rows(tile)
        if not isinstance(softmax, Compute) or not softmax.state or places is None:
            return
        for row, (b, h, q) in enumerate(places):
            if found[row].any() or self.truth.sink(b, h, q) > 1e-3:
                continue
            most = self.truth.head(b, h).weights[q, self.weighed].max(initial=0)
            if most > 0 and truth.weights[row].max(initial=0) > 1e-2 * most:
                text = (
                    f"all weights of row {row} are rounded to 0: `{softmax.state[0].id}` is far "
                    "above every score"
                )
                raise self._finding_at(softmax, "FW804", text, machine, softmax.state[0])

    # --- sums -----------------------------------------------------------------------------

    def _check_sum(self, key: Key, tile: Tile, stmt: Compute, machine: Machine) -> None:
        """Check that the running sum is the sum of the weights so far."""
        truth, places = self.truth.scores(tile), self.truth.rows(tile)
        if truth is None or places is None:
            return
        self.weighed += [int(k) for k in truth.keys]
        cols = tile.axes[1]
        assert cols is not None
        if self.suspect is None:
            self.suspect = self._wrong_score(key, truth, truth.valid[:, None], cols, machine)
        found = np.asarray(tile.data, dtype=np.float64)[:, : truth.weights.shape[1]]
        factor = _factor(found, truth.weights)
        total = np.asarray(machine.cells[self._key(stmt.state[1])].tile.data, dtype=np.float64)
        for row, (b, h, q) in enumerate(places):
            weights = self.truth.head(b, h).weights[q, self.weighed]
            expected = factor[row, 0] * (weights.sum() + self.truth.sink(b, h, q))
            if not 1e-30 < expected < np.inf:
                continue
            if not abs(total[row] - expected) <= self.loose * expected and self.suspect is None:
                text = (
                    f"row {row} of `{stmt.state[1].id}` is {total[row]:.6g} after this step, the "
                    f"weights seen so far sum to {expected:.6g}"
                )
                self.suspect = self._finding_at(stmt, "FW804", text, machine, *stmt.state)

    def _check_accumulator(
        self, weights: Tile, tile: Tile, truth: Scores, stmt: Compute, machine: Machine
    ) -> None:
        """Check that the accumulator is the weighted sum of the values so far."""
        places = self.truth.rows(tile)
        if places is None:
            return
        self.seen += [int(k) for k in truth.keys]
        data = np.asarray(weights.data, np.float64)[:, : truth.weights.shape[1]]
        factor = _factor(data, truth.weights)
        for row, (b, h, q) in enumerate(places):
            if not factor[row, 0] > 0:
                continue
            v = self.truth.value(b, h)[self.seen]
            weight = factor[row, 0] * self.truth.head(b, h).weights[q, self.seen]
            expected, scale = weight @ v, weight @ np.abs(v)
            found = np.asarray(tile.data[row], dtype=np.float64)
            off = ~(np.abs(found - expected) <= self.loose * scale + 1e-6)
            if off.any():
                col = int(np.argmax(off))
                text = (
                    f"row {row}, column {col} of the sum is {found[col]:.6g} after this step, "
                    f"expected {expected[col]:.6g}"
                )
                assert stmt.target is not None
                raise self._finding_at(stmt, "FW804", text, machine, stmt.target)

    def _check_store(self, stmt: Copy, machine: Machine) -> None:
        """Check the stored rows. At fault is an earlier suspect, else a key that was never added,
        else a statement after the sum."""
        key, name = self.program.source(stmt), self.program.dest(stmt)[0]
        tile, steps = machine.cells[key].tile, self.history.get(key, [])
        places, answer = self._stored_rows(machine), self.truth.answer(name)
        if places is None or answer is None or not steps:
            return
        for row, place in enumerate(places):
            expected = np.atleast_1d(answer[place])
            found = np.atleast_1d(np.asarray(tile.data[row], dtype=np.float64))
            near = np.abs(found - expected) <= self.loose * (1 + np.abs(expected))
            same = np.where(np.isfinite(expected), near, found == expected)
            if same.all():
                continue
            if self.suspect is not None:
                raise self.suspect
            self._check_missed_keys(place, stmt, machine)
            col = int(np.argmin(same))
            text = (
                f"row {row} of `{name}` is {found[col]:.6g} after this, "
                f"expected {expected[col]:.6g}"
            )
            b, h, q = place
            empty = not self.truth.head(b, h).weights[q].any()
            also = self._operands(steps[-1]) if empty else ()  # they have their start values yet
            read = [self._key(n) for n in self._operands(steps[-1])]
            before = (*self.adding.get(key, ()), *self.rescaled.get(key, []))
            before += tuple(machine.cells[k].writer for k in read if k != key)
            raise self._finding_at(steps[-1], "FW804", text, machine, *also, before=before)

    def _stored_rows(self, machine: Machine) -> list[tuple[int, int, int]] | None:
        """Batch, head and query of each row that the last store wrote, from its addresses."""
        name, region, stmt = machine.stores[-1]
        axes = self.program.tensors[name].axes
        at = {a.label: start for a, (start, _) in zip(axes, region, strict=True)}
        if self.program.paged(stmt):
            return self._stored_in_pages(name, machine)
        rank = len(self.program.buffers[self.program.source(stmt)].shape)
        label, (_, size) = axes[-rank].label, region[-rank]
        if not {"B", "H", "L"} <= at.keys() or label not in ("L", "G"):
            return None
        shape = self.truth.inputs["Q"].shape
        if label == "L":
            return [(at["B"], at["H"], q) for q in range(at["L"], min(at["L"] + size, shape[2]))]
        group = self.truth.spec.group
        heads = range(at["H"] * group + at["G"], at["H"] * group + min(at["G"] + size, group))
        return [(at["B"], h, at["L"]) for h in heads]

    def _stored_in_pages(self, name: str, machine: Machine) -> list[tuple[int, int, int]] | None:
        """The same where a page is the heads of a group, at one query."""
        labels, group = [a.label for a in self.program.tensors[name].axes], self.truth.spec.group
        if not {"B", "H", "L", "G"} <= set(labels):
            return None
        found = []
        for region in machine.last_stored:
            at = dict(zip(labels, region, strict=True))
            (b, _), (h, _), (q, queries), (g, heads) = (at[x] for x in "BHLG")
            members = itertools.product(range(q, q + queries), range(g, g + heads))
            found += [(b, h * group + member, query) for query, member in members]
        return found

    def _check_missed_keys(
        self, place: tuple[int, int, int], store: Copy, machine: Machine
    ) -> None:
        """Report a key that the row sees and that no iteration added."""
        b, h, q = place
        missed = set(np.flatnonzero(np.isfinite(self.truth.head(b, h).scores[q])))
        missed -= set(self.seen)
        for loop in statements(self.program.tree.body):
            if not missed or not isinstance(loop, For):
                continue
            adds = [s for s in statements(loop.body) if _is_verb(s, "gemm")]
            if adds:
                text = f"key {min(missed)} is visible to query {q}, but this loop never adds it"
                found = self._finding_at(loop, "FW804", text, machine).diagnostic
                also = (Label(store.span, "stored here"), *self.program.guard(adds[-1]))
                raise WrongStatement(replace(found, secondary=(*found.secondary, *also)))

    def _operands(self, stmt: Statement) -> tuple[Name, ...]:
        args = stmt.args if isinstance(stmt, Compute) else ()
        names = [e for a in args for e in expressions(a) if isinstance(e, Name)]
        return tuple(n for n in names if self.program.tile(n) is not None)

    # --- words ----------------------------------------------------------------------------

    def _place(self, machine: Machine, key: Key, wrong: Array, cols: Where) -> str:
        """The first wrong element of a tile, as query and key and as row and column."""
        row, col = (int(i) for i in np.argwhere(wrong)[0])
        rows = machine.cells[key].tile.axes[0]
        first = rows.start if rows is not None and not isinstance(rows.start, Unknown) else 0
        start = 0 if isinstance(cols.start, Unknown) else cols.start
        what = "query" if rows is not None and rows.label == "L" and not rows.group else "row"
        return f"{what} {first + row}, key {start + col} (row {row}, column {col} of the tile)"

    def _finding_at(
        self,
        stmt: Statement,
        code: str,
        text: str,
        machine: Machine,
        *held: Name,
        before: Sequence[Statement] = (),
    ) -> WrongStatement:
        """The finding at a statement. `held` are tiles whose start value may be wrong, `before`
        steps that may share the fault."""
        rounds = ", ".join(f"{f.var.id} = {machine.env.get(f.var.id)}" for f in machine.loops)
        where = problem(self.block, self.truth.dims) + (f", {rounds}" if rounds else "")
        hint = f"first wrong at `{format_stmt(stmt)}`"
        also = list(self.program.definitions(stmt, params=isinstance(stmt, Compute)))
        for name in held:
            first = self.history.get(self._key(name), [])
            if first and first[0] is not stmt:
                also.append(Label(first[0].span, f"`{name.id}` starts here"))
        also += [Label(s.span, "this step may share the fault") for s in before if s is not stmt]
        return WrongStatement(Diagnostic(code, text, stmt.span, where, tuple(also), hint))


def problem(block: Mapping[str, int], dims: Mapping[str, int]) -> str:
    """A problem and a thread block in words."""
    sizes = [f"{d} = {dims[d]}" for d in ("q_len", "kv_len") if d in dims]
    return ", ".join([*sizes, *(f"{k} = {v}" for k, v in block.items())])


def _is_scores(tile: Tile) -> bool:
    return len(tile.axes) == 2 and tile.axes[1] is not None and tile.axes[1].label == "L"


def _factor(found: Floats, weights: Floats) -> Floats:
    """The factor between two rows of weights, from the largest true weight of each."""
    if not weights.shape[1]:
        return np.zeros((len(weights), 1))
    best = weights.argmax(axis=1)[:, None]
    top = np.take_along_axis(weights, best, axis=1)
    return np.where(top > 0, np.take_along_axis(found, best, axis=1) / np.where(top > 0, top, 1), 0)


def _is_near(made: Floats, true: Floats) -> Array:
    with np.errstate(invalid="ignore"):
        near: Array = np.abs(made - true) <= _SCORE * (1 + np.abs(true))
    return near


def _fits_scale(made: Floats, true: Floats, shown: Array) -> bool:
    return any(bool((_is_near(made, unit * true) | ~shown).all()) for unit in _UNITS)


def _is_verb(stmt: Statement, *verbs: str) -> bool:
    return isinstance(stmt, Compute) and stmt.operation in verbs
