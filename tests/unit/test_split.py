"""Programs that split their keys over thread blocks (`flashwright split`): what is made,
against the checker, the CPU run and an emulated GPU, and what is refused."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from flashwright import gpu as gpus
from flashwright.author.builtin.variants import make_spec
from flashwright.build.steps import Steps
from flashwright.check.check import check, checked_program
from flashwright.cli.rewrite import split as command
from flashwright.generate.packed import PackedOrder
from flashwright.grad.grad import backward
from flashwright.judge import oracle
from flashwright.judge.cpu import CpuVerdict, judge
from flashwright.judge.inputs import make_inputs
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.lower.translate import translate
from flashwright.program.kernels import Kernels
from flashwright.rewrite.packed import packed
from flashwright.rewrite.split import split
from flashwright.semantics.interpret import interpret_all
from flashwright.spec import AttentionSpec, load
from tests.example_programs import EXAMPLES
from tests.share import some
from tests.unit.emulated import needs_compilers
from tests.unit.test_emulate_backward import launched
from tests.unit.together import kernels

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "causal": ("gqa", {"causal": True, "head_dim": 128}),
    "window": ("mha", {"causal": True, "window": 100, "sink_tokens": 4}),
    "softcap": ("gqa", {"softcap": 30.0, "head_dim": 64}),
    "sink": ("gqa", {"causal": True, "sink": True, "head_dim": 64}),
    "alibi": ("mha", {"causal": True, "alibi": True}),
    "mla": ("mla", {"causal": True}),
}
REFUSED_EXAMPLES = {
    "append": ("no loop carries sums", "grid block_idx", 1),
    "decode": ("several kernels", "// the parts of a row, each relative to its own maximum\n", 2),
    "paper": ("`Q` is a view with an offset", "Allocate Q in global", 1),
    "softmax_by_hand": ("`Smax` passes from one iteration", "  Compute max(Smax,", 1),
}
SPLIT_EXAMPLES = sorted({p.stem for p in EXAMPLES.glob("*.tl")} - {*REFUSED_EXAMPLES})
SIGMOID = (EXAMPLES / "sigmoid.tl").read_text()
SINK = (EXAMPLES / "sink_softcap.tl").read_text()
WINDOW = (EXAMPLES / "sink_tile.tl").read_text()
DIFFERENTIAL = (EXAMPLES / "differential.tl").read_text()


def made(text: str) -> str:
    return format_tree(split(parse(text)))


def judged(
    text: str, spec: AttentionSpec, splits: int, cases: list[dict[str, int]] | None = None
) -> CpuVerdict:
    spec = spec.model_copy(update={"dims": {**spec.dims, "splits": splits}})
    return judge(Kernels(check(parse(text)).kernels), spec, base=EXAMPLES, cases=cases)


def case(q_len: int, kv_len: int) -> dict[str, int]:
    return {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": q_len, "kv_len": kv_len}


# --- what is made -------------------------------------------------------------------------------


IN_TURN = list(zip(VARIANTS, itertools.cycle(["h200", "a100", "t4"])))
PARTS = [(name, 7) for name in ("sink_softcap", "sink_tile", "documents")] + [("sigmoid", 1)]


@pytest.mark.parametrize(("name", "gpu"), IN_TURN)
def test_the_authors_programs(name: str, gpu: str) -> None:
    """They are clean wherever the forward is, and the first kernel is scheduled as the forward."""
    variant, settings = VARIANTS[name]
    card, spec = gpus.find(gpu), make_spec(variant, **settings)
    whole = PackedOrder(spec, card).rectangular()
    text = made(whole)
    found = check(parse(text), card)
    assert found.diagnostics == check(parse(whole), card).diagnostics == ()
    before = translate(checked_program(parse(whole), card), card)
    first, _ = (translate(program, card) for program in found.kernels)
    assert first.plan.stays == before.plan.stays
    assert before.report is not None
    assert first.report is not None
    assert [r.text for r in first.report.remarks] == [r.text for r in before.report.remarks]
    assert "param Rows = 16" in text


@pytest.mark.parametrize("name", some(VARIANTS, 3))
def test_the_authors_programs_compute_attention(name: str) -> None:
    variant, settings = VARIANTS[name]
    spec = make_spec(variant, **settings)
    for gpu, splits in (("t4", 1), ("h200", 3), ("t4", 9)):
        text = made(PackedOrder(spec, gpus.find(gpu)).rectangular())
        mine = case(70, 300) | ({"kv_heads": 2} if spec.heads == spec.kv_heads else {})
        verdict = judged(text, spec, splits, [mine, {**mine, "q_len": 140, "kv_len": 33}])
        assert {c.output for c in verdict.cases} == {"O", "LSE"}
        assert verdict.ok, (gpu, splits, verdict)


@pytest.mark.slow
def test_selected_blocks() -> None:
    """A table that all thread blocks of a row read together, and one block of rows a query."""
    spec = make_spec("nsa-selected", heads=4, kv_heads=2, top_k=4)
    text = made(PackedOrder(spec, gpus.find("a100")).rectangular())
    assert not check(parse(text), gpus.find("a100")).diagnostics
    assert "for j = floor(TopK * split_idx / splits):" in text
    assert judged(text, spec, 3).ok
    unread = text.replace("floor(TopK *", "floor((TopK - 1) *")
    assert "elements on axis T of `Idx`" in check(parse(unread)).diagnostics[0].message


@pytest.mark.parametrize("name", some(SPLIT_EXAMPLES, 4))
def test_examples(name: str) -> None:
    text = made((EXAMPLES / f"{name}.tl").read_text())
    assert not check(parse(text)).diagnostics
    assert text == format_tree(parse(text))
    verdict = judged(text, load(EXAMPLES / f"{name}.toml"), 3)
    assert verdict.ok, verdict.diagnostics


@pytest.mark.parametrize("part", some(PARTS, 3), ids=lambda part: part[0])
def test_any_number_of_splits(part: tuple[str, int]) -> None:
    """What is added before the loop counts once; so do initial values."""
    name, splits = part
    text = made((EXAMPLES / f"{name}.tl").read_text())
    assert judged(text, load(EXAMPLES / f"{name}.toml"), splits).ok


def test_a_packed_program() -> None:
    """Sequences of other lengths than the longest: both kernels skip what lies past their ends."""
    text = made((EXAMPLES / "packed.tl").read_text())
    assert "if block_idx * BM < q_last - q_first" in text
    assert "if block_idx * Rows < q_last - q_first" in text
    card = gpus.find("h200")
    spec = make_spec("gqa", causal=True, head_dim=64)
    both = made(format_tree(packed(parse(PackedOrder(spec, card).rectangular()))))
    found = check(parse(both), card)
    assert not found.diagnostics
    assert "if block_idx * Rows < q_length" in both
    first, _ = (translate(program, card) for program in found.kernels)
    assert first.plan.stays
    assert all(m.ranges for m in first.plan.maps)


@pytest.mark.parametrize("name", ["sink_softcap", "sink_tile", "forgetting"])
def test_packed_and_split(name: str) -> None:
    """What `flashwright pack` makes, with sequences of several lengths: the numbers stay."""
    whole = packed(parse((EXAMPLES / f"{name}.tl").read_text()))
    two = parse(made(format_tree(whole)))
    drawn = np.random.default_rng(3)
    starts = {"StartsQ": [0, 100, 101, 101, 131], "StartsK": [0, 300, 310, 375, 375]}
    tokens = {"Q": (2, 131, 64), "K": (1, 375, 64), "V": (1, 375, 64), "Gates": (2, 375)}
    given: dict[str, Any] = {n: np.array(at, np.int32) for n, at in starts.items()}
    given |= {n: drawn.standard_normal(shape).astype(np.float32) for n, shape in tokens.items()}
    given["Sink"] = np.array([2.5, -1.0], np.float32)
    dims = {"batch": 4, "heads": 2, "kv_heads": 1, "q_len": 100, "kv_len": 300}
    right = interpret_all(Kernels(check(whole).kernels), given, dims)
    for splits in (1, 4):
        outputs = interpret_all(Kernels(check(two).kernels), given, {**dims, "splits": splits})
        assert outputs.keys() == right.keys()
        for output, expected in right.items():
            np.testing.assert_allclose(outputs[output], expected, rtol=0.01, atol=0.01)


def test_a_cache_in_pages() -> None:
    """The example's first kernel as a program of its own, which ends as its second one does."""
    head, kernel, second = re.split(r"^(?=grid )", (EXAMPLES / "decode.tl").read_text(), flags=re.M)
    kernel = kernel.replace("part_idx = 0:splits * ceil(group / BM)", "block_idx = 0:group / BM")
    kernel = kernel.replace(
        "floor(tiles * split_idx / splits):floor(tiles * (split_idx + 1) / splits)", "0:tiles"
    )
    body = [
        x for x in kernel.splitlines() if not x.startswith(("let split", "let block", "Copy O"))
    ]
    body = [x for x in body if "PartMax" not in x and "PartSum" not in x and x[:2] != "//"]
    body.append("Allocate LSE in register (BM) as fp32")
    end = second[second.index("Compute O / where") :].replace("Rows", "BM")
    head = "".join(x for x in head.splitlines(keepends=True) if "Part" not in x)
    head = head.replace(", splits", "").replace("param Rows = 16\n", "")
    text = made(head + "\n".join(body) + "\n" + end)
    assert not check(parse(text), gpus.find("h200")).diagnostics
    spec = load(EXAMPLES / "decode.toml")
    for splits in (1, 3, 8):
        assert judged(text, spec, splits).ok


def test_comments_stay_where_they_belong() -> None:
    """Each is there once, with its statement: a sink's in the second kernel."""
    text = made(SINK)
    first, second = text.split("// the parts of a row, each relative to its own maximum\n")
    assert text.startswith("// Causal attention with a sink logit")
    note = "// The sink is the first thing every row has seen"
    assert note not in first
    assert f"{note}: its logit is the maximum so far, its weight is 1.\nCompute Sink" in second
    assert "  // never 0: the sink is in it" in second
    ranges = (EXAMPLES / "packed.tl").read_text()  # what both kernels need has a comment
    for program, two in ((SINK, text), (ranges, made(ranges))):
        for line in (line for line in program.splitlines() if line.lstrip().startswith("//")):
            assert two.count(line) == 1
    note = "// last token"
    noted = made(ranges.replace("StartsQ[batch_idx + 1]", f"StartsQ[batch_idx + 1]  {note}"))
    assert noted.count(note) == 1


def test_kernels_hold_only_what_they_need() -> None:
    first, second = made(SINK).split("// the parts of a row")
    assert "Sink[" not in first
    assert "LSE in register" not in first
    assert "Copy K" not in second
    assert "kv_head" not in second.replace("kv_heads", "")


def test_names_that_the_program_has_are_left_alone() -> None:
    taken = SINK.replace("Scale", "Rows").replace("kv_head ", "split_idx ")
    taken = taken.replace("H = kv_head,", "H = split_idx,").replace("block_idx", "tiles")
    text = made(
        taken.replace("Allocate Sink", "dim splits\nAllocate Sink")
        .replace("H: heads)", "H: heads, T: splits)")
        .replace("Sink[head_idx]", "Sink[head_idx, 0]")
    )
    assert "param Rows_ = 16" in text
    assert "let split_idx_ = part_idx % splits_" in text
    assert not check(parse(text)).diagnostics


def test_what_stands_behind_the_loop_is_in_the_second_kernel() -> None:
    """A gate of the output is loaded there, at the rows of its small tiles."""
    gated = SIGMOID.replace(
        "Allocate S in",
        "Allocate Gate in global (batch, heads, q_len, HeadDim) as bf16\nAllocate S in",
    )
    place = "in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to register"
    load_gate = f"Copy Gate (BM, HeadDim) {place}\n"
    gated = gated.replace(
        "Compute 0 and get O_register", f"{load_gate}Compute 0 and get O_register"
    )
    gated = gated.replace("Copy O (", "Compute O * Gate and get new O\nCopy O (")
    first, second = made(gated).split("// the parts of a row")
    assert "Copy Gate" not in first
    assert "Copy Gate (Rows, HeadDim)" in second
    assert "Compute O * Gate and get new O" in second


def test_tiles_whose_size_means_more_keep_it() -> None:
    """An element for each block of queries: with smaller blocks it would be another one."""
    per_block = SIGMOID.replace(
        "Allocate S in",
        "Allocate Weight in global (H: heads, N: ceil(q_len / BM)) as fp32\nAllocate S in",
    ).replace("Copy O (", "Compute O * Weight[head_idx, block_idx] and get new O\nCopy O (")
    text = made(per_block)
    assert "Rows" not in text
    assert "(N: splits, B: batch" in text
    assert "Copy PartO (BM, HeadDim)" in text
    assert not check(parse(text)).diagnostics


def test_sums_of_two_softmaxes() -> None:
    text = made(DIFFERENTIAL)
    for one in "12":
        assert f"Compute max(M{one}, PartM{one}) and get NewM{one}" in text


# --- what is refused ----------------------------------------------------------------------------


def refusal(text: str) -> Diagnostic:
    with pytest.raises(Failed) as failed:
        split(parse(text))
    (found,) = failed.value.diagnostics
    assert found.code == "FW910"
    return found


@pytest.mark.parametrize("name", REFUSED_EXAMPLES)
def test_examples_that_cannot_be_split(name: str) -> None:
    text = (EXAMPLES / f"{name}.tl").read_text()
    message, begins, lines = REFUSED_EXAMPLES[name]
    found = refusal(text)
    assert message in found.message
    assert found.span is not None
    assert found.span.line == text[: text.index(begins)].count("\n") + lines


LOOP = SIGMOID[SIGMOID.index("for i") : SIGMOID.index("end\n") + 4]
ALL = LOOP.replace("min(kv_len, (block_idx + 1) * BM + kv_len - q_len)", "kv_len")
STORE = SIGMOID[SIGMOID.index("Copy O (") :]
MAXIMA = "  Compute rowmax(S) and get Top\n  Compute sigmoid(S + Top * 0)"
SCORES = "B = batch_idx, H = head_idx, L = block_idx, M = i"
AHEAD = PackedOrder(make_spec("mha", head_dim=64, causal=True), gpus.find("t4")).rectangular()


def with_tile(tile: str, *edits: tuple[str, str]) -> str:
    """Sigmoid attention with one more Allocate, and edits."""
    text = SIGMOID.replace("Allocate S in", f"Allocate {tile}\nAllocate S in")
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text


REFUSED = {
    "no loop carries sums": """param BM = 64
Allocate X in global (batch, heads, q_len) as fp32
Allocate Y in global (batch, heads, q_len) as fp32
grid block_idx = 0:q_len / BM, h = 0:heads, b = 0:batch
Copy X (BM) in coordinate [B = b, H = h, L = block_idx] from global to register
Copy X (BM) in coordinate [B = b, H = h, L = block_idx] from register to global and get Y
""",
    "several loops carry sums": SIGMOID.replace(
        LOOP,
        ALL.replace("kv_len / BN", "floor(kv_len / BN / 2)")
        + ALL.replace("for i = 0:", "for j = floor(kv_len / BN / 2):").replace("L = i]", "L = j]"),
    ),
    "`O` passes from one iteration to the next": SIGMOID.replace(
        "  Compute GEMM S, V_shared", "  Compute O * 0.5 and get new O\n  Compute GEMM S, V_shared"
    ),
    "`Top` is what the last iteration left": with_tile(
        "Top in register (BM) as fp32",
        ("  Compute sigmoid(S)", MAXIMA),
        (STORE, f"Compute O * Top and get new O\n{STORE}"),
        (LOOP[: LOOP.index("\n")], ALL[: ALL.index("\n")]),
    ),
    "a result is stored in the loop": with_tile(
        "P in global (B: batch, H: heads, L: q_len, M: kv_len) as fp32",
        (LOOP[: LOOP.index("\n")], ALL[: ALL.index("\n")]),
        (
            "  Compute sigmoid(S)",
            f"  Copy S (BM, BN) in coordinate [{SCORES}] from register to global and get P\n"
            "  Compute sigmoid(S)",
        ),
    ),
    "the kernel adds to global memory": SIGMOID.replace(
        "O in global (batch, heads, q_len, HeadDim) as bf16",
        "O in global (batch, heads, q_len, HeadDim) as fp32",
    ).replace("from register to global", "from register to global and accumulate"),
    "no result is stored at a place that is known before the loop": SIGMOID.replace(
        STORE, "let at = block_idx\n" + STORE.replace("L = block_idx", "L = at")
    ),
    "this loads ahead, but not under `if i < ... - 1`": AHEAD.replace(
        "if i < Last - 1", "if not i >= Last - 1"
    ),
    "this uses sums of the loop before the loop": SINK.replace(
        "Compute 0 and get O_register",
        "Compute 0 and get O_register\nCompute Ssum * 2 and get new Ssum",
    ),
}


@pytest.mark.parametrize("step", ["O * 0.5 and accumulate O", "O + O * 0.5 and get new O"])
def test_what_depends_on_the_sum_is_no_sum(step: str) -> None:
    gemm = "  Compute GEMM S, V_shared"
    program = SIGMOID.replace(gemm, f"  Compute {step}\n{gemm}")
    assert not check(parse(program)).errors
    assert "`O` passes from one iteration to the next" in refusal(program).message


@pytest.mark.parametrize("step", ["rowsum(S) and accumulate N", "N + rowsum(S) and get new N"])
def test_forms_of_sums(step: str) -> None:
    """A sum beside the others, which its own kernel stores."""
    text = with_tile(
        "N in register (BM) as fp32",
        ("Compute 0 and get O_register", "Compute 0 and get O_register\nCompute 0 and get N"),
        ("  Reshape S", f"  Compute {step}\n  Reshape S"),
        (STORE, f"Compute where(N == 0, 0, O / N * N) and get new O\n{STORE}"),
    )
    two = made(text)
    assert "Compute N + PartN and get new N" in two
    assert judged(two, load(EXAMPLES / "sigmoid.toml"), 3).ok


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_split_is_said(message: str) -> None:
    assert not check(parse(REFUSED[message])).errors
    assert message in refusal(REFUSED[message]).message


def test_forms_of_loading_ahead() -> None:
    """`i + 1 < Last` is the same as `i < Last - 1`."""
    text = made(AHEAD.replace("i < Last - 1", "i + 1 < Last"))
    assert "if i + 1 < last" in text
    assert "if first < last  // the first block, if there is any" in text
    spec = make_spec("mha", head_dim=64, causal=True)
    assert judged(text, spec, 3, [{**case(70, 300), "kv_heads": 2}]).ok


def test_errors_of_the_program_come_first() -> None:
    with pytest.raises(Failed) as failed:
        split(parse(SIGMOID.replace("get O_register", "get P_register", 1)))
    assert {d.code for d in failed.value.diagnostics} != {"FW910"}


def test_backward_passes_are_refused() -> None:
    derived = backward(checked_program(parse(SIGMOID))).tree
    assert refusal(format_tree(derived)).message == "the program has several kernels"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*args: Any) -> int:
        with pytest.raises(typer.Exit) as ended:
            command(*args)
        return ended.value.exit_code

    out = tmp_path / "split.tl"
    assert run(str(EXAMPLES / "sigmoid.tl"), out) == 0
    assert capsys.readouterr().out == f"{out}: split\n"
    assert run(str(EXAMPLES / "sigmoid.tl"), None) == 0
    assert capsys.readouterr().out == out.read_text() == made(SIGMOID)
    assert run(str(out), None) == 1
    assert "error[FW910]" in capsys.readouterr().err


# --- the kernels --------------------------------------------------------------------------------


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize(
    "gpu",
    [
        "h200",
        "t4",
    ],
)
def test_the_kernels_agree_with_fp64(gpu: str) -> None:
    """Both in a row: more splits than tiles, rows that see no key, a sink that counts once."""
    card = gpus.find(gpu)
    spec = make_spec("gqa", heads=2, kv_heads=1, head_dim=64, causal=True, sink=True)
    text = made(PackedOrder(spec, card).rectangular())
    programs = check(parse(text), card).kernels
    steps = kernels([(format_tree(p.tree), spec) for p in programs], gpu)
    for splits, (q_len, kv_len) in ((3, (70, 400)), (9, (90, 40))):
        dims = {"batch": 1, "heads": 2, "kv_heads": 1, "q_len": q_len, "kv_len": kv_len}
        given = make_inputs(spec, dims, 1, "normal")
        record = Steps.of(Kernels(programs))
        tensors = launched(steps, record, given, {**dims, "splits": splits}, "eager")
        expected = oracle.attention(spec, given, dims)
        for name in ("O", "LSE"):
            right = np.asarray(expected[name])
            error = np.abs(tensors[name].astype(np.float64) - right)[np.isfinite(right)].max()
            assert error < 0.01, (name, splits)
