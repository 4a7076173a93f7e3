"""The benchmark on a GPU: that it measures what it says, and takes nobody's word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flashwright.author.builtin.variants import make_spec
from flashwright.build import driver
from flashwright.cli.main import app
from flashwright.judge import oracle, oracle_device
from flashwright.measure import ceilings, peers
from flashwright.measure.bench import ContestDependencies, bench, problem_of
from flashwright.measure.contest import Contestant
from flashwright.measure.grid import Cell
from flashwright.measure.journal import Journal, read
from flashwright.measure.peers import registry
from flashwright.measure.records import OURS, AbsentRecord, NumberRecord, RunRecord
from flashwright.measure.results import Results
from flashwright.sandbox.candidate import Candidate, Unable
from flashwright.sandbox.limits import Limits
from flashwright.sandbox.problem import inputs_of
from flashwright.sandbox.process import Sandbox

CELL = ["--variant", "mha", "--head-dim", "64", "--length", "1024", "--mask", "causal"]
OWN = Path(__file__).with_name("bench_peers.py")


def test_one_cell_and_its_receipt(tmp_path: Path) -> None:
    out = tmp_path / "bench"
    options = ["--as", "a100", *CELL, "--peers", "flash,naive", "--out", str(out)]
    done = CliRunner().invoke(app, ["bench", *options])
    assert done.exit_code == 0, done.output
    assert "against torch flash: geometric mean" in done.output
    found = Results.of(read(out))
    assert {who for _, who in found.numbers} == {OURS, "torch flash", "naive torch"}
    for number in found.numbers.values():
        assert 1 < number.tflops < 2000
        assert number.checked >= 2
        assert number.spread < 0.2
    assert found.run is not None
    assert 50 < found.run.matmul["bf16"] < 3000
    assert found.run.copy_gbs is not None
    assert 100 < found.run.copy_gbs < 10_000
    again = CliRunner().invoke(app, ["bench", *options, "--resume"])
    assert again.exit_code == 0, again.output
    assert len(read(out)) == 5
    checked = CliRunner().invoke(app, ["receipt", "check", str(out), "--within", "0.2"])
    assert checked.exit_code == 0, checked.output
    assert "1 holds" in checked.output


def test_nsa_as_a_whole_is_timed_and_compared_by_the_blocks_that_it_chose(tmp_path: Path) -> None:
    cell = ["--table", "9", "--variant", "nsa", "--length", "2048"]
    out = tmp_path / "bench"
    done = CliRunner().invoke(app, ["bench", *cell, "--peers", "naive,fla", "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = Results.of(read(out))
    assert {who for _, who in found.numbers} >= {OURS, "naive torch"}
    (kernel,) = found.kernels.values()
    assert kernel.verdict["ok"]
    assert sum(name.endswith("kernel.cu") for name in kernel.others) >= 6


Line = NumberRecord | AbsentRecord


def measured(*functions: str, length: int = 4096) -> dict[str, Line]:
    """Contestants of bench_peers.py in one cell."""
    spec = make_spec("mha", heads=16, head_dim=128, causal=True, dtype="bf16")
    who = [Contestant(f, Candidate("python", str(OWN), f, title=f), 1.0, True) for f in functions]
    return run_cell(Cell(spec, length, 4), who)


def run_cell(cell: Cell, who: list[Contestant]) -> dict[str, Line]:
    card = driver.cards()[0]
    run = RunRecord(
        id="test",
        started="",
        title="test",
        card=card.name,
        arch=card.arch,
        translated_for="",
        layout="bshd",
        contestants=tuple(one.name for one in who),
        cells=(cell.name,),
        environment={},
        seed=1,
    )
    journal = Journal(Path("nowhere"), [run], put=lambda path, at, data: None)
    limits = Limits(seconds=6)
    dependencies = ContestDependencies(
        make=lambda candidate, spec: Sandbox(candidate, spec, limits=limits)
    )
    bench(run, [cell], who, journal, dependencies=dependencies)
    lines = [r for r in journal.records if isinstance(r, NumberRecord | AbsentRecord)]
    return {line.who: line for line in lines}


def test_a_contestant_is_timed_by_what_it_takes() -> None:
    found = measured("honest", "twice")
    once, twice = found["honest"], found["twice"]
    assert isinstance(once, NumberRecord)
    assert isinstance(twice, NumberRecord)
    # The second call finds its inputs in the L2, so a little less than twice.
    assert twice.seconds / once.seconds == pytest.approx(2, rel=0.15)


def test_cheats_and_those_who_end_have_no_number_and_the_others_do() -> None:
    found = measured("honest", "wrong", "replay", "hidden", "hangs", "crashes")
    offences = {who: line.offence for who, line in found.items() if line.record == "absent"}
    assert offences.pop("wrong") in ("wrong", "too_fast")
    assert offences.pop("replay") in ("replay", "too_fast")
    assert offences.pop("hidden") in ("hidden_work", "too_fast", "wrong")
    assert offences == {"hangs": "hang", "crashes": "crash"}
    assert isinstance(found["honest"], NumberRecord)


def test_the_ceilings_are_near_the_cards_own() -> None:
    found = ceilings.measure(["fp16", "bf16"])
    assert set(found.matmul) == {"fp16", "bf16"}
    known = ceilings.ceiling_of(driver.cards()[0].name, make_spec("mha", dtype="bf16"), found)
    assert known is not None
    for rate in found.matmul.values():
        assert 0.3 < rate * 1e12 / known.flops < 1.0
    assert found.copy_gbs is not None
    assert 0.5 < found.copy_gbs * 1e9 / known.bandwidth < 1.0


SPECS = (
    make_spec("mha", heads=4, causal=True),
    make_spec("gqa", heads=8, kv_heads=2, dtype="bf16"),
    make_spec("gqa", heads=8, kv_heads=2, causal=True, window=100),
    make_spec("gqa", heads=8, kv_heads=2, window=100),
    make_spec("gqa", heads=8, kv_heads=2, softcap=5.0, causal=True),
    make_spec("gqa", heads=8, kv_heads=2, alibi=True, causal=True),
    make_spec("gqa", heads=8, kv_heads=2, sink=True, causal=True),
    make_spec("mla", heads=4, causal=True),
    make_spec("nsa-compressed", heads=16, kv_heads=1),
    make_spec("nsa-selected", heads=16, kv_heads=1),
    make_spec("nsa-window", heads=16, kv_heads=1),
    make_spec("mha", heads=4, causal=True, dtype="fp8"),
)


def name_of(spec: Any) -> str:
    extra = {k for k in ("causal", "window", "softcap", "alibi", "sink") if getattr(spec, k)}
    return "-".join([spec.variant, spec.dtype, *sorted(extra)])


@pytest.mark.parametrize("peer", registry.BUILT_IN, ids=lambda p: p.key)
@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_a_peer_is_right_or_says_why_not(peer: registry.Peer, spec: Any) -> None:
    import torch

    cell = Cell(spec, 512, 2)
    problem = problem_of(cell, "bshd", 3)
    inputs = inputs_of(problem, 3)
    why, found = "", None
    try:
        call = getattr(peers, peer.candidate.function)(spec)
        with torch.no_grad():
            found = call(*inputs.values())
    except Unable as error:
        why = str(error)
    except (AssertionError, RuntimeError):
        if not peer.module:
            raise
        no_number(peer, cell)
        return
    if found is None:
        assert len(why) > 8  # more than a shrug
        pytest.skip(why)
    right = oracle_device.attention(torch, spec, inputs, {"tokens": 512})["O"]
    tolerance = peer.slack * oracle.RMS_LIMIT * oracle.ROUNDOFF[spec.dtype]
    result = oracle.compare(found.float().cpu().numpy(), right.cpu().numpy(), spec.dtype, tolerance)
    if not result.ok and peer.module:
        no_number(peer, cell)
        return
    assert result.ok, result.reason


def no_number(peer: registry.Peer, cell: Cell) -> None:
    """Some builds of a package lack what others have, and say so when called, or not at all. The
    benchmark then has no number for it, and says why."""
    (line,) = run_cell(cell, [Contestant(peer.name, peer.candidate, peer.slack, False)]).values()
    assert isinstance(line, AbsentRecord)
    assert len(line.why) > 8
