"""The ways from an operator to a kernel that a study compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flashwright.generate.by_model.ask import Authors
from flashwright.generate.pipeline import STAGES, WITHOUT_SKETCH, Stage
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.study import direct, pytorch

LEVELS: Mapping[str, str] = {
    "sketch": "sketch valid",
    "code": "code valid",
    "cpu": "right on the CPU",
    "compiles": "compiles",
    "right": "right",
}
"""The levels that a sample may reach, in order."""


@dataclass(frozen=True)
class Way:
    """A way from an operator to a kernel: its stages, its levels and its plan."""

    name: str
    title: str
    asked: tuple[str, ...]
    """The stages that the model is asked for."""
    levels: tuple[str, ...]
    """The LEVELS that exist on this way."""
    plan: Callable[[Authors], Sequence[Stage]]
    """The stages of a run, in order."""


def _usual(authors: Authors) -> Sequence[Stage]:
    return STAGES


def _without_sketch(authors: Authors) -> Sequence[Stage]:
    return WITHOUT_SKETCH


_EVERY = tuple(LEVELS)
WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        Way("tl", "sketch, code, kernel", ("sketch", "code", "translate"), _EVERY, _usual),
        Way(
            "no-sketch",
            "code straight from the operator, kernel",
            ("code", "translate"),
            _EVERY[1:],
            _without_sketch,
        ),
        Way("direct", "CUDA straight from the operator", ("direct",), _EVERY[3:], direct.plan),
        Way("pytorch", "a PyTorch function", ("pytorch",), _EVERY[4:], pytorch.plan),
    )
}


def chosen(text: str) -> tuple[Way, ...]:
    """The ways of a list such as `tl,direct`. Raises Failed if one does not exist."""
    names = dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in WAYS]
    if unknown or not names:
        what = f"there is no way {unknown[0][:40]!r}" if unknown else "a study needs a way"
        raise Failed(Diagnostic("FW902", what, help=f"there are {', '.join(WAYS)}"))
    return tuple(WAYS[name] for name in names)
