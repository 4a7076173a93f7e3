"""Packages with several kernels: which one is called, who sees them all, and what is amiss."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flashwright
from flashwright import spec as specs
from flashwright.author.builtin import tuned
from flashwright.author.builtin.variants import make_spec
from flashwright.build import classes
from flashwright.build.classes import ALONE, CLASSES, OWN, Classes, Kernels, Rule, folders, serving
from flashwright.build.load import CUBIN, PLAN, Kernel
from flashwright.build.package import IN_RECORD, RECORD
from flashwright.generate import stages
from flashwright.judge.form import bounds_of
from flashwright.judge.judge import _digests
from flashwright.judge.problems import problems
from flashwright.lang.diagnostic import Failed
from flashwright.measure import kernels
from flashwright.report import package as reported
from flashwright.sandbox.candidate import Candidate
from tests.unit import emulated, test_kernel, test_receipt, test_report
from tests.unit.emulated import needs_compilers
from tests.unit.fake_gpu import (
    ATTENTION,
    Driver,
    cubin,
    inputs,
    make_plan,
    on_fake_gpu,
    outputs,
    process,
    refused,
)
from tests.unit.measure_fakes import made as made_up
from tests.unit.test_cli import GOOD, Outcome

needs_c = pytest.mark.skipif(
    not (shutil.which("cc") and shutil.which("c++")), reason="no C and C++ compiler here"
)
nvcc, no_gpu, translator = test_kernel.nvcc, test_kernel.no_gpu, test_kernel.translator
SPEC = emulated.SPEC
RULES = Classes(rules=(Rule(up_to=100, kernel="short"), Rule(kernel=OWN)))


def put(folder: Path, rules: Classes | str = RULES, **plans: dict[str, Any]) -> Path:
    """A package whose kernels differ in their threads: 128, and 32 for `short`."""
    for name, changes in {OWN: {}, "short": {"threads": 32}, **plans}.items():
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        (place / PLAN).write_text(make_plan(**changes).dump())
        (place / CUBIN).write_bytes(cubin(90))
        (place / "spec.toml").write_text(specs.dump(SPEC))
    (folder / CLASSES).write_text(rules if isinstance(rules, str) else rules.dump())
    return folder


# --- which one is called ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    with process(tmp_path_factory.mktemp("driver")) as executor:
        yield executor


def called(kernel: Kernel | Kernels, keys: int, **more: Any) -> int:
    """The threads of the kernel that a call with so many keys launches."""
    kernel(*inputs(k=keys), out=outputs(), **more)
    return Driver().last.block[0]


@needs_c
@on_fake_gpu
def test_the_keys_say_which_kernel_is_called() -> None:
    with tempfile.TemporaryDirectory() as place:
        loaded = flashwright.load(put(Path(place)))
    assert isinstance(loaded, Kernels)
    assert [called(loaded, keys) for keys in (1, 100, 101, 5000)] == [32, 32, 128, 128]
    assert loaded.inputs == ("Q", "K", "V", "Slopes")
    assert "short" in repr(loaded)


@needs_c
@on_fake_gpu
def test_by_name_in_the_other_layout_and_what_is_amiss() -> None:
    with tempfile.TemporaryDirectory() as place:
        loaded = flashwright.load(put(Path(place)))
    q, k, v, slopes = inputs(k=70)
    loaded(q, K=k, V=v, Slopes=slopes, out=outputs())
    assert Driver().last.block[0] == 32
    # In bshd the keys are on another axis: 3 heads and 101 keys, not the other way round.
    q, k, v, slopes = inputs(k=101)
    turned = [type(x)(x.array.swapaxes(1, 2)) for x in (q, k, v)]
    out = {n: type(x)(x.array.swapaxes(1, 2)) for n, x in outputs().items() if n == "O"}
    loaded(*turned, slopes, out=out, layout="bshd")
    assert Driver().last.block[0] == 128
    with refused(TypeError, "`K` is missing"):
        loaded(q)
    with refused(ValueError, "layout must be"):
        loaded(q, k, v, slopes, layout="shd")


@needs_c
@on_fake_gpu
def test_a_package_without_the_file_is_one_kernel() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = put(Path(place))
        (folder / CLASSES).unlink()
        loaded = flashwright.load(folder)
    assert isinstance(loaded, Kernel)
    assert called(loaded, 50) == 128


def test_rules_go_upwards_and_the_last_serves_the_rest(tmp_path: Path) -> None:
    rules = Classes(
        rules=(Rule(up_to=64, kernel="a"), Rule(up_to=512, kernel=OWN), Rule(kernel="a"))
    )
    assert [rules.pick(n) for n in (0, 64, 65, 512, 513)] == ["a", "a", OWN, OWN, "a"]
    assert rules.others == ("a",)
    assert Classes.model_validate_json(rules.dump()) == rules
    folder = put(tmp_path)
    assert serving(folder, {"kv_len": 100}) == folder / "short"
    assert serving(folder, {"kv_len": 101}) == folder
    assert list(folders(folder).values()) == [folder, folder / "short"]
    (folder / CLASSES).unlink()
    assert classes.read(folder) == ALONE


# --- damage -----------------------------------------------------------------------------------


def gone(folder: Path) -> None:
    shutil.rmtree(folder / "short")


def other_spec(folder: Path) -> None:
    (folder / "short/spec.toml").write_text(specs.dump(SPEC.model_copy(update={"window": 5})))


def other_tensors(folder: Path) -> None:
    (folder / "short" / PLAN).write_text(make_plan(tensors=ATTENTION[:5]).dump())


DAMAGE: list[tuple[str | Callable[[Path], None], str]] = [
    ("{", "classes.json: the file: Invalid JSON"),
    ('{"rules": []}', "it has no rules"),
    ('{"rules": [{"up_to": 9, "kernal": "."}]}', "rules.0.kernel: Field required"),
    ('{"rules": [{"up_to": -1, "kernel": "."}]}', "rules.0.up_to"),
    ('{"rules": [{"up_to": 9, "kernel": "."}]}', "rule 1, the last, ends at 9"),
    ('{"rules": [{"kernel": "short"}, {"kernel": "."}]}', "rule 1 has no up_to"),
    (
        '{"rules": [{"up_to": 9, "kernel": "a"}, {"up_to": 8, "kernel": "."}, {"kernel": "."}]}',
        "rule 2 serves up to 8, the one before it up to 9 already",
    ),
    ('{"rules": [{"kernel": "../short"}]}', "'../short' is no name of a subfolder"),
    ('{"by": "tokens", "rules": [{"kernel": "short"}]}', "by: Input should be 'kv_len'"),
    (gone, "there is no subfolder 'short'"),
    (other_spec, "'short' is a kernel for another spec"),
    (other_tensors, "'short' is called with other tensors"),
    (lambda f: (f / "short" / PLAN).unlink(), "short is no kernel package"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=[words for _, words in DAMAGE])
def test_damage_is_told_with_its_place_and_a_way_out(
    damage: str | Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    folder = put(tmp_path, damage if isinstance(damage, str) else RULES)
    if not isinstance(damage, str):
        damage(folder)
    with pytest.raises(Failed) as failed:
        flashwright.load(folder)
    (found,) = failed.value.diagnostics
    assert found.code == "FW852"
    assert words in found.message
    assert str(folder) in found.message
    assert found.help
    done = Outcome("emulate", str(folder), "--q-len", "5")
    assert done.code == 2
    assert "Traceback" not in done.out + done.err


# --- who sees them all ------------------------------------------------------------------------


def test_the_judge_puts_problems_to_every_kernel(tmp_path: Path) -> None:
    candidate = Candidate.package(put(tmp_path))
    bounds = bounds_of(candidate)
    assert bounds == [100]
    for device, at in (("cuda", [100, 101]), ("emulated", [101])):
        keys = [p.dims["kv_len"] for p in problems(SPEC, 1, device, bounds=bounds)]
        assert keys[1 : 1 + len(at)] == at
    only = problems(SPEC, 1, "cuda", [(7, 8)], bounds)
    assert [p.dims["kv_len"] for p in only] == [8]
    assert len(set(_digests(candidate))) == len(_digests(candidate))
    assert any(name.endswith(f"short/{CUBIN}") for name in _digests(candidate))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A right kernel for few keys, and one that races beyond them."""
    folder = emulated.write(tmp_path_factory.mktemp("two"))
    emulated.write(folder / "long", emulated.without_second_barrier)
    rules = Classes(rules=(Rule(up_to=128, kernel=OWN), Rule(kernel="long")))
    (folder / CLASSES).write_text(rules.dump())
    return folder


@needs_compilers
@pytest.mark.slow
def test_the_emulated_judge_finds_what_a_further_kernel_does(two: Path) -> None:
    found = flashwright.verify(str(two), SPEC, on="cpu", seed=7)
    assert not found.ok
    (first, *_) = found.offences
    assert "long/code.tl, line" in first.diagnostic.message
    assert first.diagnostic.span is None, "it is no line of the package's own TL"
    alone = flashwright.verify(str(two), SPEC, on="cpu", seed=7, lengths=[(100, 128)])
    assert alone.ok, "up to 128 keys it is never called"


@needs_compilers
@pytest.mark.slow
def test_emulate_takes_the_kernel_that_serves_the_problem(two: Path) -> None:
    assert Outcome("emulate", str(two), "--q-len", "70", "--kv-len", "128").code == 0
    done = Outcome("emulate", str(two), "--q-len", "130", "--kv-len", "400")
    assert done.code == 1
    assert "long/code.tl" in (done.out + done.err).replace("\n", "")


def several(folder: Path) -> kernels.KernelBuild:
    """A package of two kernels, as the benchmark has it."""
    own = made_up(SPEC)
    files: dict[str, str | bytes] = {**own.files, "launch.json": make_plan().dump()}
    files["spec.toml"] = specs.dump(SPEC)
    short = {f"short/{n}": data for n, data in files.items()}
    short["short/code.tl"] = "// other TL\n"
    return kernels.save(replace(own, files={CLASSES: RULES.dump(), **files, **short}), folder)


def test_the_benchmark_keeps_and_tells_all_kernels(tmp_path: Path) -> None:
    saved = several(tmp_path)
    found = kernels.load(Path(saved.folder))
    names = {n for n in saved.files if n.rpartition("/")[2] != "build.json"}
    assert set(found.files) == names
    assert found.hashes == saved.hashes
    assert {CLASSES, "short/code.tl", "short/kernel.cu", "short/kernel.cubin"} < set(found.hashes)
    assert found.hashes["short/code.tl"] != found.hashes["tl"]
    record = found.record({}, {})
    assert set(record.others) == {CLASSES, "short/code.tl", "short/kernel.cu"}


def test_the_report_has_their_digests_and_claims_nothing_of_them(tmp_path: Path) -> None:
    folder = Path(several(tmp_path).folder)
    told = {"ok": True, "gpu": "a100", "artefacts": {"spec.toml": ""}}
    told["artefacts"] = {"code.tl": kernels.sha256((folder / "code.tl").read_bytes())}
    (folder / "result.json").write_text(json.dumps(told))
    kernel = reported.read(folder)
    assert "short/kernel.cubin" in kernel.hashes
    assert kernel.changed == (CLASSES,)
    (folder / CLASSES).unlink()
    assert reported.read(folder).changed == ()


@pytest.fixture
def receipts(tmp_path: Path) -> Path:
    """A benchmark's file whose kernel has a second one beside it."""
    file: Path = test_receipt.file.__wrapped__(tmp_path)  # type: ignore[attr-defined]
    own = test_receipt.made()
    others = {"short/code.tl": own.files["code.tl"], "short/kernel.cu": own.files["kernel.cu"]}
    others[CLASSES] = RULES.dump()

    def edit(record: dict[str, Any]) -> None:
        record["others"] = others
        hashed = {**others, "short/kernel.cubin": own.files["kernel.cubin"]}
        record["hashes"] |= {name: kernels.sha256(data) for name, data in hashed.items()}

    test_receipt.change(file, "kernel", edit, again=True)
    return file


def test_a_receipt_builds_all_kernels_again(receipts: Path, tmp_path: Path) -> None:
    found = test_receipt.checked(receipts, tmp_path, test_receipt.dependencies())
    assert {f.status for f in found} == {"holds"}
    (place,) = (tmp_path / "built").iterdir()
    assert (place / CLASSES).read_text() == RULES.dump()
    assert (place / "short" / "kernel.cubin").read_bytes() == b"cubin"


def test_a_receipt_of_a_changed_further_kernel_differs(receipts: Path, tmp_path: Path) -> None:
    def edit(record: dict[str, Any]) -> None:
        record["others"]["short/code.tl"] += "\n// changed"

    test_receipt.change(receipts, "kernel", edit, again=True)
    (first, *_) = test_receipt.checked(receipts, tmp_path, test_receipt.dependencies())
    assert first.status == "differs"
    assert "short/code.tl" in first.why[0]


def test_build_makes_all_kernels_and_its_record_names_them(
    tmp_path: Path, nvcc: test_kernel.FakeNvcc, translator: object
) -> None:
    folder = tmp_path / "package"
    for place in (folder, folder / "short"):
        place.mkdir(exist_ok=True)
        (place / "code.tl").write_text(GOOD)
        assert Outcome("build", str(place), "--gpu", "a100").code == 0
    rules = Classes(by="kv_len", rules=RULES.rules)
    (folder / CLASSES).write_text(rules.dump())
    for place in (folder, folder / "short"):
        (place / PLAN).write_text(make_plan().dump())
    for place in (folder / "short", folder):
        (place / "kernel.cubin").unlink()
    done = Outcome("build", str(folder))
    assert done.code == 0, done.err
    assert (folder / "short" / "kernel.cubin").is_file()
    artefacts = json.loads((folder / "build.json").read_text())["artefacts"]
    assert artefacts[CLASSES] == kernels.sha256(rules.dump())
    short = (folder / "short" / "build.json").read_bytes()
    assert artefacts["short/build.json"] == kernels.sha256(short)


# --- what the author writes -------------------------------------------------------------------

D64 = make_spec("mha", head_dim=64, causal=True, dtype="bf16")
SHORT = "128x128-s2-w8-q2-noSplitMasked"
WHOLE = {*IN_RECORD, RECORD}


def test_generate_compiles_every_kernel_of_a_package(
    tmp_path: Path, nvcc: test_kernel.FakeNvcc
) -> None:
    test_report.generate(D64, tmp_path, "verdict")
    assert len(nvcc.runs) == 2
    assert {p.name for p in tmp_path.iterdir()} >= WHOLE
    assert {p.name for p in (tmp_path / SHORT).iterdir()} == WHOLE
    told = json.loads((tmp_path / RECORD).read_text())["artefacts"]
    short = json.loads((tmp_path / SHORT / RECORD).read_text())["artefacts"]
    assert told[f"{SHORT}/{RECORD}"] == kernels.sha256((tmp_path / SHORT / RECORD).read_bytes())
    assert told[CLASSES] == kernels.sha256((tmp_path / CLASSES).read_bytes())
    assert set(short) == set(IN_RECORD)
    assert short["code.tl"] == kernels.sha256((tmp_path / SHORT / "code.tl").read_bytes())
    assert classes.read(tmp_path).others == (SHORT,)


def test_a_kernel_that_does_not_compile_is_named(
    tmp_path: Path, nvcc: test_kernel.FakeNvcc
) -> None:
    nvcc.set(body="exit 1", says="kernel.cu(9): error: no such thing\n")
    run = test_report.generate(D64, tmp_path, "verdict")
    assert [Path(f.file).parent.name for f in run.failed] == [SHORT], "it is the first"
    assert not (tmp_path / RECORD).exists()


def test_the_report_sees_that_a_further_kernel_was_changed(tmp_path: Path) -> None:
    test_report.generate(D64, tmp_path, "build", "verdict")
    assert reported.read(tmp_path).changed == ()
    (tmp_path / SHORT / "code.tl").write_text("// mine\n")
    assert reported.read(tmp_path).changed == (f"{SHORT}/code.tl",)


def test_the_benchmark_makes_the_same_kernels(tmp_path: Path) -> None:
    made = kernels.make(D64, "h200", None)
    assert not made.why
    test_report.generate(D64, tmp_path / "generated", "build", "verdict")
    for name in (CLASSES, "code.tl", f"{SHORT}/code.tl", f"{SHORT}/kernel.cu", "kernel.cu"):
        assert made.files[name] == (tmp_path / "generated" / name).read_text()
    assert set(made.record({}, {}).others) == {CLASSES, f"{SHORT}/code.tl", f"{SHORT}/kernel.cu"}
    folder = Path(kernels.put(made, tmp_path / "made").folder)
    assert classes.read(folder).others == (SHORT,)
    own = kernels.make(D64.model_copy(update={"causal": False}), "h200", None)
    kernels.put(own, folder)
    assert classes.read(folder) == ALONE, "the rules were for others"


@needs_compilers
@pytest.mark.slow
def test_the_emulated_verdict_of_generate_is_on_every_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = [c.model_copy(update={"up_to": c.up_to and 128}) for c in tuned._shipped()]
    monkeypatch.setattr(tuned, "_shipped", lambda: tuple(early))
    monkeypatch.setattr(stages, "EMULATION_PROBLEMS", 2)
    run = test_report.generate(D64, tmp_path)
    assert run.ok
    assert run.emulated is not None
    keys = {case.dims["kv_len"] for case in run.emulated.cases}
    assert {128, 129} <= keys, "however short the time is"


def test_generate_anew_leaves_no_rules_of_other_kernels(
    tmp_path: Path, nvcc: test_kernel.FakeNvcc, translator: object
) -> None:
    (tmp_path / CLASSES).write_text(RULES.dump())
    assert Outcome(*test_kernel.GENERATE, "--until", "build", "--out", str(tmp_path)).code == 0
    assert not (tmp_path / CLASSES).exists()
    assert (tmp_path / f"{CLASSES}.bak").read_text() == RULES.dump()
