"""The verdict under emulation: what it accepts, what it names, and what becomes of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import flashwright
from flashwright.build import driver
from flashwright.build.reading import cubin_version
from flashwright.cli.command import exit_code
from flashwright.files import sha256
from flashwright.generate import pipeline, stages
from flashwright.gpu import find
from flashwright.judge import emulated as judging
from flashwright.judge.emulated import judge_emulated
from flashwright.judge.verdict import EMULATION
from flashwright.lang.diagnostic import Failed
from flashwright.report import headline
from flashwright.report.gather import gather
from tests.unit import emulated
from tests.unit import report_example as example
from tests.unit.emulated import needs_compilers
from tests.unit.test_report import Nobody

SPEC = emulated.SPEC


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulated.write(tmp_path_factory.mktemp("package"))


@pytest.mark.slow
@needs_compilers
def test_a_right_kernel_is_accepted_on_all_problems(package: Path) -> None:
    told: list[tuple[int, int, str]] = []
    found = judge_emulated(package, SPEC, seed=7, progress=lambda *step: told.append(step))
    assert found.ok, found
    assert (found.device, found.arch, found.seed) == (EMULATION, "sm_80", 7)
    assert "accepted under emulation" in found.headline
    assert {c.name for c in found.checks if c.passed} >= {"fp64", "written", "repeat", "hazards"}
    assert all(c.passed for c in found.checks)
    lengths = {(c.dims["q_len"], c.dims["kv_len"]) for c in found.cases}
    assert (1, 1) in lengths
    assert any(q < kv for q, kv in lengths)
    assert any(q > kv for q, kv in lengths)
    assert len({c.kind for c in found.cases}) >= 6
    assert told[-1][0] <= told[-1][1]
    assert len(told) > 10


@needs_compilers
def test_fewer_problems_than_a_verdict_rests_on_are_not_enough(package: Path) -> None:
    found = judge_emulated(package, SPEC, seed=7, seconds=0.0)
    assert not found.ok
    assert not found.offences
    assert re.search(r"^not enough: 1 of \d+ problems were tried in 0 s", found.headline)
    assert [d.code for d in found.diagnostics] == ["FW858"]
    assert exit_code(found.diagnostics) == 2
    assert found.record()["ok"] is False


@needs_compilers
@pytest.mark.slow
def test_how_many_problems_there_are_does_not_depend_on_the_time(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "ROUNDS", 1)
    found = judge_emulated(package, SPEC, seed=7, most=2)
    assert found.ok
    assert (found.device, found.arch, found.seed) == (EMULATION, "sm_80", 7)
    assert "accepted under emulation" in found.headline
    assert {c.name for c in found.checks if c.passed} >= {"fp64", "written", "repeat", "hazards"}
    assert all(c.passed is not False for c in found.checks)
    assert len({(c.dims["q_len"], c.dims["kv_len"]) for c in found.cases}) == 2
    assert any(re.search(r"it rests on 2 of \d+ problems", note) for note in found.notes)


def counting(source: str) -> str:
    """It counts its calls in a `__device__` variable, and from some call on does not write O."""
    lines = source.splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if "__global__" in line)
    while "namespace" in lines[at - 1] or "extern" in lines[at - 1]:
        at -= 1
    body = next(n for n in range(at, len(lines)) if lines[n].rstrip().endswith("{"))
    grid = "gridDim.x * gridDim.y * gridDim.z"
    early = f"""
  __shared__ unsigned call;
  if (threadIdx.x == 0) call = atomicAdd(&blocks_so_far, 1u);
  __syncthreads();
  if (call >= {MANY_BLOCKS}u + 0 * {grid}) return;
"""
    lines.insert(body + 1, early)
    lines.insert(at, "__device__ unsigned blocks_so_far;\n")
    return "".join(lines)


MANY_BLOCKS = 30


@pytest.mark.slow
@needs_compilers
def test_variables_of_the_module_outlive_a_launch(tmp_path: Path) -> None:
    folder = emulated.write(tmp_path / "package", counting)
    found = judge_emulated(folder, SPEC, seed=7, lengths=[(16, 16)])
    names = {o.name for o in found.offences}
    assert names & {"not_repeatable", "unwritten"}, found


# --- what belongs together --------------------------------------------------------------------


def recorded(folder: Path) -> Path:
    """The package with the digests of its files in build.json."""
    names = ("kernel.cu", "kernel.cubin", "kernel.ptx", "launch.json")
    digests = {name: sha256((folder / name).read_bytes()) for name in names}
    (folder / "build.json").write_text(json.dumps({"schema": 1, "artefacts": digests}))
    return folder


@pytest.mark.slow
@needs_compilers
def test_files_of_one_build_are_told_from_the_ptx_alone(package: Path, tmp_path: Path) -> None:
    found = judge_emulated(package, SPEC, seed=2, lengths=[(8, 8)])
    assert any("about the PTX alone" in note for note in found.notes)
    whole = recorded(emulated.write(tmp_path / "whole"))
    assert judge_emulated(whole, SPEC, seed=2, lengths=[(8, 8)]).notes == ()


@needs_compilers
@pytest.mark.parametrize("name", ["kernel.cubin", "kernel.ptx", "kernel.cu"])
def test_a_file_of_another_build_is_named(name: str, tmp_path: Path) -> None:
    folder = recorded(emulated.write(tmp_path / "package"))
    (folder / name).write_bytes((folder / name).read_bytes() + b"\n")
    with pytest.raises(Failed, match=rf"FW852.*{name} in .* is not what build.json"):
        judge_emulated(folder, SPEC, seed=2, lengths=[(8, 8)])


@needs_compilers
@pytest.mark.parametrize("arch", ["sm_90a", "sm_75", "sm_81", "ada", "sm_80a"])
def test_the_architecture_is_that_of_what_was_compiled(arch: str, tmp_path: Path) -> None:
    folder = emulated.write(tmp_path / "package")
    plan = json.loads((folder / "launch.json").read_text())
    (folder / "launch.json").write_text(json.dumps({**plan, "arch": arch, "shared": 4096}))
    with pytest.raises(Failed, match=rf"FW852.*({arch}|it is for sm_80)"):
        judge_emulated(folder, SPEC, seed=2, lengths=[(8, 8)])


@needs_compilers
def test_a_cubin_for_an_older_gpu_than_the_ptx(tmp_path: Path) -> None:
    folder = emulated.write(tmp_path / "package")
    cubin = bytearray((folder / "kernel.cubin").read_bytes())
    assert cubin_version(folder, bytes(cubin)) == 80
    cubin[0x31] = 75
    (folder / "kernel.cubin").write_bytes(cubin)
    with pytest.raises(Failed, match=r"FW852.*kernel.cubin: it is for sm_75"):
        judge_emulated(folder, SPEC, seed=2, lengths=[(8, 8)])


@needs_compilers
def test_a_missing_barrier_is_an_offence_at_its_line(tmp_path: Path) -> None:
    folder = emulated.write(tmp_path / "package", emulated.without_second_barrier)
    found = judge_emulated(folder, SPEC, seed=1, lengths=[(300, 300)])
    assert not found.ok
    races = {o.name: o for o in found.offences}
    assert "race" in races
    assert races["race"].diagnostic.code == "FW837"
    span = races["race"].diagnostic.span
    assert span is not None
    copy = [emulated.tl_line(f"Copy {x} (BN, HeadDim)") for x in "KV"]
    gemms = [emulated.tl_line(f"Compute GEMM {x}") for x in ("Q_shared", "S")]
    assert span.line in (*copy, copy[0] + 6, *gemms)
    assert {c.name: c.passed for c in found.checks}["hazards"] is False
    assert "race" in found.headline


@needs_compilers
@pytest.mark.slow
def test_a_wrong_number_is_wrong_without_any_hazard(tmp_path: Path) -> None:
    folder = emulated.write(tmp_path / "package")
    ptx = folder / "kernel.ptx"
    text = ptx.read_text()
    scale = re.search(r"0f3E38AA3B", text)  # log2(e) / sqrt(64)
    assert scale, "the softmax scale is a constant of the kernel"
    ptx.write_text(text.replace(scale[0], "0f3E48AA3B"))
    found = judge_emulated(folder, SPEC, seed=1, lengths=[(64, 96)])
    assert {o.name for o in found.offences} <= {"wrong", "low_precision"}
    assert found.offences
    assert {c.name: c.passed for c in found.checks}["hazards"] is True


@needs_compilers
@pytest.mark.slow
def test_a_wrong_stride_of_the_batches_shows_in_the_first_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stride without q_len is right where q_len is 1."""
    monkeypatch.setattr(judging, "ROUNDS", 1)
    right = "p.Q.tile(batch_idx, head_idx, block_idx * BM)"
    wrong = "p.Q.tile(0, head_idx, batch_idx * heads + block_idx * BM)"
    folder = emulated.write(tmp_path, lambda source: source.replace(right, wrong))
    found = judge_emulated(folder, SPEC, seed=1, most=1)
    assert "wrong" in {o.name for o in found.offences}, found


@needs_compilers
@pytest.mark.slow
def test_the_same_from_python(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "ROUNDS", 1)
    found = flashwright.verify(str(package), SPEC, on="cpu", lengths=[(17, 33)], seed=2)
    assert found.ok
    assert found.emulated
    assert str(found).startswith(f"{package} on the CPU, by emulation of sm_80\n")


def test_a_folder_without_ptx_is_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="FW852"):
        judge_emulated(tmp_path, SPEC)


# --- generate and the report ------------------------------------------------------------------


@needs_compilers
def test_generate_without_a_gpu_ends_with_an_emulated_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_look", lambda: ((), "the test says so"))
    monkeypatch.setattr(judging, "ROUNDS", 1)
    monkeypatch.setattr(stages, "EMULATION_PROBLEMS", 2)
    run = pipeline.generate(SPEC, find(emulated.GPU), tmp_path, Nobody())
    assert run.ok
    assert run.kind == "emulated"
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["verdict"] == "emulated"
    assert result["gpu_run"] is None
    assert result["emulated_run"]["device"] == EMULATION
    assert "/" not in result["emulated_run"]["candidate"]  # a record names no place of a machine
    assert result["stages"][-1] == {**result["stages"][-1], "stage": "verdict", "status": "ok"}
    assert pipeline.EMULATED in result["claimed"]
    assert "not run on a GPU" in result["not_claimed"]
    (point,) = headline.verdicts(gather([tmp_path]))
    assert (point.state, point.title) == ("emulated", "Right under emulation, not run on a GPU")
    assert "not run on a GPU" in point.not_shown


def test_an_emulated_verdict_is_none_of_a_gpu(tmp_path: Path) -> None:
    spec = example.SPECS["gqa d128 causal"]
    told = example.verdict(spec, device=EMULATION, arch="sm_80")
    folder = example.write_package(tmp_path / "kernel", emulated_run=told)
    (point,) = headline.verdicts(gather([folder]))
    assert point.state == "emulated"
    rejected = {**example.rejected(spec), "device": EMULATION}
    bad = example.write_package(tmp_path / "bad", emulated_run=rejected, ok=False)
    assert headline.verdicts(gather([bad]))[0].state == "rejected"
    later = tmp_path / "verdict.json"
    later.write_text(json.dumps(example.verdict(spec, candidate=str(folder))))
    assert headline.verdicts(gather([folder, later]))[0].state == "right"


def test_a_verdict_of_a_gpu_outweighs_an_emulated_one(tmp_path: Path) -> None:
    spec = example.SPECS["gqa d128 causal"]
    folder = example.write_package(tmp_path / "kernel", example.verdict(spec))
    path = tmp_path / "verdict.json"
    path.write_text(json.dumps(example.verdict(spec, device=EMULATION, candidate=str(folder))))
    assert headline.verdicts(gather([folder, path]))[0].state == "right"
