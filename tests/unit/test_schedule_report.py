"""The path that each example and recipe takes, and what the translator says of it."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from flashwright import gpu as gpus
from flashwright.build import make as making
from flashwright.build import package
from flashwright.build.compile import Built
from flashwright.check.check import check
from flashwright.cli.kernel import build_in_words
from flashwright.gpu import Gpu
from flashwright.lang.codes import CODES
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.fix import apply
from flashwright.lang.parse import parse
from flashwright.lower.report import Report, notes
from flashwright.lower.translate import translate
from flashwright.program.program import Program
from flashwright.report import markdown, page, terminal
from flashwright.report.gather import gather
from tests.example_programs import PROGRAMS as EXAMPLE_FILES
from tests.share import some
from tests.unit.report_example import write_package
from tests.unit.test_cli import Outcome
from tests.unit.tl_attention import COPY, attention

LANGUAGE = Path(__file__).parents[2] / "docs" / "language.md"
CASES = Path(__file__).parents[1] / "cases"
SHIFT = "kv_len - q_len"
SEEN = f"kv_idx <= q_idx + {SHIFT}"


def whole_programs() -> dict[str, str]:
    """The programs of docs/language.md that are whole."""
    fences = re.findall(r"^```tl\n(.*?)^```$", LANGUAGE.read_text(), re.MULTILINE | re.DOTALL)
    every = [text for text in fences if text.count("\ngrid ") == 1]
    return {f"language {number}": text for number, text in enumerate(every, 1)}


def sink_tokens() -> str:
    """A window behind which the first keys stay visible."""
    first = f"floor(max(0, block * BM + {SHIFT} - Window + 1) / BN)"
    place = "where(i < Start + SinkBlocks, i - Start, i)"
    copy = COPY.replace("L = i", f"L = {place}")
    return attention(
        params="param Window = 256\nparam SinkTokens = 4\nparam SinkBlocks = 1",
        allocate=f"let Start = max(0, {first} - SinkBlocks)",
        low="Start",
        high=f"min(kv_len, (block + 1) * BM + {SHIFT}) / BN",
        copy_k=copy.format("K"),
        copy_v=copy.format("V"),
        mask=f"{SEEN} and (kv_idx > q_idx + {SHIFT} - Window or kv_idx < SinkTokens)",
    )


def grouped() -> str:
    """Heads that share keys and values."""
    copy = COPY.replace("H = head", "H = kv_head")
    text = attention(
        allocate="let kv_head = floor(head * kv_heads / heads)",
        copy_k=copy.format("K"),
        copy_v=copy.format("V"),
    )
    return re.sub(r"(Allocate [KV] in global \(batch, )heads", r"\1kv_heads", text)


RECIPES = {
    "grouped heads": grouped(),
    "causal": attention(
        high=f"min(kv_len, (block + 1) * BM + {SHIFT}) / BN", mask=f"kv_idx < kv_len and {SEEN}"
    ),
    "window": attention(
        params="param Window = 256",
        low=f"floor(max(0, block * BM + {SHIFT} - Window + 1) / BN)",
        mask=f"kv_idx < kv_len and {SEEN} and kv_idx > q_idx + {SHIFT} - Window",
    ),
    "sink tokens": sink_tokens(),
    "softcap": attention(
        params="param Softcap = 30",
        scale="Compute S * Scale and get new S\n"
        "  Compute Softcap * tanh(S / Softcap) and get new S",
    ),
    "alibi": attention(
        allocate="Allocate Slopes in global (H: heads) as fp32",
        scale=f"Compute S * Scale + Slopes[head] * (kv_idx - q_idx - ({SHIFT})) and get new S",
    ),
    "sink": attention(
        allocate="Allocate Sink in global (H: heads) as fp32",
        start="1",
    ).replace("Compute -1e30 and get Smax", "Compute Sink[head] and get Smax"),
    "lengths": attention(
        allocate="Allocate Lengths in global (B: batch) as int32\nlet length = Lengths[item]",
        mask="kv_idx < kv_len and kv_idx < length",
    ),
}
"""Recipes of docs/language.md that are no example of their own."""
PROGRAMS = {**{p.stem: p.read_text() for p in EXAMPLE_FILES}, **whole_programs(), **RECIPES}


def reported(text: str, gpu: str) -> tuple[Report, list[Diagnostic]]:
    card = gpus.find(gpu)
    checked = check(parse(text), card)
    assert checked.program is not None
    assert not checked.errors, checked.errors
    report = translate(checked.program, card).report
    assert report is not None
    return report, notes(report, text, checked.program.tree)


def said(text: str, gpu: str) -> list[str]:
    """The path, then each note's code and line."""
    report, found = reported(text, gpu)
    return [report.in_words(), *(f"{d.code}:{d.span.line if d.span else 0}" for d in found)]


# --- every example and recipe -----------------------------------------------------------------

PINS: dict[tuple[str, str], tuple[str, str]] = {
    ("append", "h200"): ("mma.sync, cp.async", "FW812:0"),
    ("append", "a100"): ("mma.sync, cp.async", ""),
    ("bias_prefix", "h200"): (
        "wgmma, TMA, persistent; loop 28: overlapped, masked iterations split",
        "FW818:29 FW818:30 FW813:31 FW815:32",
    ),
    ("block_list", "h200"): (
        "wgmma, TMA, persistent; loop 32: overlapped, masked iterations split",
        "FW815:36",
    ),
    ("block_list", "a100"): (
        "mma.sync, cp.async; loop 32: copies run 1 iteration ahead",
        "",
    ),
    ("bias_prefix", "a100"): (
        "mma.sync, cp.async; loop 28: copies do not run ahead",
        "FW818:29 FW818:30",
    ),
    ("differential", "h200"): (
        "wgmma, TMA, persistent; loop 35: overlapped, masked iterations split",
        "FW818:36 FW818:37 FW818:38 FW815:39",
    ),
    ("differential", "a100"): (
        "mma.sync, cp.async; loop 35: copies do not run ahead",
        "FW818:36 FW818:37 FW818:38",
    ),
    ("documents", "h200"): (
        "wgmma, TMA, persistent; loop 27: overlapped, masked iterations split, early exit",
        "FW818:28 FW818:29 FW815:30",
    ),
    ("documents", "a100"): (
        "mma.sync, cp.async; loop 27: copies do not run ahead",
        "FW818:28 FW818:29",
    ),
    ("forgetting", "h200"): (
        "wgmma, TMA, persistent; loop 30: overlapped, masked iterations split, early exit",
        "FW818:31 FW818:32 FW815:34",
    ),
    ("forgetting", "a100"): (
        "mma.sync, cp.async; loop 30: copies do not run ahead",
        "FW818:31 FW818:32",
    ),
    ("packed", "h200"): (
        "wgmma, TMA, persistent; loop 40: overlapped, masked iterations split, early exit",
        "FW815:43",
    ),
    ("packed", "a100"): ("mma.sync, cp.async", "FW818:41 FW818:42"),
    ("paged", "h200"): (
        "wgmma, TMA, persistent; loop 28: overlapped, masked iterations split",
        "FW818:30 FW818:31 FW815:32",
    ),
    ("paged", "a100"): (
        "mma.sync, cp.async; loop 28: copies do not run ahead",
        "FW818:30 FW818:31",
    ),
    ("paper", "h200"): (
        "wgmma, TMA, persistent; loop 27: overlapped, masked iterations split",
        "FW818:28 FW815:29",
    ),
    ("paper", "a100"): (
        "mma.sync, cp.async; loop 27: copies do not run ahead",
        "FW818:28",
    ),
    ("relative_bias", "h200"): (
        "wgmma, TMA, persistent; loop 27: overlapped, masked iterations split",
        "FW818:28 FW818:29 FW815:30",
    ),
    ("relative_bias", "a100"): (
        "mma.sync, cp.async; loop 27: copies do not run ahead",
        "FW818:28 FW818:29",
    ),
    ("rope_split", "h200"): (
        "wgmma, TMA, persistent; loop 28: overlapped, masked iterations split, early exit",
        "FW818:29 FW818:30 FW818:31 FW815:32",
    ),
    ("rope_split", "a100"): (
        "mma.sync, cp.async; loop 28: copies do not run ahead",
        "FW818:29 FW818:30 FW818:31",
    ),
    ("side_by_side", "h200"): (
        "wgmma, TMA, persistent; loop 30: overlapped, masked iterations split, early exit",
        "FW818:31 FW818:33 FW815:34",
    ),
    ("side_by_side", "a100"): (
        "mma.sync, cp.async; loop 30: copies do not run ahead",
        "FW818:31 FW818:33",
    ),
    ("sigmoid", "h200"): (
        "wgmma, TMA, persistent; loop 21: overlapped, masked iterations split",
        "FW818:22 FW818:23 FW815:24",
    ),
    ("sigmoid", "a100"): (
        "mma.sync, cp.async; loop 21: copies do not run ahead",
        "FW818:22 FW818:23",
    ),
    ("sink_softcap", "h200"): (
        "wgmma, TMA, persistent; loop 30: overlapped, masked iterations split, early exit",
        "FW818:31 FW818:32 FW815:33",
    ),
    ("sink_softcap", "a100"): (
        "mma.sync, cp.async; loop 30: copies do not run ahead",
        "FW818:31 FW818:32",
    ),
    ("sink_tile", "h200"): (
        "wgmma, TMA, persistent; loop 41: overlapped, masked iterations split, early exit",
        "FW815:34 FW818:42 FW818:43",
    ),
    ("sink_tile", "a100"): (
        "mma.sync, cp.async; loop 41: copies do not run ahead",
        "FW818:42 FW818:43",
    ),
    ("softmax_by_hand", "h200"): (
        "wgmma, TMA, persistent; loop 27: overlapped, masked iterations split, early exit",
        "FW818:28 FW818:29 FW815:30",
    ),
    ("softmax_by_hand", "a100"): (
        "mma.sync, cp.async; loop 27: copies do not run ahead",
        "FW818:28 FW818:29",
    ),
    ("unscaled", "h200"): (
        "wgmma, TMA, persistent; loop 23: overlapped, masked iterations split",
        "FW818:24 FW818:25 FW815:26",
    ),
    ("unscaled", "a100"): (
        "mma.sync, cp.async; loop 23: copies do not run ahead",
        "FW818:24 FW818:25",
    ),
    ("language 1", "h200"): (
        "wgmma, TMA, persistent; loop 22: overlapped, masked iterations split, early exit",
        "FW818:23 FW818:24 FW815:25",
    ),
    ("language 1", "a100"): (
        "mma.sync, cp.async; loop 22: copies do not run ahead",
        "FW818:23 FW818:24",
    ),
    ("grouped heads", "h200"): (
        "wgmma, TMA, persistent; loop 24: overlapped, masked iterations split",
        "FW818:25 FW818:26 FW815:27",
    ),
    ("grouped heads", "a100"): (
        "mma.sync, cp.async; loop 24: copies do not run ahead",
        "FW818:25 FW818:26",
    ),
    ("causal", "h200"): (
        "wgmma, TMA, persistent; loop 24: overlapped, masked iterations split, early exit",
        "FW818:25 FW818:26 FW815:27",
    ),
    ("causal", "a100"): (
        "mma.sync, cp.async; loop 24: copies do not run ahead",
        "FW818:25 FW818:26",
    ),
    ("window", "h200"): (
        "wgmma, TMA, persistent; loop 24: overlapped, masked iterations split, early exit",
        "FW818:25 FW818:26 FW815:27",
    ),
    ("window", "a100"): (
        "mma.sync, cp.async; loop 24: copies do not run ahead",
        "FW818:25 FW818:26",
    ),
    ("sink tokens", "h200"): (
        "wgmma, TMA, persistent; loop 26: overlapped, masked iterations split",
        "FW818:27 FW818:28 FW815:29",
    ),
    ("sink tokens", "a100"): (
        "mma.sync, cp.async; loop 26: copies do not run ahead",
        "FW818:27 FW818:28",
    ),
    ("softcap", "h200"): (
        "wgmma, TMA, persistent; loop 24: overlapped, masked iterations split",
        "FW818:25 FW818:26 FW815:27",
    ),
    ("softcap", "a100"): (
        "mma.sync, cp.async; loop 24: copies do not run ahead",
        "FW818:25 FW818:26",
    ),
    ("alibi", "h200"): (
        "wgmma, TMA, persistent; loop 24: overlapped, masked iterations split",
        "FW818:25 FW818:26 FW815:27",
    ),
    ("alibi", "a100"): (
        "mma.sync, cp.async; loop 24: copies do not run ahead",
        "FW818:25 FW818:26",
    ),
    ("sink", "h200"): (
        "wgmma, TMA, persistent; loop 24: overlapped, masked iterations split",
        "FW818:25 FW818:26 FW815:27",
    ),
    ("sink", "a100"): (
        "mma.sync, cp.async; loop 24: copies do not run ahead",
        "FW818:25 FW818:26",
    ),
    ("lengths", "h200"): (
        "wgmma, TMA, persistent; loop 25: overlapped, masked iterations split",
        "FW818:26 FW818:27 FW815:28",
    ),
    ("lengths", "a100"): (
        "mma.sync, cp.async; loop 25: copies do not run ahead",
        "FW818:26 FW818:27",
    ),
}
"""The path, and the code and line of each note."""


@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize("name", some(PROGRAMS, 3))
def test_the_path_of_every_program(name: str, gpu: str) -> None:
    assert (name, gpu) in PINS, f"pin what is said: {said(PROGRAMS[name], gpu)}"
    path, *codes = said(PROGRAMS[name], gpu)
    assert (path.replace("loop at line ", "loop "), " ".join(codes)) == PINS[name, gpu]


OVERLAPPED = {
    "linear_state": "; loop 22: not overlapped",
    "q_transposed": ", ping-pong; loop 26: overlapped, masked iterations split, early exit",
    "restaged": "; loop 36: overlapped, masked iterations split",
    "skipped_by_data": ", ping-pong; loop 26: overlapped, masked iterations split, early exit",
    "vector_in_shared": ", ping-pong; loop 28: overlapped, masked iterations split",
}
"""What Hopper's schedule is for programs of tests/cases."""


@pytest.mark.parametrize("name", OVERLAPPED)
def test_the_schedule_of_a_case(name: str) -> None:
    path, *_ = said((CASES / f"{name}.tl").read_text(), "h200")
    wanted = f"wgmma, TMA, persistent{OVERLAPPED[name]}"
    assert path.replace("loop at line ", "loop ") == wanted


# --- what a mutation says ---------------------------------------------------------------------


def fast(**parts: object) -> str:
    """A program with all that Hopper offers, and nothing left to say."""
    text = attention(k_stages=2, v_stages=2, **parts)
    return text.replace("BM = 64", "BM = 128").replace("Warps = 4", "Warps = 8")


BIAS = fast(
    allocate="Allocate Bias in global (H: heads, L: q_len, M: kv_len) as fp16\n"
    "Allocate Bias in register (BM, BN) as fp32",
    copy_k="Copy Bias (BM, BN) in coordinate [H = head, L = block, M = i] from global "
    f"to register\n  {COPY.format('K')}",
    scale="Compute S * Scale + Bias and get new S",
)
FP8 = re.sub(
    r"(Allocate O in global .*) as e4m3",
    r"\1 as bf16",
    fast(dtype="e4m3").replace("BN = 32", "BN = 64"),
)
SHARED_P = {
    "allocate": "Allocate S in shared (BM, BN) as fp16",
    "reshape": "Copy S from register to shared",
    "p": "S_shared",
}
VIEW = re.sub(
    r"\[B = item, H = head, L = block\] from global",
    "[L = block] from global",
    fast().replace(
        "Allocate Q in global (batch, heads, q_len, HeadDim) as fp16",
        "let at = (item * heads + head) * q_len * HeadDim\n"
        "Allocate Q in global (q_len, HeadDim) as fp16 with offset at",
    ),
)
MUTATIONS = {
    "nothing": (fast(), "h200", []),
    "overlap": (fast(params="param Overlap = 0"), "h200", ["FW814:6 remove `param Overlap = 0`"]),
    "ping-pong": (
        fast(params="param PingPong = 0"),
        "h200",
        ["FW815:6 remove `param PingPong = 0`"],
    ),
    "masked iterations": (
        fast(params="param SplitMasked = 0"),
        "h200",
        ["FW816:6 remove `param SplitMasked = 0`"],
    ),
    "masked iterations, earlier name": (
        fast(params="param Apart = 0"),
        "h200",
        ["FW816:6 remove `param Apart = 0`"],
    ),
    "persistent": (
        fast(params="param Persistent = 0"),
        "h200",
        ["FW817:6 remove `param Persistent = 0`"],
    ),
    "two warps": (
        attention(k_stages=2, v_stages=2).replace("Warps = 4", "Warps = 2"),
        "h200",
        ["FW812:27 write `param Warps = 4`"],
    ),
    "too few warps": (
        fast().replace("Warps = 8", "Warps = 4"),
        "h200",
        ["FW812:27 write `param Warps = 8`", "FW812:32 write `param Warps = 8`"],
    ),
    "default warps": (
        fast().replace("param Warps = 8\n", ""),
        "h200",
        ["FW812:26 write `param Warps = 8`", "FW812:31 write `param Warps = 8`"],
    ),
    "64 rows for two warpgroups": (
        fast().replace("BM = 128", "BM = 64").replace("HeadDim = 64", "HeadDim = 128"),
        "h200",
        ["FW815:27"],
    ),
    "a result through shared memory": (
        fast(allocate="Allocate O in shared (BM, HeadDim) as fp16")
        .replace("L = block] from register", "L = block] from shared")
        .replace("Copy O (", "Copy O from register to shared\nCopy O ("),
        "h200",
        [],
    ),
    "one tile for both GEMMs": (
        fast(copy_v="").replace("S, V_shared", "S, K_shared"),
        "h200",
        ["FW814:27"],
    ),
    "views back to back": (VIEW, "h200", []),
    "padded views": (VIEW.replace("* q_len *", "* (q_len + 8) *"), "h200", ["FW813:20"]),
    "rows of run-time length": (BIAS, "h200", ["FW813:26"]),
    "no room for a ring of the bias": (
        re.sub("stages 2", "stages 3", BIAS.replace("= 64", "= 128")).replace("= 32", "= 128"),
        "h200",
        ["FW818:26"],
    ),
    "fp8": (FP8, "h200", []),
    "a wide fp8 sum": (FP8.replace("HeadDim = 64", "HeadDim = 256"), "h200", ["FW812:32"]),
    "weights through shared memory": (fast(**SHARED_P), "h200", ["FW815:31"]),
    "a mask without a test": (fast(mask="not (kv_idx >= kv_len)"), "h200", ["FW816:29"]),
    "no stages": (
        fast().replace(" with stages 2", ""),
        "a100",
        ["FW818:25", "FW818:26"],
    ),
    "a tile that is read after the loop": (
        fast(end="Compute GEMM Q_shared, K_shared.T and get S"),
        "a100",
        ["FW818:25"],
    ),
    "barriers that do not fit beside the tiles": (
        re.sub("stages 2", "stages 41", fast().replace("= 64", "= 80").replace("= 32", "= 16")),
        "h200",
        ["FW812:19"],
    ),
    "no wgmma on the GPU": (fast().replace("Warps = 8", "Warps = 2"), "a100", []),
}


@pytest.mark.parametrize("name", some(MUTATIONS))
def test_a_mutation_gives_its_note(name: str) -> None:
    text, gpu, wanted = MUTATIONS[name]
    _, found = reported(text, gpu)
    told = [
        f"{d.code}:{d.span.line if d.span else 0} {d.fix.title if d.fix else ''}".strip()
        for d in found
    ]
    assert told == wanted
    assert all(d.severity == "note" for d in found)
    if any(d.fix for d in found):  # the edit restores what the note misses
        mended, _ = apply(text, found)
        left = [d.code for d in reported(mended, gpu)[1]]
        assert not set(left) & {d.code for d in found}


def test_an_edit_leaves_a_param_that_others_need() -> None:
    text = fast(params="param PingPong = 0\nparam Offset = PingPong")
    (found,) = reported(text.replace("0:kv_len", "Offset:kv_len"), "h200")[1]
    assert (found.code, found.fix) == ("FW815", None)


def test_notes_have_a_severity_of_their_own() -> None:
    notes_of = {code for code, entry in CODES.items() if entry.severity == "note"}
    assert notes_of == {*(f"FW{n}" for n in range(812, 821)), "FW883"}


# --- where it is said -------------------------------------------------------------------------


@pytest.fixture
def slow(tmp_path: Path) -> str:
    path = tmp_path / "slow.tl"
    path.write_text(fast(params="param PingPong = 0"))
    return str(path)


PATH = "h200: wgmma, TMA, persistent; loop at line 24: overlapped, masked iterations split\n"


def test_check_says_the_path_and_the_notes(slow: str) -> None:
    done = Outcome("check", slow, "--gpu", "h200")
    assert done.code == 0
    assert done.out.endswith(PATH)
    assert f"note[FW815]: no ping-pong: `param PingPong = 0`\n --> {slow}:6:1" in done.out
    assert "= edit: remove `param PingPong = 0`\n" in done.out
    assert "clean: 0 errors, 0 warnings" in done.out
    assert "note" not in Outcome("check", slow).out


def test_check_says_notes_to_programs_and_models(slow: str) -> None:
    done = Outcome("check", slow, "--gpu", "h200", "--format", "json")
    (found,) = json.loads(done.out)
    assert (done.code, found["code"], found["severity"], found["line"]) == (0, "FW815", "note", 6)
    assert found["fix"]["title"] == "remove `param PingPong = 0`"
    told = Outcome("check", slow, "--gpu", "h200", "--format", "model").out
    assert told.startswith("1. note FW815 on line 6: no ping-pong")


def test_check_does_not_apply_the_edits_of_notes(slow: str) -> None:
    before = Path(slow).read_text()
    assert Outcome("check", slow, "--gpu", "h200", "--fix").code == 0
    assert Path(slow).read_text() == before


def test_check_says_that_there_is_no_translation(tmp_path: Path) -> None:
    text = PROGRAMS["side_by_side"].replace("q_len, RopeDim", "q_len, 60")
    file = tmp_path / "odd.tl"
    file.write_text(text)
    done = Outcome("check", str(file), "--gpu", "h200")
    assert done.code == 0
    last = done.out.splitlines()[-1]
    assert last.startswith("h200: ")
    assert "Qrope" in last


def test_translate_says_the_path_beside_the_source(slow: str, tmp_path: Path) -> None:
    done = Outcome("translate", slow, "--gpu", "h200")
    assert (done.code, done.err.startswith(PATH), "note[FW815]" in done.err) == (0, True, True)
    assert "note[" not in done.out
    done = Outcome("translate", slow, "--gpu", "h200", "--out", str(tmp_path / "kernel.cu"))
    assert PATH in done.out


def compiled(registers: int = 168, spills: int = 0) -> Built:
    return Built(
        registers=registers,
        spill_stores=spills,
        spill_loads=spills,
        stack=0,
        shared=0,
        seconds=1.0,
        cubin=b"",
        ptx="",
        arch="sm_90a",
        real="sm_90a",
        key="",
        nvcc="13",
        cached=False,
    )


def recorded(text: str, gpu: str, registers: int) -> dict[str, object]:
    report, _ = reported(text, gpu)
    built = package.record(compiled(registers), gpus.find(gpu), {}, report)
    schedule = json.loads(built)["schedule"]
    assert isinstance(schedule, dict)
    return schedule


def test_the_record_has_the_schedule() -> None:
    schedule = recorded(fast(params="param PingPong = 0"), "h200", 168)
    assert schedule == {
        "products": "wgmma",
        "copies": "TMA",
        "persistent": True,
        "ping_pong": False,
        "registers": {"most": 240, "setmaxnreg": True, "left": None},
        "blocks": 1,
        "sparing": False,
        "loops": [{"line": 24, "overlapped": True, "split": True, "early_exit": False, "ahead": 0}],
        "remarks": [
            {
                "code": "FW815",
                "line": 6,
                "text": "no ping-pong: `param PingPong = 0`",
                "help": "remove `param PingPong`",
            }
        ],
    }


def test_registers_that_are_left() -> None:
    """With setmaxnreg ptxas reports the registers of the launch, which say nothing of this."""
    one = attention(k_stages=2, v_stages=2)
    for text, gpu in ((one, "a100"), (fast(), "a100"), (one, "h200")):
        registers = recorded(text, gpu, 60)["registers"]
        assert isinstance(registers, dict)
        assert registers["left"] == registers["most"] - 60
        assert registers["most"] % 8 == 0 or registers["most"] == 255


def test_a_kernel_that_a_model_wrote_has_no_schedule() -> None:
    assert "schedule" not in json.loads(package.record(compiled(), gpus.find("h200"), {}))


def test_the_sparing_translation_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def build(source: str, *_: object, **__: object) -> Built:
        calls.append(source)
        return compiled(spills=20 if len(calls) == 1 else 0)

    monkeypatch.setattr(making, "build", build)
    card = gpus.find("h200")
    program = check(parse(fast()), card).program
    assert program is not None
    made, _ = making.make(program, card)
    assert made.report is not None
    assert made.report.sparing
    (remark,) = made.report.remarks
    assert (remark.code, "the kernel spills: 20 bytes" in remark.text) == ("FW819", True)
    assert "sparing registers" in made.report.in_words()


def bounds(source: str) -> int:
    """The blocks an SM that a kernel asks for."""
    found = re.search(r"__launch_bounds__\(Threads(?:, (\d+))?\)", source)
    assert found is not None
    return int(found[1] or 1)


@pytest.mark.parametrize(
    ("params", "stages", "blocks"),
    [("param Persistent = 0", 2, 2), ("", 2, 1), ("param Persistent = 0", 13, 1)],
)
def test_two_kernels_with_one_consumer_warpgroup_share_an_sm(
    params: str, stages: int, blocks: int
) -> None:
    """Unless they are persistent, or shared memory has no room for both."""
    card = gpus.find("h200")
    program = check(parse(attention(params=params, k_stages=stages, v_stages=stages)), card).program
    assert program is not None
    found = translate(program, card)
    assert (bounds(found.source), found.report.blocks) == (blocks, blocks)
    given = [int(n) for n in re.findall(r"fw::(?:de)?alloc_registers<(\d+)>", found.source)]
    assert sum(given) == (256 if blocks == 2 else 0)  # of the 512 that two blocks have
    assert bounds(translate(program, card, blocks=1).source) == 1


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """ptxas spills as long as more than two blocks share an SM's registers; what was compiled."""
    calls: list[str] = []

    def build(source: str, *_: object, **__: object) -> Built:
        calls.append(source)
        return compiled(spills=8 * max(0, bounds(source) - 2))

    monkeypatch.setattr(making, "build", build)
    return calls


def small() -> tuple[Program, Gpu]:
    """A program of which an A100 holds several blocks at once."""
    card = gpus.find("a100")
    program = check(parse(attention()), card).program
    assert program is not None
    return program, card


def test_a_spill_that_our_own_bounds_cause_is_none(crowded: list[str]) -> None:
    program, card = small()
    made, built = making.make(program, card)
    assert bounds(crowded[0]) > 2
    assert [bounds(source) for source in crowded] == [*range(bounds(crowded[0]), 1, -1)]
    assert (bounds(made.source), built.spills) == (2, 0)
    assert made.report is not None
    assert (made.report.sparing, made.report.blocks) == (False, 2)
    remark = made.report.remarks[-1]
    assert "the fast translation with 2 blocks an SM is taken" in remark.text
    assert f"{bounds(crowded[0])} blocks an SM, at most" in remark.text
    assert json.loads(package.record(built, card, {}, made.report))["schedule"]["blocks"] == 2


def test_a_spill_that_remains_is_refused_with_the_cap_or_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(source: str, *_: object, **__: object) -> Built:
        return compiled(registers=255, spills=4 * bounds(source))

    monkeypatch.setattr(making, "build", build)
    program, card = small()
    with pytest.raises(Failed, match="1 block an SM, at most 255 registers") as caught:
        making.make(program, card)
    (found,) = caught.value.diagnostics
    assert found.code == "FW823"
    assert "the kernel spills: 4 bytes stored" in found.message
    assert "3 blocks an SM, at most 168 registers: 24 bytes" in found.message
    assert "--allow-spills 8" in (found.help or "")
    with pytest.raises(Failed):
        making.make(program, card, allow_spills=7)
    made, built = making.make(program, card, allow_spills=8)
    assert (built.spills, bounds(made.source)) == (8, 1)
    record = json.loads(package.record(built, card, {}, made.report))
    assert (record["allowed_spills"], record["spill_stores"]) == (8, 4)
    assert "8 bytes spill, and 8 are allowed" in record["schedule"]["remarks"][-1]["text"]
    assert "8 bytes of spills (8 are allowed)" in build_in_words(built, made.report)[0]


def test_the_report_says_it_in_every_form(tmp_path: Path) -> None:
    folder = write_package(tmp_path / "kernel")
    record = json.loads((folder / "build.json").read_text())
    record["schedule"] = recorded(fast(params="param PingPong = 0"), "h200", 168)
    (folder / "build.json").write_text(json.dumps(record))
    made = gather([folder])
    path = PATH.removeprefix("h200: ").strip()
    note = "FW815, line 6: no ping-pong: `param PingPong = 0`"
    assert path in page.html(made)
    assert note.replace("`", "") in page.html(made).replace("`", "")
    assert path.replace("_", r"\_") in markdown.render(made)
    assert "FW815, line 6: no ping-pong" in markdown.render(made)
    console = Console(width=200, record=True, file=StringIO())
    for part in terminal.render(made, 200):
        console.print(part)
    told = console.export_text()
    assert path in told
    assert note in told
