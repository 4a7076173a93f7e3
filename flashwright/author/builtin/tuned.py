"""Measured choices: the fastest tilings that `flashwright tune` found, by GPU, element type,
widths, mask and score options.

The table is tuned.json beside this file; `flashwright tune --write-defaults` adds to it. A workload
in the table gets the measured tiling; the cost model decides for all others.

The fastest tiling depends on the length. So a workload has one main choice, and may have further
ones for `up_to` so many keys.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flashwright.author.builtin.needs import Tiling, Workload, count
from flashwright.gpu import Gpu

MADE_BY = "flashwright tune --write-defaults"
PARAMS = ("BM", "BN", "Stages", "Warps", "QStages")
Key = tuple[str, tuple[str, ...], int, int, bool, tuple[str, ...]]


class Choice(BaseModel):
    """One line of the table: a workload, its measured tiling and the number of keys it serves."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    gpu: str
    dtypes: tuple[str, ...]
    qk_dim: int
    v_dim: int
    causal: bool
    beyond: tuple[str, ...] = ()
    """Additions to plain attention: options, a `window`, the `sinks` before it; `wide_scores`
    have a number in fp32 each."""
    up_to: int | None = Field(None, ge=1)
    """The most keys it serves; None for the main choice, which serves all other lengths."""
    bm: int = Field(alias="BM")
    bn: int = Field(alias="BN")
    stages: int = Field(alias="Stages")
    warps: int = Field(alias="Warps")
    q_stages: int = Field(1, alias="QStages")
    off: tuple[str, ...] = ()
    """The schedule params that are off."""
    tried: int | None = None
    """The number of tilings that were timed; None if unknown."""
    lengths: tuple[int, int] | None = None
    """The fewest and the most keys of the measurement."""
    evidence: str = Field("", pattern="^[0-9a-f]*$")
    """The digest of the tuning that it is from, which lies in a folder beside the table; older
    choices have none."""

    @property
    def key(self) -> Key:
        """The workload it is for, without the length."""
        return self.gpu, self.dtypes, self.qk_dim, self.v_dim, self.causal, self.beyond

    @property
    def tiling(self) -> Tiling:
        """The tiling in the form of the cost model."""
        return Tiling(self.bm, self.bn, self.stages, self.warps, self.q_stages, self.off)

    @property
    def reason(self) -> str:
        """Such as `measured on the H200: fastest of 14 tilings at 512 to 16384 keys`."""
        text = f"measured on the {self.gpu.upper()}: fastest"
        text += f" of {count(self.tried, 'tiling')}" if self.tried else " of those tried"
        if self.lengths is not None:
            low, high = self.lengths
            return f"{text} at {high} keys" if low == high else f"{text} at {low} to {high} keys"
        return text if self.up_to is None else f"{text} up to {self.up_to} keys"

    def serves(self, workload: Workload, gpu: Gpu) -> bool:
        """Whether it was measured for such a workload: options take registers, and other masks may
        need other tiles."""
        w = workload
        return (
            self.beyond == beyond(w)
            and w.q_len == w.kv_len
            and w.rows_fixed is None
            and w.cols_fixed is None
            and w.kv_dtype is None
            and self.gpu == gpu.name
            and w.dtype in self.dtypes
            and (self.qk_dim, self.v_dim, self.causal) == (w.qk_dim, w.v_dim, w.causal)
        )


def beyond(workload: Workload) -> tuple[str, ...]:
    """What a workload has beyond plain attention, in a fixed order."""
    more = {
        "window": workload.window is not None,
        "sinks": workload.sinks > 0,
        "score_bytes": workload.score_bytes > 0,
        "wide_scores": workload.score_bytes > 2,
        "key_vectors": workload.key_vectors > 0,
        "listed": workload.listed is not None,
    }
    return (*sorted(workload.options), *(name for name, there in more.items() if there))


def find(workload: Workload, gpu: Gpu, keys: int | None = None) -> Choice | None:
    """The main choice for a workload, or that for so many keys; None if it was not measured."""
    main = next((c for c in _shipped() if c.up_to is None and c.serves(workload, gpu)), None)
    if main is None or keys is None:
        return main
    return next((c for c in further(main) if c.up_to is not None and keys <= c.up_to), main)


def further(main: Choice) -> list[Choice]:
    """The choices for shorter lengths beside a main one, ascending."""
    return [c for c in _shipped() if c.up_to is not None and c.key == main.key]


def read(text: str) -> list[Choice]:
    """The choices of a table, ascending for each key. Raises ValueError if it is not valid."""
    data: dict[str, Any] = json.loads(text)
    choices = _ordered(_choice(n, one) for n, one in enumerate(data["choices"], 1))
    _complete(choices)
    return choices


def dump(choices: Iterable[Choice]) -> str:
    """A table of choices, a line each."""
    lines = [
        "    " + json.dumps(c.model_dump(mode="json", by_alias=True, exclude_defaults=True))
        for c in _ordered(choices)
    ]
    rows = ",\n".join(lines)
    return f'{{\n  "made by": {json.dumps(MADE_BY)},\n  "choices": [\n{rows}\n  ]\n}}\n'


def _choice(number: int, one: object) -> Choice:
    try:
        return Choice.model_validate(one)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"choice {number}: {where}: {first['msg']}") from None


def _ordered(choices: Iterable[Choice]) -> list[Choice]:
    """Order the choices by key and length, the main one last, like the rules of a package."""
    return sorted(choices, key=lambda c: (c.key, c.up_to is None, c.up_to or 0))


def _complete(choices: list[Choice]) -> None:
    """Check that every length has exactly one choice; ValueError otherwise."""
    counts = Counter((c.key, c.up_to) for c in choices)
    for (key, up_to), times in counts.items():
        if times > 1:
            which = "without up_to" if up_to is None else f"up_to {up_to}"
            raise ValueError(f"{_words(key)}: there are {times} choices {which}")
        if (key, None) not in counts:
            text = f"up_to {up_to} has no choice without up_to beside it, for more keys"
            raise ValueError(f"{_words(key)}: {text}")


def _words(key: Key) -> str:
    gpu, dtypes, qk_dim, v_dim, causal, beyond = key
    mask = "causal" if causal else "full"
    return " ".join((gpu, "+".join(dtypes), f"{qk_dim}/{v_dim}", mask, *beyond))


@cache
def _shipped() -> tuple[Choice, ...]:
    file = resources.files("flashwright.author.builtin") / "tuned.json"
    return tuple(read(file.read_text(encoding="utf-8")))
