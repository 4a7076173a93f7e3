"""The command line: what each command prints, writes and exits with, for good input and bad."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

import flashwright
from flashwright import __version__
from flashwright.cli import command
from flashwright.cli.emulate_tables import lines_table
from flashwright.cli.main import app
from flashwright.cli.show import folded, gpus_table, progress_bar, tl
from flashwright.emulate.profile import LEVELS, LineCounts, Profile
from flashwright.gpu import GPUS
from flashwright.lang.codes import CODES
from flashwright.lang.diagnostic import Diagnostic

GOOD = """\
// causal attention, 64 wide
param HeadDim = 64
param BM = 64
param BN = 64
param Warps = 4
param Scale = 1 / sqrt(HeadDim)
grid block_idx = 0:q_len / BM, head_idx = 0:heads, batch_idx = 0:batch
let kv_head = floor(head_idx * kv_heads / heads)
Allocate Q in global (batch, heads, q_len, HeadDim) as fp16
Allocate K in global (batch, kv_heads, kv_len, HeadDim) as fp16
Allocate V in global (batch, kv_heads, kv_len, HeadDim) as fp16
Allocate O in global (batch, heads, q_len, HeadDim) as fp16
Allocate Q in shared (BM, HeadDim) as fp16
Allocate K in shared (BN, HeadDim) as fp16
Allocate V in shared (BN, HeadDim) as fp16
Allocate S in register (BM, BN) as fp32
Allocate O in register (BM, HeadDim) as fp32
Allocate Smax in register (BM) as fp32
Allocate Ssum in register (BM) as fp32
Compute 0 and get O_register
Compute -1e30 and get Smax
Compute 0 and get Ssum
Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
for i = 0:min(kv_len, (block_idx + 1) * BM + kv_len - q_len) / BN
  Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
  Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = kv_head, L = i] from global to shared
  Compute GEMM Q_shared, K_shared.T and get S
  Compute Multiply S, Scale and get new S
  Compute Mask S where kv_idx <= q_idx + kv_len - q_len
  Compute Softmax S with Smax and Ssum and rescale O_register
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Compute GEMM S, V_shared and accumulate O_register
end
Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
"""  # noqa: E501
NO_TRANSPOSE = GOOD.replace("K_shared.T", "K_shared")
MISSPELT = GOOD.replace("  Copy K", "  Copi K").replace("Compute Multiply", "Comptue Multiply")
SKETCH = (
    "Copy Q from global to shared\nCopy K from global to shared\nCompute GEMM Q, K.T and get S\n"
)
CAUSAL = "causal, head_dim=64, lse=false"


class Outcome:
    """What a command did."""

    def __init__(self, *args: str, input: str | bytes | None = None) -> None:
        result = CliRunner().invoke(app, list(args), input=input)
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr
        assert "bug in Flashwright" not in self.err, self.err
        assert "Traceback" not in result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "causal.tl"
    path.write_text(GOOD)
    return path


def saved(folder: Path, text: str, name: str = "program.tl") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


# --- check ------------------------------------------------------------------------------------


def test_check_clean(program: Path) -> None:
    done = Outcome("check", str(program), "--gpu", "h200")
    assert done.code == 0
    assert "clean: 0 errors, 0 warnings; shared memory 24 of 227 KB, registers ~" in done.out


def test_check_wrong_is_1_and_names_the_place(tmp_path: Path) -> None:
    done = Outcome("check", saved(tmp_path, NO_TRANSPOSE))
    assert done.code == 1
    assert "error[FW503]" in done.out
    assert "program.tl:27:" in done.out
    assert "^" in done.out


def test_check_over_budget_only_with_the_gpu(tmp_path: Path) -> None:
    file = saved(
        tmp_path, GOOD.replace("(BN, HeadDim) as fp16\n", "(BN, HeadDim) as fp16 with stages 4\n")
    )
    assert Outcome("check", file, "--gpu", "h200").code == 0
    done = Outcome("check", file, "--gpu", "t4")
    assert done.code == 1
    assert "error[FW701]" in done.out


def test_warnings_alone_are_fine(tmp_path: Path) -> None:
    done = Outcome("check", saved(tmp_path, GOOD + "param Spare = 3\n"))
    assert done.code == 0
    assert "warning[FW203]" in done.out
    assert "1 warning" in done.out


def test_check_reads_stdin() -> None:
    assert Outcome("check", "-", input=GOOD).code == 0
    done = Outcome("check", "-", input=NO_TRANSPOSE)
    assert done.code == 1
    assert "<stdin>:27:" in done.out


def test_check_json(tmp_path: Path) -> None:
    file = saved(tmp_path, NO_TRANSPOSE)
    done = Outcome("check", file, "--format", "json")
    found = json.loads(done.out)
    assert done.code == 1
    assert found[0]["code"] == "FW503"
    assert found[0]["line"] == 27
    assert found[0]["file"] == file
    assert json.loads(Outcome("check", "-", "--format", "json", input=GOOD).out) == []
    unread = Outcome("check", str(tmp_path), "--format", "json")
    assert (unread.code, json.loads(unread.out)[0]["code"]) == (2, "FW001")


def test_check_for_a_model(tmp_path: Path) -> None:
    done = Outcome("check", saved(tmp_path, NO_TRANSPOSE), "--format", "model")
    assert done.code == 1
    assert done.out.startswith("1. error FW503 on line 27")


def test_fix_repairs_misspelt_keywords(tmp_path: Path) -> None:
    file = saved(tmp_path, MISSPELT)
    assert Outcome("check", file).code == 1
    done = Outcome("check", file, "--fix")
    assert done.code == 0
    assert "2 fixes applied" in done.err
    assert Path(file).read_text() == GOOD
    assert os.listdir(tmp_path) == ["program.tl"]
    again = Outcome("check", file, "--fix")
    assert "0 fixes applied" in again.err


def test_fix_keeps_line_ends_and_mode(tmp_path: Path) -> None:
    path = tmp_path / "dos.tl"
    path.write_bytes(MISSPELT.replace("\n", "\r\n").encode())
    path.chmod(0o640)
    assert Outcome("check", str(path), "--fix").code == 0
    assert path.read_bytes() == GOOD.replace("\n", "\r\n").encode()
    assert path.stat().st_mode & 0o777 == 0o640


def test_fix_of_stdin_prints_the_program() -> None:
    done = Outcome("check", "-", "--fix", input=MISSPELT)
    assert (done.code, done.out) == (0, GOOD)


def test_fix_writes_the_new_name_of_a_param(tmp_path: Path) -> None:
    earlier = GOOD.replace("param Warps = 4\n", "param Warps = 4\nparam Apart = 0\n")
    file = saved(tmp_path, earlier)
    done = Outcome("check", file)
    assert done.code == 0, "a warning, and the program can be used"
    assert "warning[FW210]: `Apart` is now called `SplitMasked`" in done.out
    done = Outcome("check", file, "--fix")
    assert (done.code, "1 fix applied" in done.err) == (0, True)
    assert Path(file).read_text() == earlier.replace("Apart", "SplitMasked")
    assert "FW210" not in Outcome("check", file).out


def test_fix_leaves_what_it_cannot_mend(tmp_path: Path) -> None:
    text = GOOD.replace("BM = 64", "BM = 0")
    file = saved(tmp_path, text)
    assert Outcome("check", file, "--fix").code == 1
    assert Path(file).read_text() == text


# --- bad input --------------------------------------------------------------------------------

BAD_FILES = {
    "not UTF-8": (GOOD.encode("utf-16"), "FW002"),
    "latin 1": ("// café\n".encode("latin-1"), "FW002"),
    "NUL": (b"Copy Q\0 from global to shared\n", "FW002"),
    "10 MB": (b"Copy Q from global to shared\n" * 360_000, "FW003"),
    "nested": (b"for i = 0:2\n" * 1_000, "FW004"),
    "empty": (b"", "FW005"),
    "prose": (b"Dear reader, this is a letter and no program at all.\n", "FW005"),
    "random": (random.Random(7).randbytes(4096), "FW002"),
}


@pytest.mark.parametrize("name", BAD_FILES)
@pytest.mark.parametrize("what", ["check", "run", "fmt"])
def test_bad_files_are_2(tmp_path: Path, name: str, what: str) -> None:
    data, code = BAD_FILES[name]
    path = tmp_path / "bad.tl"
    path.write_bytes(data)
    done = Outcome(what, str(path))
    assert done.code == 2
    assert f"error[{code}]" in done.out + done.err
    piped = Outcome(what, "-", input=data)
    assert piped.code == 2
    assert f"error[{code}]" in piped.out + piped.err
    assert path.read_bytes() == data


@pytest.mark.parametrize("what", ["check", "run", "fmt"])
def test_what_cannot_be_read_is_2(tmp_path: Path, what: str) -> None:
    for file in (str(tmp_path), str(tmp_path / "none.tl"), "x" * 5000, "a\0b"):
        done = Outcome(what, file)
        assert done.code == 2
        assert "error[FW001]" in done.out + done.err


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.one_of(
        st.binary(max_size=300), st.text(max_size=300).map(lambda t: t.encode("utf-8", "replace"))
    )
)
def test_random_input_never_gives_a_traceback(data: bytes) -> None:
    for args in (("check", "-"), ("check", "-", "--fix"), ("fmt", "-"), ("run", "-")):
        assert Outcome(*args, input=data).code in (0, 1, 2)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_damaged_programs_never_give_a_traceback(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(GOOD)))
    end = data.draw(st.integers(start, min(len(GOOD), start + 40)))
    text = GOOD[:start] + data.draw(st.text("abQK_()[]=0:/.\n", max_size=8)) + GOOD[end:]
    assert Outcome("check", "-", "--gpu", "a100", input=text).code in (0, 1, 2)


# --- fmt --------------------------------------------------------------------------------------


def test_fmt_is_idempotent(tmp_path: Path) -> None:
    file = saved(tmp_path, GOOD.replace("param BM = 64", "PARAM   BM=64"))
    assert Outcome("fmt", file, "--check").code == 1
    assert "formatted" in Outcome("fmt", file).out
    once = Path(file).read_text()
    assert Outcome("fmt", file, "--check").code == 0
    assert "unchanged" in Outcome("fmt", file).out
    assert Path(file).read_text() == once
    assert Outcome("fmt", file, "--stdout").out == once


def test_fmt_of_a_wrong_program_changes_nothing(tmp_path: Path) -> None:
    file = saved(tmp_path, "Copy Q form global\n")
    done = Outcome("fmt", file)
    assert done.code == 1
    assert "error[FW101]" in done.err
    assert Path(file).read_text() == "Copy Q form global\n"


def test_a_full_disk_is_a_diagnostic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    text = GOOD.replace("param BM = 64", "param BM   = 64")
    file = saved(tmp_path, text)
    monkeypatch.setattr(os, "replace", full)
    done = Outcome("fmt", file)
    assert done.code == 2
    assert "error[FW001]: cannot write" in done.err
    assert os.strerror(errno.ENOSPC) in done.err
    assert Path(file).read_text() == text
    assert os.listdir(tmp_path) == ["program.tl"]


# --- run --------------------------------------------------------------------------------------


def test_run_compares_with_the_inline_spec(program: Path) -> None:
    done = Outcome("run", str(program), "--spec", CAUSAL, "--q-len", "70", "--kv-len", "100")
    assert done.code == 0, done.err
    assert "agrees with fp64" in done.out


@pytest.mark.parametrize("name", ["causal.toml", "spec.toml"])
def test_run_finds_the_spec_beside_the_program(program: Path, name: str) -> None:
    program.with_name(name).write_text(
        'variant = "mine"\nhead_dim = 64\ncausal = true\nlse = false\n'
    )
    done = Outcome("run", str(program), "--q-len", "20", "--format", "json")
    record = json.loads(done.out)
    assert done.code == 0
    assert record["compared"]
    assert record["spec"]["variant"] == "mine"
    assert record["cases"][0]["dims"]["q_len"] == 20
    assert record["cases"][0]["relative_rms"] < 1e-2


def test_run_against_another_spec_is_1(program: Path) -> None:
    options = ("--spec", "head_dim=64, lse=false", "--q-len", "70")
    done = Outcome("run", str(program), *options)
    assert done.code == 1
    assert "error[FW8" in done.err
    assert "causal.tl:" in done.err
    record = json.loads(Outcome("run", str(program), *options, "--format", "json").out)
    assert not record["ok"]
    assert record["diagnostics"][0]["code"].startswith("FW8")


def test_run_without_a_spec_says_so(program: Path) -> None:
    done = Outcome("run", str(program))
    assert done.code == 0
    assert "NOTHING WAS COMPARED" in done.out
    assert "1 x 2 x 128 x 64" in done.out
    record = json.loads(Outcome("run", str(program), "--format", "json", "--batch", "3").out)
    assert not record["compared"]
    assert record["outputs"][0]["shape"] == [3, 2, 128, 64]
    assert record["outputs"][0]["finite"] == record["outputs"][0]["size"]


def test_run_of_a_sketch_says_what_to_do(tmp_path: Path) -> None:
    done = Outcome("run", saved(tmp_path, SKETCH))
    assert done.code == 1
    assert "this is a sketch" in done.err
    assert "flashwright generate" in done.err


def test_run_of_a_wrong_program_is_1(tmp_path: Path) -> None:
    file = saved(tmp_path, NO_TRANSPOSE)
    assert Outcome("run", file).code == 1
    done = Outcome("run", file, "--format", "json")
    assert (done.code, json.loads(done.out)["diagnostics"][0]["code"]) == (1, "FW503")


@pytest.mark.parametrize(
    ("spec", "code", "says"),
    [
        ("head_dim=0", "FW901", "head_dim"),
        ("heads=32, kv_heads=5", "FW901", "must divide"),
        ("hed_dim=64", "FW903", "did you mean head_dim"),
        ("nowhere.toml", "FW903", "no such file"),
    ],
)
def test_run_with_a_bad_spec_is_2(program: Path, spec: str, code: str, says: str) -> None:
    done = Outcome("run", str(program), "--spec", spec)
    assert done.code == 2
    assert f"error[{code}]" in done.err
    assert says in done.err


def test_a_bad_spec_file_is_shown_with_its_line(program: Path) -> None:
    program.with_name("spec.toml").write_text('variant = "mha"\nhead_dim = 7\n')
    done = Outcome("run", str(program))
    assert done.code == 2
    assert "spec.toml:2:1" in done.err
    assert "2 | head_dim = 7" in done.err
    program.with_name("spec.toml").write_text('variant = "mha\n')
    assert "error[FW903]" in Outcome("run", str(program)).err


def test_run_with_a_reference_of_ones_own(program: Path) -> None:
    program.with_name("spec.toml").write_text(
        'variant = "mine"\nhead_dim = 64\nreference = "right.py"\n'
    )
    assert "error[FW903]" in Outcome("run", str(program)).err  # there is no such file yet
    right = program.with_name("right.py")
    right.write_text("def reference(inputs, dims):\n    return 1 / 0\n")
    done = Outcome("run", str(program))
    assert done.code == 2
    assert "right.py:2: ZeroDivisionError" in done.err
    right.write_text("def reference(inputs, dims):\n    return inputs['Q'] * 0 + 1\n")
    assert Outcome("run", str(program), "--q-len", "20").code == 1


def test_run_with_heads_that_do_not_divide_is_2(program: Path) -> None:
    done = Outcome("run", str(program), "--heads", "3", "--kv-heads", "2")
    assert done.code == 2
    assert "must divide" in done.err


@pytest.mark.parametrize("sizes", [("--q-len", "0"), ("--q-len", "many"), ("--seed", "-1")])
def test_impossible_sizes_are_usage_errors(program: Path, sizes: tuple[str, str]) -> None:
    assert Outcome("run", str(program), *sizes).code == 2


# --- looking up -------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["FW301", "fw301", "301"])
def test_explain(code: str) -> None:
    done = Outcome("explain", code)
    assert done.code == 0
    assert "FW301" in done.out
    assert "Wrong" in done.out
    assert "Right" in done.out
    assert "##" not in done.out  # Markdown is rendered, in a terminal or not
    assert "```" not in done.out


def test_explain_lists_every_code() -> None:
    done = Outcome("explain")
    assert done.code == 0
    assert all(code in done.out for code in CODES)


@pytest.mark.parametrize(
    ("code", "guess"), [("FW3O1", "FW301"), ("reshape", "FW501"), ("zzz", "lists")]
)
def test_explain_of_an_unknown_code_guesses(code: str, guess: str) -> None:
    done = Outcome("explain", code)
    assert done.code == 2
    assert guess in done.err


def test_lists() -> None:
    assert "grouped-query attention" in Outcome("variants").out
    assert all(
        name in Outcome("gpus").out for name in ("t4", "rtx8000", "a100", "l40s", "h100", "h200")
    )


@pytest.mark.parametrize("name", [*GPUS])
def test_names_that_one_types_are_whole_in_80_columns(name: str) -> None:
    assert any(line.split()[:1] == [name] for line in gpus_at_80().splitlines())


@cache
def gpus_at_80() -> str:
    out = Console(width=80, file=io.StringIO(), highlight=False)
    out.print(gpus_table(GPUS.values()))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    return str(text)


def test_the_figures_of_a_profile_are_whole_in_80_columns() -> None:
    counts = dict.fromkeys(LEVELS, 123_456_000)
    text = "Copy Q (BM, HeadDim) in coordinate [B = b, H = h, L = i] from global to shared"
    row = LineCounts(25, text, {"mma": 1_234_567}, 0, counts, 2133, 100, 176, 10, 3)
    out = Console(width=80, file=io.StringIO(), highlight=False)
    out.print(lines_table(Profile(LineCounts(), (row,), "code.tl"), 80))
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    for figure in ("warp instr.", "sectors", "waits", "1,234,567", "247M", "21.33", "17.60"):
        assert figure in shown
    assert "Copy Q" in shown


def test_a_failure_says_how_to_mend_it() -> None:
    failed = flashwright.Failed(Diagnostic("FW821", "there is no nvcc", help="install one"))
    assert str(failed) == "FW821: there is no nvcc\n  help: install one"


def test_a_program_that_has_no_translation_is_wrong_not_bad_input(tmp_path: Path) -> None:
    grid = "grid block_idx = 0:q_len / BM, part = 0:1, head_idx = 0:heads, batch_idx = 0:batch"
    text = GOOD.replace("L = block_idx]", "L = block_idx + part]").splitlines(keepends=True)
    lines = [grid + "\n" if line.startswith("grid ") else line for line in text]
    done = Outcome("translate", saved(tmp_path, "".join(lines)), "--gpu", "a100")
    assert (done.code, "error[FW811]" in done.err) == (1, True)


def test_an_early_ctrl_c_gives_no_traceback() -> None:
    """While the command line is imported, before there is a command."""
    code = (
        "import runpy, sys\n"
        "class Finder:\n"
        "  def find_spec(self, name, *_):\n"
        "    if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "runpy.run_module('flashwright', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (130, "Interrupted.")


def test_version_and_usage() -> None:
    assert Outcome("--version").out == f"flashwright {__version__}\n"
    assert Outcome("nonsense").code == 2
    assert Outcome("check").code == 2


# --- the last resort --------------------------------------------------------------------------


def broken() -> int:
    raise RuntimeError("the moon is full")


def test_an_unexpected_exception_is_our_bug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASHWRIGHT_DEBUG", raising=False)
    with pytest.raises(command.typer.Exit) as ended:
        command.guarded(broken)()
    assert ended.value.exit_code == 70
    err = capsys.readouterr().err
    assert "this is a bug in flashwright" in err.lower()
    assert "RuntimeError: the moon is full" in err
    assert "in broken" in err
    assert "Traceback" not in err
    monkeypatch.setenv("FLASHWRIGHT_DEBUG", "1")
    with pytest.raises(command.typer.Exit):
        command.guarded(broken)()
    assert "Traceback" in capsys.readouterr().err


def test_folded_lines_are_still_the_same_program() -> None:
    from flashwright.lang.parse import parse

    pieces = [p for line in GOOD.splitlines() for p in folded(line, 60)]
    assert max(map(len, pieces)) <= 60
    assert parse("\n".join(pieces)) == parse(GOOD)
    assert tl(GOOD).plain == GOOD


def test_a_reader_that_leaves_early_is_no_verdict() -> None:
    """`flashwright check FILE | head -0`: neither 1 (wrong) nor a traceback."""
    typed = f"{sys.executable} -m flashwright gpus | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, check=False)
    assert done.stdout.strip() in ("0", "141")  # 0 where all was written before the reader left
    assert "Traceback" not in done.stderr


def test_a_bar_shows_words_as_they_are() -> None:
    seen = io.StringIO()
    with progress_bar(Console(file=seen, force_terminal=True, width=100)) as bar:
        bar.add_task("study [/red]", total=1, what="a server says [/no]")
    assert "study [/red]" in seen.getvalue()
    assert "a server says [/no]" in seen.getvalue()


@pytest.mark.parametrize("command", [["generate", "mha"], ["study", "--out", "x"]])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dollars", "2"], "say what a million tokens cost"),
        (["--dollars", "2", "--price", "3"], "'3' is not IN/OUT"),
    ],
)
def test_dollars_need_a_price(command: list[str], options: list[str], said: str) -> None:
    told = CliRunner().invoke(app, [*command, "--gpu", "a100", "--model", "m", *options])
    assert told.exit_code == 2
    assert said in told.output
