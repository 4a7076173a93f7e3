"""Additions to global memory at stated turns: the clause, its checks, derived programs with it, and
their kernels."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.backward import tilings
from flashwright.author.builtin.variants import make_spec
from flashwright.build.steps import Steps
from flashwright.check.check import check, checked_program
from flashwright.cli.main import app
from flashwright.grad.grad import backward
from flashwright.lang.diagnostic import Failed
from flashwright.lang.format import format_stmt, format_tree
from flashwright.lang.nodes import Copy, Tree, statements
from flashwright.lang.parse import parse, read
from flashwright.lower import ir
from flashwright.lower.passes.delay_turns import delay_turns
from flashwright.lower.term import ZERO
from flashwright.lower.translate import translate
from flashwright.program.kernels import Kernels
from flashwright.semantics.interpret import interpret_all
from tests.example_programs import EXAMPLES
from tests.unit.test_several_kernels import ADDED, BACKWARD, codes, problem

AT_TURN = ADDED.replace("dQsum\n", "dQsum at turn block_idx\n")


def test_the_clause_is_read_and_written() -> None:
    line = "Copy dQ (64, 64) in coordinate [L = i] from register to global and accumulate"
    for text in (f"{line} at turn i + 1", f"{line} dQsum at turn floor(i / 2)"):
        (stmt,) = parse(text).body
        assert isinstance(stmt, Copy)
        assert stmt.adds
        assert stmt.turn is not None
        assert format_stmt(stmt) == text
        assert parse(text.upper().replace("FLOOR", "floor")).body != ()


def test_turn_is_a_name_elsewhere() -> None:
    tree = parse("param turn = 2\nCopy Q (turn, 64) in coordinate [L = turn] from global to shared")
    assert parse(format_tree(tree)) == tree


def test_a_sum_at_turns_is_clean_and_right() -> None:
    source = BACKWARD.read_text().replace(ADDED, AT_TURN)
    kernels = Kernels(check(parse(source), gpus.find("h200")).kernels)
    (counters,) = kernels.counters
    assert [axis.label for axis in counters.axes] == ["B", "H", "L", "D", "W"]
    record = Steps.of(kernels)
    assert counters.name in set(record.scratch) & set(record.zeroed)
    given, expected = problem(130, 150)
    found = interpret_all(kernels, given)
    for name, wanted in expected.items():
        error = np.sqrt(np.mean((found[name].astype(np.float64) - wanted) ** 2))
        assert error <= 4e-3 * np.sqrt(np.mean(wanted**2)), name


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        pytest.param("block_idx + 1", "turn 1, but turn 0 of this tile is next", id="nobody first"),
        pytest.param("0", "turn 0, but turn 1 of this tile is next", id="two at one turn"),
        pytest.param("2 * block_idx", "turn 2, but turn 1 of this tile is next", id="one left out"),
        pytest.param(
            *("ceil(kv_len / BN) - 1 - block_idx", "but turn 0 of this tile is next"),
            id="later blocks first",
        ),
        pytest.param("block_idx / 2", "turn 1/2", id="no whole number"),
    ],
)
def test_turns_out_of_order_are_found_at_their_line(turn: str, message: str) -> None:
    source = BACKWARD.read_text().replace(ADDED, AT_TURN.replace("block_idx\n", f"{turn}\n"))
    (found,) = check(parse(source)).errors
    assert found.code == "FW613"
    assert message in found.message
    assert found.span is not None
    assert source.splitlines()[found.span.line - 1] == source_line(source, "at turn")
    assert found.help is not None


def source_line(source: str, part: str) -> str:
    return next(line for line in source.splitlines() if part in line)


SUM = """
param N = 64
Allocate X in global (B: batch, H: heads, L: q_len) as fp32
Allocate S in global (L: q_len) as fp32
Allocate Y in global (L: q_len) as fp32

grid a = 0:heads, b = 0:batch
Copy X (N) in coordinate [B = b, H = a, L = 0] from global to register
Copy X (N) in coordinate [L = 0] from register to global and accumulate S at turn TURN

grid i = 0:q_len / N
Copy S (N) in coordinate [L = i] from global to register
Copy S (N) in coordinate [L = i] from register to global and get Y
"""


@pytest.mark.parametrize(
    ("turn", "wrong"),
    [
        ("b * heads + a", "`a` falls from"),  # persistent kernels take tiles in another order
        ("a * batch + b", "is next"),
    ],
)
def test_an_order_in_which_blocks_may_wait_for_each_other(turn: str, wrong: str) -> None:
    found = check(parse(SUM.replace("TURN", turn))).errors
    assert [d.code for d in found] == ["FW613"]
    assert wrong in found[0].message


def test_turns_along_the_other_axes_of_the_grid() -> None:
    text = SUM.replace("L = 0] from register", "L = a] from register").replace(
        "H = a, L = 0", "L = a"
    )
    text = text.replace("B: batch, H: heads", "B: batch").replace("0:heads", "0:q_len / N")
    assert check(parse(text.replace("TURN", "b"))).ok


PLAIN = AT_TURN.replace(" at turn block_idx", "")


@pytest.mark.parametrize(
    ("new", "code"),
    [
        pytest.param(PLAIN + AT_TURN, "FW613", id="also added without a turn"),
        pytest.param(AT_TURN.replace("L = i", "L at i * BM"), "FW613", id="in elements"),
        pytest.param(AT_TURN.replace("accumulate", "get"), "FW205", id="not added"),
        pytest.param(AT_TURN.replace("turn block_idx", "turn dQ"), "FW206", id="a tile"),
    ],
)
def test_what_has_no_turns(new: str, code: str) -> None:
    assert code in codes((ADDED, new))


def test_only_programs_of_several_kernels_have_counters() -> None:
    one = SUM[: SUM.index("grid i")].replace("TURN", "a").replace("a = 0:heads, b", "b")
    one = one.replace("Allocate Y in global (L: q_len) as fp32\n", "").replace("H = a, ", "H = 0, ")
    found = check(parse(one.replace("turn a", "turn b"))).errors
    assert [d.message for d in found] == ["`at turn` needs a program of several kernels"]


def test_counters_count_for_one_kernel() -> None:
    begin, end = SUM.index("grid a"), SUM.index("grid i")
    first = SUM[begin:end].replace("a = 0:heads, ", "").replace("H = a", "H = 0")
    twice = SUM[:begin] + 2 * first.replace("TURN", "b") + SUM[end:]
    messages = [d.message for d in check(parse(twice)).errors]
    assert messages == ["two kernels accumulate `S` at turns"]


# --- derived programs ---------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "mha full": {"variant": "mha"},
    "mha causal": {"variant": "mha", "causal": True},
    "mha window": {"variant": "mha", "causal": True, "window": 70},
    "gqa causal": {"variant": "gqa", "causal": True},
    "gqa window": {"variant": "gqa", "causal": True, "window": 70},
    "alibi": {"variant": "gqa", "causal": True, "alibi": True},
    "sink": {"variant": "gqa", "causal": True, "sink": True},
}


@cache
def derived(setting: str, gpu: str = "h200", head_dim: int = 64) -> Tree:
    """A deterministic backward pass with the author's first sizes."""
    card = gpus.find(gpu)
    spec = make_spec(**SETTINGS[setting], head_dim=head_dim, dtype="bf16")
    forward = checked_program(parse(write_code(write_sketch(spec), spec, card).code))
    _, sized = next(tilings(backward(forward, deterministic=True).tree, card))
    return sized


def turns(tree: Tree) -> dict[str, str]:
    """The turns of all additions, by the tensor that they add to."""
    copies = [s for s in statements(tree.body) if isinstance(s, Copy) and s.adds]
    text = {(c.target or c.name).id: format_stmt(c) for c in copies}
    return {name: line.partition(" at turn ")[2] for name, line in text.items()}


@pytest.mark.parametrize("setting", SETTINGS)
def test_derived_programs_are_clean(setting: str) -> None:
    tree = derived(setting)
    assert check(tree, gpus.find("h200")).ok
    window = "max(0, floor((i * BM + kv_len - q_len - Window + 1) / BN))"
    turn = f"block_idx - {window}" if "window" in setting else "block_idx"
    assert turns(tree)["dQsum"] == turn
    assert "let i = Start + Steps - 1 - " in format_tree(tree)  # the last queries first


def test_parts_of_one_block_need_no_turn() -> None:
    found = turns(derived("alibi"))
    assert found["dSlopesparts"] == ""
    assert found["dSlopes"] == "batch_idx"


def test_other_gradients_are_added_in_order_too() -> None:
    def of(name: str) -> dict[str, str]:
        program = checked_program(parse(read(EXAMPLES / f"{name}.tl")))
        tree = backward(program, deterministic=True).tree
        assert check(tree).ok
        return turns(tree)

    assert of("bias_prefix")["dBiassum"] == "batch_idx"
    assert of("rope_split")["dKropesum"] == "head_idx"
    assert of("documents")["dQsum"] == "block_idx"  # bounds from data: all blocks visit all tiles


def test_a_sum_without_an_order_is_refused() -> None:
    program = checked_program(parse(read(EXAMPLES / "forgetting.tl")))
    with pytest.raises(Failed, match="gradient of `Gates` have no order") as refused:
        backward(program, deterministic=True)
    assert [d.code for d in refused.value.diagnostics] == ["FW908"]


def test_without_it_nothing_changes() -> None:
    spec = make_spec("mha", causal=True, head_dim=64, dtype="bf16")
    forward = checked_program(parse(write_code(write_sketch(spec), spec, gpus.find("h200")).code))
    assert set(turns(backward(forward).tree).values()) == {""}


def test_the_commands() -> None:
    run = CliRunner().invoke
    example = str(EXAMPLES / "unscaled.tl")
    assert "at turn block_idx\n" in run(app, ["grad", example, "--deterministic"]).output
    assert "at turn" not in run(app, ["grad", example]).output
    refused = run(app, ["generate", "mha", "--gpu", "h200", "--deterministic"])
    assert refused.exit_code == 2
    assert "only with --backward" in refused.output


# --- kernels ------------------------------------------------------------------------------------


def main_kernel(setting: str, gpu: str, head_dim: int = 64) -> str:
    card = gpus.find(gpu)
    programs = check(derived(setting, gpu, head_dim), card).kernels
    (main,) = (p for p in programs if "dQsum" in p.counters)
    return translate(main, card).source


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_turn_is_passed_on_while_the_next_scores_are_computed(head_dim: int) -> None:
    source = main_kernel("mha causal", "h200", head_dim)
    loop = source[source.rindex("CUTE_NO_UNROLL") :]
    steps = r"start_product<[^(]*\(group, (\w+)|turns\.(take|hand_over)|(add|finish\w*<\d>)"
    found = [next(filter(None, one)) for one in re.findall(steps, loop)]
    assert found == [
        *("S", "dP", "finish_products<1>", "hand_over", "finish_products<0>"),
        *("dV", "dQ", "dK", "take", "finish_products<1>", "add", "finish_products<0>"),
        "hand_over",  # behind the loop
    ]


def test_tiles_are_taken_in_the_order_of_their_turns() -> None:
    for setting in ("mha full", "mha causal"):
        assert "fw::TileScheduler<16, true>" in main_kernel(setting, "h200")
    for setting in ("mha full", "gqa causal"):
        assert "int const block_idx = blockIdx.z;" in main_kernel(setting, "a100")


def turn_nodes() -> tuple[ir.TakeTurn, ir.PassTurn]:
    """The IR around an addition at a turn."""
    source = BACKWARD.read_text().replace(ADDED, AT_TURN)
    counters = check(parse(source)).kernels[1].counters["dQsum"]
    window = ir.Window(counters, (ZERO, ZERO, ZERO, ZERO), None, None)
    return ir.TakeTurn(window, ZERO), ir.PassTurn(counters)


def test_of_several_turns_each_is_passed_on_at_once() -> None:
    gemm = ir.Gemm(("S", "register"), ("K", "shared"), ("Q", "shared"), True, True)
    once, passed = turn_nodes()
    loop = ir.Loop("i", ZERO, ZERO, (gemm, once, passed))
    assert delay_turns((loop,)) == (ir.Loop("i", ZERO, ZERO, (gemm, passed, once)), passed)
    store = ir.Store(gemm.target, once.counters, optional=False, adds=True)
    looped = delay_turns((ir.Loop("i", ZERO, ZERO, (gemm, once, store, passed)),))
    assert looped == (ir.Loop("i", ZERO, ZERO, (gemm, passed, once, store)), passed)
    twice = ir.Loop("i", ZERO, ZERO, (gemm, once, passed, once, passed))
    assert delay_turns((twice,)) == (twice,)
    alone = ir.Loop("i", ZERO, ZERO, (once, passed))
    assert delay_turns((alone,)) == (alone,)
