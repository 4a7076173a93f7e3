"""The layout of the package: imports follow the order of docs/architecture.md, without circles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "flashwright"
ENTRIES = ("__init__", "__main__")
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def order() -> list[str]:
    """The layers, as the first table of docs/architecture.md lists them."""
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    cells = re.findall(r"^\| ((?:`\w+(?:\.py|/)`(?:, )?)+) \|", page.split("\n## ")[0], re.M)
    return [name for cell in cells for name in re.findall(r"`(\w+)", cell)]


def layer(module: str) -> str:
    return (module.split(".")[1:] or ["__init__"])[0]


@cache
def imported(path: Path) -> frozenset[str]:
    """The modules of ours that a file imports: at its top, in a function, for annotations."""
    return frozenset(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flashwright"):
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if inner in FILES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (n.name for n in node.names if n.name.startswith("flashwright"))


def test_imports_go_one_way() -> None:
    known = order()
    assert set(known) == {layer(m) for m in FILES} - set(ENTRIES) | {"device"}
    wrong = [
        f"{module} imports {other}"
        for module, path in FILES.items()
        if layer(module) not in ENTRIES
        for other in imported(path)
        if layer(other) not in known[: known.index(layer(module)) + 1]
    ]
    assert wrong == []


def test_there_are_no_import_circles() -> None:
    graph = {module: {m for m in imported(path) if m != module} for module, path in FILES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_every_folder_says_what_lives_there() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("__init__.py")
        if not ast.get_docstring(ast.parse(path.read_text("utf-8")))
    ]
    assert silent == []


def test_nothing_below_the_author_knows_a_variant() -> None:
    names = ("mha", "gqa", "mqa", "mla", "nsa")
    folders = ("lang", "program", "semantics", "check", "lower", "build", "untrusted", "emulate")
    wrong = [
        f"{path.relative_to(ROOT)}: {node.value!r}"
        for folder in (*folders, "sandbox", "judge")
        for path in (PACKAGE / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and str(node.value).lower() in names
    ]
    assert wrong == []
