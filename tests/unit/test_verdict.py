"""The verdict of the CPU run: the statement that first goes wrong is the one that is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashwright.check.check import check, checked_program
from flashwright.judge.cpu import CpuVerdict, default_cases, judge
from flashwright.lang.diagnostic import Failed
from flashwright.lang.parse import parse, read
from flashwright.spec import AttentionSpec, load

EXAMPLES = Path(__file__).parents[2] / "examples"
SINK = read(EXAMPLES / "sink_softcap.tl")
HAND = read(EXAMPLES / "softmax_by_hand.tl")
CAP = "  Compute Softcap * tanh(S / Softcap) and get new S\n"


def spec(name: str) -> AttentionSpec:
    return load(EXAMPLES / f"{name}.toml")


def verdict(source: str, name: str) -> CpuVerdict:
    return judge(checked_program(parse(source)), spec(name), base=EXAMPLES)


def line_of(source: str, text: str) -> int:
    (line,) = [n for n, row in enumerate(source.splitlines(), 1) if text in row]
    return line


def changed(source: str, old: str, new: str) -> str:
    assert source.count(old) == 1, old
    return source.replace(old, new)


MASK = "Mask S where kv_idx <= q_idx + kv_len - q_len"
WRONG = {
    "the scale": (SINK, "sink_softcap", "S, Scale", "S, 2 * Scale", "FW802", "2 * Scale"),
    "the softcap": (SINK, "sink_softcap", "tanh(S / Softcap)", "tanh(S)", "FW802", "tanh(S)"),
    "the mask": (SINK, "sink_softcap", MASK, f"{MASK} - 1", "FW803", "Mask"),
    "the sink's weight": (SINK, "sink_softcap", "1 and get Ssum", "2 and get Ssum", "FW804", None),
    "the log-sum-exp": (
        *(SINK, "sink_softcap", "Smax + log(Ssum)", "Smax + log2(Ssum)", "FW804", "log2"),
    ),
    "exp for exp2": (
        *(HAND, "softmax_by_hand", "exp2(S * Log2Scale", "exp(S * Log2Scale", "FW802"),
        "exp(S * Log2Scale",
    ),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=list(WRONG))
def test_names_the_statement(case: tuple[str, str, str, str, str, str | None]) -> None:
    source, name, old, new, code, place = case
    program = changed(source, old, new)
    found = verdict(program, name)
    assert not found.ok
    (diagnostic,) = found.diagnostics
    assert diagnostic.code == code
    assert diagnostic.span is not None
    if place is not None:
        assert diagnostic.span.line == line_of(program, place)
    else:  # two statements share the fault: both are shown
        marked = [diagnostic.span, *(label.span for label in diagnostic.secondary)]
        assert line_of(program, new) in {span.line for span in marked}
    assert "q_len = " in diagnostic.label, "the problem it showed on"


def test_a_softcap_that_brings_masked_keys_back_is_blamed_not_the_mask() -> None:
    late = SINK.replace(CAP, "").replace("  Compute Softmax", f"{CAP}  Compute Softmax")
    found = verdict(late, "sink_softcap")
    (diagnostic,) = found.diagnostics
    assert diagnostic.code == "FW803"
    assert diagnostic.span is not None
    assert diagnostic.span.line == line_of(late, "tanh")


def test_a_user_reference_names_the_store_and_the_element() -> None:
    source = read(EXAMPLES / "sigmoid.tl")
    found = verdict(changed(source, "param Bias = -4", "param Bias = -3"), "sigmoid")
    (diagnostic,) = found.diagnostics
    assert diagnostic.code == "FW801"
    assert diagnostic.span is not None
    assert diagnostic.span.line == line_of(source, "Copy O")
    assert "expected" in diagnostic.message


def test_another_element_type_than_the_spec_asks_for_is_no_match() -> None:
    with pytest.raises(Failed) as failed:
        verdict(SINK.replace("as bf16", "as fp16"), "sink_softcap")
    (found,) = failed.value.diagnostics
    assert (found.code, found.bad_input) == ("FW904", True)


def test_pages_are_not_mistaken_for_each_other() -> None:
    source = read(EXAMPLES / "paged.tl")
    assert not check(parse(source)).diagnostics
    other = source.replace(
        "Copy V (BN, HeadDim) in coordinate [P = page", "Copy V (BN, HeadDim) in coordinate [P = 0"
    )
    codes = {d.code for d in check(parse(other)).errors}
    assert codes == {"FW603"}, "scores of one page, values of another"


def test_the_cases_cross_heads_batches_and_lengths() -> None:
    cases = default_cases(spec("sink_softcap"))
    assert {c["batch"] for c in cases} == {1, 2}
    assert any(c["kv_heads"] > 1 and c["heads"] > c["kv_heads"] for c in cases)
    assert any(c["q_len"] > c["kv_len"] for c in cases)
    assert any(c["q_len"] < c["kv_len"] for c in cases)
