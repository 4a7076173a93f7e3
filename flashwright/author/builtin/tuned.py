"""Measured choices: what `flashwright tune` found fastest, by GPU, element type, widths and mask.

The table is tuned.json beside this file; `flashwright tune --write-defaults` adds to it. A plain
workload that it has is given the measured tiling; all others are left to the cost model.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from flashwright.author.builtin.cost import Tiling, Workload, count
from flashwright.gpu import Gpu

MADE_BY = "flashwright tune --write-defaults"
PARAMS = ("BM", "BN", "Stages", "Warps", "QStages")


class Choice(BaseModel):
    """One line of the table."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    gpu: str
    dtypes: tuple[str, ...]
    qk_dim: int
    v_dim: int
    causal: bool
    bm: int = Field(alias="BM")
    bn: int = Field(alias="BN")
    stages: int = Field(alias="Stages")
    warps: int = Field(alias="Warps")
    q_stages: int = Field(1, alias="QStages")
    off: tuple[str, ...] = ()
    """Schedule params that are 0."""
    tried: int | None = None
    """How many tilings were timed; None where that was not kept."""
    lengths: tuple[int, int] | None = None
    """The fewest and the most keys."""

    @property
    def key(self) -> tuple[str, tuple[str, ...], int, int, bool]:
        """What it is the choice for."""
        return self.gpu, self.dtypes, self.qk_dim, self.v_dim, self.causal

    @property
    def tiling(self) -> Tiling:
        """As the cost model has it."""
        return Tiling(self.bm, self.bn, self.stages, self.warps, self.q_stages, self.off)

    @property
    def reason(self) -> str:
        """Such as `measured on the H200: fastest of 14 tilings at 512 to 16384 keys`."""
        text = f"measured on the {self.gpu.upper()}: fastest"
        text += f" of {count(self.tried, 'tiling')}" if self.tried else " of those tried"
        if self.lengths is not None:
            text += " at {} to {} keys".format(*self.lengths)
        return text

    def serves(self, workload: Workload, gpu: Gpu) -> bool:
        """Whether it was measured for such work: options take registers, and other walks over the
        keys other tiles."""
        w = workload
        plain = w.window is None and not w.options and w.q_len == w.kv_len
        return (
            plain
            and w.rows_fixed is None
            and w.cols_fixed is None
            and self.gpu == gpu.name
            and w.dtype in self.dtypes
            and (self.qk_dim, self.v_dim, self.causal) == (w.qk_dim, w.v_dim, w.causal)
        )


def find(workload: Workload, gpu: Gpu) -> Choice | None:
    """The measured choice for a workload, where there is one."""
    return next((c for c in _shipped() if c.serves(workload, gpu)), None)


def read(text: str) -> list[Choice]:
    """The choices of a table; ValueError where it is none."""
    data: dict[str, Any] = json.loads(text)
    return [Choice.model_validate(one) for one in data["choices"]]


def dump(choices: list[Choice]) -> str:
    """A table of choices, a line each."""
    lines = [
        "    " + json.dumps(c.model_dump(mode="json", by_alias=True, exclude_defaults=True))
        for c in sorted(choices, key=lambda c: c.key)
    ]
    rows = ",\n".join(lines)
    return f'{{\n  "made by": {json.dumps(MADE_BY)},\n  "choices": [\n{rows}\n  ]\n}}\n'


@cache
def _shipped() -> tuple[Choice, ...]:
    file = resources.files("flashwright.author.builtin") / "tuned.json"
    return tuple(read(file.read_text(encoding="utf-8")))
