"""TL as GBNF: it lets all our programs through, and nothing that the reader refuses."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from typer.testing import CliRunner

from flashwright.cli.main import app
from flashwright.lang import gbnf_rules
from flashwright.lang.format import format_tree
from flashwright.lang.gbnf import Level, Limits, gbnf, translate
from flashwright.lang.nodes import Tree
from flashwright.lang.parse import parse, read
from tests.share import some
from tests.unit.gbnf_matcher import Gbnf
from tests.unit.tl_trees import trees

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    path for top in ("examples", "flashwright", "tests") for path in (ROOT / top).rglob("*.tl")
)
LEVELS: list[Level] = ["sketch", "code"]
SKETCH = """\
Copy Q from global to shared
for i = 0:kv_len / BN
  Compute GEMM Q_shared, K_shared.T and get S
end
"""
CODE = "param BM = 64  // rows\n\nCopy Q (BM, 64) in coordinate [L = i] from global to shared\n"


@cache
def grammar(level: Level, bounded: bool = False) -> Gbnf:
    return Gbnf(gbnf(level, bounded))


@cache
def tree_of(path: Path) -> Tree:
    return parse(read(path))


@pytest.mark.parametrize("path", some(PROGRAMS, 16), ids=lambda p: p.stem)
def test_every_program_is_let_through(path: Path) -> None:
    tree = tree_of(path)
    assert grammar(tree.level).accepts(format_tree(tree))


def test_there_are_programs() -> None:
    assert {tree_of(path).level for path in PROGRAMS} == {"sketch", "code"}
    assert len(PROGRAMS) > 20


@settings(max_examples=15, deadline=None)
@given(trees())
def test_so_is_what_the_formatter_writes(tree: Tree) -> None:
    text = format_tree(tree)
    if tree.level == "code":  # the statements in any order: code's own come first
        text = "param BM = 64\n" + text
    assert grammar(tree.level).accepts(text), text


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_what_it_lets_through_is_tl_of_its_level(level: Level, bounded: bool) -> None:
    walked = grammar(level, bounded)
    for seed in range(120):
        text = walked.walk(random.Random(seed))
        assert parse(text).level == level, text


@pytest.mark.parametrize(
    "text",
    [
        SKETCH.replace("  Compute", " Compute"),
        SKETCH.replace("end\n", ""),
        SKETCH.replace(":kv_len", " : kv_len"),
        SKETCH.replace("for i", "for end"),
        SKETCH.replace("Copy Q", "Copy GLOBAL"),
        SKETCH.replace("Copy Q", "Copy Q  "),
        SKETCH.replace("and get S", "and get S and accumulate S"),
        SKETCH.replace("and get S", "where a and get"),
        SKETCH.replace("Q_shared,", "where,"),
        SKETCH.replace("Q_shared,", "(Q_shared),"),
        SKETCH.replace("shared\n", "shared memory\n", 1),
        SKETCH.replace("Copy Q", "Copy Q (BM)"),
        "param BM = 64\n" + SKETCH,
        "// only a comment\n",
        "",
    ],
)
def test_what_is_no_sketch_is_stopped(text: str) -> None:
    assert grammar("sketch").accepts(SKETCH)
    assert not grammar("sketch").accepts(text)


def test_code_begins_with_what_only_code_has() -> None:
    assert grammar("code").accepts(CODE)
    assert grammar("code").accepts("// why\ndim n\n" + CODE)
    assert not grammar("code").accepts(SKETCH)


@pytest.mark.parametrize("name", ["end_", "forward", "ifs", "gets", "_to", "Registers2", "e", "an"])
def test_names_that_begin_like_a_reserved_word(name: str) -> None:
    for bounded in (False, True):
        assert grammar("sketch", bounded).accepts(f"Copy {name} from global to shared\n")


@pytest.mark.parametrize("word", ["end", "FOR", "If", "registers", "get", "accumulate", "Rescale"])
def test_reserved_words_are_no_names(word: str) -> None:
    for bounded in (False, True):
        assert not grammar("sketch", bounded).accepts(f"Copy {word} from global to shared\n")


@pytest.mark.parametrize(("level", "most"), [("sketch", 1900), ("code", 3200)])
def test_a_bounded_grammar_comes_to_an_end(level: Level, most: int) -> None:
    """No token is shorter than a character: so many tokens are enough for whatever it writes."""
    assert grammar(level, bounded=True).longest() < most
    assert grammar(level).longest() == float("inf")
    shorter = Limits(name=6, items=1, lines=1, opening=1)
    assert Gbnf(translate(gbnf_rules.read(), level, shorter)).longest() < most / 3


def test_bounded_programs_have_no_comments() -> None:
    for level in LEVELS:
        assert "//" not in gbnf(level, bounded=True)
    assert not grammar("sketch", bounded=True).accepts("// why\nCopy Q from global to shared\n")
    assert grammar("sketch", bounded=True).accepts(SKETCH)


# --- it is made from grammar.lark -------------------------------------------------------------


def changed(old: str, new: str) -> str:
    text = gbnf_rules.FILE.read_text("utf-8")
    assert old in text
    return translate(gbnf_rules.read(text.replace(old, new)), "sketch")


def test_a_new_statement_of_the_language_is_in_it() -> None:
    lark = gbnf_rules.FILE.read_text("utf-8").replace("| dim |", "| dim | swap |")
    lark = lark.replace("dim: DIM", "swap: SWAP NAME TO NAME\ndim: DIM")
    lark = lark.replace("DIM.2:", "SWAP.2: /swap\\b/i\nDIM.2:")
    made = Gbnf(translate(gbnf_rules.read(lark), "sketch"))
    assert made.accepts("swap a to b\n")
    assert not made.accepts("let swap = 1\n")  # a new reserved word
    assert grammar("sketch").accepts("let swap = 1\n")


def test_a_rule_that_is_gone_is_gone_from_it() -> None:
    made = Gbnf(changed(" | rescale)*", ")*"))
    assert not made.accepts(SKETCH.replace("and get S", "and get S and rescale O"))
    assert grammar("sketch").accepts(SKETCH.replace("and get S", "and get S and rescale O"))
    assert not Gbnf(changed("| transpose |", "|")).accepts(SKETCH)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("NUMBER: /[0-9]+", "NUMBER: /[0-9_]+", "NUMBER has changed"),
        ("DIM.2: /dim", "DIM.2: /di[ms]", "cannot read"),
        ('dim: DIM NAME ("," NAME)*', 'dim: DIM NAME ("," NAME)+', "do not know"),
    ],
)
def test_what_it_cannot_follow_is_said(old: str, new: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        changed(old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('" from "', '" of "'),
        ('"  "', '" "'),
        ('", "', '","'),
        ('compute ::= "C', 'compute ::= "c'),
    ],
)
def test_the_programs_find_a_mutated_grammar(old: str, new: str) -> None:
    text = gbnf("sketch")
    assert old in text
    mutant = Gbnf(text.replace(old, new))
    sketches = [tree for tree in map(tree_of, PROGRAMS) if tree.level == "sketch"]
    assert not all(mutant.accepts(format_tree(tree)) for tree in sketches)


# --- the command ------------------------------------------------------------------------------


def test_the_command_prints_either_grammar(tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert run(app, ["grammar"]).stdout == gbnf_rules.FILE.read_text("utf-8")
    assert run(app, ["grammar", "--gbnf"]).stdout == gbnf("code")
    file = tmp_path / "tl.gbnf"
    options = ["--gbnf", "--level", "sketch", "--bounded", "-o", str(file)]
    told = run(app, ["grammar", *options])
    assert (told.exit_code, file.read_text("utf-8")) == (0, gbnf("sketch", bounded=True))
    assert str(file) in told.stdout


@pytest.mark.parametrize("options", [["--bounded"], ["--level", "code"]])
def test_options_of_gbnf_alone(options: list[str]) -> None:
    told = CliRunner().invoke(app, ["grammar", *options])
    assert told.exit_code == 2
    assert "--gbnf" in told.output
