"""`generate --backward`: its stages, by the built-in author and by a scripted model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashwright import spec as specs
from flashwright.author.builtin.variants import make_spec
from flashwright.author.llm.budget import Budget
from flashwright.author.llm.connect import connect
from flashwright.author.llm.transcript import FOLDER, Transcript
from flashwright.build import toolchain
from flashwright.check.check import check
from flashwright.cli.main import app
from flashwright.generate import pipeline
from flashwright.generate.by_model.ask import Authors, StageAuthor
from flashwright.generate.state import Run
from flashwright.gpu import find
from flashwright.lang.parse import parse
from tests.unit.llm_server import Server, say, serve
from tests.unit.test_by_model import Nobody, fenced

CARD = find("a100")
SPEC = make_spec("gqa", heads=4, kv_heads=2, head_dim=64, dtype="bf16").differentiated()
OPTIONS = ("gqa", "--gpu", "a100", "--heads", "4", "--kv-heads", "2", "--head-dim", "64")


@pytest.fixture(autouse=True)
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes are the first that fit: nothing is compiled for them."""
    monkeypatch.setattr(toolchain, "has_nvcc", lambda: False)


def test_its_stages(tmp_path: Path) -> None:
    run = pipeline.generate(SPEC, CARD, tmp_path, Nobody(), last="translate")
    assert run.ok, run.failed
    assert specs.load(tmp_path / "spec.toml") == SPEC
    assert len(check(parse((tmp_path / "code.tl").read_text()), CARD).kernels) == 3
    for step in ("1", "2", "3"):
        assert (tmp_path / step / "kernel.cu").is_file()
    assert json.loads((tmp_path / "steps.json").read_text())["zeroed"] == ["dQsum"]
    result = json.loads((tmp_path / "result.json").read_text())
    assert {case["output"] for case in result["cpu"]} == {"dQ", "dK", "dV"}
    assert list(result["others"]) == ["1", "2", "3"]
    assert [choice["name"] for choice in result["parameters"]] == ["BM", "BN", "Warps", "stages"]
    assert "forward.tl" in result["artefacts"]


def test_a_forward_takes_its_place(tmp_path: Path) -> None:
    """Nothing of the backward pass stays: with steps.json the package would be read as one."""
    pipeline.generate(SPEC, CARD, tmp_path, Nobody(), last="check")
    assert (tmp_path / "steps.json").is_file()
    pipeline.generate(SPEC.attention(), CARD, tmp_path, Nobody(), last="check")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"spec.toml", "sketch.tl", "code.tl", "reasoning.md", "result.json"}


def test_the_command(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    done = CliRunner().invoke(
        app, ["generate", *OPTIONS, "--backward", "--until", "check", "--out", out]
    )
    assert done.exit_code == 0, done.output
    assert specs.load(Path(out, "spec.toml")).backward


@pytest.mark.parametrize(
    "more", [("--no-lse",), ("--model", "m", "--improve", "2"), ("--translate", "m")]
)
def test_what_it_does_not_have(more: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["generate", *OPTIONS, "--backward", *more])
    assert done.exit_code == 2
    assert "not with --backward" in done.output


def test_what_has_no_backward_is_told_at_its_line(tmp_path: Path) -> None:
    spec = make_spec("nsa-selected", head_dim=64, dtype="bf16").differentiated()
    run = pipeline.generate(spec, CARD, tmp_path, Nobody(), last="check")
    assert not run.ok
    assert [(f.file, f.diagnostic.code) for f in run.failed] == [("forward.tl", "FW908")]


def by_model(server: Server, folder: Path) -> Run:
    model = connect("m", server.url, env={"OPENAI_API_KEY": ""})
    authors = Authors(Transcript(folder / FOLDER), {"code": StageAuthor(model, "m", Budget(3))})
    authors.begin(SPEC, CARD)
    return pipeline.generate(SPEC, CARD, folder, Nobody(), authors, last="cpu")


@pytest.mark.usefixtures("checked_here")
def test_a_model_writes_it(tmp_path: Path) -> None:
    """It gets the forward, the derived backward and the formulas; a wrong program is sent back."""
    plain = pipeline.generate(SPEC, CARD, tmp_path / "plain", Nobody(), last="parameters")
    code = plain.artefacts["code.tl"]
    wrong = code.replace("dK_register * Scale", "dK_register * Scale * 2")
    assert wrong != code
    with serve([say(fenced(wrong)), say(fenced(code))]) as server:
        run = by_model(server, tmp_path / "model")
    assert run.ok, run.failed
    asked = server.requests[0].text
    for text in ("dS[q, k] = P[q, k] * (dP[q, k] - Delta[q])", "any order; dK and dV must"):
        assert text in asked
    for name in ("forward.tl", "derived.tl"):
        assert json.dumps(plain.artefacts[name].rstrip())[1:-1] in json.dumps(asked)
    assert "FW802" in server.requests[1].text
    assert (tmp_path / "model" / "code.tl").read_text() == code
    assert len(run.programs) == 3
