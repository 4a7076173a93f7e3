"""Measured choices: taken where they were measured, and nowhere else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from flashwright.author.builtin import tuned
from flashwright.author.builtin.author import Written, workload, write_code, write_sketch
from flashwright.author.builtin.choose import choose
from flashwright.author.builtin.complete import complete
from flashwright.author.builtin.needs import Tiling, Workload, footprint
from flashwright.author.builtin.reasoning import reasoning
from flashwright.author.builtin.retile import tiling_of
from flashwright.author.builtin.variants import make_spec
from flashwright.check.check import check
from flashwright.gpu import A100, H100, H200
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from tests.unit.test_cli import Outcome
from tests.unit.tune_fakes import package

D64 = Workload(64, 64, "bf16", heads=32, kv_heads=32)
MEASURED = Tiling(192, 128, 2, 12, 2, ("SplitMasked",))


def shipped() -> str:
    file = resources.files("flashwright.author.builtin") / "tuned.json"
    return file.read_text(encoding="utf-8")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_what_was_measured_is_taken(dtype: str, causal: bool) -> None:
    decision = choose(replace(D64, dtype=dtype, causal=causal), H200)
    assert decision.tiling == MEASURED
    assert decision.ranked[0] is decision.chosen
    assert decision.measured.startswith("measured on the H200: fastest")
    assert decision.measured in decision.reasons["BM"]
    wide = choose(replace(D64, qk_dim=128, v_dim=128, dtype=dtype, causal=causal), H200)
    assert wide.tiling == Tiling(128, 160, 2, 8, 2)


@pytest.mark.parametrize(
    "other",
    [
        {"options": ("softcap",)},
        {"window": 512},
        {"dtype": "e4m3"},
        {"v_dim": 128},
        {"kv_len": 256},
        {"cols_fixed": 64},
    ],
    ids=str,
)
def test_other_work_is_left_to_the_model(other: dict[str, object]) -> None:
    decision = choose(replace(D64, **other), H200)  # type: ignore[arg-type]
    assert not decision.measured


def test_other_gpus_and_a_given_headroom_are_left_to_the_model() -> None:
    assert not choose(D64, H100).measured
    assert not choose(D64, A100).measured
    assert choose(D64, H200, headroom=8).tiling != MEASURED


def test_a_choice_that_does_not_fit_is_passed_over() -> None:
    need = footprint(D64, MEASURED, H200).shared_bytes
    assert choose(D64, replace(H200, shared_per_block=need)).tiling == MEASURED
    smaller = choose(D64, replace(H200, shared_per_block=need - 1))
    assert not smaller.measured
    assert smaller.tiling != MEASURED


def test_a_second_buffer_for_q_takes_its_room() -> None:
    one = footprint(D64, replace(MEASURED, q_stages=1), H200)
    two = footprint(D64, MEASURED, H200)
    assert two.shared_bytes - one.shared_bytes == 192 * 64 * 2
    assert two.registers == one.registers


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_code_has_the_measured_sizes_and_says_so(head_dim: int) -> None:
    spec = make_spec("gqa", heads=32, kv_heads=8, head_dim=head_dim, dtype="bf16", causal=True)
    written = write_code(write_sketch(spec), spec, H200)
    assert "Allocate Q in shared (BM, HeadDim) as bf16 with stages QStages" in written.code
    assert "measured on the H200" in written.code
    assert "measured on the H200" in reasoning(spec, H200, written)
    checked = check(parse(written.code), H200)
    assert checked.program is not None
    assert not checked.errors
    tiling, params = choose(workload(spec), H200).tiling, checked.program.params
    assert [params[name] for name in tuned.PARAMS] == [
        *(tiling.bm, tiling.bn, tiling.stages, tiling.warps, tiling.q_stages)
    ]
    q = checked.program.buffers["Q", "shared"]
    assert q.stages == 2


def test_elsewhere_q_has_one_buffer_and_no_param() -> None:
    spec = make_spec("mha", head_dim=64, dtype="bf16")
    assert "QStages" not in write_code(write_sketch(spec), spec, A100).code


def test_what_is_switched_off_is_a_param() -> None:
    choice = tuned.Choice.model_validate(
        {**json.loads(shipped())["choices"][0], "off": ["PingPong"]}
    )
    spec = make_spec("mha", head_dim=64, dtype="bf16")
    decision = choose(workload(spec), H200)
    forced = replace(decision, chosen=replace(decision.chosen, tiling=choice.tiling))
    tree, _ = complete(parse(write_sketch(spec)), spec, H200, forced)
    program = check(parse(format_tree(tree)), H200).program
    assert program is not None
    assert not program.schedule.ping_pong
    assert program.schedule.overlap


def test_the_reason_comes_from_the_data() -> None:
    (first, *_) = tuned.read(shipped())
    told = first.model_copy(update={"tried": 14, "lengths": (512, 16384)})
    assert told.reason == "measured on the H200: fastest of 14 tilings at 512 to 16384 keys"


def test_the_table_is_as_it_would_be_written_again() -> None:
    choices = tuned.read(shipped())
    assert tuned.dump(choices) == shipped()
    assert tuned.dump(reversed(choices)) == shipped()
    assert len({(c.key, c.up_to) for c in choices}) == len(choices)
    for choice in choices:
        need = footprint(Workload(choice.qk_dim, choice.v_dim), choice.tiling, H200)
        assert need.registers <= need.register_limit


# --- other lengths ----------------------------------------------------------------------------

CAUSAL = make_spec("mha", head_dim=64, dtype="bf16", causal=True)


def table(*changes: dict[str, object]) -> list[tuned.Choice]:
    """Lines of a table for CAUSAL on the H200; 192x128 where nothing else is said."""
    line = next(c for c in tuned.read(shipped()) if c.tiling == MEASURED and c.causal)
    return [line.model_copy(update=change) for change in changes]


def written(monkeypatch: pytest.MonkeyPatch, *changes: dict[str, object]) -> Written:
    monkeypatch.setattr(tuned, "_shipped", lambda: tuple(tuned.read(tuned.dump(table(*changes)))))
    return write_code(write_sketch(CAUSAL), CAUSAL, H200)


def test_what_is_faster_for_few_keys_is_a_program_of_its_own() -> None:
    made = write_code(write_sketch(CAUSAL), CAUSAL, H200)
    (name,) = made.further
    assert made.classes == [(1024, name), (None, "")]
    short = Tiling(128, 128, 2, 8, 2, ("SplitMasked",))
    for code, tiling in ((made.code, MEASURED), (made.further[name], short)):
        checked = check(parse(code), H200)
        assert checked.program is not None
        assert not checked.errors
        assert tiling_of(checked.program) == tiling
    assert made.further[name].count("measured on the H200: fastest of those tried up to 1024") == 6
    assert name in reasoning(CAUSAL, H200, made)


def test_options_have_measured_programs_of_their_own() -> None:
    spec = make_spec("mha", head_dim=64, dtype="bf16", causal=True, softcap=30.0)
    made = write_code(write_sketch(spec), spec, H200)
    (name,) = made.further
    assert made.classes == [(512, name), (None, "")]
    assert "param BM = 192" in made.code
    assert "param BN = 64 " in made.further[name]
    assert "measured on the H200" in made.code


@pytest.mark.parametrize("other", [{"causal": False}, {"window": 64}, {"alibi": True}], ids=str)
def test_other_work_has_one_program(other: dict[str, object]) -> None:
    spec = make_spec("mha", **{"head_dim": 64, "dtype": "bf16", "causal": True, **other})
    made = write_code(write_sketch(spec), spec, H200)
    assert made.classes == [(None, "")]
    assert not made.further
    assert "Other lengths" not in reasoning(spec, H200, made)


def test_the_same_tiles_are_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"bm": 128, "warps": 8}
    made = written(
        monkeypatch, {}, {"up_to": 4096, **small}, {"up_to": 512, **small}, {"up_to": 1024}
    )
    (name,) = made.further
    assert made.classes == [(512, name), (1024, ""), (4096, name), (None, "")]
    assert "up to 1024 keys this kernel" in reasoning(CAUSAL, H200, made)
    alone = written(monkeypatch, {}, {"up_to": 512})
    assert not alone.further
    assert "Other lengths" not in reasoning(CAUSAL, H200, alone)


def test_what_does_not_fit_is_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    made = written(monkeypatch, {}, {"up_to": 512, "stages": 9})
    assert made.classes == [(None, "")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (({"up_to": 64},), "h200 bf16+fp16 64/64 causal: up_to 64 has no choice without up_to"),
        (({}, {"up_to": 64}, {"up_to": 64, "bm": 64}), "there are 2 choices up_to 64"),
        (({}, {"bm": 64}), "there are 2 choices without up_to"),
        (({}, {"up_to": 0}), "choice 1: up_to: Input should be greater than or equal to 1"),
    ],
)
def test_a_table_with_a_hole_or_two_choices_is_refused(
    changes: tuple[dict[str, object], ...], words: str, tmp_path: Path
) -> None:
    text = tuned.dump(table(*changes))
    with pytest.raises(ValueError, match=re.escape(words)):
        tuned.read(text)
    file = tmp_path / "tuned.json"
    file.write_text(text)
    done = Outcome("tune", str(package(tmp_path / "package")), "--write-defaults", str(file))
    assert done.code == 2
    assert words in " ".join(done.err.split())
