"""`flashwright generate --packed`, `--decode`, `--cache`, `--paged` and `--kv-dtype`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from flashwright.author.builtin.variants import make_spec
from flashwright.author.llm import prompt
from flashwright.author.llm.budget import Budget, estimate_prompt
from flashwright.author.llm.connect import connect
from flashwright.author.llm.prompt import Facts
from flashwright.author.llm.transcript import FOLDER, Transcript
from flashwright.build import toolchain
from flashwright.check.check import check
from flashwright.generate import pipeline
from flashwright.generate.backward import built
from flashwright.generate.by_model.ask import Authors, StageAuthor
from flashwright.generate.folder import write_package
from flashwright.generate.packed import PackedOrder
from flashwright.generate.replay import replay
from flashwright.generate.state import Run
from flashwright.gpu import H200
from flashwright.judge.emulated import judge_emulated
from flashwright.lang.parse import parse
from flashwright.program.kernels import Kernels
from flashwright.spec import AttentionSpec, load
from tests.unit.emulated import needs_compilers
from tests.unit.llm_server import Server, say, serve
from tests.unit.test_by_model import Nobody, fenced
from tests.unit.test_cli import Outcome

SMALL = ("--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--dtype", "bf16", "--gpu", "h200")
WAYS = {
    "packed": (("--packed", "--causal"), {"packed": True}, "packed sequences"),
    "decode": (("--decode", "1"), {"decode": 1}, "decode of 1 query, keys in a cache"),
    "decode over pages in fp8": (
        ("--decode", "2", "--paged", "16", "--kv-dtype", "fp8"),
        {"decode": 2, "page": 16, "kv_dtype": "fp8"},
        "decode of up to 2 queries, keys in pages of 16",
    ),
    "packed queries, keys in pages": (
        ("--packed", "--paged", "48", "--causal"),
        {"packed": True, "page": 48},
        "packed sequences, keys in pages of 48",
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_the_program_is_written_and_checked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHWRIGHT_NVCC", "/nowhere/nvcc")  # nothing is compiled here
    options, settings, words = WAYS[name]
    folder = str(tmp_path / "out")
    done = Outcome("generate", "gqa", *SMALL, *options, "--until", "check", "--out", folder)
    assert done.code == 0
    assert words in " ".join(done.out.split())
    given = tomllib.loads(Path(folder, "spec.toml").read_text())
    assert settings.items() <= given.items()
    rectangular, code = (Path(folder, f"{n}.tl").read_text() for n in ("rectangular", "code"))
    assert "LengthsK" in code or "StartsK" in code
    assert "LengthsK" not in rectangular
    assert ("StartsQ" in code) == ("packed" in settings)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--packed", "--decode", "1"), "decode: queries are packed or as many for each sequence"),
        (("--decode", "1", "--cache"), "cache: decode says that keys lie in a cache"),
        (("--paged", "16", "--cache"), "cache: page says that keys lie in a cache"),
        (("--decode", "0"), "decode: must be at least 1"),
        (("--decode", "129"), "decode: must be at most 128"),
        (("--paged", "0"), "page: must be at least 1"),
        (("--packed", "--backward"), "packed: a backward pass has rectangular batches"),
        (
            ("--decode", "1", "--kv-dtype", "fp8", "--dtype", "fp8"),
            "kv_dtype: goes with a Q of 16 bits",
        ),
    ],
)
def test_what_does_not_go_together_is_said(options: tuple[str, ...], told: str) -> None:
    done = Outcome("generate", "gqa", *SMALL, *options)
    assert done.code == 2
    assert told in done.err


RESCALED = "O * exp(Smax - NewSmax) + PartO * exp(PartSmax - NewSmax)"


@pytest.mark.slow
@needs_compilers
def test_a_decode_is_accepted_and_a_wrong_one_refused(tmp_path: Path) -> None:
    """End to end, under emulation: pages full of NaN, tables that name no page behind the end. The
    other kernel adds parts of sums that have different maxima."""
    folder = tmp_path / "out"
    options = ("--decode", "1", "--paged", "16", "--out", str(folder))
    done = Outcome("generate", "gqa", *SMALL, *options)
    assert done.code == 0, done.out
    assert "accepted under emulation" in done.out
    text = (folder / "code.tl").read_text()
    assert RESCALED in text
    tree = parse(text.replace(RESCALED, "O + PartO"))
    write_package(tmp_path / "wrong", built(tree, H200), H200.name)
    verdict = judge_emulated(tmp_path / "wrong", load(folder / "spec.toml"), seed=7, most=4)
    assert {offence.name for offence in verdict.offences} <= {"wrong", "special_shapes"}
    assert verdict.offences


# --- by a language model ------------------------------------------------------------------------

MODELLED = {
    "packed": {"packed": True, "causal": True},
    "packed queries, a cache": {"packed": True, "cache": True},
    "packed queries, pages": {"packed": True, "page": 48},
    "decode": {"decode": 2, "causal": True, "alibi": True, "sink": True},
    "decode over pages in fp8": {"decode": 1, "page": 16, "kv_dtype": "fp8"},
}
LIMIT = 12_700
"""Tokens of a prompt: the language of several kernels and of caches comes on top."""


def spec_of(name: str) -> AttentionSpec:
    return make_spec("gqa", heads=4, kv_heads=2, head_dim=64, dtype="bf16", **MODELLED[name])


@pytest.mark.parametrize("name", MODELLED)
def test_the_prompt_has_what_the_program_needs(name: str) -> None:
    """Each tensor with its axes and type, and how rows of sequences are copied."""
    spec = spec_of(name)
    messages = prompt.first("code", Facts(spec, H200, stages=("code",)))
    text = messages[1].text
    assert estimate_prompt(messages) < LIMIT
    assert not re.search(r"\{\{|\{%|\bNone\b", text)
    code = PackedOrder(spec, H200).code()
    for tensor in Kernels(check(parse(code)).kernels).inputs:
        (told,) = re.findall(rf"^- {tensor.name} \((.*)\) (\w+): input", text, re.MULTILINE)
        letters = [axis.label for axis in tensor.axes]
        if "G" not in letters:
            assert [axis.split(":")[0] for axis in told[0].split(", ")] == letters, tensor.name
        assert told[1] == tensor.dtype
    for word in re.findall(r"\bpage_idx\b|\bsplits\b|\bLengthsK\b|\bKDescale\b", code):
        assert word in text
    example = text[text.index("## An example") :]
    program = re.search(r"```tl\n(.*?)```", example, re.DOTALL)
    assert program is not None
    assert not check(parse(program[1]), H200).errors
    assert "Window" in program[1] or "sigmoid" in program[1]  # another operator
    assert ("PartO" in program[1]) == (spec.decode is not None)


def by_model(server: Server, spec: AttentionSpec, folder: Path) -> Run:
    model = connect("m", server.url, env={"OPENAI_API_KEY": ""})
    authors = Authors(Transcript(folder / FOLDER), {"code": StageAuthor(model, "m", Budget(3))})
    authors.begin(spec, H200)
    return pipeline.generate(spec, H200, folder, Nobody(), authors, last="cpu")


@pytest.mark.usefixtures("checked_here")
@pytest.mark.parametrize(
    ("name", "right", "wrong", "told"),
    [
        (
            "packed",
            "let kv_last = StartsK[batch_idx + 1]",
            "let kv_last = kv_first + kv_len",
            ("FW801", "queries and keys of the sequences, in order: "),
        ),
        (
            "decode over pages in fp8",
            "let kv_length = LengthsK[batch_idx]",
            "let kv_length = kv_len",
            ("FW605", "axis P of `K`", "FW203", "`LengthsK` is not used"),
        ),
    ],
)
def test_a_model_writes_it(
    name: str,
    right: str,
    wrong: str,
    told: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The author's program is accepted. One that ignores lengths is sent back, with the reason. The
    record gives the same again."""
    monkeypatch.setattr(toolchain, "has_nvcc", lambda: False)
    spec = spec_of(name)
    code = PackedOrder(spec, H200).code()
    assert right in code
    with serve([say(fenced(code.replace(right, wrong))), say(fenced(code))]) as server:
        run = by_model(server, spec, tmp_path / "run")
        assert len(server.requests) == 2
    assert run.ok, run.failed
    assert (tmp_path / "run" / "code.tl").read_text() == code
    assert len(run.programs) == len(check(parse(code)).kernels)
    for words in told:
        assert words in server.requests[1].text
    again = replay(tmp_path / "run", tmp_path / "again", Nobody(), last="cpu")
    assert again.same, again
    assert (tmp_path / "again" / "code.tl").read_text() == code


@pytest.mark.parametrize(
    "more", [("--translate", "m"), ("--sketch", "m"), ("--model", "m", "--improve", "2")]
)
def test_a_model_writes_the_tl_alone(more: tuple[str, ...]) -> None:
    done = Outcome("generate", "gqa", *SMALL, "--packed", *more)
    assert done.code == 2
    told = "not for packed sequences, caches and decode: a model writes the TL (--params)"
    assert told in " ".join(done.err.replace("\u2502", "").split())


def test_the_command_asks_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "")
    monkeypatch.setattr(toolchain, "has_nvcc", lambda: False)
    options = ("--decode", "1", "--paged", "16", "--until", "code", "--out", str(tmp_path / "o"))
    code = PackedOrder(
        make_spec("gqa", heads=4, kv_heads=2, head_dim=64, dtype="bf16", decode=1, page=16), H200
    ).code()
    with serve([say(fenced(code))]) as server:
        model = ("--model", "m", "--base-url", server.url)
        done = Outcome("generate", "gqa", *SMALL, *options, *model)
    assert done.code == 0, done.err
    assert (tmp_path / "o" / "code.tl").read_text() == code
