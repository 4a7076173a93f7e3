"""One differential test: a TL program, the problems it runs on, and the recipe that made it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FuzzCase:
    """A program for one GPU with its problems."""

    gpu: str
    text: str
    problems: tuple[Mapping[str, int], ...]
    seed: int = 0
    inputs: str = "normal"
    """The distribution of the inputs (inputs.py)."""
    spread: float = 1.0
    """Standard deviation of Q: scores then spread by about 1.5."""
    tags: tuple[str, ...] = ()
    """The features that the generator chose, for the coverage counts."""
    choices: tuple[int, ...] = field(default=(), repr=False)
    spoilt: bool = False
    """Whether the text was edited to be slightly invalid (spoil.py)."""
    sparing: bool = False
    """Whether to use the sparing translation, which needs fewer registers."""

    def settings(self) -> dict[str, Any]:
        """All but the text, as plain data."""
        return {
            "gpu": self.gpu,
            "seed": self.seed,
            "inputs": self.inputs,
            "spread": self.spread,
            "spoilt": self.spoilt,
            "sparing": self.sparing,
            "problems": [dict(p) for p in self.problems],
            "tags": list(self.tags),
            "choices": list(self.choices),
        }


def save(case: FuzzCase, path: Path, comment: str) -> None:
    """Write the program with a comment as its first line, and its settings as JSON beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"// {comment}\n{case.text}", encoding="utf-8")
    settings = json.dumps(case.settings(), indent=1) + "\n"
    path.with_suffix(".json").write_text(settings, encoding="utf-8")


def load(path: Path) -> FuzzCase:
    """Read a case that `save` wrote, without its comment."""
    known = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    problems = tuple(known.pop("problems"))
    tags, choices = tuple(known.pop("tags")), tuple(known.pop("choices"))
    first, _, rest = path.read_text(encoding="utf-8").partition("\n")
    text = rest if first.startswith("//") else f"{first}\n{rest}"
    return FuzzCase(text=text, problems=problems, tags=tags, choices=choices, **known)
