"""The whole translator: every program there is, names, the map, and what it refuses."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.choose import NothingFits
from flashwright.author.builtin.variants import VARIANTS, make_spec
from flashwright.cli.main import app
from flashwright.lower.names import cpp
from flashwright.lower.printing.kernel import wrapped
from flashwright.lower.translate import translate
from flashwright.spec import BadSpec
from tests.example_programs import EXAMPLES, PROGRAMS
from tests.share import some
from tests.unit.lowered import printed, refusal
from tests.unit.tl_attention import COPY, attention, program

GPUS = {"t4": ("fp16",), "a100": ("bf16",), "l40s": ("bf16", "fp8"), "h200": ("fp16", "fp8")}
MASKS: tuple[dict[str, object], ...] = (
    {"causal": False},
    {"causal": True},
    {"causal": True, "window": 70},
    {"causal": False, "window": 70},
)
OPTIONS: tuple[dict[str, object], ...] = (
    {},
    {"softcap": 20.0},
    {"alibi": True},
    {"sink": True},
    {"softcap": 20.0, "alibi": True, "sink": True},
)
TITLE = re.compile(r"^ *// +(\d+) \| (.*)$")


def check_kernel(text: str, gpu: str) -> None:
    made = translate(program(text, strict=False), gpus.find(gpu))
    lines, tl = made.source.splitlines(), text.splitlines()
    assert made.plan.arch == gpus.find(gpu).arch
    for number, line in enumerate(lines, 1):
        assert len(line) <= 100 or line.lstrip().startswith("//"), line
        if title := TITLE.match(line):  # what stands there is the line that it names
            words = title[2].split()
            assert tl[int(title[1]) - 1].split()[0] == words[0], line
            assert made.map.tl_line(number) == int(title[1])
    names = set(re.findall(r"[A-Za-z_]\w*", re.sub(r"//.*", "", made.source)))
    for constant in re.findall(r"^constexpr \w+ (\w+)", made.source, re.MULTILINE):
        assert made.source.count(constant) > 1 or constant in names
    assert "\n\n\n" not in made.source


@pytest.mark.parametrize(
    "gpu", [g if g != "l40s" else pytest.param(g, marks=pytest.mark.slow) for g in GPUS]
)
@pytest.mark.parametrize("variant", some(sorted({*VARIANTS} - {"mla-decode"}), 5))
def test_built_in_programs(variant: str, gpu: str) -> None:
    """Each mask and each option; each with one head dim and dtype."""
    card, wanted = gpus.find(gpu), [(m, OPTIONS[0]) for m in MASKS]
    wanted += [(MASKS[1], o) for o in OPTIONS[1:]]
    made = 0
    for number, (mask, option) in enumerate(wanted):
        dtype = GPUS[gpu][number % len(GPUS[gpu])]
        head_dim = 192 if variant == "mla" else (64, 128)[number % 2]
        try:
            spec = make_spec(variant, head_dim=head_dim, dtype=dtype, **mask, **option)
            text = write_code(write_sketch(spec), spec, card).code
        except (BadSpec, NothingFits):
            continue
        check_kernel(text, gpu)
        made += 1
    assert made


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("path", some(PROGRAMS, 3), ids=lambda p: p.stem)
def test_examples(path: Path, gpu: str) -> None:
    text = path.read_text("utf-8")
    check_kernel(text.replace("bf16", "fp16") if gpu == "t4" else text, gpu)


def test_the_map_leads_from_every_line_to_the_line_it_stands_under() -> None:
    text = attention(k_stages=2, v_stages=2)
    made = translate(program(text), gpus.find("a100"))
    under = 0
    for number, line in enumerate(made.source.splitlines(), 1):
        if title := TITLE.match(line):
            under = int(title[1])
        found = made.map.tl_line(number)
        if "fw::gemm" in line or "fw::operand" in line or "fw::exp2" in line:
            assert found == under, line
        if "copy_async" in line:
            assert found is not None
            assert "Copy" in text.splitlines()[found - 1]
    assert made.map.tl_line(1) is None
    assert made.map.tl_line(100_000) is None


# --- names -------------------------------------------------------------------------------------


def test_names_that_c_has_already() -> None:
    renames = {"Scale": "float", "Smax": "sum", "Ssum": "most", "i": "m", "item": "register"}
    text = attention()
    for old, new in renames.items():
        text = re.sub(rf"\b{old}\b", "wide_at" if new == "register" else new, text)
    source = printed(text)
    assert "constexpr float float_ = 0.125f;" in source
    assert "auto sum_ = fw::row_vector<BM, Warps>();" in source
    assert "auto most_ = fw::row_vector<BM, Warps>();" in source
    assert "for (int m_ = 0; m_ * BN < kv_len; ++m_) {" in source
    assert "int const wide_at_ = blockIdx.z;" in source
    assert "float const now = fw::max(sum_(m), most * float_);" in source


@pytest.mark.parametrize("name", ["int", "nullptr", "p", "fw", "shared", "exp", "now", "blockIdx"])
def test_words_that_are_taken(name: str) -> None:
    assert cpp(name) == f"{name}_"


def test_words_that_are_free() -> None:
    assert [cpp(n) for n in ("S", "K", "block_idx", "Table")] == ["S", "K", "block_idx", "Table"]


def test_only_what_is_used_is_declared() -> None:
    source = printed(attention(params="param Unused = 7"), strict=False)
    assert "Unused" not in source
    assert "heads" not in source[source.index("attention(") :]
    assert "fw::Place<Warps> const at;" in source
    assert "wide_at" not in source


# --- long lines --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (
            "  fw::copy<Threads>(" + "a" * 60 + ", p.K.tile(x, y, z), kv_len - 7 * i);",
            [
                "  fw::copy<Threads>(" + "a" * 60 + ", p.K.tile(x, y, z),",
                "      kv_len - 7 * i);",
            ],
        ),
        (
            "  S(m, n) = " + "a" * 40 + " <= b && c > d - " + "e" * 30 + " ? S(m, n) : -INFINITY;",
            [
                "  S(m, n) = " + "a" * 40 + " <= b && c > d - " + "e" * 30,
                "      ? S(m, n) : -INFINITY;",
            ],
        ),
        ("  // " + "word, " * 40, ["  // " + "word, " * 40]),
        ("  " + "x" * 120 + ";", ["  " + "x" * 120 + ";"]),
    ],
)
def test_long_lines_are_broken_where_it_reads_well(line: str, parts: list[str]) -> None:
    assert wrapped(line) == parts


# --- what is refused ---------------------------------------------------------------------------

REFUSED = {
    "a left operand in registers that is transposed": (
        attention().replace("GEMM S, V_shared", "GEMM S.T, V_shared"),
        "Compute GEMM S.T",
    ),
    "a grid with four axes": (
        attention().replace("item = 0:batch", "item = 0:batch, more = 0:2"),
        "grid",
    ),
    "a grid that a launch cannot compute": (
        attention().replace("block = 0:q_len / BM", "block = 0:abs(q_len)"),
        "grid",
    ),
    "a product that is no whole number of steps": (
        attention().replace("param HeadDim = 64", "param HeadDim = 40"),
        "Compute GEMM",
    ),
    "a tile whose rows are no multiple of 32 bytes": (
        attention(
            allocate="Allocate Bias in global (L: q_len, M: 8) as fp16\n"
            "Allocate Bias in register (BM, 8) as fp32\n"
            "Copy Bias (BM, 8) in coordinate [L = block] from global to shared\n"
            "Copy Bias from shared to register",
        ),
        "Copy Bias (BM, 8)",
    ),
    "a place that is no whole number": (
        attention(copy_k=COPY.format("K").replace("H = head", "H = sqrt(head)")),
        "Copy K",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_place(case: str) -> None:
    text, begins = REFUSED[case]
    found = refusal(text)
    assert found.code == "FW811"
    assert found.message
    assert found.span is not None
    assert text.splitlines()[found.span.line - 1].strip().startswith(begins)


def test_no_mma_for_the_type() -> None:
    found = refusal(attention(dtype="bf16"), "t4")
    assert (found.code, found.span is not None) == ("FW811", True)
    assert "bf16" in found.message


def test_8_bit_products_lie_otherwise() -> None:
    """Their columns lie in another order than those of other tiles: not to be mixed up silently."""
    bias = (
        "Allocate Bias in global (D: HeadDim) as fp32\nAllocate Bias in register (HeadDim) as fp32"
    )
    copy = "Copy Bias (HeadDim) in coordinate [D = 0] from global to register"
    add = "Compute O_register + Bias and get new O_register"
    wrong = attention(dtype="e4m3", allocate=bias, end=f"{copy}\n{add}")
    wrong = wrong.replace("O in global (batch, heads, q_len, HeadDim) as e4m3",
                          "O in global (batch, heads, q_len, HeadDim) as bf16")  # fmt: skip
    found = refusal(wrong, "l40s")
    assert found.code == "FW811"
    assert "`Bias`" in found.message
    right = wrong.replace(f"{copy}\n{add}", "").replace(bias, "")
    assert "fw::store<Warps, true>" in printed(right, "l40s")
    assert "fw::load_cols<Warps>(Bias" in printed(wrong.replace("e4m3", "fp16"), "l40s", False)


def test_the_example_of_the_explanation(tmp_path: Path) -> None:
    """A program that is right, with a grid of four axes: `flashwright explain FW811` shows it."""
    text = attention(params="param Group = 4").replace("heads,", "H: kv_heads, G: Group,")
    text = text.replace(
        "K in global (batch, H: kv_heads, G: Group,", "K in global (batch, kv_heads,"
    )
    text = text.replace(
        "V in global (batch, H: kv_heads, G: Group,", "V in global (batch, kv_heads,"
    )
    text = re.sub(r"\((batch), H: kv_heads, G: Group, q_len, HeadDim\)",
                  r"(B: batch, H: kv_heads, G: Group, L: q_len, D: HeadDim)", text)  # fmt: skip
    text = text.replace("head = 0:H: kv_heads, G: Group,", "group = 0:Group, head = 0:kv_heads,")
    text = text.replace("H = head, L = block", "H = head, G = group, L = block")
    assert program(text), "the checker has nothing against it"
    path = tmp_path / "code.tl"
    path.write_text(text)
    result = CliRunner().invoke(app, ["translate", str(path), "--gpu", "a100"])
    assert result.exit_code == 1
    said = result.output + (result.stderr or "")
    assert "error[FW811]: a grid has at most three axes" in said
    assert "group = 0:Group, head = 0:kv_heads" in said, "with its place"
    page = (files("flashwright.lang") / "explain" / "FW811.md").read_text("utf-8")
    assert "error[FW811]: a grid has at most three axes" in page


NARROWED = (
    (
        "Allocate S in register",
        "Allocate G in register (BM, BN) as {dtype}\nAllocate S in register",
    ),
    (
        "  Compute Multiply S, Scale and get new S",
        "  Compute (S * 4096 + 1) * 0.125 and get G\n  Compute G * Scale and get new S",
    ),
)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_a_factor_waits_only_where_nothing_is_rounded(dtype: str) -> None:
    """Without its factor a value may not fit a narrow tile."""
    source = (EXAMPLES / "sink_tile.tl").read_text()
    for old, new in NARROWED:
        assert source.count(old) == 1
        source = source.replace(old, new.format(dtype=dtype))
    text = " ".join(printed(source).split())
    whole, waiting = "S(m, n) * 4096.f + 1.f) * 0.125f", "G(m, n) = S(m, n) * 4096.f + 1.f;"
    assert (whole in text, waiting in text) == ((True, False) if dtype == "fp16" else (False, True))
    assert ("0.125f * Scale" in text) is (dtype == "fp32")


def test_rows_that_warpgroups_would_share_but_for_a_reason_that_is_said() -> None:
    text = attention(k_stages=2, v_stages=2, end="Copy K from shared to global and get W")
    text = text.replace("Warps = 4", "Warps = 8").replace("HeadDim = 64", "HeadDim = 128")
    place = "(BN, HeadDim) in coordinate [B = item, H = head, L = 0]"
    text = text.replace("Copy K from shared", f"Copy K {place} from shared").replace(
        "Allocate O in global",
        "Allocate W in global (batch, heads, BN, HeadDim) as fp16\nAllocate O in global",
    )
    found = refusal(text, "h200")
    assert found.code == "FW811"
    assert "no wgmma: a tile that comes from global memory is stored from there, line" in found.help
