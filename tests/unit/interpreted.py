"""Programs of tl_attention.py run with NumPy and compared with attention written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flashwright.check.check import check
from flashwright.lang.diagnostic import Diagnostic
from flashwright.lang.fix import apply
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.semantics.interpret import interpret
from tests.unit.tl_attention import program

LENGTHS = ((70, 100), (64, 96), (1, 33), (130, 40), (40, 200))
Array = Any
Scores = Callable[[Array, dict[str, Array], dict[str, int]], Array]


def agrees(text: str, inputs: Callable[..., dict[str, Array]], scores: Scores) -> None:
    """The program gives the softmax of what `scores` makes of Q K^T / sqrt(d), -inf where masked.

    `inputs(rng, dims)` gives the tensors beside Q, K and V, or others in their place.
    """
    made = program(text)
    assert parse(format_tree(made.tree)) == made.tree
    for q_len, kv_len in LENGTHS:
        dims = {"batch": 2, "heads": 2, "kv_heads": 2, "q_len": q_len, "kv_len": kv_len}
        rng = np.random.default_rng(q_len)
        given = {
            name: rng.standard_normal((2, 2, length, 64)).astype(np.float16)
            for name, length in (("Q", q_len), ("K", kv_len), ("V", kv_len))
        }
        given |= inputs(rng, dims)
        found = interpret(made, given, dims)["O"].astype(np.float64)
        exact = {name: array.astype(np.float64) for name, array in given.items()}
        plain = exact["Q"] @ exact["K"].swapaxes(-1, -2) / 8
        expected = softmax(scores(plain, given, dims)) @ exact["V"]
        np.testing.assert_allclose(found, expected, atol=4e-3)


def softmax(scores: Array) -> Array:
    """Rows that sum to 1, or are all 0 where everything is masked."""
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total > 0, total, 1)


def errors(text: str) -> list[Diagnostic]:
    """What the checker has against a program."""
    return list(check(parse(text)).errors)


def mended(text: str, found: Diagnostic) -> str:
    """The program after the fix of a finding, which it must have."""
    source, count = apply(text, [found])
    assert count == 1
    return source


def only_error(text: str, code: str) -> Diagnostic:
    """The one thing that the checker has against a program."""
    (found,) = errors(text)
    assert found.code == code, found
    return found
