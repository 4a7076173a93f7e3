"""Rounds of `generate --improve` with a scripted model: a real gain is kept, a real loss is not."""

from __future__ import annotations

import json
import re
from pathlib import Path

from flashwright import gpu as gpus
from flashwright.author.builtin.variants import make_spec
from flashwright.author.llm.budget import Budget
from flashwright.author.llm.connect import connect
from flashwright.author.llm.transcript import FOLDER, Transcript
from flashwright.generate import pipeline
from flashwright.generate.by_model.ask import Authors, StageAuthor
from flashwright.generate.by_model.speed import Stopwatch
from flashwright.generate.replay import replay
from flashwright.judge.judge import judge
from flashwright.sandbox.candidate import Candidate
from tests.gpu.made import code_of
from tests.unit.llm_server import say, serve
from tests.unit.test_by_model import Nobody

SPEC = make_spec("mha", heads=16, head_dim=64, causal=True, dtype="bf16")
GPU = "a100"  # every newer card takes its PTX


def test_a_gain_is_kept_a_loss_is_not_and_the_package_stays_right(tmp_path: Path) -> None:
    good = code_of(SPEC, GPU)
    narrow = re.sub(r"(param BN = )\d+", r"\g<1>16", good)
    assert narrow != good
    wrong = good.replace("1 / sqrt(HeadDim)", "1 / HeadDim")
    folder = tmp_path / "run"
    script = [say(f"```tl\n{code}```") for code in (narrow, wrong, good, narrow)]
    with serve(script) as server:
        model = connect("m", server.url, env={"OPENAI_API_KEY": ""})
        code = StageAuthor(model, "m", Budget(1, None))
        rounds = StageAuthor(model, "m", Budget(3, None))
        watch = Stopwatch(peers=list)
        transcript = Transcript(folder / FOLDER)
        authors = Authors(transcript, {"code": code, "improve": rounds}, stopwatch=watch)
        authors.begin(SPEC, gpus.find(GPU))
        run = pipeline.generate(SPEC, gpus.find(GPU), folder, Nobody(), authors)
        questions = [request.text for request in server.requests]
    assert run.ok, run.failed
    told = json.loads((folder / "result.json").read_text())["asked"]["improve"]
    assert [one["kept"] for one in told["rounds"]] == [False, True, False], told
    assert "not right" in told["rounds"][0]["why"]
    assert "slower" in told["rounds"][2]["why"]
    assert (folder / "code.tl").read_text() == good
    assert "TFLOPS" in questions[1]
    assert "times as fast as the built-in author's kernel" in questions[1]
    before, after = told["before"]["times"]["4096"], told["after"]["times"]["4096"]
    assert after["seconds"] < before["seconds"]
    # What was kept is the built-in author's program: as fast as that, and right.
    (ratio,) = told["after"]["times_as_fast_as"].values()
    assert 0.8 < ratio < 1.25  # that one is compiled for the card at hand, ours by its driver
    assert judge(Candidate.package(folder), SPEC, seed=1).ok
    again = replay(folder, tmp_path / "again", Nobody())
    assert again.same, again.lines
