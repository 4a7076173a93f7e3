"""The same program with other sizes: it means the same, says its sizes, and fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashwright.author.builtin.author import workload, write_code, write_sketch
from flashwright.author.builtin.needs import Tiling, footprint
from flashwright.author.builtin.retile import (
    NEEDED,
    name_of,
    offers,
    params_of,
    retiled,
    tiling_of,
)
from flashwright.author.builtin.variants import make_spec
from flashwright.check.check import check
from flashwright.gpu import A100, H200, Gpu, find
from flashwright.lang.nodes import Param, statements
from flashwright.lang.parse import parse
from flashwright.program.program import Program
from flashwright.spec import AttentionSpec
from tests.unit.test_cli import SKETCH

EXAMPLES = Path(__file__).parents[2] / "examples"
D64 = make_spec("mha", head_dim=64, dtype="bf16", causal=True)
LENGTHS = (512, 4096)


def program(spec: AttentionSpec, gpu: Gpu) -> Program:
    return checked(write_code(write_sketch(spec), spec, gpu).code, gpu)


def checked(code: str, gpu: Gpu) -> Program:
    found = check(parse(code), gpu)
    assert found.program is not None
    assert not found.errors, found.errors
    return found.program


def listed(spec: AttentionSpec, gpu: Gpu) -> tuple[Program, list[Tiling]]:
    made, work = program(spec, gpu), workload(spec)
    problems = [replace(work, batch=16384 // n, q_len=n, kv_len=n) for n in LENGTHS]
    return made, [offer.tiling for offer in offers(made, gpu, problems)]


@pytest.mark.parametrize(
    ("gpu", "first"), [("h200", 12), ("a100", 6), pytest.param("t4", 6, marks=pytest.mark.slow)]
)
def test_every_offer_is_a_program_of_its_sizes(gpu: str, first: int) -> None:
    card = find(gpu)
    made, tilings = listed(D64.model_copy(update={"dtype": "fp16"}), card)
    assert tilings[0] == tiling_of(made), "the present one comes first"
    assert len(set(tilings)) == len(tilings) == len({name_of(t) for t in tilings})
    for tiling in tilings[:first]:
        assert tiling_of(checked(retiled(made.tree, tiling, "for a test"), card)) == tiling


def test_what_is_offered_fits_and_is_in_turn_the_best_of_each_length() -> None:
    made, tilings = listed(D64, H200)
    work = workload(D64)
    for tiling in tilings:
        need = footprint(work, tiling, H200)
        assert need.shared_bytes <= H200.shared_per_block
        assert need.registers <= need.register_limit
    problems = [replace(work, batch=16384 // n, q_len=n, kv_len=n) for n in LENGTHS]
    found = offers(made, H200, problems)
    for number in range(len(LENGTHS)):
        best = min(offer.microseconds[number] for offer in found)
        assert any(offer.microseconds[number] == best for offer in found[:4])
    # Things that the model knows nothing of are tried early too, with the best tiles.
    assert {"Overlap", "PingPong", "SplitMasked", "Persistent"} == {
        n for t in tilings[:24] for n in t.off
    }


def test_only_sizes_and_schedule_change() -> None:
    made = program(D64, H200)
    tiling = Tiling(128, 96, 3, 8, 1, ("PingPong", "SplitMasked"))
    text = retiled(made.tree, tiling, "for a test")
    changed = checked(text, H200)
    assert not changed.schedule.ping_pong
    assert changed.schedule.overlap
    numbers = params_of(tiling)

    def rest(one: Program) -> list[object]:
        every = statements(one.tree.body)
        return [s for s in every if not (isinstance(s, Param) and s.name.id in numbers)]

    assert [str(s) for s in rest(changed)] == [str(s) for s in rest(made)]
    params = [line for line in text.splitlines() if line.startswith("param BM")]
    assert params[0].endswith("// for a test"), "the old reason does not stay"
    # And back again: a schedule that is on by itself needs no param, one that is there stays.
    again = retiled(changed.tree, replace(tiling, off=("SplitMasked",)), "for a test")
    assert "param PingPong = 1" in again
    assert checked(again, H200).schedule.ping_pong


def test_stages_are_given_to_a_program_that_has_none() -> None:
    spec = D64
    text = retiled(program(spec, H200).tree, Tiling(128, 64, 1, 8), "for a test")
    plain = text.replace(" with stages Stages", "").replace(" with stages QStages", "")
    plain = "\n".join(line for line in plain.splitlines() if "Stages" not in line) + "\n"
    made = checked(plain, H200)
    assert tiling_of(made) == Tiling(128, 64, 1, 8)
    more = checked(retiled(made.tree, Tiling(128, 64, 2, 8, 2), "for a test"), H200)
    assert more.buffers["K", "shared"].stages == more.buffers["V", "shared"].stages == 2
    assert more.buffers["Q", "shared"].stages == 2


def test_a_program_that_fetches_ahead_itself_keeps_its_stages() -> None:
    _, tilings = listed(D64, A100)
    assert "let Last" in write_code(write_sketch(D64), D64, A100).code
    assert {t.stages for t in tilings} == {1}
    assert {t.off for t in tilings} == {()}, "and has no schedule to change"


def test_somebody_elses_program_is_retiled_as_well() -> None:
    made = checked((EXAMPLES / "sigmoid.tl").read_text(), A100)
    present = tiling_of(made)
    assert present is not None
    other = replace(present, bn=present.bn // 2)
    assert tiling_of(checked(retiled(made.tree, other, "for a test"), A100)) == other


def test_a_program_without_these_names_has_no_tiling() -> None:
    code = write_code(write_sketch(D64), D64, A100).code.replace("BN", "Columns")
    assert tiling_of(checked(code, A100)) is None
    assert NEEDED == ("BM", "BN")
    assert "param" not in SKETCH
