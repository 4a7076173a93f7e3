"""The notebook runs from top to bottom without a GPU; what a notebook shows is HTML, escaped."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from flashwright.build import toolchain
from flashwright.judge.verdict import Check, Offence, Verdict
from flashwright.lang.diagnostic import Diagnostic
from flashwright.spec import AttentionSpec

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tour.ipynb"
EVIL = "<script>alert(1)</script>"


def shown(cell: str, names: dict[str, Any]) -> Any:
    """Run a cell; the value of the expression at its end, as a notebook shows it."""
    body = ast.parse(cell).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.mark.slow
@pytest.mark.skipif(not toolchain.has_nvcc(), reason="there is no CUDA compiler")
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    found = [shown("".join(c["source"]), names) for c in cells if c["cell_type"] == "code"]
    pages = [value._repr_html_() for value in found if hasattr(value, "_repr_html_")]
    assert "FW607" in pages[0]
    assert "mask_ignored" in pages[1]
    assert "FW837" in {d.code for d in names["done"].diagnostics}


def test_a_verdict_shows_what_speaks_against_the_kernel() -> None:
    finding = Diagnostic("FW853", f"O is wrong {EVIL}", help="look at the mask")
    verdict = Verdict(
        candidate=EVIL,
        device="cpu",
        arch="",
        spec=AttentionSpec.make(variant="mha"),
        seed=1,
        cases=(),
        checks=(Check("agrees", "every output agrees", False),),
        offences=(Offence("wrong", "O is wrong", finding),),
    )
    for page in (verdict._repr_html_(), finding._repr_html_()):
        assert "<script" not in page
        assert "&lt;script&gt;" in page
        assert "O is wrong" in page
    assert "<td>no</td><td>every output agrees</td>" in verdict._repr_html_()
    assert "look at the mask" in finding._repr_html_()
