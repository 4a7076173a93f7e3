"""NSA as a whole in the benchmark: what it is compared with, its choice of blocks, its package."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashwright.build import driver
from flashwright.build.cache import Cache
from flashwright.generate import store
from flashwright.generate.folder import RESULT
from flashwright.judge import nsa as whole
from flashwright.judge import oracle
from flashwright.measure import kernels, module_verdict, receipt, spot
from flashwright.measure.bench import Contest, problem_of
from flashwright.measure.contest import Contestant
from flashwright.measure.grid import Cell
from flashwright.measure.journal import Journal
from flashwright.measure.kernels import KernelBuild
from flashwright.measure.records import OURS, AbsentRecord, NumberRecord
from flashwright.measure.session import BenchPlan, session
from flashwright.measure.tables import TABLES, whole_nsa
from flashwright.measure.timing import Rules
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.problem import inputs_of
from flashwright.spec import AttentionSpec, BadSpec, parse, parse_inline
from tests.unit.measure_fakes import (
    H200,
    Behaviour,
    Quiet,
    Workshop,
    World,
    peer,
    run_record,
    verdict,
)

torch = pytest.importorskip("torch")
from flashwright.measure.peers import naive_torch  # noqa: E402
from flashwright.measure.peers.nsa import _Fla  # noqa: E402
from flashwright.sparse import contestant  # noqa: E402

SMALL = {"heads": 8, "kv_heads": 2, "head_dim": 32, "block": 16, "stride": 16, "top_k": 5}
SPEC = whole_nsa("fp16").model_copy(update={**SMALL, "selected_block": 16, "window": 20})
CELL = Cell(SPEC, 200, 1)
PROBLEM = problem_of(CELL, "bshd", 3)
SEED = 5


def given() -> dict[str, Any]:
    return inputs_of(PROBLEM, SEED, "cpu")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot, "inputs_of", lambda problem, seed: inputs_of(problem, seed, "cpu"))


def compared(out: Any, blocks: Any, head: int, slack: float = 1.0) -> oracle.Comparison:
    """As the benchmark compares what it fetched of a call."""
    idx = blocks[0, head // SPEC.group].numpy().astype(np.int32)
    right = spot.expected(PROBLEM, SEED, 0, head, None, idx, slack)
    limit = None if slack == 1 else slack * oracle.RMS_LIMIT * oracle.ROUNDOFF["fp16"]
    return oracle.compare(out[0, head].float().numpy(), right, "fp16", limit)


@pytest.mark.parametrize(("call", "slack"), [(contestant._call, 1.0), (naive_torch, 4.0)])
def test_ours_and_naive_pytorch_are_right_by_the_blocks_that_they_chose(
    call: Any, slack: float, on_cpu: None
) -> None:
    out, blocks = call(SPEC)(*given().values())
    for name, found in zip(PROBLEM.outputs, (out, blocks), strict=True):
        assert tuple(found.shape) == PROBLEM.outputs[name][0]
    assert all(compared(out, blocks, head, slack).ok for head in (0, 3, 7))
    assert not compared(out.roll(1, 2), blocks, 3, slack).ok


def test_an_output_of_other_blocks_than_those_named_is_wrong(on_cpu: None) -> None:
    inputs = given()
    _, blocks = contestant._call(SPEC)(*inputs.values())
    gates = [inputs[name] for name in whole.GATES.values()]
    rows = (inputs[name].transpose(1, 2) for name in "QKV")
    fewer = torch.where(torch.arange(SPEC.top_k) < 4, blocks.transpose(1, 2), -1)
    sizes = (SPEC.top_k, SPEC.block, SPEC.window)
    other = contestant.nsa(*rows, *gates, fewer, *sizes).transpose(1, 2)
    assert not compared(other, blocks, 0).ok


ROW = 190  # in the 12th block; blocks 0, 10 and 11 are always read, two of nine others chosen


def lightest(row: Any, order: list[int]) -> None:
    row[3] = order[0]


def twice(row: Any, order: list[int]) -> None:
    row[3] = row[4]


def without_the_one_before(row: Any, order: list[int]) -> None:
    row[2] = order[0]


def few(row: Any, order: list[int]) -> None:
    row[4] = -1


def ahead(row: Any, order: list[int]) -> None:
    row[4] = 12


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lightest, "blocks that are lighter"),
        (twice, "a block twice"),
        (without_the_one_before, "its own block, the one before"),
        (few, "another number"),
        (ahead, "another number"),
    ],
)
def test_a_wrong_choice_is_named(change: Any, why: str, on_cpu: None) -> None:
    _, blocks = contestant._call(SPEC)(*given().values())
    idx = blocks[0, 1].numpy().copy()
    assert set(idx[ROW][:3]) == {11, 0, 10}
    change(idx[ROW], by_weight())
    with pytest.raises(whole.WrongChoice, match=f"query {ROW} .*{why}"):
        spot.expected(PROBLEM, SEED, 0, 5, None, idx)


def by_weight() -> list[int]:
    """The blocks between which that query chooses, the lightest first, by fp64."""
    weight = weights()
    return sorted(range(1, 10), key=lambda n: float(weight[n]))


def weights() -> Any:
    inputs = given()
    means = whole.means(inputs["K"].double(), SPEC.block)[:, 1:2]
    return whole.weights(torch, SPEC, inputs["Q"][:, 4:].double(), means, slice(ROW, ROW + 1))[0]


def test_of_two_blocks_either_may_be_chosen_if_rounding_decides(on_cpu: None) -> None:
    _, blocks = contestant._call(SPEC)(*given().values())
    *_, after, last, first = by_weight()
    idx, weight = blocks[0, 1].numpy().copy(), weights()
    assert set(idx[ROW][3:]) == {first, last}
    idx[ROW][3:] = first, after
    units = float(1 - weight[after] / weight[last]) / oracle.ROUNDOFF["fp16"]
    spot.expected(PROBLEM, SEED, 0, 5, None, idx, 1.01 * units / whole.TIES)
    with pytest.raises(whole.WrongChoice, match="lighter"):
        spot.expected(PROBLEM, SEED, 0, 5, None, idx, 0.99 * units / whole.TIES)


# --- in a run ---------------------------------------------------------------------------------

CELLS = [cell for cell in TABLES[9].cells() if cell.kernel.startswith("nsa d128")][:2]


def measured(world: World) -> dict[str, Any]:
    candidates = {CELLS[0].kernel: Candidate("python", "call.py", "attention", title=OURS)}
    who = [Contestant(OURS, candidates, watched=True), Contestant("fla", peer("fla").candidate)]
    contest = Contest(run_record(CELLS, "fla"), who, Rules(seconds=0), world.dependencies())
    return {line.who: line for line in contest.measure(CELLS[0])}


def test_whoever_chooses_wrong_blocks_has_no_number() -> None:
    found = measured(World({"fla": Behaviour(block=1)}))
    assert isinstance(found[OURS], NumberRecord)
    absent = found["fla"]
    assert isinstance(absent, AbsentRecord)
    assert (absent.offence, "lighter" in absent.why) == ("wrong", True)


def test_a_call_of_many_launches_has_more_room_by_the_clock_but_not_any() -> None:
    assert isinstance(measured(World({OURS: Behaviour(wall=2e-3)}))[OURS], NumberRecord)
    late = measured(World({OURS: Behaviour(wall=4e-3)}))[OURS]
    assert late.offence == "hidden_work"


def test_peers_that_the_table_wants_take_part_where_they_are_not_installed() -> None:
    from flashwright.measure.peers import registry

    (fla,) = [one for one in registry.choose(None, (), TABLES[9].peers) if one.key == "fla"]
    if fla.installed:
        pytest.skip("fla is installed")
    from flashwright.measure.peers import flash_linear_attention
    from flashwright.sandbox.candidate import Unable

    with pytest.raises(Unable, match="fla is not installed"):
        flash_linear_attention(whole_nsa("fp16"))
    assert fla not in registry.choose(None)


def test_the_adapter_of_fla_finds_the_blocks_after_the_call(monkeypatch: Any) -> None:
    """fla returns no blocks: they are asked of its own steps, and only when they are wanted."""
    rows = dict(given())
    asked: list[str] = []

    def parallel_nsa(q: Any, k: Any, v: Any, **how: Any) -> Any:
        asked.append("call")
        return contestant.nsa(
            *(q, k, v, how["g_cmp"], how["g_slc"], None, None, how["block_counts"]),
            how["block_size"],
        )

    def topk(**how: Any) -> Any:
        asked.append("choice")
        shape = (1, 200, SPEC.kv_heads, how["block_counts"])
        return torch.zeros(shape, dtype=torch.int32)

    library = SimpleNamespace(
        parallel_nsa=parallel_nsa,
        mean_pooling=lambda x, size, starts: whole.means(x.transpose(1, 2), size).transpose(1, 2),
        parallel_nsa_compression=lambda **how: (None, None),
        parallel_nsa_topk=topk,
    )
    latest = "flashwright.measure.peers.nsa.flex_attention"
    monkeypatch.setattr(latest, lambda spec: lambda q, k, v: torch.ones_like(q))
    out, blocks = _Fla(SPEC, library)(*rows.values())
    assert asked == ["call"]
    assert tuple(blocks().shape) == PROBLEM.outputs["Idx"][0]
    ours, _ = contestant._call(SPEC.model_copy(update={"window": 0}))(*rows.values())
    gate = rows["GateSwa"].transpose(1, 2)[..., None]
    torch.testing.assert_close(out, ours + gate, atol=2e-3, rtol=2e-3)


# --- the package, its verdict and its receipt -------------------------------------------------


def package(name: str = "h200-heaviestblocks-1") -> KernelBuild:
    """A module of one kernel, as `make` gives it."""
    files: dict[str, str | bytes] = {
        f"packages/{name}/code.tl": "// TL\n",
        f"packages/{name}/kernel.cu": "// CUDA\n",
        f"packages/{name}/kernel.cubin": b"cubin",
        f"packages/{name}/{RESULT}": '{"ok": true}',
        kernels.CALL: kernels._CALL_TEXT,
    }
    return KernelBuild(CELLS[0].spec, "h200", files, seconds={"build": 1.0})


def test_the_files_are_those_of_all_kernels_that_a_call_asks_the_store_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path))

    class Order(SimpleNamespace):
        def make(self, folder: Path, verified: bool) -> None:
            (folder / "1").mkdir(parents=True)
            (folder / "1" / "kernel.cu").write_text(self.name)
            (folder / RESULT).write_text(json.dumps({"ok": True}))

    def attention(*rows: Any, **how: Any) -> Any:
        for name in ("one", "two"):
            order = Order(key=name, name=name, in_words=lambda: "a kernel")
            store.find_or_make(order, lambda text: None)
        return rows[0], rows[0]

    monkeypatch.setattr(contestant, "nsa", attention)
    monkeypatch.setattr(contestant, "LENGTHS", (1, 2))
    found = contestant.packages(SPEC, "cpu")
    assert found["packages/two/1/kernel.cu"] == b"two"
    assert set(found) == {
        f"packages/{name}/{file}" for name in ("one", "two") for file in ("1/kernel.cu", RESULT)
    }


def test_a_call_finds_the_kernels_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = kernels.save(package(), tmp_path / "kernels")
    candidate = kernels.candidate_of(made)
    assert (candidate.kind, candidate.factory) == ("python", True)
    assert kernels.entry(made.record({"ok": True}, {}), made.folder) == candidate
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path / "cache"))
    code: dict[str, Any] = {"__file__": candidate.where}
    exec(compile(Path(candidate.where).read_text(), candidate.where, "exec"), code)
    assert callable(code["attention"](SPEC))
    order: Any = SimpleNamespace(name="h200-heaviestblocks-1")
    assert store.find(order) == Cache().root / "packages" / "h200-heaviestblocks-1"


def test_its_kernels_are_made_on_the_card_or_it_says_why_not() -> None:
    spec = CELLS[0].spec
    assert "not for a100" in kernels.make(spec, "a100", H200).why
    assert "not for h200" in kernels.make(spec, "h200", None).why


def test_a_receipt_has_all_kernels_and_is_made_again(tmp_path: Path) -> None:
    versions = {"torch": "2.11", "nvcc": "13.0", "translator": "abc"}
    workshop = Workshop(World(), environment=versions)
    dependencies = replace(
        workshop.dependencies(),
        make=lambda *asked: [package()],
        judge=lambda candidate, spec: replace(verdict(), candidate=candidate.title),
    )
    plan = BenchPlan("table 9", tuple(CELLS), "h200", (peer("flash"),), table=9)
    book, _ = Journal.begin(tmp_path)
    session(plan, H200, tmp_path, book, Quiet(), 11, dependencies=dependencies)
    names = [cell.name for cell in CELLS]
    again = receipt.ReceiptDependencies(
        card=H200,
        contest=World().dependencies(),
        make=lambda *asked: package(),
        judge=dependencies.judge,
        peers=lambda: {"flash": peer("flash")},
        environment=lambda peers: dict(workshop.environment),
        ceilings=workshop.ceilings,
    )

    def check(how: receipt.ReceiptDependencies) -> list[receipt.ReceiptFinding]:
        return [*receipt.check(tmp_path, names, tmp_path / "again", how)]

    for finding in check(again):
        assert not finding.differing
        assert finding.now is not None
    other = replace(package(), files={**package().files, "packages/x/code.tl": "// TL, another"})
    how = replace(again, make=lambda *asked: other)
    (first, _) = check(how)
    assert "kernel.hashes.packages/x/code.tl" in {one.name for one in first.differing}


@pytest.mark.parametrize("block", [0, 1])
def test_the_verdict_takes_right_blocks_only(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({"nsa": Behaviour(block=block)})
    monkeypatch.setattr(driver, "cards", lambda: [H200])
    candidate = Candidate("python", "call.py", "attention", title="nsa")
    judge = partial(module_verdict.judged, seed=1, make=world.make)
    found = judge(candidate, CELLS[0].spec, expected=world.dependencies().expected)
    assert found.ok == (not block)
    assert len(found.cases) == 8 * len(module_verdict.LENGTHS)
    assert [o.name for o in found.offences] == ["wrong"] * block


def test_a_kernel_alone_cannot_have_this_spec() -> None:
    text = 'variant = "nsa"\nbranch = "all"\ncausal = true\nwindow = 5\nblock = 64\nstride = 64\n'
    with pytest.raises(BadSpec, match=r"spec:2: branch: 'all' is several kernels"):
        parse(text)
    with pytest.raises(BadSpec, match="branch: 'all' is several kernels"):
        parse_inline("branch=all")
    with pytest.raises(BadSpec, match="block, stride and selected_block"):
        AttentionSpec.make(variant="nsa", branch="all", causal=True, window=5)
