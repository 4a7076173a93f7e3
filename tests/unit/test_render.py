"""Showing diagnostics: exact text for people, JSON for programs, short text for models."""

import json

from flashwright.lang import fix, render
from flashwright.lang.diagnostic import Diagnostic, Edit, Failed, Fix
from flashwright.lang.nodes import Span
from flashwright.lang.parse import parse


def failure(source: str) -> tuple[Diagnostic, ...]:
    try:
        parse(source)
    except Failed as failed:
        return failed.diagnostics
    raise AssertionError("this parses")


def span(line: int, column: int, end_line: int, end_column: int) -> Span:
    return Span(0, 0, line, column, end_line, end_column)


def test_terminal() -> None:
    source = "for i = 0:3\n  Copy Q form global to shared\n\nCompute Exp S\n"
    assert (
        render.terminal(failure(source), source, "a.tl", False)
        == """\
error[FW101]: expected `(`, `in` or `from`, found `form`
 --> a.tl:2:10
  |
2 |   Copy Q form global to shared
  |          ^^^^ did you mean `from`?
  |
  = help: it is written like this: Copy K (BN, HeadDim) in coordinate [L = i] from global to shared
  = fix: replace `form` by `from` (flashwright check --fix)

error[FW103]: the block opened by `for` on line 1 has no `end`
 --> a.tl:4:1
  |
1 | for i = 0:3
  | --- this block is not closed
...
4 | Compute Exp S
  | ^^^^^^^ expected `end` before this
  |
  = help: close the block with `end` on a line of its own
  = fix: add `end` before this line (flashwright check --fix)
"""
    )


def test_color_only_adds_codes() -> None:
    source = "Copy Q form global to shared"
    plain = render.terminal(failure(source), source, "a.tl", False)
    colored = render.terminal(failure(source), source, "a.tl", True)
    assert colored.startswith("\x1b[1;31merror[FW101]\x1b[0m")
    for style in ("[0m", "[1m", "[1;31m", "[1;34m"):
        colored = colored.replace("\x1b" + style, "")
    assert colored == plain


def test_carets_stand_under_wide_combining_and_tab_characters() -> None:
    source = "\tlet e\u0301 = \u6f22\u5b57 @"
    d = Diagnostic("FW101", "m", span(1, 14, 1, 15), "here")
    row, under = render.terminal([d], source, "a.tl", False).split("\n")[3:5]
    assert row == "1 |     let e\u0301 = \u6f22\u5b57 @"
    assert under == "  |" + " " * 18 + "^ here"


def test_control_codes_of_the_source_never_reach_the_terminal() -> None:
    source = "Compute Exp S\nCopy \x1b[2J from global to shared"
    assert "\x1b" not in render.terminal(failure(source), source, "a.tl", False)
    assert "\x1b" not in render.for_model(failure(source), source)


def test_a_span_over_several_lines() -> None:
    d = Diagnostic("FW101", "m", span(1, 3, 2, 4), "both")
    assert (
        render.terminal([d], "a bcd\n  ef", "a.tl", False)
        == """\
error[FW101]: m
 --> a.tl:1:3
  |
1 | a bcd
  |   ^^^
2 |   ef
  |   ^ both
"""
    )


def test_a_diagnostic_without_a_place() -> None:
    d = Diagnostic("FW003", "too large", help="make it smaller")
    assert render.terminal([d], "", "a.tl", False) == (
        "error[FW003]: too large\n --> a.tl\n  = help: make it smaller\n"
    )
    assert json.loads(render.as_json([d], "a.tl"))[0]["line"] is None
    assert render.for_model([d], "") == "1. error FW003: too large\n   help: make it smaller\n"


def test_a_very_long_line_is_shown_in_part() -> None:
    d = Diagnostic("FW101", "m", span(1, 5001, 1, 5002), "here")
    text = render.terminal([d], "x" * 5000 + "@" + "y" * 5000, "a.tl", False)
    row, under = text.split("\n")[3:5]
    assert len(row) < 200
    assert row[under.index("^")] == "@"


def test_json() -> None:
    source = "Copy Q form global to shared"
    (record,) = json.loads(render.as_json(failure(source), "a.tl"))
    assert record["code"] == "FW101"
    assert record["severity"] == "error"
    assert record["title"] == "syntax error in a statement"
    assert [record[k] for k in ("line", "column", "end_line", "end_column")] == [1, 8, 1, 12]
    assert record["fix"]["edits"] == [{"start": 7, "end": 11, "text": "from"}]
    assert record["secondary"] == []


def test_for_model() -> None:
    source = "for i = 0:3\n  Compute Exp S\nCompute Log S\n"
    assert (
        render.for_model(failure(source), source)
        == """\
1. error FW103 on line 3: the block opened by `for` on line 1 has no `end`
   line 3: Compute Log S
   at `Compute`: expected `end` before this
   line 1: for i = 0:3   <- this block is not closed
   fix: add `end` before this line
   help: close the block with `end` on a line of its own
"""
    )


def test_summary() -> None:
    error, warning = Diagnostic("FW101", "m"), Diagnostic("FW203", "m")
    assert render.summary([error, warning, error]) == "2 errors, 1 warning"
    assert render.summary([warning]) == "1 warning"
    assert render.summary([]) == "no problems"


def test_of_two_fixes_that_overlap_the_first_is_applied() -> None:
    def edit(start: int, end: int, text: str) -> Diagnostic:
        return Diagnostic("FW101", "m", fix=Fix("t", (Edit(start, end, text),)))

    assert fix.apply("abcdef", [edit(1, 3, "X"), edit(2, 4, "Y"), edit(4, 4, "-")]) == ("aXd-ef", 2)
    assert fix.apply("abc", [edit(1, 1, "end\n"), edit(1, 2, "B")]) == ("aend\nBc", 2)
    assert fix.apply("abc", [edit(1, 1, "x"), edit(1, 1, "y"), Diagnostic("FW101", "m")]) == (
        "axbc",
        1,
    )
