"""Probes of which keys a candidate reads: change one key, and see which rows change.

A masked key must change no bit of the output's row (or, if the spec lets two runs differ, no more
than that). A visible key whose change moves the true output must move the candidate's. This finds a
wrong mask, a dropped tail or a wrong group of heads, whatever the tolerance. The rows of a backward
pass are those of dQ.
"""

from __future__ import annotations

import numpy as np

from flashwright.judge import oracle, sequences
from flashwright.judge.problems import SHARED, Problem, sizes
from flashwright.judge.trial import Outcome, Trial
from flashwright.sandbox.process import Called
from flashwright.sandbox.tensors import Array, bits
from flashwright.spec import AttentionSpec

LENGTHS = (75, 203)
"""Neither is a multiple of a tile's size, and there are keys before the first query."""
FEW, BEYOND, FARTHEST = 33, 90, 8192
"""A window longer than LENGTHS is probed with FEW queries and BEYOND more keys than the window. One
wider than FARTHEST is not probed."""
PROBES = 6
PUSH = 8.0  # how far V moves: far beyond rounding, even with a small weight
VARIES = 4.0  # units of a row's RMS beyond which a row has moved, where two runs may differ
SHOWS = 8.0  # roundoffs of a row's RMS from which a change must show


MOVED = ("KV", "V", "K")
"""The tensors that change at a key, in turn: who looks at one of them only has an old answer."""


def probed(spec: AttentionSpec, seed: int, whole_groups: bool = False) -> Problem:
    """The problem whose keys are changed."""
    most = spec.group if whole_groups else SHARED
    return Problem({**spec.dims, **sizes(spec, *_lengths(spec), 2, 2, most)}, "normal", seed)


def probe(trial: Trial, spec: AttentionSpec, problem: Problem) -> Outcome:
    """Change keys one at a time: the last, the first, and some between them."""
    rng = np.random.default_rng([problem.seed, 1])
    outcome = Outcome(problem)
    drawn, name = trial.form.inputs(problem, None), _rows_in(spec)
    made = trial.expected.inputs(drawn, problem.dims, problem.seed)
    expected = trial.expected.outputs(made, problem.dims)
    shapes = trial.form.outputs(problem, expected)
    before = trial.sandbox.call(trial.form.taken(made), shapes, trial.form.dims(problem))
    if name not in before.outputs or before.outputs[name].array.shape != expected[name].shape:
        return outcome
    for number, place in enumerate(_places(spec, made, rng)):
        names = "K" if spec.latent else MOVED[number % len(MOVED)]
        moved = _changed(spec, drawn, names, place)
        changed = trial.expected.inputs(moved, problem.dims, problem.seed)
        after = trial.sandbox.call(trial.form.taken(changed), shapes, trial.form.dims(problem))
        wanted = trial.expected.outputs(changed, problem.dims)[name]
        _watch(outcome, spec, place, made, (expected[name], wanted), (before, after))
    return outcome


def _places(
    spec: AttentionSpec, made: dict[str, Array], rng: np.random.Generator
) -> list[tuple[int, int, int]]:
    """Batch, kv head and key of those that are changed: every batch and head in turn."""
    if spec.batch is None:
        counts = [made["K"].shape[2]] * len(made["K"])
    else:
        counts = [sequences.keys(made, b) for b in range(sequences.count(made))]
    most = max(counts)
    some = rng.choice(most, min(PROBES, most), replace=False)
    edge = spec.sink_tokens or 0  # the first key that is no sink token, and the last that is one
    edges = [key for key in (edge, edge - 1) if 0 < edge < most]
    chosen = dict.fromkeys([most - 1, 0, *edges, *(int(k) for k in some)])
    heads = made["K"].shape[0 if made["K"].ndim == 3 else 1]
    turns = rng.permutation([*np.ndindex(len(counts), heads)])
    found = []
    for number, key in enumerate(chosen):
        b, g = (int(n) for n in turns[number % len(turns)])
        b = b if counts[b] else int(np.argmax(counts))
        found.append((b, g, min(key, counts[b] - 1)))
    return found


def _rows_in(spec: AttentionSpec) -> str:
    """The output whose rows belong to queries."""
    return "dQ" if spec.backward else "O"


def _lengths(spec: AttentionSpec) -> tuple[int, int]:
    """q_len and kv_len at which a window hides keys."""
    if spec.window is None or not LENGTHS[1] <= spec.window <= FARTHEST:
        return LENGTHS
    return FEW, spec.window + (spec.sink_tokens or 0) + BEYOND


def _changed(
    spec: AttentionSpec, made: dict[str, Array], names: str, place: tuple[int, int, int]
) -> dict[str, Array]:
    changed = {name: array.copy() for name, array in made.items()}
    at = place if spec.batch is None else sequences.key(made, *place)
    for name in names:
        row = changed[name][at].astype(np.float64)
        moved = row + PUSH if name == "V" else -row
        if changed[name].dtype == np.int8:  # V goes to the other end
            moved = np.where(row > 0, -127, 127) if name == "V" else np.minimum(moved, 127)
        changed[name][at] = moved.astype(changed[name].dtype)
    return changed


def _watch(
    outcome: Outcome,
    spec: AttentionSpec,
    place: tuple[int, int, int],
    made: dict[str, Array],
    truth: tuple[Array, Array],
    calls: tuple[Called, Called],
) -> None:
    b, g, key = place
    outcome.ask("mask")
    scale = np.sqrt(np.mean(truth[0] ** 2, axis=-1)) + 1e-30
    moved = _moved(spec, calls, scale)
    sees = _seen(spec, outcome.problem, made, place)
    where = f"key {key} of batch {b}, kv head {g}"
    ghosts = np.argwhere(moved & ~sees)
    if len(ghosts):
        at = tuple(int(i) for i in ghosts[0])
        text = f"{where} is masked for {len(ghosts)} rows whose output changes with it"
        outcome.blame("mask_ignored", f"{text}, the first (batch, head, query) {at}")
    unit = oracle.ROUNDOFF[spec.dtype] * SHOWS
    change = np.abs(truth[0] - truth[1])
    should = (change.max(axis=-1) > unit * scale) & sees
    if not spec.repeats(_rows_in(spec)):  # twice what counts as moved
        should = (np.sqrt(np.mean(change**2, axis=-1)) > 2 * VARIES * _unit(spec) * scale) & sees
    missing = np.argwhere(should & ~moved)
    if len(missing):
        at = tuple(int(i) for i in missing[0])
        text = f"{where} is visible for {len(missing)} rows whose output does not change with it"
        outcome.blame("key_ignored", f"{text}, the first (batch, head, query) {at}")


def _moved(spec: AttentionSpec, calls: tuple[Called, Called], scale: Array) -> Array:
    """Which rows (batch, heads, q_len) differ between two calls; `scale` is the RMS of each."""
    one, two = (call.outputs[_rows_in(spec)].array for call in calls)
    if spec.repeats(_rows_in(spec)):
        other: Array = (bits(one) != bits(two)).any(axis=-1)
        return other
    apart = one.astype(np.float64) - two.astype(np.float64)
    return np.asarray(np.sqrt(np.mean(apart**2, axis=-1)) > VARIES * _unit(spec) * scale)


def _unit(spec: AttentionSpec) -> float:
    """The RMS difference that two runs may have, if the spec lets them differ."""
    given = spec.tolerance
    return oracle.ROUNDOFF[spec.dtype] if given is None else given / oracle.RMS_LIMIT


def _seen(
    spec: AttentionSpec, problem: Problem, made: dict[str, Array], place: tuple[int, int, int]
) -> Array:
    """Which rows (batch, heads, q_len) see a key; of packed queries (heads, tokens)."""
    b, g, key = place
    sees = np.zeros(made["Q"].shape[:-1], np.bool_)
    if spec.batch is not None:
        alone = Problem({}, problem.kind, problem.seed)
        one = sequences.one(made, b)
        sees[sequences.rows(made, b)] = _seen(spec.each, alone, one, (0, g, key))[0]
        return sees
    group = made["Q"].shape[1] // made["K"].shape[1]
    for head in range(g * group, (g + 1) * group):
        scores = oracle.weights(spec, made, problem.dims, b, head).scores
        sees[b, head] = scores[:, key] > -np.inf
    return sees
