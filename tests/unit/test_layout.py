"""The layout of the package: data flows one way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "flashwright"
# A module may import those before it, and its own.
ORDER = (
    *("spec", "gpu", "lang", "files", "confine", "apart", "check", "interpret", "author", "lower"),
    *(
        "build",
        "sandbox",
        "emulate",
        "judge",
        "measure",
        "selftest",
        "report",
        "run",
        "folder",
        "stages",
    ),
    *("speed", "asking", "kernel_by_model", "tl_by_model", "improve", "pipeline", "replay"),
    *("study", "fuzz", "cli"),
)
FILES = sorted(PACKAGE.rglob("*.py"))


def layer(path: Path) -> str | None:
    top = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return None if top in ("__init__", "__main__") else top


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    own = layer(path)
    if own is None:
        return
    allowed = set(ORDER[: ORDER.index(own) + 1])
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flashwright"):
            parts = (node.module or "").split(".")
            names = [parts[1]] if len(parts) > 1 else [a.name for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name.split(".")[1] for a in node.names if a.name.startswith("flashwright.")]
        for name in names:
            assert name in allowed or name == "__version__", f"{own} must not import {name}"


@pytest.mark.parametrize(
    "folder", ["lang", "check", "lower", "build", "emulate", "sandbox", "judge"]
)
def test_nothing_below_the_author_knows_a_variant(folder: str) -> None:
    names = ("mha", "gqa", "mqa", "mla", "nsa")
    for path in (PACKAGE / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value.lower() not in names, f"{path.name}: {node.value!r}"
