"""A run with a real model from the command line to its report: llama.cpp on loopback, one thread.

The model is far too small to write TL that is right. Under the bounded grammar it writes TL all the
same, and the run must come to its end and say truly what it found.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashwright.author.llm.budget import Budget
from flashwright.author.llm.connect import connect
from flashwright.cli.main import app
from flashwright.generate.by_model.ask import StageAuthor, _grammar
from flashwright.lang.gbnf import gbnf
from flashwright.lang.parse import parse
from tests.unit.llm_server import serve, status
from tests.unit.local_model import Local

GENERATE = ["generate", "mha", "--gpu", "a100", "--causal", "--head-dim", "64"]


@pytest.mark.local
@pytest.mark.slow  # it reads 2,500 tokens first: about two minutes
def test_a_tiny_model_writes_a_sketch_and_the_run_says_what_is_wrong(
    local_model: Local, tmp_path: Path
) -> None:
    asked = ["--sketch", local_model.model, "--base-url", local_model.base_url]
    options = ["--attempts", "1", "--bounded-grammar", "--out", str(tmp_path)]
    told = CliRunner().invoke(app, [*GENERATE, *asked, *options], env={"NO_COLOR": "1"})
    assert told.exit_code == 1, told.output
    assert "Traceback" not in told.output
    assert "the budget of 1 attempts is used up" in told.output

    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ok"] is False
    assert result["claimed"] == []
    found = [finding["code"] for finding in result["findings"]]
    assert found[-1] == "FW913"
    assert len(found) > 1  # what is wrong with the sketch
    assert result["asked"]["sketch"]["tokens"] > 2000
    assert result["asked"]["sketch"]["attempts"] == [1]

    kept = tmp_path / "model" / "sketch.1.01"
    exchange = json.loads((kept / "exchange.json").read_text())
    assert exchange["question"]["grammar"] == gbnf("sketch", bounded=True)
    assert exchange["reply"]["usage"]["counted"]
    written = (tmp_path / "sketch.tl").read_text()
    assert parse(written).level == "sketch"  # TL, by the grammar
    assert written.strip() in exchange["reply"]["text"]
    assert json.loads((kept / "outcome.json").read_text())["taken"] is False


@pytest.mark.parametrize(("option", "bounded"), [([], False), (["--bounded-grammar"], True)])
def test_a_server_that_takes_grammars_gets_one(
    option: list[str], bounded: bool, tmp_path: Path
) -> None:
    env = {"NO_COLOR": "1", "OPENAI_API_KEY": ""}
    sent = []
    for owner in ("llamacpp", "somebody"):
        with serve([status(404)], owned_by=owner) as server:
            asked = ["--sketch", "m", "--base-url", server.url, "--attempts", "1"]
            out = ["--out", str(tmp_path / owner)]
            CliRunner().invoke(app, [*GENERATE, *asked, *out, *option], env=env)
        sent.append(server.requests[0].body.get("grammar"))
    assert sent == [gbnf("sketch", bounded), None]


def test_no_grammar_for_cuda() -> None:
    with serve([], owned_by="llamacpp") as server:
        who = StageAuthor(connect("m", server.url, env={}), "m", Budget())
        assert _grammar("translate", who) is None
        assert _grammar("code", who) == gbnf("code")
