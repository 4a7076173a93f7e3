"""Programs for rectangular batches, rewritten for packed sequences (`flashwright pack`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.check.check import check, checked_program
from flashwright.cli.rewrite import pack
from flashwright.fuzz.case import FuzzCase, load
from flashwright.fuzz.oracle import evaluate_cases
from flashwright.generate.packed_sizes import rectangular
from flashwright.grad.grad import backward
from flashwright.lang.diagnostic import Failed
from flashwright.lang.format import format_expr, format_tree
from flashwright.lang.parse import parse
from flashwright.lower.translate import translate
from flashwright.rewrite.packed import packed
from flashwright.spec import Batch
from tests.share import some
from tests.unit.emulated import needs_compilers

EXAMPLES = Path(__file__).parents[2] / "examples"
CASES = Path(__file__).parents[1] / "cases"
OTHERS = {"append", "decode", "packed", "paper"}
RECTANGULAR = sorted({p.stem for p in EXAMPLES.glob("*.tl")} - OTHERS)
GRADIENTS = ("sink_softcap", "sigmoid", "bias_prefix", "documents", "rope_split", "paper")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "causal": ("gqa", {"causal": True, "head_dim": 128}),
    "full": ("mha", {"head_dim": 64}),
    "window": ("mha", {"causal": True, "window": 512, "sink_tokens": 4}),
    "alibi": ("mha", {"causal": True, "alibi": True, "softcap": 30.0}),
    "mla": ("mla", {"causal": True}),
}


def made(text: str) -> str:
    return format_tree(packed(parse(text)))


@pytest.mark.parametrize("name", RECTANGULAR)
def test_every_example_can_be_packed(name: str) -> None:
    text = made((EXAMPLES / f"{name}.tl").read_text())
    assert not check(parse(text)).diagnostics
    assert "q_tokens" in text
    assert "B = batch_idx" not in text


@pytest.mark.parametrize("name", GRADIENTS)
def test_backward_passes_can_be_packed(name: str) -> None:
    derived = backward(checked_program(parse((EXAMPLES / f"{name}.tl").read_text()))).tree
    text = format_tree(packed(derived))
    assert not check(parse(text)).diagnostics
    assert "in fragments" not in text
    assert text.count("Allocate StartsQ") == 1
    assert "if block_idx * BN < kv_length" in text


def test_sequences_have_the_tiling_that_was_measured_for_usual_lengths() -> None:
    """Longer steps are faster from 4,096 keys on, where few sequences are as long."""
    spec = make_spec("gqa", head_dim=128, dtype="bf16", causal=True, packed=True)
    card = gpus.find("h200")
    whole = rectangular(write_sketch(spec.each), spec, card)
    assert "param BN = 128" in whole.code
    assert not whole.further
    assert "param BN = 160" in write_code(write_sketch(spec.each), spec.each, card).code


@pytest.mark.parametrize("name", ["sigmoid", "sink_softcap", "relative_bias"])
def test_deterministic_backward_passes_can_be_packed(name: str) -> None:
    """Turns count additions to tiles of a sequence. The parts of a sink's gradient are columns."""
    program = checked_program(parse((EXAMPLES / f"{name}.tl").read_text()))
    derived = backward(program, wrt=("Q", "K", "V", "Sink"), deterministic=True).tree
    text = format_tree(packed(derived))
    assert not check(parse(text)).diagnostics
    assert "in q_first:q_last] from register to global and accumulate dQsum at turn" in text


@pytest.mark.parametrize("name", VARIANTS)
def test_the_authors_kernels_keep_their_schedule(name: str) -> None:
    variant, settings = VARIANTS[name]
    card, spec = gpus.find("h200"), make_spec(variant, **settings)
    code = write_code(write_sketch(spec), spec, card).code
    before = translate(checked_program(parse(code), card), card)
    after = translate(checked_program(parse(made(code)), card), card)
    assert before.report is not None
    assert after.report is not None
    assert [r.text for r in after.report.remarks] == [r.text for r in before.report.remarks]
    assert all(m.ranges for m in after.plan.maps)
    assert after.plan.stays


CACHES = {
    "rectangular queries": Batch(queries=False),
    "lengths": Batch(lengths=True),
    "rectangular queries, lengths": Batch(queries=False, lengths=True),
    "pages": Batch(page=16),
    "rectangular queries, pages": Batch(queries=False, page=48),
}


@pytest.mark.parametrize("name", some(VARIANTS, 3))
@pytest.mark.parametrize("kind", CACHES)
def test_keys_in_a_cache(kind: str, name: str) -> None:
    batch = CACHES[kind]
    variant, settings = VARIANTS[name]
    card, spec = gpus.find("h200"), make_spec(variant, **settings)
    code = write_code(write_sketch(spec), spec, card).code
    tree = parse(format_tree(packed(parse(code), batch)))
    verdict = check(tree, card)
    assert not verdict.diagnostics
    (program,) = verdict.kernels
    names = {t.name for t in program.tensors.values()}
    assert ("StartsQ" in names) == batch.queries
    assert ("StartsK" in names) == (batch.page is None)
    assert ("LengthsK" in names) == (batch.lengths or batch.page is not None)
    assert ("Table" in names) == (batch.page is not None)
    lies = {a.label: format_expr(a.size) for a in program.tensors["K"].axes}
    assert lies["L"] == ("kv_tokens" if batch.page is None else "PageSize")


def test_elements_of_pages_are_refused() -> None:
    text = (EXAMPLES / "sigmoid.tl").read_text()
    text = text.replace(
        "Allocate Q in", "Allocate W in global (B: batch, L: kv_len) as fp32\nAllocate Q in", 1
    )
    text = text.replace(
        "  Compute S * Scale + Bias",
        "  Compute S + W[batch_idx, kv_idx] and get new S\n  Compute S * Scale + Bias",
    )
    assert "W[kv_first + kv_idx]" in made(text)
    with pytest.raises(Failed) as failed:
        packed(parse(text), Batch(page=16))
    assert "an element of `W` is read, whose rows lie in pages" in str(failed.value)


def test_names_that_the_program_has_are_left_alone() -> None:
    text = (EXAMPLES / "sink_softcap.tl").read_text()
    again = made(text.replace("kv_head ", "q_first ").replace("kv_head,", "q_first,"))
    assert "let q_first_ = StartsQ[batch_idx]" in again
    assert not check(parse(again)).errors


REFUSED = {
    "no tensor has an axis of the batch": (EXAMPLES / "packed.tl").read_text(),
    "`Bias` has queries and keys of each sequence": (EXAMPLES / "bias_prefix.tl")
    .read_text()
    .replace("Bias in global (H:", "Bias in global (B: batch, H:")
    .replace("Bias (BM, BN) in coordinate [H", "Bias (BM, BN) in coordinate [B = batch_idx, H"),
    "the index of the batch is not known": (EXAMPLES / "sigmoid.tl")
    .read_text()
    .replace("Allocate Q in", "let one = batch_idx\nAllocate Q in")
    .replace("B = batch_idx", "B = one"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_packed_is_said(message: str) -> None:
    with pytest.raises(Failed) as failed:
        packed(parse(REFUSED[message]))
    assert failed.value.diagnostics[0].code == "FW909"
    assert message in failed.value.diagnostics[0].message


def run(*args: Any, **options: Any) -> int:
    with pytest.raises(typer.Exit) as ended:
        pack(*args, **options)
    return ended.value.exit_code


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "packed.tl"
    assert run(str(EXAMPLES / "sigmoid.tl"), out=out) == 0
    assert capsys.readouterr().out == f"{out}: packed\n"
    assert run(str(EXAMPLES / "sigmoid.tl")) == 0
    assert capsys.readouterr().out == out.read_text()
    assert run(str(out)) == 1
    assert "error[FW909]" in capsys.readouterr().err
    assert run(str(EXAMPLES / "sigmoid.tl"), pages=32, rectangular=True) == 0
    shown = capsys.readouterr().out
    assert "param PageSize = 32" in shown
    assert "StartsQ" not in shown


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_packed_kernels_and_the_cpu_run_agree(gpu: str, tmp_path: Path) -> None:
    """Places before the start of a sequence (forgetting), elements by index (documents), several
    tiles side by side, a tile before the loop."""
    cases: list[FuzzCase] = []
    for name in ("forgetting", "documents", "side_by_side", "sink_tile"):
        (tmp_path / f"{name}.tl").write_text(made((EXAMPLES / f"{name}.tl").read_text()))
        settings = (CASES / "packed.json").read_text().replace('"h200"', f'"{gpu}"')
        (tmp_path / f"{name}.json").write_text(settings)
        cases.append(load(tmp_path / f"{name}.tl"))
    outcomes = evaluate_cases(cases)
    assert [o.kind for o in outcomes] == ["agree"] * len(cases), outcomes
