"""What of the trial on a GPU can be tested without one: the oracle, the problems, plain words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from flashwright.author.builtin.variants import make_spec
from flashwright.build import driver
from flashwright.cli.main import app
from flashwright.judge import flash, inputs, oracle, oracle_device
from flashwright.judge.cpu import default_cases
from flashwright.judge.judge import judge
from flashwright.judge.offences import offence
from flashwright.judge.problems import problems
from flashwright.judge.verdict import Case, Verdict
from flashwright.lang.diagnostic import Failed
from flashwright.sandbox.candidate import Candidate

needs_no_gpu = pytest.mark.skipif(driver.missing() is None, reason="there is a GPU here")
LENGTHS = [(1, 1), (70, 70), (257, 100), (100, 257), (3, 0)]
SPECS: list[tuple[str, dict[str, Any]]] = [
    ("gqa", {}),
    ("gqa", {"causal": True, "dtype": "bf16"}),
    ("gqa", {"window": 30}),
    ("gqa", {"window": 30, "causal": True, "dtype": "fp8"}),
    ("gqa", {"softcap": 5.0, "alibi": True, "causal": True}),
    ("gqa", {"sink": True, "causal": True}),
    ("mla", {}),
    ("nsa-compressed", {}),
    ("nsa-selected", {}),
]


@pytest.mark.parametrize(("variant", "options"), SPECS, ids=str)
def test_the_oracle_on_the_device_says_what_the_oracle_says(
    variant: str, options: dict[str, Any]
) -> None:
    spec = make_spec(variant, **options)
    lengths = LENGTHS[:-1] if spec.branch else LENGTHS
    for dims in default_cases(spec, lengths):
        given = inputs.make_inputs(spec, dims, 1)
        expected = oracle.attention(spec, given, dims)
        found = oracle_device.attention(np, spec, given, dims)
        for name in ("O", "LSE"):
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-12, atol=1e-12)


def test_long_rows_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec("gqa", causal=True, alibi=True)
    (dims,) = default_cases(spec, [(50, 70)])
    given = inputs.make_inputs(spec, dims, 0)
    whole = oracle_device.attention(np, spec, given, dims)
    monkeypatch.setattr(oracle_device, "_ROWS", 16)
    parts = oracle_device.attention(np, spec, given, dims)
    np.testing.assert_allclose(parts["O"], whole["O"], rtol=1e-12)
    np.testing.assert_allclose(parts["LSE"], whole["LSE"], rtol=1e-12)


def test_the_problems_have_the_lengths_and_several_batches_and_heads() -> None:
    found = [p.dims for p in problems(make_spec("gqa"), 0)]
    pairs = {(d["q_len"], d["kv_len"]) for d in found}
    assert {(n, n) for n in (1, 63, 128, 1000, 4097)} <= pairs
    assert any(q < k for q, k in pairs)
    assert any(q > k for q, k in pairs)
    assert {0, 1, 2, 3, 5} <= {d["batch"] for d in found}
    assert max(d["batch"] * d["heads"] for d in found) > 1024
    assert max(k for _, k in pairs) > 65536
    heads = {(d["heads"], d["kv_heads"]) for d in found if d["kv_len"] <= 4097}
    assert len(heads) >= 3
    assert all(q == 4 * kv for q, kv in heads)
    assert (32, 8) in heads  # the operator's own
    assert {p.dims["kv_heads"] for p in problems(make_spec("mqa"), 0)} == {1}
    assert all("tokens" in p.dims for p in problems(make_spec("nsa-compressed"), 0))
    assert {p.kind for p in problems(make_spec("mha"), 0)} == set(inputs.KINDS)


def test_the_seed_decides_the_shapes_that_nobody_saw() -> None:
    spec = make_spec("gqa")
    one, same, other = ([p.dims for p in problems(spec, s)] for s in (1, 1, 2))
    assert one == same
    assert one != other


def test_which_library_errors_are_no_yardstick() -> None:
    assert flash.unable(make_spec("gqa", softcap=30.0, alibi=True, window=10)) is None
    assert "fp8" in (flash.unable(make_spec("gqa", dtype="fp8")) or "")
    assert flash.unable(make_spec("nsa-selected"))
    assert flash.unable(make_spec("mha", head_dim=512))


def test_a_verdict_in_words_and_as_data() -> None:
    good = oracle.Comparison(True, "", relative_rms=3e-3)
    case = Case({"q_len": 1, "kv_len": 1}, "normal", "O", good, 2e-3)
    told: dict[str, Any] = {"spec": make_spec("gqa"), "seed": 5, "cases": (case,)}
    found = Verdict("folder", "Some GPU", "sm_90", **told)
    assert found.ok
    assert found.worst_ratio == pytest.approx(1.5)
    assert "at most 1.50 times" in str(found)
    wrong = Verdict("folder", "Some GPU", "sm_90", **told, offences=(offence("replay", "old"),))
    assert not wrong.ok
    assert "rejected: replay" in str(wrong)
    record = json.loads(json.dumps(wrong.record()))
    assert record["ok"] is False
    assert record["offences"] == [{"name": "replay", "code": "FW869", "message": "old"}]
    assert record["seed"] == 5


@pytest.mark.parametrize(
    ("arch", "able"),
    [
        *((name, True) for name in ("sm_75", "sm_89", "sm_90", "sm_90a")),
        *((name, False) for name in ("sm_80a", "sm_100", "sm_100a", "gfx90a")),
    ],
)
def test_what_a_card_can_run(arch: str, able: bool) -> None:
    assert driver.Card(0, "NVIDIA H200", (9, 0)).takes(arch) is able


@needs_no_gpu
def test_without_a_gpu_there_is_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(Failed) as failed:
        judge(Candidate.package(tmp_path), make_spec("gqa"))
    assert [d.code for d in failed.value.diagnostics] == ["FW851"]


@needs_no_gpu
@pytest.mark.parametrize("command", [["verify", "FOLDER"], ["bench", "--as", "a100"]])
def test_the_commands_say_so_and_why(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text('variant = "x"\n')
    done = CliRunner().invoke(app, [str(tmp_path) if c == "FOLDER" else c for c in command])
    assert done.exit_code == 2
    assert "error[FW851]: no GPU can be used here" in done.stderr
    assert "driver" in done.stderr


@pytest.mark.parametrize(
    ("files", "words"),
    [({}, "FW852"), (None, "FW857")],
    ids=["empty", "missing"],
)
def test_what_is_no_package_is_refused(
    files: dict[str, str] | None, words: str, tmp_path: Path
) -> None:
    folder = tmp_path if files is not None else tmp_path / "nothing"
    done = CliRunner().invoke(app, ["verify", str(folder)])
    assert done.exit_code == 2
    assert words in done.stderr
