"""Reading TL: every form of the paper, both loop spellings, comments, and every kind of mistake."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashwright.lang import fix
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.nodes import (
    Allocate,
    Binary,
    Call,
    Comment,
    Compute,
    Copy,
    For,
    If,
    Name,
    Num,
    Reshape,
    Tree,
    Unary,
)
from flashwright.lang.parse import MAX_BYTES, parse, read

LISTING_1 = """\
Compute GEMM Q_shared, K_shared.T and
get S
if i < (kv_len/BN) - 1
Copy K (BN, HeadDim) in coordinate [L
= i+1] from global to shared
end
Compute Softmax S
// No reshape!
Compute GEMM S, V_shared and accumulate
O_register
"""
LISTING_2 = """\
Compute GEMM Q_shared, K_shared and get
S //K_shared should be transposed
Compute Softmax S with Smax and Ssum
Reshape S from (MMA_C, MMA_M, MMA_N) to
(MMA_A, MMA_M, MMA_N_new)
Compute GEMM S, V_shared and accumulate
O_reg
"""


def only(source: str) -> object:
    (stmt,) = parse(source).body
    return stmt


def failure(source: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(Failed) as caught:
        parse(source)
    return caught.value.diagnostics


def found(source: str) -> list[tuple[str, int]]:
    return [(d.code, d.span.line) for d in failure(source) if d.span]


# --- what the paper prints --------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "Copy Q from global to shared",
        "Copy Q (BM, HeadDim) in coor [L =block_idx] from global to shared memory",
        "Copy A (BM, BK) in coordinate [L = i] from global to shared",
        "Compute GEMM A, B and get S",
        "Compute GEMM A, B and accumulate S",
        "Compute Multiply A, x and get new A",
        "Compute Multiply A, x and get B",
        "Compute Softmax A",
        "Allocate A in global (M, K) with offset batch_offset\nCopy A from global to shared",
        "Allocate C in register (BM, BN)\nfor i in 0:K:\n  Compute GEMM A, B and get C\n",
        "reshape rS from mma_C to mma_A",
        "Reshape G from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)",
        "for i=0:N\n  Compute Softmax G\nend",
    ],
)
def test_every_form_in_the_paper_parses(source: str) -> None:
    assert parse(source).body


def test_listing_1_parses_with_its_wrapped_lines() -> None:
    gemm, prefetch, softmax, note, second = parse(LISTING_1).body
    assert isinstance(gemm, Compute)
    assert gemm.target == Name("S")
    assert isinstance(prefetch, If)
    assert isinstance(prefetch.then[0], Copy)
    assert isinstance(softmax, Compute)
    assert note == Comment("No reshape!")
    assert isinstance(second, Compute)
    assert (second.mode, second.target) == ("accumulate", Name("O_register"))


def test_listing_2_parses_with_its_wrapped_lines() -> None:
    gemm, softmax, reshape, _ = parse(LISTING_2).body
    assert gemm.comment == "K_shared should be transposed"
    assert isinstance(softmax, Compute)
    assert softmax.state == (Name("Smax"), Name("Ssum"))
    assert isinstance(reshape, Reshape)
    assert reshape.dest == (Name("MMA_A"), Name("MMA_M"), Name("MMA_N_new"))


def test_the_zero_that_the_listings_print_for_the_letter_o_is_mended() -> None:
    source = LISTING_1.replace("O_register", "0_register")
    (d,) = failure(source)
    assert (d.code, d.span and d.span.line) == ("FW101", 10)
    assert fix.apply(source, [d]) == (LISTING_1, 1)


def test_statements_may_share_a_line() -> None:
    source = "Compute Multiply A, x and get new A Compute Multiply A, x and get B"
    assert len(parse(source).body) == 2


# --- the forms --------------------------------------------------------------------------------


def test_both_loop_spellings_give_equal_trees() -> None:
    body = "  Copy K from global to shared\n  if i < 3{}\n    Compute Softmax S\n{}"
    with_end = "for i = 0:N\n" + body.format("", "  end\n") + "end\nCopy O from register to global"
    by_indent = "for i in 0:N:\n" + body.format(":", "") + "Copy O from register to global"
    by_colon_and_end = "for i in 0:N:\n" + body.format(":", "  end\n") + "end\n"
    assert parse(with_end) == parse(by_indent)
    assert parse(by_colon_and_end) == Tree(parse(with_end).body[:1])


def test_else_belongs_to_the_if_of_its_column() -> None:
    source = "if a:\n  for i in 0:N:\n    Compute Exp S\nelse:\n  Compute Log S\nCompute Abs S\n"
    branch, after = parse(source).body
    assert isinstance(branch, If)
    assert isinstance(branch.then[0], For)
    assert len(branch.orelse) == 1
    assert isinstance(after, Compute)


def test_a_continued_line_at_the_margin_does_not_close_a_colon_block() -> None:
    loop = only(
        "for i in 0:N:\n  Compute GEMM S, V and accumulate\nO_register\n  Compute Softmax S"
    )
    assert isinstance(loop, For)
    assert len(loop.body) == 2


def test_a_range_may_wrap_after_its_colon() -> None:
    assert only("grid b = 0:\n  q_len / BM, h = 0:heads") == only(
        "grid b = 0:q_len / BM, h=0:heads"
    )


def test_verbs_and_expressions() -> None:
    plain = only("Compute Softcap * tanh(S / Softcap) and get new S")
    assert isinstance(plain, Compute)
    assert plain.verb is None
    assert plain.mode == "get new"
    assert only("Compute -1e30 and get m") == Compute(
        None, (Unary("-", Num("1e30")),), mode="get", target=Name("m")
    )
    assert only("Compute GEMM(Q, K.T) and get S") == only("Compute GEMM Q, K.T and get S")
    assert only("Compute Multiply (A + B), C and get D") == Compute(
        Name("Multiply"),
        (Binary("+", Name("A"), Name("B")), Name("C")),
        mode="get",
        target=Name("D"),
    )
    choose = only("Compute where(l > 0, O / l, 0) and get O")
    assert isinstance(choose, Compute)
    assert isinstance(choose.args[0], Call)


def test_a_verb_does_not_swallow_the_next_statement() -> None:
    first, second = parse("Compute S\nCopy Q from global to shared").body
    assert first == Compute(None, (Name("S"),))
    assert isinstance(second, Copy)


def test_a_mask_condition_may_begin_with_a_bracket() -> None:
    mask = only("Compute Mask S where (a or b) and not c")
    assert isinstance(mask, Compute)
    assert isinstance(mask.where, Binary)
    assert mask.where.op == "and"


def test_clauses_come_in_any_order_and_keywords_in_any_case() -> None:
    assert only("compute Softmax S AND RESCALE O with m, l") == only(
        "Compute Softmax S with m and l and rescale O"
    )
    assert only("ALLOCATE K in Registers (L: BN) with stages 2 as bf16") == Allocate(
        Name("K"),
        "register",
        only("Allocate K in register (L: BN)").shape,  # type: ignore[attr-defined]
        Name("bf16"),
        None,
        Num("2"),
    )


def test_words_of_a_clause_may_be_names_elsewhere() -> None:
    stmt = only("Allocate A in global memory (M) with offset offset + stages")
    assert isinstance(stmt, Allocate)
    assert stmt.offset == Binary("+", Name("offset"), Name("stages"))


def test_spans_are_of_the_header_and_include_brackets() -> None:
    loop = only("for i = 0:(N + 1)  // c\n  Compute exp(S) and get S\nend")
    assert isinstance(loop, For)
    assert (loop.span.start, loop.span.end, loop.span.end_line) == (0, 17, 1)
    call = loop.body[0].args[0]  # type: ignore[union-attr]
    assert (call.span.column, call.span.end_column) == (11, 17)


# --- comments and blank lines -----------------------------------------------------------------


def test_no_comment_is_lost() -> None:
    source = """\
// top

param BM = 128 // rows
for i in 0:N: // head
  // first
  Copy K // a
    from global // b
    to shared
  // last in the loop
// after the loop
if c
else // why
end // closed
Compute Softmax S and // odd
  get S
// end of file"""
    top, param, loop, after, branch, closed, softmax, last = parse(source).body
    assert top == Comment("top")
    assert (param.comment, param.gap) == ("rows", True)
    assert isinstance(loop, For)
    assert loop.comment == "head"
    assert loop.body[0] == Comment("first")
    assert loop.body[1].comment == "a b"
    assert loop.body[2] == Comment("last in the loop")
    assert after == Comment("after the loop")
    assert isinstance(branch, If)
    assert branch.orelse == (Comment("why"),)
    assert closed == Comment("closed")
    assert softmax.comment == "odd"
    assert last == Comment("end of file")


def test_blank_lines_are_kept_but_not_at_the_top_of_a_body() -> None:
    source = "\n\nfor i = 0:3\n\n  Compute Exp S\n\n\n  // note\nend\n\nCompute Log S"
    loop, log = parse(source).body
    assert isinstance(loop, For)
    assert [loop.gap, log.gap] == [False, True]
    assert [stmt.gap for stmt in loop.body] == [False, True]


# --- mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("Copy Q form global to shared", "Copy Q from global to shared"),
        ("Copy Q from global to shraed", "Copy Q from global to shared"),
        ("Compute GEMM S, V and accumlate O", "Compute GEMM S, V and accumulate O"),
        ("Compute GEMM S, V and gte new O", "Compute GEMM S, V and get new O"),
        ("Compute Softmax S wiht m and l", "Compute Softmax S with m and l"),
        ("Allocate K in registr (BM)", "Allocate K in register (BM)"),
        (
            "Copy Q in cordinate [L = i] from global to shared",
            "Copy Q in coordinate [L = i] from global to shared",
        ),
        ("Cmpute Softmax S", "Compute Softmax S"),
        ("fro i = 0:3\n  Compute Exp S\nedn\n", "for i = 0:3\n  Compute Exp S\nend\n"),
        ("Compute GEMM Q, K^T and get S", "Compute GEMM Q, K.T and get S"),
        ("Compute Mask S where a ≤ b && c", "Compute Mask S where a <= b and c"),
        ("Copy Q from\u00a0global to shared;", "Copy Q from global to shared"),
        ("# note\nCompute Exp S", "// note\nCompute Exp S"),
        ("if i = 3\n  Compute Exp S\nend", "if i == 3\n  Compute Exp S\nend"),
        ("for i in range(min(a, N)):\n  Compute Exp S", "for i in 0:min(a, N):\n  Compute Exp S"),
        ("for i in range(1,N)\nCompute Exp S\nendfor", "for i in 1:N\nCompute Exp S\nend"),
        ("for i = 0:3\nCompute Exp S\nend for", "for i = 0:3\nCompute Exp S\nend "),
        (
            "for i = 0:3\n  Compute Exp S\nCompute Log S",
            "for i = 0:3\n  Compute Exp S\nend\nCompute Log S",
        ),
        ("for i = 0:3\n  Compute Exp S", "for i = 0:3\n  Compute Exp S\nend\n"),
    ],
)
def test_a_plain_slip_is_mended_by_its_fix(wrong: str, right: str) -> None:
    diagnostics = failure(wrong)
    mended, count = fix.apply(wrong, diagnostics)
    assert count == len(diagnostics)
    assert mended == right
    parse(mended)


def test_an_error_names_what_was_found_and_what_was_expected() -> None:
    (d,) = failure("Copy Q (BM from global to shared")
    assert d.message == "expected `,`, `)` or an operator, found `from`"
    assert d.span
    assert (d.span.column, d.span.end_column) == (12, 16)
    (d,) = failure("param to = 3\nCompute Exp S")
    assert "`to` is a word of TL and cannot be a name" in d.message
    (d,) = failure("Copy Q from\nCompute Exp S")
    assert "expected `global`, `shared` or `register` after `from`" in d.message
    (d,) = failure("Compute Exp S\nCompute a @ b and get S")
    assert "found `@`" in d.message


def test_several_errors_in_one_pass_without_a_cascade() -> None:
    source = """\
param BM == 3
for i = = 0:N
  Copy K from global shared
  if
    Compute GEMM A B and get C
  end
  frobnicate everything
  Compute Exp S
end
Allocate K in shared (BM
Compute Log S
"""
    assert found(source) == [
        ("FW101", 1),
        ("FW101", 2),
        ("FW101", 3),
        ("FW101", 4),
        ("FW101", 5),
        ("FW102", 7),
        ("FW101", 10),
    ]


def test_a_missing_end_is_reported_where_the_indentation_ends() -> None:
    source = "for i = 0:3\n  for j = 0:2\n    Compute Exp S\nend\nCompute Log S\n"
    (d,) = failure(source)
    assert d.code == "FW103"
    assert [label.span.line for label in d.secondary] == [2]
    assert d.span
    assert d.span.line == 4
    mended, _ = fix.apply(source, [d])
    assert len(parse(mended).body) == 2


def test_a_missing_end_has_no_fix_where_a_line_could_not_be_read() -> None:
    unread, missing = failure("for i = 0:3\n  Compute Exp S\nfinish loop\nCompute Log S\n")
    assert (unread.code, missing.code, missing.fix) == ("FW102", "FW103", None)


def test_a_stray_end_or_else() -> None:
    assert found("Compute Exp S\nend\nCompute Log S\nelse") == [("FW103", 2), ("FW103", 4)]
    (d,) = failure("for i in 0:3:\nCompute Exp S\nend")
    assert d.code == "FW103"
    assert d.secondary[0].span.line == 1
    assert d.help
    assert "indent" in d.help


def test_a_clause_given_twice() -> None:
    assert found("Compute GEMM a, b and get c and accumulate d") == [("FW101", 1)]
    assert found("Allocate a in shared (b) as fp16 as bf16") == [("FW101", 1)]


@pytest.mark.parametrize(
    "source",
    [
        "",
        " \n\t\n",
        "// only a comment\n",
        "hello world\nthis is a letter\n",
        "import numpy as np\n\ndef f(x):\n    for i in range(3):\n        return x\n",
        "```\n{}\n```",
    ],
)
def test_a_file_without_tl_gets_one_diagnostic(source: str) -> None:
    (d,) = failure(source)
    assert d.code == "FW005"
    assert d.bad_input
    assert "Copy" in (d.help or "")


def test_at_most_twenty_diagnostics() -> None:
    assert len(failure("Copy Q from global\n" * 500)) == 20


# --- limits and files -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "for i = 0:3\n" * 10_000 + "Compute Exp S\n" + "end\n" * 10_000,
        "param x = " + " + ".join(["1"] * 10_000),
        "param x = " + "(" * 10_000 + "1" + ")" * 10_000,
        "param x = " + "- " * 10_000 + "1",
        "param x = " + "f(" * 100 + "1" + ")" * 100,
        "param x = " + "t[" * 100 + "1" + "]" * 100,
    ],
)
def test_what_is_too_deep_or_too_long_is_refused(source: str) -> None:
    assert [d.code for d in failure(source)] == ["FW004"]


def test_what_is_just_within_the_limits_parses() -> None:
    parse("for i = 0:3\n" * 64 + "Compute Exp S\n" + "end\n" * 64)
    parse("param x = " + " + ".join(["1"] * 199))
    parse("param x = " + "(" * 64 + "1" + ")" * 64)


def test_read(tmp_path: Path) -> None:
    file = tmp_path / "a.tl"
    file.write_bytes(b"\xef\xbb\xbfCopy Q\r\nfrom global to shared\r")
    assert read(str(file)) == "Copy Q\nfrom global to shared\n"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ("// é\n".encode("latin-1"), "FW002"),
        ("Copy Q from global to shared".encode("utf-16"), "FW002"),
        (b"Copy Q\0", "FW002"),
        (b"\n" * 10_000_000, "FW003"),
        (b"\n" * (MAX_BYTES + 1), "FW003"),
        (None, "FW001"),
    ],
)
def test_a_file_that_is_no_text(tmp_path: Path, data: bytes | None, code: str) -> None:
    file = tmp_path / "a.tl"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(Failed) as caught:
        read(file)
    assert [d.code for d in caught.value.diagnostics] == [code]


def test_a_folder_or_a_locked_file_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "locked.tl"
    file.write_text("Copy Q from global to shared")
    file.chmod(0)
    paths = [tmp_path, tmp_path / "a\0b"] + ([file] if os.geteuid() else [])
    for path in paths:
        with pytest.raises(Failed) as caught:
            read(path)
        assert [d.code for d in caught.value.diagnostics] == ["FW001"]


def test_lark_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, flashwright.lang.parse; sys.exit('lark' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_assignment_is_pointed_to_compute_and_let() -> None:
    with pytest.raises(Failed) as failed:
        parse("param BM = 64\nS = S * 2\n")
    (found,) = failed.value.diagnostics
    assert (found.code, found.span.line if found.span else 0) == ("FW102", 2)
    assert "and get S" in (found.help or "")
