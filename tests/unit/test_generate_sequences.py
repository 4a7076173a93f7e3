"""`flashwright generate --packed`, `--decode`, `--cache`, `--paged` and `--kv-dtype`."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from flashwright.author.builtin.variants import make_spec
from flashwright.generate.backward import built
from flashwright.generate.folder import write_package
from flashwright.gpu import H200
from flashwright.judge.emulated import judge_emulated
from flashwright.lang.parse import parse
from flashwright.measure.grid import of_spec
from flashwright.spec import BadSpec, load
from tests.unit.emulated import needs_compilers
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


def test_what_measures_says_that_it_has_rectangular_batches() -> None:
    spec = make_spec("gqa", heads=4, kv_heads=2, dtype="bf16", packed=True)
    with pytest.raises(BadSpec, match=r"packed sequences.*`bench` measures rectangular batches"):
        of_spec(spec, [1024])
