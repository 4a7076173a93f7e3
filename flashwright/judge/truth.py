"""The true contents of a program's tiles, from the positions of their rows and columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwright.judge import oracle
from flashwright.program.scalars import Unknown, whole
from flashwright.semantics.tiles import Tile, Where
from flashwright.spec import AttentionSpec

Array = NDArray[Any]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """The true values for one tile of scores, without keys past the end."""

    scores: Floats
    """After scale, softcap and bias; -inf where the spec hides the key."""
    weights: Floats
    """exp(score - the greatest score of the whole row)."""
    valid: Array
    """Which rows of the tile exist."""
    stages: tuple[Floats, ...]
    """The products, then the scores after each step of the spec."""
    keys: Array


class Truth:
    """fp64 attention on the inputs of one problem, tile by tile."""

    def __init__(
        self, spec: AttentionSpec, inputs: Mapping[str, Array], dims: Mapping[str, int]
    ) -> None:
        self.spec, self.inputs, self.dims = spec, inputs, dims
        self._heads: dict[tuple[int, int], oracle.Weights] = {}
        self._answer: dict[str, Floats] | None = None

    def rows(self, tile: Tile) -> list[tuple[int, int, int]] | None:
        """Batch, head and query of each row of a tile that exists; None if they are unknown."""
        axis = tile.axes[0]
        if axis is None or isinstance(axis.start, Unknown):
            return None
        count = min(axis.size, axis.extent - axis.start)
        found = [self._row(tile, axis, axis.start + row) for row in range(count)]
        return None if None in found else [f for f in found if f is not None]

    def _row(self, tile: Tile, rows: Where, position: int) -> tuple[int, int, int] | None:
        at = {dim: whole(place.value) for dim, place in tile.at.items()}
        b = at.get("batch")
        if b is None:
            return None
        if rows.group:  # of each query the heads of a group
            kv_head, (q, member) = at.get("kv_heads"), divmod(position, rows.group)
            h = None if kv_head is None else kv_head * rows.group + member
        elif rows.label == "L":
            h, q = at.get("heads"), position
        else:  # rows are the heads of a group, at one position
            kv_head, found = at.get("kv_heads", 0), at.get("q_len")
            if kv_head is None or found is None:
                return None
            h, q = kv_head * self.spec.group + position, found
        return None if h is None else (b, h, q)

    def head(self, b: int, h: int) -> oracle.Weights:
        """Scores and weights of a whole head."""
        if (b, h) not in self._heads:
            self._heads[b, h] = oracle.weights(self.spec, self.inputs, self.dims, b, h)
        return self._heads[b, h]

    def kv_head(self, h: int) -> int:
        """The kv head that a query head reads."""
        heads, kv_heads = self.inputs["Q"].shape[1], self.inputs["K"].shape[1]
        return h * int(kv_heads) // int(heads)

    def sink(self, b: int, h: int, q: int) -> float:
        """The sink's weight relative to the row's greatest score; 0 without one."""
        if not self.spec.sink:
            return 0.0
        top = self.head(b, h).scores[q].max(initial=-np.inf)
        return float(np.exp(float(self.inputs["Sink"][h]) - top)) if top > -np.inf else np.inf

    def scores(self, tile: Tile) -> Scores | None:
        """The true values of a tile of scores or weights; None if its positions are unknown."""
        cols, places = tile.axes[1], self.rows(tile)
        if cols is None or isinstance(cols.start, Unknown) or places is None:
            return None
        keys = np.arange(cols.start, min(cols.start + cols.size, cols.extent))
        shape = (tile.shape[0], len(keys))
        scores, weights, products = np.full(shape, -np.inf), np.zeros(shape), np.zeros(shape)
        scales = np.ones((tile.shape[0], 1))
        for row, (b, h, q) in enumerate(places):
            head = self.head(b, h)
            scores[row], weights[row] = head.scores[q, keys], head.weights[q, keys]
            k = self.inputs["K"][b, self.kv_head(h)][keys].astype(np.float64)
            products[row] = k @ self.inputs["Q"][b, h, q].astype(np.float64)
            scales[row] = self._scale("K", b, h)
        valid = np.arange(tile.shape[0]) < len(places)
        stages = self._stages(products * scales, scores)
        own = (products,) if self.spec.kv_dtype is not None else ()
        return Scores(scores, weights, valid, (*own, *stages), keys)

    def _scale(self, name: str, b: int, h: int) -> float:
        """The factor of K's or V's elements for a query head."""
        scales = self.inputs.get(f"{name}Descale")
        return 1.0 if scales is None else float(scales[b, self.kv_head(h)])

    def _stages(self, products: Floats, scores: Floats) -> tuple[Floats, ...]:
        scaled = products * self.spec.softmax_scale
        if self.spec.softcap is None:
            return (products, scaled, scores) if self.spec.alibi else (products, scores)
        capped = self.spec.softcap * np.tanh(scaled / self.spec.softcap)
        return (products, scaled, capped, scores) if self.spec.alibi else (products, scaled, scores)

    def value(self, b: int, h: int) -> Floats:
        """V of the kv head that a query head reads."""
        values: Floats = self.spec.values(self.inputs)[b, self.kv_head(h)].astype(np.float64)
        return values

    def answer(self, name: str) -> Floats | None:
        """A whole output of the oracle by name; None for a name it does not have."""
        if self._answer is None:
            self._answer = oracle.attention(self.spec, self.inputs, self.dims)
        return self._answer.get(name)
