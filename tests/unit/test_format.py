"""Writing TL: one canonical form that reads back as the same tree."""

import re

import pytest
from hypothesis import given, settings

from flashwright.lang.format import format_expr, format_stmt, format_tree
from flashwright.lang.nodes import Compute, Name, Param, Tree, Unary
from flashwright.lang.parse import parse
from tests.unit.tl_trees import trees

MESSY = """\
// A kernel


PARAM HeadDim=128// width
Param BM = 64 // rows
param Scale=(1/sqrt(HeadDim))

param Warps = 4 // alone
grid b=0:q_len/BM , h = 0:heads
ALLOCATE K in registers ( BN,D:HeadDim ) with stages 2 as bf16
for i in 0:(N+1)-1: // blocks
    // load
    copy K (BN,HeadDim) in coord [ L=i+1 ] from global memory to shared

    if not (i<3) :
        compute GEMM Q,K.T ; accumulate S
    else:
        compute softmax S and rescale O with m, l
Compute mask S where ((a<b) and (c or d)) // edge
reshape S from (MMA_C) to mma_A
"""
CANONICAL = """\
// A kernel

param HeadDim = 128  // width
param BM = 64        // rows
param Scale = 1 / sqrt(HeadDim)

param Warps = 4  // alone
grid b = 0:q_len / BM, h = 0:heads
Allocate K in register (BN, D: HeadDim) as bf16 with stages 2
for i = 0:N + 1 - 1  // blocks
  // load
  Copy K (BN, HeadDim) in coordinate [L = i + 1] from global to shared

  if not i < 3
    Compute GEMM Q, K.T and accumulate S
  else
    Compute softmax S with m and l and rescale O
  end
end
Compute mask S where a < b and (c or d)  // edge
Reshape S from MMA_C to mma_A
"""


def test_the_canonical_form() -> None:
    assert format_tree(parse(MESSY)) == CANONICAL
    assert format_tree(parse(CANONICAL)) == CANONICAL


@pytest.mark.parametrize(
    "text",
    [
        "a - (b - c)",
        "a - b - c",
        "a / (b * c) * d",
        "-(a + b) * -c",
        "--a",
        "not (a and b) or c",
        "(not a) + b",
        "(a < b) == c",
        "(a or b) and c < d + e % f",
        "min(T[a, b + 1], K.T)",
    ],
)
def test_brackets_stay_only_where_they_are_needed(text: str) -> None:
    stmt = parse(f"let x = {text}").body[0]
    assert format_stmt(stmt) == f"let x = {text}"
    more = parse(f"let x = ({text})").body[0]
    assert more == stmt


def test_one_statement_is_one_line_without_its_comment() -> None:
    stmt = parse("for i = 0:3 // c\n  Compute Exp S\nend").body[0]
    assert format_stmt(stmt) == "for i = 0:3"
    assert format_expr(Name("a")) == "a"


def test_a_first_operand_with_a_sign_still_reads_as_the_verbs() -> None:
    stmt = Compute(
        Name("Multiply"), (Unary("-", Name("S")), Name("x")), mode="get", target=Name("S")
    )
    assert format_stmt(stmt) == "Compute Multiply(-S, x) and get S"
    assert parse(format_stmt(stmt)).body == (stmt,)


def test_an_empty_comment_stays() -> None:
    source = "//\nparam a = 1  //\n"
    tree = parse(source)
    assert isinstance(tree.body[1], Param)
    assert tree.body[1].comment == ""
    assert format_tree(tree) == source


@settings(max_examples=60, deadline=None)
@given(trees())
def test_every_tree_reads_back_equal_and_formatting_is_idempotent(tree: Tree) -> None:
    text = format_tree(tree)
    again = parse(text)
    assert again == tree
    assert format_tree(again) == text


@settings(max_examples=40, deadline=None)
@given(trees())
def test_the_tree_does_not_depend_on_line_ends(tree: Tree) -> None:
    lines = [re.sub(r"\s*//.*", "", line).strip() for line in format_tree(tree).split("\n")]
    dense = [line for line in lines if line]
    wrapped = [line.replace(" ", "\n  ") for line in dense]
    assert parse("\n".join(wrapped)) == parse("\n".join(dense))
