"""The verifier rejects IR that breaks a rule, one rule at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from flashwright import gpu as gpus
from flashwright.check.check import check
from flashwright.fuzz.case import load
from flashwright.fuzz.oracle import ProgramOutcome, prepare
from flashwright.lang.diagnostic import Failed
from flashwright.lang.parse import parse
from flashwright.lower import ir
from flashwright.lower.element import Leaf, variable
from flashwright.lower.frontend.lowering import lower
from flashwright.lower.passes.bad_ir import BadIR
from flashwright.lower.passes.verify import Verifier, enabled, verify_stages
from flashwright.lower.passes.verify_rings import verify_groups, verify_rings
from flashwright.lower.term import Var, plus
from flashwright.lower.translate import prepared, schedule, translate
from flashwright.program.program import Program

CASES = Path(__file__).parents[1] / "cases"
Body = tuple[ir.Statement, ...]
Edit = Callable[[ir.Statement], Sequence[ir.Statement]]


@cache
def program(name: str, gpu: str = "h200") -> Program:
    made = check(parse((CASES / f"{name}.tl").read_text()), gpus.find(gpu)).program
    assert made is not None
    return made


def edited(body: Body, edit: Edit) -> Body:
    """The body with each statement replaced by others, loops and branches inside first."""
    out: list[ir.Statement] = []
    for node in body:
        if isinstance(node, ir.Loop):
            node = replace(node, body=edited(node.body, edit))
        elif isinstance(node, ir.Branch):
            then, orelse = edited(node.then, edit), edited(node.orelse, edit)
            node = replace(node, then=then, orelse=orelse)
        out += edit(node)
    return tuple(out)


def without(kind: type, key: str = "", only: int | None = None) -> Edit:
    """Leaves statements of a kind out: all, or one of them by its number."""
    seen = [-1]

    def edit(node: ir.Statement) -> Sequence[ir.Statement]:
        if not isinstance(node, kind) or (key and getattr(node, "key", ("",))[0] != key):
            return [node]
        seen[0] += 1
        return [] if only in (None, seen[0]) else [node]

    return edit


def each(kind: type, change: Callable[..., Sequence[ir.Statement]]) -> Edit:
    """Puts statements of a kind through a change."""
    return lambda node: change(node) if isinstance(node, kind) else [node]


def front(name: str = "let_in_loop") -> tuple[Verifier, Body]:
    made = program(name)
    kernel = lower(made)
    return Verifier(made, kernel.grid, kernel.body, on=True), kernel.body


@cache
def hopper(name: str = "let_in_loop") -> tuple[Verifier, Program, ir.Roles]:
    made = program(name)
    kernel = lower(made)
    printer, *_ = prepared(made, gpus.find("h200"))
    (roles,) = printer.kernel.body
    assert isinstance(roles, ir.Roles)
    return Verifier(made, kernel.grid, kernel.body, on=True), printer.program, roles


def rejected(edit: Edit, name: str = "let_in_loop") -> str:
    """Why consumers are rejected."""
    verifier, made, roles = hopper(name)
    verifier.products(roles.consumers, "test", made)
    with pytest.raises(BadIR) as found:
        verifier.products(edited(roles.consumers, edit), "test", made)
    return found.value.text


def test_tests_have_it_on() -> None:
    assert enabled()


def test_error_names_the_pass_the_statement_and_the_line() -> None:
    verifier, body = front()
    with pytest.raises(BadIR) as found:
        verifier(edited(body, without(ir.Define)), "a pass")
    assert found.value.stage == "a pass"
    assert "behind a pass: " in str(found.value)
    assert found.value.line is not None
    assert f"(line {found.value.line})" in str(found.value)


# --- names, tiles and positions ---------------------------------------------------------------


def unbuffered(node: ir.Compute) -> list[ir.Statement]:
    assigns = tuple(
        replace(a, buffer=a.buffer and replace(a.buffer, name="W")) for a in node.assigns
    )
    return [replace(node, assigns=assigns)]


def lasting(node: ir.Compute) -> list[ir.Statement]:
    assigns = tuple(replace(a, kept=a.kept or a.buffer is None) for a in node.assigns)
    return [replace(node, assigns=assigns)]


def unknown_leaf(node: ir.Compute) -> list[ir.Statement]:
    return [replace(node, assigns=tuple(replace(a, value=Leaf(Var("w"))) for a in node.assigns))]


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (without(ir.Define), "is not defined here"),
        (each(ir.Define, lambda n: [n, n]), "is defined already"),
        (each(ir.Define, lambda n: [n, replace(n, again=True)]), "never varies"),
        (each(ir.Loop, lambda n: [ir.Define(n.var, n.low), n]), "variable i is defined already"),
        (each(ir.Loop, lambda n: [replace(n, number="resumes")]), "which never varies"),
        (each(ir.Loop, lambda n: [replace(n, low=Var(n.var))]), "i is not defined here"),
        (each(ir.Compute, lambda n: [replace(n, rows=None, cols=None)]), "kv_idx is not known"),
        (each(ir.Compute, unbuffered), "has no buffer"),
        (each(ir.Compute, lasting), "is to last, and is no vector"),
        (each(ir.Compute, unknown_leaf), "w is not defined here"),
        (each(ir.Gemm, lambda n: [replace(n, right=("W", "shared"))]), "no tile W_shared"),
    ],
)
def test_names_tiles_and_positions(edit: Edit, text: str) -> None:
    verifier, body = front()
    verifier(body, "test")
    with pytest.raises(BadIR) as found:
        verifier(edited(body, edit), "test")
    assert text in found.value.text


def test_vector_that_nobody_makes() -> None:
    """A name local to the row, or a kept vector, is made before it is read."""
    verifier, body = front()

    def last_first(node: ir.Compute) -> list[ir.Statement]:
        return [replace(node, assigns=tuple(reversed(node.assigns)))]

    with pytest.raises(BadIR, match="drop is not defined here"):
        verifier(edited(body, each(ir.Compute, last_first)), "test")


# --- rings ------------------------------------------------------------------------------------


def early_release(body: Body) -> Body:
    """Each release of K right behind the wait for it."""
    less = edited(body, without(ir.Release, "K"))
    return edited(
        less,
        lambda n: [n, ir.Release(n.key)] if isinstance(n, ir.Await) and n.key[0] == "K" else [n],
    )


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (without(ir.Await, "K"), "K is read and was not waited for"),
        (without(ir.Await, "Q"), "Q is read and was not waited for"),
        (each(ir.Await, lambda n: [n, n]), "is waited for twice"),
        (each(ir.Release, lambda n: [n, n]), "is handed back, but not held"),
        (without(ir.Release, "Q"), "Q is still held at the end of a block"),
        (without(ir.Release, "K", only=0), "K is h"),
        (without(ir.Release, "V", only=0), "V is held at one end of the loop only"),
        (each(ir.Branch, lambda n: [replace(n, orelse=())]), "Q is held behind one arm only"),
        (each(ir.Release, lambda n: [ir.Drain(n.key), n]), "is handed back in two ways"),
    ],
)
def test_structured_rings(edit: Edit, text: str) -> None:
    found = rejected(edit)
    assert text in found or ("K is h" in text and "waited for twice" in found)


def test_release_before_the_last_reader() -> None:
    verifier, made, roles = hopper()
    with pytest.raises(BadIR, match="K is read and was not waited for"):
        verifier.consumers(early_release(roles.consumers), "test", made)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (without(ir.Drain), "K is not handed back at the end"),
        (without(ir.Await, "K"), "K is read and was not waited for"),
    ],
)
def test_loose_rings(edit: Edit, text: str) -> None:
    assert text in rejected(edit, "place_where_prefetch")


# --- products under way -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (without(ir.Finish), ""),
        (without(ir.Finish, only=0), ""),
        (each(ir.Finish, lambda n: [replace(n, left=n.left + 1)]), ""),
        (each(ir.Finish, lambda n: [n, n]), "it waits until"),
        (each(ir.Finish, lambda n: [replace(n, targets=(("Q", "shared"),))]), "has ended"),
        (without(ir.Open), "is not open for products"),
        (each(ir.Start, lambda n: [n.gemm]), "neither started nor waited for"),
    ],
)
def test_products(edit: Edit, text: str) -> None:
    assert text in rejected(edit)


def test_no_product_is_under_way_at_the_end_of_a_body() -> None:
    _, _, roles = hopper()

    def more(loop: ir.Loop) -> list[ir.Statement]:
        start = next(n for n in loop.body if isinstance(n, ir.Start))
        return [replace(loop, body=(*loop.body, ir.Open((start.gemm.target,)), start))]

    with pytest.raises(BadIR, match="S is under way at the end of a body"):
        verify_groups(edited(roles.consumers, each(ir.Loop, more)), "test")


def test_operand_is_not_rewritten_under_way() -> None:
    _, _, roles = hopper()

    def again(node: ir.Start) -> list[ir.Statement]:
        left = node.gemm.left
        if left[1] == "shared":
            return [node]
        return [node, ir.Move(("Q", "shared"), left, operand=True)]

    with pytest.raises(BadIR, match="an operand of O is given away or rewritten"):
        verify_groups(edited(roles.consumers, each(ir.Start, again)), "test")


def test_tile_is_not_released_under_way() -> None:
    _, _, roles = hopper()

    def at_once(node: ir.Start) -> list[ir.Statement]:
        return [node, ir.Release(node.gemm.right)]

    with pytest.raises(BadIR, match="an operand of S is given away or rewritten"):
        verify_groups(edited(roles.consumers, each(ir.Start, at_once)), "test")


def test_no_product_is_under_way_at_a_loop() -> None:
    verifier, made, roles = hopper()
    gemms = [n.gemm for n in ir.flat(roles.consumers) if isinstance(n, ir.Start)]
    scores = gemms[0].target
    start: list[ir.Statement] = [
        ir.Open((scores,)),
        ir.Start(replace(gemms[0], right=gemms[0].left)),
    ]

    def before(node: ir.Loop) -> list[ir.Statement]:
        return [*start, node]

    with pytest.raises(BadIR, match="S is under way at a loop or branch"):
        verifier.products(edited(roles.consumers, each(ir.Loop, before)), "test", made)


# --- roles against each other -----------------------------------------------------------------


def roles_rejected(change: Callable[[ir.Roles], ir.Roles], name: str) -> str:
    verifier, made, roles = hopper(name)
    verifier.roles(roles, made)
    with pytest.raises(BadIR) as found:
        verifier.roles(change(roles), made)
    return found.value.text


def backwards(node: ir.Loop) -> list[ir.Statement]:
    return [replace(node, body=tuple(reversed(node.body)))]


def twice_the_place(node: ir.Load) -> list[ir.Statement]:
    window = node.window
    start = (*window.start[:-2], plus(window.start[-2], 64), window.start[-1])
    return [replace(node, window=replace(window, start=start))]


@pytest.mark.parametrize(
    ("change", "name", "text"),
    [
        (
            lambda r: replace(r, producer=edited(r.producer, each(ir.Loop, backwards))),
            "v_before_k_deadlock",
            "deadlock",
        ),
        (
            lambda r: replace(r, producer=edited(r.producer, without(ir.Load, only=1))),
            "v_before_k_deadlock",
            "deadlock",
        ),
        (
            lambda r: replace(r, producer=edited(r.producer, each(ir.Load, lambda n: [n, n]))),
            "v_before_k_deadlock",
            "deadlock",
        ),
        (
            lambda r: replace(r, producer=edited(r.producer, each(ir.Load, twice_the_place))),
            "v_before_k_deadlock",
            "is not what the program multiplies here",
        ),
        (
            lambda r: replace(r, consumers=edited(r.consumers, without(ir.PingPong, only=0))),
            "fill_late",
            "without a wait before it",
        ),
        (
            lambda r: replace(r, consumers=edited(r.consumers, without(ir.PingPong, only=1))),
            "fill_late",
            "",
        ),
        (
            lambda r: replace(r, consumers=edited(r.consumers, without(ir.Refill))),
            "place_where_prefetch",
            "",
        ),
    ],
)
def test_roles(change: Callable[[ir.Roles], ir.Roles], name: str, text: str) -> None:
    assert text in roles_rejected(change, name)


def test_stages_decide_on_a_deadlock() -> None:
    """What one stage cannot do, two can."""
    verifier, made, roles = hopper("v_before_k_deadlock")
    wrong = replace(roles, producer=edited(roles.producer, each(ir.Loop, backwards)))
    buffers = {k: replace(b, stages=2) for k, b in made.buffers.items()}
    verifier.roles(wrong, replace(made, buffers=buffers))


# --- copies by all threads --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "name", "edit"),
    [
        ("a100", "let_in_loop", without(ir.Barrier)),
        ("a100", "let_in_loop", without(ir.Wait)),
        ("a100", "let_in_loop", without(ir.Barrier, only=0)),
        ("a100", "let_in_loop", each(ir.Wait, lambda n: [replace(n, left=n.left + 1)])),
        ("a100", "let_in_loop", without(ir.Commit)),
        ("t4", "if_q", without(ir.Put)),
        ("t4", "if_q", without(ir.Barrier)),
    ],
)
def test_copies(gpu: str, name: str, edit: Edit) -> None:
    made, card = program(name, gpu), gpus.find(gpu)
    kernel = lower(made)
    verifier = Verifier(made, kernel.grid, kernel.body, on=True)
    body = schedule(made, card, kernel.body, verifier=verifier)
    verifier.scheduled(body, card.cp_async)
    with pytest.raises(BadIR) as found:
        verifier.scheduled(edited(body, edit), card.cp_async)
    assert found.value.stage == "the placing of barriers"


def test_kept_vector_has_the_name_of_its_maker() -> None:
    _, _, roles = hopper()
    made = [n for n in ir.flat(roles.consumers) if isinstance(n, ir.Compute) and n.kept]
    for node in made:
        assert set(node.kept) <= {variable(a.target) for a in node.assigns}


# --- what the translator does then ------------------------------------------------------------


def refusing(monkeypatch: pytest.MonkeyPatch, stages: set[str]) -> None:
    """Lets the verifier refuse what these schedules give."""
    monkeypatch.delenv("FLASHWRIGHT_VERIFY")

    def roles(self: Verifier, roles: ir.Roles, program: Program) -> None:
        if "roles" in stages:
            raise BadIR("warp specialization", roles.consumers[0], "planted")

    def scheduled(self: Verifier, body: Body, asynchronous: bool) -> Body:
        if ("cp.async" if asynchronous else "registers") in stages:
            raise BadIR("barriers", body[0], "planted")
        return body

    monkeypatch.setattr(Verifier, "roles", roles)
    monkeypatch.setattr(Verifier, "scheduled", scheduled)


@pytest.mark.parametrize(
    ("gpu", "stages", "path"),
    [
        ("h200", {"roles"}, ("mma.sync", "cp.async")),
        ("h200", {"roles", "cp.async"}, ("mma.sync", "registers")),
        ("a100", {"cp.async"}, ("mma.sync", "registers")),
    ],
)
def test_refused_schedule_gives_way_to_a_simpler_one(
    monkeypatch: pytest.MonkeyPatch, gpu: str, stages: set[str], path: tuple[str, str]
) -> None:
    refusing(monkeypatch, stages)
    report = translate(program("let_in_loop", gpu), gpus.find(gpu)).report
    assert report is not None
    assert (report.products, report.copies) == path
    told = [r for r in report.remarks if r.code == "FW820"]
    assert len(told) == len(stages)
    assert all("planted" in r.text and r.lines for r in told)


def test_without_any_schedule_left_the_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, {"roles", "cp.async", "registers"})
    with pytest.raises(Failed, match="FW811: no schedule keeps") as found:
        translate(program("let_in_loop"), gpus.find("h200"))
    assert "report" in (found.value.diagnostics[0].help or "")


def test_fuzzer_counts_a_refused_schedule_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, {"roles"})
    outcome = prepare(load(CASES / "let_in_loop.tl"))
    assert isinstance(outcome, ProgramOutcome)
    assert (outcome.kind, outcome.failed) == ("unverified", True)


def test_a_tile_with_stages_is_read_at_one() -> None:
    tile, scores, stage = ("O", "shared"), ("O", "register"), Var("stage", "int")
    write = ir.Move(scores, tile, stage=stage)
    verify_stages(
        (write, ir.Gemm(("S", "register"), tile, ("K", "shared"), True, True, left_stage=stage)),
        "x",
    )
    for reader in (
        ir.Gemm(("S", "register"), tile, ("K", "shared"), True, True),
        ir.Move(tile, scores),
        ir.Move(scores, tile),
    ):
        with pytest.raises(BadIR, match="O has stages, and none is named"):
            verify_stages((write, reader), "x")


K = ("K", "shared")
AHEAD = ir.Await(K, ahead=True)
READ_AHEAD = ir.Gemm(("S", "register"), ("Q", "shared"), K, True, True, ahead=True)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ((AHEAD, ir.Release(K)), "waited for ahead of no value"),
        ((ir.Await(K), AHEAD, AHEAD), "waited for ahead of no value"),
        ((ir.Await(K), READ_AHEAD, ir.Release(K)), "read ahead and was not waited for"),
        ((ir.Await(K), AHEAD, READ_AHEAD, ir.Release(K)), "still held at the end"),
    ],
)
def test_two_values_of_a_tile(body: Body, text: str) -> None:
    with pytest.raises(BadIR, match=text):
        verify_rings(body, "here", {K, ("Q", "shared")})
    verify_rings(
        (ir.Await(K), AHEAD, READ_AHEAD, ir.Release(K), ir.Release(K)), "here", {K, ("Q", "shared")}
    )
