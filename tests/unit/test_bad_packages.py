"""Packages that are not what they should be: each ends in a diagnostic, never in an exception."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashwright import spec as specs
from flashwright.build import classes
from flashwright.build.load import read_plan
from flashwright.build.reading import read_cubin, untied
from flashwright.emulate.package import Package, read_package
from flashwright.judge import emulated as judged
from flashwright.judge.emulated import judge_emulated
from flashwright.lang.diagnostic import Failed
from flashwright.measure import kernels
from flashwright.report import package as reported
from flashwright.sandbox.limits import Limits
from tests.unit import emulated
from tests.unit.emulated import needs_compilers
from tests.unit.fake_gpu import cubin, make_plan
from tests.unit.test_cli import Outcome

SPEC = emulated.SPEC
JSON = ("launch.json", "classes.json", "build.json", "kernel.map.json")


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of two kernels, with its record."""
    folder = emulated.write(tmp_path_factory.mktemp("honest") / "package")
    shutil.copytree(folder, folder / "short")
    rules = classes.Classes.of([(40, "short"), (None, "")])
    (folder / "classes.json").write_text(rules.dump())
    facts = {"registers": 128, "spill_stores": 0, "spill_loads": 0, "stack": 0}
    record = {"schema": 1, "gpu": "a100", **facts, "artefacts": {}}
    (folder / "build.json").write_text(json.dumps(record))
    (folder / "spec.toml").write_text(specs.dump(SPEC))
    return folder


@pytest.fixture
def package(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "package"))


def change(path: Path, *place: str | int, to: Any) -> None:
    """Put something else into a JSON file."""
    told = json.loads(path.read_text())
    inner = told
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = to
    path.write_text(json.dumps(told))


# --- one field at a time ----------------------------------------------------------------------

FIELDS: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("shared",), 10**12, "shared: a block has 0 to 166912 bytes"),
    (("shared",), -1, "shared: a block has 0 to 166912 bytes"),
    (("shared",), "4096", "shared: Input should be a valid integer"),
    (("shared",), 4096.5, "shared: Input should be a valid integer"),
    (("threads",), 10**9, "threads: a block has 1 to 1024 threads"),
    (("threads",), 0, "threads: a block has 1 to 1024 threads"),
    (("threads",), True, "threads: Input should be a valid integer"),
    (("threads",), float("nan"), "threads: Input should be a valid integer"),
    (("threads",), float("inf"), "threads: Input should be a valid integer"),
    (("threads",), 10**5000, "launch.json: "),
    (("entry",), 5, "entry: Input should be a valid string"),
    (("entry",), "", "entry: '' is no name of a kernel"),
    (("entry",), "a b\0c", "is no name of a kernel"),
    (("arch",), "sm_999", "arch: no known GPU is 'sm_999'"),
    (("grid",), [], "grid: a grid has 1 to 3 axes"),
    (("grid", 0), [], "grid.0: a size of the grid is no expression"),
    (("grid", 0), ["q_len", 0, "floor_div"], "grid.0: a size of the grid is divided by zero"),
    (("grid", 0), ["q_len", 10**30, "*"], "grid.0: a size of the grid has the number 1000"),
    (("grid", 0), [-1], "grid.0: a size of the grid is -1"),
    (("grid", 1), [100_000], "grid.1: a size of the grid is 100000, not 0 to 65535"),
    (("grid", 0), ["+"], "grid.0: a size of the grid is no expression"),
    (("grid", 0), ["q_len", 1, "+"] + [1, "+"] * 200, "grid.0: a size of 403 tokens"),
    (("grid", 0), [None], "grid.0.0"),
    (("grid", 0), [[[[]]]], "grid.0.0"),
    (("dims",), {"q_len": 1}, "dims: Input should be a valid"),
    (("dims", 0), "", "dims, tensors: '' is no name"),
    (("tensors",), "Q", "tensors: Input should be a valid"),
    (("tensors", 4), 7, "tensors.4: Input should be an object"),
    (("tensors", 4), None, "tensors.4: Input should be an object"),
    (("tensors", 0, "name"), 1, "tensors.0.name: Input should be a valid string"),
    (("tensors", 0, "name"), "../Q", "dims, tensors: '../Q' is no name"),
    (("tensors", 0, "dtype"), "fp7", "tensors.Q.dtype: no tensor can have"),
    (("tensors", 0, "axes"), [], "tensors.Q.axes: 0 axes"),
    (("tensors", 0, "axes", 0, "size"), [-5], "tensors.Q.axes.0.size: a size of `Q` is -5"),
    (("tensors", 0, "axes", 0, "size"), ["batch", 0, "mod"], "divided by zero"),
    (("tensors", 0, "vector"), 0, "tensors.Q.vector: 0 elements at once"),
    (("tensors", 0, "surprise"), 0, "tensors.0.surprise: Extra inputs"),
]


@needs_compilers
@pytest.mark.parametrize(("place", "value", "words"), FIELDS, ids=[w[:50] for _, _, w in FIELDS])
def test_a_field_is_named_with_its_file(
    package: Path, place: tuple[str | int, ...], value: Any, words: str
) -> None:
    path = package / "launch.json"
    if isinstance(value, int) and value > 10**4000:
        path.write_text(path.read_text().replace('"threads": 128', '"threads": ' + "1" * 5000))
    else:
        change(path, *place, to=value)
    with pytest.raises(Failed) as failed:
        judge_emulated(package, SPEC, lengths=[(8, 8)])
    assert {d.code for d in failed.value.diagnostics} == {"FW852"}
    assert words in str(failed.value)
    assert str(path) in str(failed.value)


@needs_compilers
@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([{"up_to": 10**30, "kernel": "short"}, {"kernel": "."}], "rules.0.up_to"),
        ([{"up_to": 1 << 25, "kernel": "short"}, {"kernel": "."}], "rules.0.up_to"),
        ([{"up_to": 1.5, "kernel": "short"}, {"kernel": "."}], "rules.0.up_to"),
        ([{"kernel": 5}], "rules.0.kernel"),
        ([{"kernel": "a\0b"}], "is no name of a subfolder"),
        ([{"kernel": "."}] * 1000, "rules"),
        ("x", "rules"),
    ],
)
def test_rules_that_no_trial_can_follow(package: Path, rules: Any, words: str) -> None:
    change(package / "classes.json", "rules", to=rules)
    with pytest.raises(Failed, match="FW852") as failed:
        judge_emulated(package, SPEC)
    assert words in str(failed.value)


@needs_compilers
@pytest.mark.parametrize("by", ["batch", "heads", "q_len"])
def test_kernels_are_chosen_by_the_number_of_keys_alone(package: Path, by: str) -> None:
    change(package / "classes.json", "by", to=by)
    with pytest.raises(Failed, match=r"FW852.*by: Input should be 'kv_len'"):
        judge_emulated(package, SPEC)


@needs_compilers
@pytest.mark.slow
def test_a_kernel_for_lengths_that_nobody_can_try_is_not_accepted(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judged, "ROUNDS", 1)
    change(package / "classes.json", "rules", 0, "up_to", to=1 << 20)
    found = judge_emulated(package, SPEC, seed=1, most=1)
    assert not found.ok
    assert "the kernel for more than 1048576 keys was not tried" in found.missing


@needs_compilers
@pytest.mark.parametrize(
    ("axis", "words"),
    [
        (["q_len", "kv_len", "q_len", "-", "floor_div"], "divides by zero"),
        (["q_len", 2000000000, "*", 2000000000, "*"], "too large"),
        pytest.param(["q_len", 1000000, "-"], "no tensor has the shape", marks=pytest.mark.slow),
        (["q_len", 100000000, "*"], "cannot be emulated|no tensor has the shape"),
    ],
)
def test_sizes_that_only_a_problem_shows(package: Path, axis: list[Any], words: str) -> None:
    for place in (package, package / "short"):
        change(place / "launch.json", "tensors", 4, "axes", 2, "size", to=axis)
    with pytest.raises(Failed, match=rf"FW852.*({words})"):
        judge_emulated(package, SPEC, lengths=[(8, 8)])


@needs_compilers
@pytest.mark.parametrize("count", [["q_len", 9, "-"], ["q_len", 1000000000, "*"]])
def test_a_grid_that_only_a_problem_shows(package: Path, count: list[Any]) -> None:
    for place in (package, package / "short"):
        change(place / "launch.json", "grid", 1, to=count)
    with pytest.raises(Failed, match=r"FW852.*grid\.1: -?\d+ blocks"):
        judge_emulated(package, SPEC, lengths=[(8, 8)])


@needs_compilers
def test_an_input_of_another_rank_than_the_specs(package: Path) -> None:
    for place in (package, package / "short"):
        axes = json.loads((place / "launch.json").read_text())["tensors"][0]["axes"]
        axes.insert(0, {"label": "P", "size": [1]})
        change(place / "launch.json", "tensors", 0, "axes", to=axes)
    with pytest.raises(Failed, match=r"FW904.*tensors\.Q has the shape \(1, "):
        judge_emulated(package, SPEC, lengths=[(8, 8)])


# --- files ------------------------------------------------------------------------------------


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 33)


def noise(path: Path) -> None:
    path.write_bytes(bytes(random.Random(1).randbytes(4000)))


DAMAGE: list[Callable[[Path], None]] = [pipe, folder, endless, circle, huge, noise]
READ = (*JSON, "kernel.ptx", "kernel.cubin")


@needs_compilers
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", READ)
def test_what_stands_in_place_of_a_file(
    package: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(package / name)
    with pytest.raises(Failed) as failed:
        judge_emulated(package, SPEC, lengths=[(8, 64)])
    assert {d.code for d in failed.value.diagnostics} <= {"FW852", "FW831"}
    assert name in str(failed.value)


@needs_compilers
def test_every_command_ends_with_a_message(package: Path) -> None:
    change(package / "launch.json", "threads", to=10**9)
    name = str(package)
    for command in (
        ("verify", name, "--on", "cpu"),
        ("emulate", name, "--q-len", "8"),
        ("report", name),
        ("build", name, "--gpu", "a100"),
    ):
        done = Outcome(*command)
        assert done.code == 2, command
        assert "FW852" in done.err, command
        assert "launch.json: threads: a block has 1 to 1024 threads" in done.err, command
        assert "Traceback" not in done.out + done.err
        assert "bug in Flashwright" not in done.out + done.err


RECORDS = {
    "[]": "the file: Input should be an object",
    "null": "the file: Input should be an object",
    '"text"': "the file: Input should be an object",
    "{": "the file: Invalid JSON",
    "[" * 100_000: "the file: Invalid JSON",
    '{"a":' * 100_000: "the file: Invalid JSON",
    '{"registers": "x"}': "registers: Input should be a valid integer",
    '{"registers": 1e99}': "registers: Input should be a valid integer",
    '{"stack": [1]}': "stack: Input should be a valid integer",
    '{"gpu": 5}': "gpu: Input should be a valid string",
    "\udcff": "the file: Invalid JSON",
}


@needs_compilers
@pytest.mark.parametrize("text", RECORDS, ids=[text[:20] for text in RECORDS])
def test_a_record_that_is_none_ends_a_benchmark_with_a_message(package: Path, text: str) -> None:
    (package / "build.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(Failed) as failed:
        kernels.load(package)
    assert [d.code for d in failed.value.diagnostics] == ["FW852"]
    assert f"build.json: {RECORDS[text]}" in str(failed.value)


@needs_compilers
@pytest.mark.parametrize("name", [*READ, "spec.toml", "reasoning.md"])
def test_a_benchmark_waits_for_no_pipe(package: Path, name: str) -> None:
    (package / name).touch()
    pipe(package / name)
    with pytest.raises(Failed) as failed:
        kernels.load(package)
    assert {d.code for d in failed.value.diagnostics} == {"FW852"}
    assert name in str(failed.value)


@needs_compilers
def test_what_a_benchmark_takes_from_a_package(package: Path) -> None:
    found = kernels.load(package)
    assert (found.gpu, found.ptxas["registers"], found.spec) == ("a100", 128, SPEC)
    loose = SPEC.model_copy(update={"tolerance": 0.9, "repeatable": False})
    for place in (package, package / "short"):
        (place / "spec.toml").write_text(specs.dump(loose))
    assert kernels.load(package).spec == SPEC
    (package / "build.json").unlink()
    assert kernels.load(package).gpu == "sm_80"  # all that is known then


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "it is no ELF file"),
        (b"not an ELF", "it is no ELF file"),
        (cubin()[:40], "it is no"),
        (cubin(75), "it is for sm_75, and launch.json says sm_80"),
        (cubin()[:18] + b"\x3e\x00" + cubin()[20:], "for another machine"),
    ],
)
def test_a_cubin_that_is_none(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "kernel.cubin").write_bytes(data)
    with pytest.raises(Failed, match=f"FW852.*{words}"):
        read_cubin(tmp_path, make_plan())
    for version in (80, 86, 90):
        (tmp_path / "kernel.cubin").write_bytes(cubin(version))
        assert read_cubin(tmp_path, make_plan()) == cubin(version)


PTX = [
    "",
    "words",
    "\0" * 100,
    ".target sm_75\n",
    ".version 8.0\n.target sm_80\n.visible .entry attention() { add.s32 %r1; ret; }",
    ".target sm_80\n.visible .entry attention() { .reg .b32 %r<99999999999>; ret; }",
    ".target sm_80\n.visible .entry attention() { .reg .b32 %r<9>; add.s32 %r1; ret; }",
    ".target sm_80\n.visible .entry attention() { .reg .b32 %r<9>; add.s32 _, %r1, %r2; ret; }",
    ".target sm_80\n.visible .entry attention() { .reg .b32 %r<9>; mov.u32 %r1, 08; ret; }",
    ".target sm_80\n.visible .entry attention() { bra; }",
    ".target sm_80\n.visible .entry attention() { bra NOWHERE; }",
    ".target sm_80\n.shared .align 0 .b8 x[4];\n.visible .entry attention() { ret; }",
    ".target sm_80\n.global .b8 x[99999999999999];\n.visible .entry attention() { ret; }",
    ".target sm_80\n}}}}",
]


@needs_compilers
@pytest.mark.parametrize("text", PTX)
def test_ptx_that_is_none(package: Path, text: str) -> None:
    (package / "classes.json").unlink()
    (package / "kernel.ptx").write_text(text)
    with pytest.raises(Failed) as failed:
        judge_emulated(package, SPEC, lengths=[(8, 8)])
    assert {d.code for d in failed.value.diagnostics} <= {"FW831", "FW852"}


@needs_compilers
@pytest.mark.parametrize("variable", [".shared .b8 big[99999999];", ".local .b8 big[9999999];"])
def test_ptx_that_takes_more_than_a_block_has(package: Path, variable: str) -> None:
    (package / "classes.json").unlink()
    path = package / "kernel.ptx"
    text = path.read_text()
    at = text.index("{", text.index(".entry")) + 1
    path.write_text(f"{text[:at]}\n{variable}\n{text[at:]}")
    with pytest.raises(Failed, match=r"FW831.*bytes of"):
        judge_emulated(package, SPEC, lengths=[(8, 8)])


# --- by chance --------------------------------------------------------------------------------

VALUES = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**12, 10**30, -(10**30), 0.5, 1e308),
    *(float("nan"), float("inf"), "", "q_len", "kv_len", "+", "mod", "ceil_div", ".", "..", "/"),
    *("\0", "x" * 5000, "sm_90a", "fp8", "e4m3", [], {}, [[]], [0], ["q_len"], {"a": 1}, "é", 7),
    *(["q_len", 0, "mod"], ["kv_len", "+"], [1] * 100, ["q_len", "kv_len", "*"]),
)
SEEDS, QUICK = 100, 15  # of each file
DECIDING = ("launch.json", "classes.json")  # what a launch follows


def places(told: Any, before: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every field of a JSON file, the inner ones too."""
    if isinstance(told, dict):
        items: list[tuple[str | int, Any]] = list(told.items())
    elif isinstance(told, list):
        items = list(enumerate(told))
    else:
        return []
    return [p for key, x in items for p in ((*before, key), *places(x, (*before, key)))]


def mutated(text: str, rng: random.Random) -> str:
    """One to three fields replaced, deleted, doubled or renamed; now and then the text itself."""
    if rng.random() < 0.1:
        at = rng.randrange(len(text))
        return rng.choice([text[:at], text[:at] + "[" * 20_000, text[:at] + "\\" + text[at:]])
    told = json.loads(text)
    for _ in range(rng.randint(1, 3)):
        known = places(told)
        if not known:
            break
        *outer, last = rng.choice(known)
        inner = told
        for step in outer:
            inner = inner[step]
        match rng.choice(("put", "put", "put", "delete", "double", "swap")):
            case "delete":
                del inner[last]
            case "double" if isinstance(inner, list):
                inner.insert(int(last), inner[int(last)])
            case "swap" if isinstance(inner, list):
                inner.reverse()
            case _:
                inner[last] = rng.choice(VALUES)
    return json.dumps(told)


def judge(place: Path) -> object:
    return judge_emulated(place, SPEC, seed=1, lengths=[(5, 7)], limits=Limits(seconds=1.0))


def read_everywhere(place: Path, judge_too: bool) -> None:
    """Whatever reads a package without a GPU, each on its own."""
    readers: list[Callable[[Path], object]] = [
        *(classes.read, read_plan, read_package, kernels.load, reported.read, untied),
        *((judge,) if judge_too else ()),
    ]
    for read in readers:
        with contextlib.suppress(Failed):
            read(place)


@needs_compilers
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(QUICK), id="some"),
        pytest.param(range(QUICK, SEEDS), id="more", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", JSON)
def test_mutated_files_end_in_diagnostics(
    package: Path, name: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Package, "with_lines", lambda self: self)  # it would compile
    monkeypatch.setattr(judged, "ROUNDS", 1)
    text = (package / name).read_text()
    for seed in seeds:
        (package / name).write_text(mutated(text, random.Random(f"{name} {seed}")))
        try:
            read_everywhere(package, name in DECIDING or seed % 20 == 0)
        except Exception as error:
            error.add_note(f"{name}, seed {seed}: {(package / name).read_text()[:3000]}")
            raise
