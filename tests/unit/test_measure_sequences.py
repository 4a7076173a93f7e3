"""`bench` over packed sequences, caches and decode: its problems, their answers, peers, records."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright import spec as specs
from flashwright.author.builtin.variants import make_spec
from flashwright.build import package
from flashwright.build.steps import Steps, StepsKernel
from flashwright.check.check import check
from flashwright.cli.bench import ShapeOptions, _cells
from flashwright.files import write
from flashwright.generate.packed import PackedOrder
from flashwright.judge import oracle
from flashwright.lang.diagnostic import Failed
from flashwright.lang.parse import parse
from flashwright.measure import kernels, sequences, spot
from flashwright.measure.bench import problem_of
from flashwright.measure.grid import Cell, kernel_name, of_package
from flashwright.measure.journal import RECORDS, Journal
from flashwright.measure.kernels import KernelBuild
from flashwright.measure.markdown import page
from flashwright.measure.peers import packages
from flashwright.measure.peers.backends import torch_flash
from flashwright.measure.receipt import ReceiptDependencies, Tolerances, numbers
from flashwright.measure.receipt import check as check_receipt
from flashwright.measure.records import OURS
from flashwright.measure.results import Results
from flashwright.measure.rows import rows
from flashwright.measure.sequences import Sequences, distributions, named, problems
from flashwright.measure.session import BenchPlan, session
from flashwright.program.kernels import Kernels
from flashwright.sandbox.candidate import Candidate, Unable
from flashwright.sandbox.device import Cpu
from flashwright.sandbox.problem import TimedProblem, inputs_of
from flashwright.sandbox.worker import Worker
from flashwright.spec import AttentionSpec, BadSpec
from tests.unit.measure_fakes import H200, MS, Behaviour, Quiet, Workshop, World, peer, verdict

torch = pytest.importorskip("torch")

CARD = gpus.find("h200")
WAYS: dict[str, dict[str, Any]] = {
    "packed": {"packed": True, "causal": True},
    "packed queries, a cache": {"packed": True, "cache": True, "alibi": True},
    "packed queries, pages": {"packed": True, "page": 48, "causal": True},
    "decode": {"decode": 2, "causal": True},
    "decode over pages": {"decode": 1, "page": 16},
    "decode over pages in fp8": {"decode": 1, "page": 16, "kv_dtype": "fp8"},
}
LENGTHS = ((40, 70), (1, 16), (17, 17))


def spec_of(name: str, **more: Any) -> AttentionSpec:
    given = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "bf16", **more}
    return make_spec("gqa", **given, **WAYS[name])


def cell_of(name: str) -> Cell:
    spec = spec_of(name)
    pairs = LENGTHS if spec.packed else tuple((spec.decode or 1, keys) for _, keys in LENGTHS)
    tokens = sum(rows for rows, _ in pairs)
    return Cell.of_sequences(spec, Sequences("some", tokens, pairs))


# --- the problems -----------------------------------------------------------------------------


def test_problems_are_known_by_their_names() -> None:
    for spec in (spec_of("packed"), spec_of("decode over pages")):
        every = problems(spec)
        assert len({one.name for one in every}) == len(every) == (5 if spec.packed else 7)
        for one in every:
            assert " " not in one.name
            assert named(spec, one.name, one.length, len(one.pairs)) == one
            assert Cell.of_sequences(spec, one) == Cell.recorded(
                spec, f"kernel {one.name}", one.length, len(one.pairs)
            )
        with pytest.raises(BadSpec, match="there is no problem 'other' of 3 sequences"):
            named(spec, "other", 1024, 3)
    assert all(sum(lengths) == 5000 for _, lengths in distributions(5000))


def test_the_work_is_that_of_each_sequence() -> None:
    """Keys are counted as they are read: in 8 bits, and once for all heads of a group."""
    cell = cell_of("packed")
    pairs = sum(sum(min(k, r + 1 + k - q) for r in range(q)) for q, k in LENGTHS)
    work = cell.work()
    assert work.pairs == pairs * 4
    assert cell.flops() == work.flops == 2 * pairs * 4 * 128
    narrow = cell_of("decode over pages in fp8").work()
    keys = sum(keys for _, keys in LENGTHS)
    assert narrow.read == keys * 2 * 128 + 3 * 4 * 64 * 2


def test_keys_are_split_as_serving_does_it() -> None:
    problem = problem_of(cell_of("decode over pages"), "bshd", 1, CARD)
    blocks = 3 * 2  # sequences and KV heads
    assert problem.dims == {"splits": sequences.split_count(CARD, blocks, 70)}
    assert problem_of(cell_of("packed"), "bshd", 1, CARD).dims == {}


# --- answers ----------------------------------------------------------------------------------


def laid(problem: TimedProblem, made: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a call as the judge has them."""
    given = {n: problem.passed(n, x) if n in problem.shapes else x for n, x in made.items()}
    return {n: x.double().numpy() if x.is_floating_point() else x.numpy() for n, x in given.items()}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_spot_check_is_the_judges_answer(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(cell_of(name), layout, 3, CARD)
    made = inputs_of(problem, 5, "cpu")
    wanted = problem.returned(oracle.attention(problem.spec, laid(problem, made))["O"])
    monkeypatch.setattr(spot, "inputs_of", lambda problem, seed: made)
    for batch in range(problem.batch):
        for head in (0, 3):
            found = spot.expected(problem, 5, batch, head)
            np.testing.assert_allclose(found, wanted[batch, head], atol=1e-6)


@pytest.mark.parametrize("name", WAYS)
def test_a_package_is_called_with_what_its_plan_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the worker, on kernels that are interpreted: the answer is the spot check's."""
    from tests.unit.test_steps import Interpreted

    cell = cell_of(name)
    problem = problem_of(cell, "bshd", 3, CARD)
    programs = check(parse(PackedOrder(cell.spec, CARD).code()), CARD).kernels
    made = [Interpreted(program) for program in programs]
    kernel = StepsKernel(made, Steps.of(Kernels(programs))) if len(made) > 1 else made[0]
    drawn = inputs_of(problem, 5, "cpu")
    found: list[Any] = []

    def timed(function: Any, told: TimedProblem, *more: Any) -> None:
        assert (told.shapes, told.sizes) == (problem.shapes, problem.sizes)
        passed = [told.passed(n, drawn[n]) for n in told.shapes]
        extra = [torch.from_numpy(x) for x in told.extra.values()]
        found.append(told.returned(function(*passed, *extra)))

    monkeypatch.setattr("flashwright.sandbox.timed.Timed", timed)
    monkeypatch.setattr(spot, "inputs_of", lambda problem, seed: drawn)
    worker = Worker(tmp_path)
    worker.candidate, worker.function = Candidate.package(tmp_path), kernel
    worker.device, worker.memory = Cpu(), None
    for file, array in problem.extra.items():
        np.save(tmp_path / f"{file}.npy", array)
    worker.prepare(
        problem.spec.model_dump(mode="json"),
        list(problem.extra),
        dict(problem.dims),
        [],
        [list(pair) for pair in problem.sequences],
        batch=problem.batch,
        length=problem.length,
        layout=problem.layout,
        kv_len=problem.kv_len,
    )
    (out,) = found
    for batch in range(problem.batch):
        right = spot.expected(problem, 5, batch, 1)
        np.testing.assert_allclose(out[batch, 1].float(), right, atol=3e-2)


# --- peers ------------------------------------------------------------------------------------


def flash_attention() -> Any:
    """Our functions, which have its signatures, by its names."""
    import flashwright

    def with_kvcache(q: Any, k: Any, v: Any, *, pack_gqa: bool = False, **more: Any) -> Any:
        table = more.pop("page_table", None)
        starts, longest = more.pop("cu_seqlens_q", None), more.pop("max_seqlen_q", None)
        if starts is None:
            return flashwright.flash_attn_with_kvcache(q, k, v, block_table=table, **more)
        lengths = more.pop("cache_seqlens")
        return flashwright.flash_attn_varlen_func(
            *(q, k, v, starts, None, longest, int(lengths.max())),
            block_table=table,
            seqused_k=lengths,
            **more,
        )

    return SimpleNamespace(
        flash_attn_varlen_func=flashwright.flash_attn_varlen_func,
        flash_attn_with_kvcache=with_kvcache,
    )


def flash_infer() -> Any:
    from flashwright.serving import wrappers

    def paged(space: Any, layout: str, use_tensor_cores: bool) -> Any:
        return wrappers.BatchDecodeWithPagedKVCacheWrapper(space, layout)

    ragged = wrappers.BatchPrefillWithRaggedKVCacheWrapper
    return SimpleNamespace(
        BatchPrefillWithRaggedKVCacheWrapper=ragged, BatchDecodeWithPagedKVCacheWrapper=paged
    )


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        (packages.flash_attention_3, "packed"),
        (packages.flash_attention_3, "packed queries, pages"),
        (packages.flash_attention_3, "decode"),
        (packages.flash_attention_3, "decode over pages"),
        (packages.flash_infer, "packed"),
        (packages.flash_infer, "decode over pages"),
    ],
)
def test_a_peer_computes_what_is_checked(
    factory: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, where libraries with these signatures are our own functions."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attention())
    monkeypatch.setitem(sys.modules, "flashinfer", flash_infer())
    monkeypatch.setattr(
        "flashwright.measure.peers.sequences._space", lambda: torch.empty(1, dtype=torch.uint8)
    )
    cell = cell_of(name)
    if not cell.spec.packed:  # as the problems are: each sequence has as many keys
        pairs = ((cell.spec.decode, 70),) * 3
        cell = replace(cell, sequences=Sequences("3x70", 70, pairs))
    problem = problem_of(cell, "bshd", 3, CARD)
    made = inputs_of(problem, 5, "cpu")
    monkeypatch.setattr(spot, "inputs_of", lambda problem, seed: made)
    function = factory(problem.spec)
    passed = [problem.passed(n, x) if n in problem.shapes else x for n, x in made.items()]
    for _ in range(2):
        out = problem.returned(function(*passed))
    assert out.shape == problem.shapes["Q"]
    for batch in range(problem.batch):
        right = spot.expected(problem, 5, batch, 3)
        np.testing.assert_allclose(out[batch, 3].float(), right, atol=3e-2)


def test_what_a_peer_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unable, match="it has no sequences of any lengths"):
        torch_flash(spec_of("packed"))
    with pytest.raises(Unable, match="it has no caches in 8 bits with scales"):
        packages.flash_attention_3(spec_of("decode over pages in fp8"))
    with pytest.raises(Unable, match="packed batches, and on decodes of one query over pages"):
        packages.flash_infer(spec_of("decode"))


# --- packages and records ---------------------------------------------------------------------


def translated(spec: AttentionSpec) -> KernelBuild:
    """A package that is not compiled."""
    made = kernels.from_tl(PackedOrder(spec, CARD).code(), spec, "h200", None)
    assert not made.why
    return made


def test_a_package_of_several_kernels_is_written_and_read(tmp_path: Path) -> None:
    made = translated(spec_of("decode over pages"))
    saved = kernels.save(made, tmp_path)
    assert {"steps.json", "code.tl", "1/kernel.cu", "2/code.tl"} <= set(made.files)
    found = kernels.load(Path(saved.folder))
    assert (found.spec, found.name) == (made.spec, made.name)
    assert found.files == made.files
    assert {"tl", "steps.json", "1/code.tl", "2/kernel.cu"} <= set(found.hashes)
    packed = kernels.put(translated(spec_of("packed")), Path(saved.folder))
    assert package.STEPS not in packed.files
    assert kernels.load(Path(packed.folder)).spec == packed.spec


def measured(folder: Path, *made: KernelBuild) -> tuple[list[Cell], list[Any]]:
    """A benchmark of packages whose calls all take 50 ms."""
    cells = [cell for one in made for cell in of_package(one.spec, (), 4096)]
    saved = [kernels.save(one, folder / "kernels") for one in made]
    world = World({OURS: Behaviour(50 * MS), "fa3": Behaviour(100 * MS)})
    plan = BenchPlan("two", tuple(cells), "h200", (peer("fa3"),), packages=tuple(saved))
    given = Workshop(world).dependencies()
    given = replace(given, judge=lambda c, s: replace(verdict(), candidate=c.title))
    book, _ = Journal.begin(folder)
    session(plan, H200, folder, book, Quiet(), 11, dependencies=given)
    return cells, list(book.records)


def test_a_run_has_a_record_of_each_problem(tmp_path: Path) -> None:
    made = [translated(spec_of("packed")), translated(spec_of("decode over pages"))]
    cells, records = measured(tmp_path, *made)
    results = Results.of(records)
    assert [cell.size for cell in cells[:5]] == [name for name, _ in distributions()]
    assert cells[5].name == "gqa 4/2 d64 full decode 1 pages of 16 1x65536"
    assert all(results.complete(cell.name) for cell in cells)
    found = rows(results)
    assert [row.name for row in found] == [cell.name for cell in cells]
    assert [row.unit for row in found] == ["TFLOPS"] * 5 + ["GB/s"] * 7
    number = results.numbers[cells[5].name, OURS]
    assert number.gbs == pytest.approx(cells[5].work().bytes / number.seconds / 1e9)
    assert found[5].entries[0].value == number.gbs
    assert found[5].entries[1].ratio == pytest.approx(2.0)
    text = page(results)
    assert f"| {OURS}, TFLOPS or GB/s |" in text
    assert "| uniform |" in text
    assert "| 8x8192 |" in text


def test_its_receipts_hold_and_a_changed_one_does_not(tmp_path: Path) -> None:
    made = translated(spec_of("decode over pages"))
    made = replace(made, files={**made.files, "build.json": "{}"})
    cells, _ = measured(tmp_path / "run", made)
    world = World({OURS: Behaviour(50 * MS), "fa3": Behaviour(100 * MS)})
    told: dict[str, Any] = {
        "card": H200,
        "contest": world.dependencies(),
        "build": lambda *asked: made,
        "judge": lambda c, s: replace(verdict(), candidate=c.title),
        "peers": lambda: {"fa3": peer("fa3")},
        "environment": lambda peers: {"torch": "2.11"},
        "ceilings": Workshop(world).ceilings,
    }
    file = tmp_path / "run" / RECORDS
    again = tmp_path / "again"
    found = list(
        check_receipt(file, numbers(file), again, ReceiptDependencies(**told), Tolerances())
    )
    assert [one.cell for one in found] == [cell.name for cell in cells]
    assert not [one.why for one in found if one.differing]
    assert {f.name for f in found[0].fields} >= {"kernel.others.steps.json"}
    text = file.read_text()
    file.write_text(text.replace("1x65536", "1x65537"))
    found = list(
        check_receipt(file, numbers(file), again, ReceiptDependencies(**told), Tolerances())
    )
    assert any("number.cell" in line for one in found for line in one.why)


# --- the command ------------------------------------------------------------------------------


def test_the_command_takes_packages_and_no_grids(tmp_path: Path) -> None:
    saved = kernels.save(translated(spec_of("decode over pages")), tmp_path)
    title, cells, made = _cells(ShapeOptions(), None, None, [Path(saved.folder)])
    assert title == kernel_name(made[0].spec) == "gqa 4/2 d64 full decode 1 pages of 16"
    assert len(cells) == 7
    _, some, _ = _cells(ShapeOptions(lengths=[8192]), None, None, [Path(saved.folder)])
    assert [cell.size for cell in some] == ["8x8192", "32x8192"]
    grid = tmp_path / "grid.toml"
    write(grid, 'lengths = [64]\n[[kernel]]\nvariant = "gqa"\npacked = true\ndtype = "bf16"\n')
    with pytest.raises(Failed, match=r"a grid has rectangular batches; .* --package"):
        _cells(ShapeOptions(), None, grid, [])
    backward = make_spec("gqa", heads=4, kv_heads=2, dtype="bf16").differentiated()
    with pytest.raises(BadSpec, match="`bench` measures forward passes"):
        of_package(backward, [64])
    assert specs.load(Path(saved.folder, "spec.toml")) == made[0].spec
