"""What an editor shows of a program that is being typed: functions of a text and a place in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashwright import gpu
from flashwright.editor.analysis import Analysis, analyse
from flashwright.editor.complete import complete
from flashwright.editor.hints import hints
from flashwright.editor.hover import hover
from flashwright.editor.names import meant
from flashwright.editor.places import word_at
from flashwright.lang.fix import apply_all
from tests.unit.call_count import calls

ROOT = Path(__file__).parents[2]
SOFTMAX = (ROOT / "examples" / "sink_softcap.tl").read_text("utf-8")
DECODE = (ROOT / "examples" / "decode.tl").read_text("utf-8")


@pytest.fixture(scope="module")
def decode() -> Analysis:
    return analyse(DECODE)


def shown(analysis: Analysis, text: str, around: str, word: str) -> str:
    """What hover shows of a word in a stretch of the text."""
    found = hover(analysis, text, text.index(around) + around.index(word))
    return found.markdown if found else ""


def labels(analysis: Analysis, typed: str) -> set[str]:
    """The completions at the end of a text."""
    return {item.label for item in complete(analysis.known, typed, len(typed))}


def test_hover_of_a_tile_tells_shape_space_positions_and_layout(decode: Analysis) -> None:
    about = shown(decode, DECODE, "  Compute GEMM S, V_shared and accumulate", "S,")
    assert "**`S`** in registers: `(BM, BN) = (64, 64)` as `fp32`, 16 KB" in about
    assert "rows: group 0..63 of `Q`, at `R = block_idx`" in about
    assert "columns: kv_len 0..63 of `K`, at `L = i in 0:length`" in about
    assert "the operand of an MMA (MMA_A)" in about
    assert "weights of a softmax" in about
    assert "masked: `kv_idx < length`" in about
    before = shown(decode, DECODE, "Compute Softmax S with", "S with")
    assert "the accumulator of an MMA (MMA_C)" in before


def test_hover_of_a_copy_tells_both_ends(decode: Analysis) -> None:
    about = shown(decode, DECODE, "Copy K (BN, HeadDim)", "K")
    assert (
        "**`K`** in shared memory: `(BN, HeadDim) = (64, 64)` as `bf16`, 2 stages of 8 KB" in about
    )
    assert "**`K`** in global memory: `(P: pages, H: kv_heads, L: PageSize, D: HeadDim)`" in about


def test_hover_knows_in_which_kernel_a_name_stands(decode: Analysis) -> None:
    assert "(Rows, HeadDim) = (16, 64)" in shown(decode, DECODE, "Compute O / where(", "O")
    assert "(BM, HeadDim) = (64, 64)" in shown(decode, DECODE, "rescale O\n", "O")
    assert "scratch between kernels" in shown(decode, DECODE, "get PartO", "PartO")


def test_hover_of_numbers_and_words(decode: Analysis) -> None:
    assert "// = 0.125" in shown(decode, DECODE, "S, Scale and", "Scale")
    assert "positions in a page" in shown(decode, DECODE, "L: PageSize", "PageSize")
    assert "let length = Lengths[batch_idx]" in shown(decode, DECODE, "kv_idx < length", "length")
    assert "position of the element's key" in shown(decode, DECODE, "kv_idx < length", "kv_idx")
    assert "Compute GEMM Q, K.T and get S" in shown(decode, DECODE, "Compute GEMM", "GEMM")
    assert shown(decode, DECODE, "// Decode: one", "one") == ""


def test_hover_on_a_finding_shows_the_long_form_of_its_code() -> None:
    wrong = SOFTMAX.replace("K_shared.T", "K_shared")
    analysis = analyse(wrong)
    code = analysis.diagnostics[0].code
    assert f"# {code}: " in shown(analysis, wrong, "Compute GEMM Q_shared", "GEMM")


def test_a_half_typed_program_keeps_what_was_known(decode: Analysis) -> None:
    """A line cannot be parsed, lines are added above, and the tiles are still known."""
    typed = "// one more line\n" + DECODE.replace(
        "  Compute Mask S where", "  Compute Mask S whe re ("
    )
    analysis = analyse(typed, before=decode.known)
    assert {d.code for d in analysis.diagnostics} == {"FW101"}
    assert "layout: the operand" in shown(analysis, typed, "GEMM S, V_shared and acc", "S,")
    assert {"K", "S", "Smax", "length"} <= labels(analysis, typed + "Compute ")
    before = {hint.line: hint.text for hint in hints(decode, DECODE, None)}
    after = {hint.line: hint.text for hint in hints(analysis, typed, None)}
    assert after == {line + 1: text for line, text in before.items()}


def test_a_wrong_program_tells_positions_of_the_last_right_one(decode: Analysis) -> None:
    wrong = DECODE.replace("Compute Multiply S, Scale", "Compute Multiply S, Skale")
    analysis = analyse(wrong, before=decode.known)
    assert "FW201" in {d.code for d in analysis.diagnostics}
    assert "(BM, BN) = (64, 64)" in shown(analysis, wrong, "Compute GEMM S, V", "S")
    assert "layout: the operand" in shown(analysis, wrong, "Compute GEMM S, V", "S")


@pytest.mark.parametrize(
    ("typed", "there", "absent"),
    [
        ("", {"Copy", "Compute", "Allocate", "for"}, {"from", "K"}),
        ("Comp", {"Compute"}, {"K", "bf16"}),
        ("Copy ", {"Q", "K", "PartO"}, {"BM", "from"}),
        ("Copy K (BN, HeadDim) ", {"from", "in"}, {"to", "K", "Copy"}),
        ("Copy K (BN, HeadDim) in coordinate [", {"P", "H", "L", "D"}, {"B", "BN"}),
        (
            "Copy K (BN, HeadDim) in coordinate [L = ",
            {"i", "length"},
            {"P"},
        ),
        ("Copy K (BN, HeadDim) from global to ", {"shared", "register"}, {"K", "from"}),
        ("Allocate X in shared (BM) as ", {"bf16", "e4m3"}, {"K", "BM"}),
        ("Allocate X in shared (", {"BM", "HeadDim"}, {"K"}),
        ("Compute ", {"GEMM", "Softmax", "exp", "S", "Scale"}, {"from", "Table"}),
        ("Compute GEMM ", {"S", "K", "Q"}, {"and get"}),
        ("Compute GEMM S, V ", {"and get", "and accumulate"}, {"S", "Copy"}),
        ("Compute GEMM S, V and get ", {"new", "S", "O"}, {"BM"}),
        ("let ", set(), {"K", "BM"}),
        ("// Compute ", set(), {"GEMM"}),
    ],
)
def test_completion_offers_what_may_stand_there(
    decode: Analysis, typed: str, there: set[str], absent: set[str]
) -> None:
    found = labels(decode, DECODE + typed)
    assert there <= found
    assert not absent & found


def test_hints_of_shared_memory_and_registers(decode: Analysis) -> None:
    rows = DECODE.split("\n")
    found = {(rows[h.line - 1].split(" as ")[0], h.text) for h in hints(decode, DECODE, None)}
    assert ("Allocate K in shared (BN, HeadDim)", "2 x 8 KB") in found
    assert ("Allocate S in register (BM, BN)", "32 registers per thread") in found
    assert ("param Scale = 1 / sqrt(HeadDim)", "= 0.125") in found
    assert any(text == "Q: 8 KB" for _, text in found)
    assert any(text == "shared memory 40 KB" for _, text in found)
    on_gpu = [h.text for h in hints(decode, DECODE, gpu.find("h200"))]
    assert any(t.startswith("shared memory 40 of 227 KB, registers ~") for t in on_gpu)


def test_budgets_and_notes_need_a_gpu() -> None:
    wide = SOFTMAX.replace("param BN = 64", "param BN = 1024")
    assert wide != SOFTMAX
    assert {d.code for d in analyse(wide).diagnostics} == set()
    assert "FW701" in {d.code for d in analyse(wide, gpu.find("h200")).diagnostics}
    off = "param Overlap = 0\n" + SOFTMAX
    analysis = analyse(off, gpu.find("h200"))
    assert analysis.diagnostics == ()
    noted = analysis.with_notes(gpu.find("h200")).diagnostics
    assert "FW814" in [d.code for d in noted if d.fix]


def test_a_name_leads_to_its_declaration(decode: Analysis) -> None:
    def line(around: str, name: str) -> str:
        word = word_at(DECODE, DECODE.index(around) + around.index(name))
        assert word is not None
        assert decode.known is not None
        place = meant(decode.known, DECODE, word)[0].declared
        return DECODE[place.start : place.end]

    assert line("GEMM S, V_shared", "V_shared").startswith("Allocate V in shared")
    assert line("kv_idx < length", "length") == "let length = Lengths[batch_idx]"
    assert line("Q_shared, K_shared.T", "Q_shared").startswith("Copy Q (BM, HeadDim)")


def test_all_fixes_are_applied_until_none_is_left() -> None:
    """The second mistake shows only once the first one, a syntax error, is gone."""
    wrong = SOFTMAX.replace("Compute Multiply", "Comptue Multiply").replace(".T", "")
    findings = analyse(wrong).diagnostics
    mended, count = apply_all(wrong, findings, lambda text: analyse(text).diagnostics)
    assert (mended, count) == (SOFTMAX, 2)


def test_the_largest_example_is_checked_between_two_keystrokes(decode: Analysis) -> None:
    """Half a million calls take a quarter of a second. (The first check also reads the grammar.)"""
    assert decode.diagnostics == ()
    assert calls(lambda: analyse(DECODE)) < 700_000


def test_no_text_is_too_broken() -> None:
    """Every state of typing a program gives findings or none, and hover, completion and hints."""
    known = None
    for end in range(0, len(DECODE), 197):
        text = DECODE[:end]
        analysis = analyse(text, before=known)
        known = analysis.known
        assert analysis.diagnostics
        hover(analysis, text, end // 2)
        complete(known, text, end)
        hints(analysis, DECODE, None)
