"""The judge's own parts: what it asks, what it reads, what it tells, and how it is called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import flashwright
from flashwright.cli.main import app
from flashwright.judge import static
from flashwright.judge.inputs import KINDS
from flashwright.judge.judge import QUESTIONS, judge
from flashwright.judge.offences import CODES, offence
from flashwright.judge.problems import problems
from flashwright.judge.verdict import Verdict
from flashwright.lang.codes import CODES as EXPLAINED
from flashwright.lang.diagnostic import Failed
from flashwright.sandbox.candidate import Candidate, InWorker
from flashwright.sandbox.place import IN_WORKER
from flashwright.sandbox.process import Called, Launched, Output
from flashwright.selftest.cases import CASES
from flashwright.selftest.kernels import honest
from flashwright.spec import AttentionSpec, BadSpec
from tests.inside import Inside

ROOT = Path(__file__).parents[2]
SPEC = AttentionSpec.make(variant="mha", heads=2, head_dim=16, dtype="fp16", causal=True)
TEXT = "causal, heads=2, head_dim=16"
HONEST = Candidate("python", "flashwright.selftest.kernels.honest", "honest", factory=True)


def names(found: Verdict) -> tuple[str, ...]:
    return tuple(o.name for o in found.offences)


# --- names and codes --------------------------------------------------------------------------


def test_every_offence_has_a_code_of_its_own_that_is_explained() -> None:
    assert len(set(CODES.values())) == len(CODES) == 26
    for name, code in CODES.items():
        found = offence(name, "what was seen", help="what to do")
        assert found.diagnostic.code == code in EXPLAINED
        assert found.diagnostic.message == f"{name}: what was seen"
        assert not found.diagnostic.bad_input  # rejected is exit code 1, not 2


def test_every_offence_is_in_the_documentation() -> None:
    page = (ROOT / "docs" / "judge.md").read_text()
    for name, code in CODES.items():
        assert f"| `{name}` | {code} |" in page, name


def test_every_offence_is_committed_by_some_case() -> None:
    assert set(CODES) <= {name for case in CASES for name in case.expected}


# --- problems ---------------------------------------------------------------------------------


def test_the_author_does_not_see_the_seed() -> None:
    """Without one it is another each time, and the verdict tells it."""
    seeds = {
        judge(HONEST, SPEC, lengths=[(3, 3)], device="cpu", sandbox=Inside).seed for _ in range(3)
    }
    assert len(seeds) == 3


def test_a_seed_makes_the_trial_again() -> None:
    one, two = (judge(HONEST, SPEC, seed=5, device="cpu", sandbox=Inside) for _ in range(2))
    assert [c.record() for c in one.cases] == [c.record() for c in two.cases]


def test_what_a_trial_has_in_it() -> None:
    for device in ("cpu", "cuda"):
        made = problems(SPEC, 1, device)
        pairs = {(p.dims["q_len"], p.dims["kv_len"]) for p in made}
        assert (1, 1) in pairs
        assert any(q < kv for q, kv in pairs)
        assert any(q > kv for q, kv in pairs)
        assert sum(q % 16 != 0 and kv % 16 != 0 for q, kv in pairs) >= 4
        assert any(p.dims["batch"] == 0 for p in made)
        assert {p.kind for p in made} == set(KINDS)
        assert any(p.dims["heads"] == SPEC.heads for p in made)
        assert any(p.dims["batch"] >= 4 for p in made)
        assert made[0].usual
        assert made[0].kind == "normal"
    assert any(p.dims["batch"] * p.dims["heads"] >= 1024 for p in made)
    assert any(p.dims["kv_len"] > 65536 for p in made)
    large = AttentionSpec.make(variant="gqa", heads=48, kv_heads=6, head_dim=16)
    for device in ("cpu", "cuda"):
        own = [(p.dims["heads"], p.dims["kv_heads"]) for p in problems(large, 1, device)]
        assert (48, 6) in own


# --- reading ----------------------------------------------------------------------------------

CALLS = {
    "import": "import flash_attn\ndef f(q, k, v): return flash_attn.run(q, k, v)",
    "from": "from torch.nn.functional import scaled_dot_product_attention as plain\nx = plain",
    "as itself": "from torch.nn.functional import scaled_dot_product_attention as f",
    "in a helper": "def g(x): return x.scaled_dot_product_attention()\ndef f(q): return g(q)",
    "in a class": "class G:\n    def g(self): import cudnn\ndef f(q): return globals()['G']()",
    "attribute": "from torch.nn import functional as f\nf.scaled_dot_product_attention(1, 2, 3)",
    "in an except": "try:\n    g()\nexcept Exception:\n    from flashinfer import prefill",
    "by name": "import importlib\ncudnn = importlib.import_module('cudnn')",
    "getattr": "import torch\nf = getattr(torch.ops.aten, '_flash_attention_forward')",
    "flex": "from torch.nn.attention.flex_attention import flex_attention\nf = flex_attention",
}
FINE = {
    "triton": "import torch\nimport triton\ndef f(q, k, v):\n    return torch.empty_like(q)",
    "a comment": "# faster than flash_attn and scaled_dot_product_attention\nx = 1",
    "a docstring": 'def f():\n    """Like scaled_dot_product_attention(q, k, v)."""',
    "its own test": "def f(q): ...\ndef test(x): return x.scaled_dot_product_attention(f(x))",
    "imported for a test": "import flash_attn\ndef f(q): ...\ndef test(): flash_attn.run()",
    "as a program": "def f(q): ...\nif __name__ == '__main__':\n    import flash_attn",
    "own name": "def flash_attention(q, k, v): ...",
}


@pytest.mark.parametrize("case", [*CALLS, *FINE])
def test_libraries_in_the_source(case: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text({**CALLS, **FINE}[case])
    found = static.libraries(Candidate("python", str(path), "f"))
    assert bool(found) == (case in CALLS), found


PTX = "mma.sync.aligned.m16n8k16.row.col.{d}.{a}.{b}.{c} {{%r1, %r2}}, {{%r3}}, {{%r4}}, {{%r1}};\n"


@pytest.mark.parametrize(
    ("types", "dtype", "words"),
    [
        (("f32", "f16", "f16", "f32"), "fp16", ""),
        (("f32", "bf16", "bf16", "f32"), "bf16", ""),
        (("f32", "e4m3", "e4m3", "f32"), "fp8", ""),
        (("f16", "f16", "f16", "f16"), "fp16", "sums in f16"),
        (("f32", "e4m3", "e4m3", "f32"), "bf16", "multiplies e4m3, and bf16 is asked for"),
        (("f32", "e5m2", "e4m3", "f32"), "fp16", "multiplies e5m2"),
        (("s32", "s8", "s8", "s32"), "fp16", "sums in"),
    ],
)
def test_matrix_instructions(
    types: tuple[str, ...], dtype: str, words: str, tmp_path: Path
) -> None:
    good = PTX.format(d="f32", a="f16", b="f16", c="f32") if dtype == "fp16" else ""
    text = good + PTX.format(**dict(zip("dabc", types, strict=True)))
    (tmp_path / "kernel.ptx").write_text(text)
    why, looked_at = static.instructions(tmp_path, SPEC.model_copy(update={"dtype": dtype}))
    assert words in why
    assert bool(why) == bool(words)
    assert looked_at == text.count("mma.sync")


def test_whose_kernels_do_the_work() -> None:
    mangled = "_ZN13pytorch_flash16flash_fwd_kernelI23Flash_fwd_kernel_traits"
    copy = Launched("_ZN2at6native29vectorized_elementwise_kernelILi8E", False, 90)
    ours = [Launched(name, True, 3) for name in ("flash_fwd_softmax_kernel", "gemm", "attn")]
    assert static.of_libraries([*ours, copy]) is None  # a copy is nobody's achievement
    assert static.of_libraries([]) is None
    for kernel in (
        mangled,
        "_ZN43_GLOBAL__N__b6de9c8c_10_SoftMax_cu_9f978f6320softmax_warp_forward",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x",
        "_Z40fmha_cutlassF_bf16_aligned_64x64_rf_sm80N22PyTorchMemEffAttention",
        "nvjet_sm90_tst_64x64_64x13_2x1_v_bz_TNT",
    ):
        found = static.of_libraries([*ours, copy, Launched(kernel, False, 1)])
        assert found is not None, kernel
        assert found.name == kernel


# --- what is told -----------------------------------------------------------------------------


def test_the_verdict_says_what_was_asked_and_what_was_not() -> None:
    found = judge(HONEST, SPEC, device="cpu", seed=1, sandbox=Inside)
    assert [c.name for c in found.checks] == list(QUESTIONS)
    left_out = {c.name: c.note for c in found.checks if c.passed is None}
    assert {"exactness", "instructions"} <= set(left_out)
    assert all(left_out.values())
    assert found.library is None
    assert found.unable
    assert found.picture is not None
    assert "accepted" in str(found)
    json.dumps(found.record(), allow_nan=False)


def test_a_rejection_in_words_and_as_data() -> None:
    zeros = Candidate("python", "flashwright.selftest.kernels.cpu", "zeros")
    found = judge(zeros, SPEC, device="cpu", seed=1, lengths=[(9, 9)], sandbox=Inside)
    record = json.loads(json.dumps(found.record(), allow_nan=False))
    assert record["ok"] is False
    assert record["seed"] == 1
    (told,) = record["offences"]
    assert (told["name"], told["code"]) == ("zeros", "FW861")
    assert "q_len 9" in told["message"]
    assert "rejected: zeros (seed 1)" in str(found)
    assert {c.name: c.passed for c in found.checks}["fp64"] is False


def test_progress_is_told() -> None:
    steps: list[tuple[int, int, str]] = []
    judge(
        *(HONEST, SPEC),
        device="cpu",
        lengths=[(3, 3), (5, 7)],
        progress=lambda *step: steps.append(step),
        sandbox=Inside,
    )
    assert [done for done, _, _ in steps] == sorted(done for done, _, _ in steps)
    assert {total for _, total, _ in steps} == {steps[-1][1]}
    assert any("kv_len 7" in text for _, _, text in steps)


class Wrong(Inside):
    """Breaks what an honest candidate gives."""

    output, index, value = "LSE", (0, 0, 1), 0.5

    def call(self, *args: Any, **options: Any) -> Called:
        found = super().call(*args, **options)
        array = found.outputs[self.output].array.copy()
        if array.shape[2] > 1:
            array[self.index] += self.value
        told = {**found.outputs, self.output: Output(array, found.outputs[self.output].dtype)}
        return Called(told, found.changed, found.spilled, found.late, found.alias)


def test_the_lse_is_judged_where_it_is_given() -> None:
    found = judge(HONEST, SPEC, device="cpu", seed=1, lengths=[(9, 9)], sandbox=Wrong)
    assert not found.ok
    assert "LSE is wrong" in found.offences[0].message


def test_a_single_wrong_element_is_enough() -> None:
    class One(Wrong):
        output, index, value = "O", (0, 0, 1, 3), 0.02

    found = judge(HONEST, SPEC, device="cpu", seed=1, lengths=[(257, 257)], sandbox=One)
    assert not found.ok
    assert "1 of " in found.offences[0].message


# --- how it is called -------------------------------------------------------------------------


def test_verify_takes_text_specs_and_candidates() -> None:
    options: dict[str, Any] = {"device": "cpu", "lengths": [(9, 9)], "sandbox": Inside}
    assert flashwright.verify(honest.causal, TEXT, **options).ok
    assert flashwright.verify("flashwright.selftest.kernels.honest:causal", SPEC, **options).ok
    assert flashwright.verify(HONEST, SPEC, **options).ok


def test_verify_refuses_what_it_cannot_read() -> None:
    with pytest.raises((BadSpec, Failed), match="hed_dim"):
        flashwright.verify(honest.causal, "hed_dim=16", device="cpu")
    with pytest.raises(Failed, match="FW857"):
        flashwright.verify("nothing of the kind", TEXT, device="cpu")


def test_nothing_is_judged_inside_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IN_WORKER, "1")
    with pytest.raises(InWorker):
        flashwright.verify(honest.causal, TEXT)
    assert not issubclass(InWorker, Exception)  # no `except Exception` of a script takes it


DECLINES = """
from flashwright.sandbox.candidate import Unable
from flashwright.selftest.kernels.honest import causal
def make(spec):
    raise Unable("only on Tuesdays")
def always(q, k, v):
    raise Unable("only on Tuesdays")
def longer(q, k, v):
    if q.shape[2] > 9:
        raise Unable("at most 9")
    return causal(q, k, v)
"""


def test_a_candidate_that_declines(tmp_path: Path) -> None:
    """A kernel does what is asked; a library has limits; who does nothing has no verdict."""
    file = tmp_path / "mine.py"
    file.write_text(DECLINES)
    options: dict[str, Any] = {"device": "cpu", "lengths": [(9, 9), (20, 20)], "sandbox": Inside}
    with pytest.raises(Failed, match="only on Tuesdays"):
        judge(Candidate("python", str(file), "make", factory=True), SPEC, **options)
    assert names(flashwright.verify(f"{file}:longer", TEXT, **options)) == ("raises",)
    found = flashwright.verify(f"{file}:longer", TEXT, libraries=True, **options)
    assert found.ok
    assert any("at most 9" in note for note in found.notes)
    with pytest.raises(Failed, match="only on Tuesdays"):
        flashwright.verify(f"{file}:always", TEXT, libraries=True, **options)


FORMS = {  # what is returned in place of O or (O, LSE)
    "a third output that is no tensor": "o, lse, 'more'",
    "a tuple in a tuple": "(o, lse), lse",
    "a tuple in a list": "[(o,)]",
    "a dict": "{'O': o, 'LSE': lse}",
    "a dict in a tuple": "o, {'LSE': lse}",
    "a number": "1.0",
    "a text": "'O'",
    "a set": "{1, 2}",
    "no output": "()",
    "None for O": "None, lse",
    "an object": "object()",
    "an array of objects": "np.array([[object()]])",
    "an array of texts": "np.array(['x'])",
    "a generator": "(x for x in (o, lse))",
    "a class": "np.ndarray",
}


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_of_another_form_is_told_as_such(form: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import numpy as np\nfrom flashwright.selftest.kernels.honest import attention as right\n"
        "def attention(q, k, v):\n    o, lse = right(q, k, v, causal=True)\n"
        f"    return {FORMS[form]}\n"
    )
    candidate = Candidate("python", str(path), "attention")
    found = judge(candidate, SPEC, seed=1, lengths=[(9, 9)], device="cpu", sandbox=Inside)
    assert names(found) == ("wrong_form",), found.offences
    assert found.offences[0].message
    assert "Traceback" not in found.offences[0].message


def test_the_inputs_that_a_spec_adds_come_in_order(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def attention(q, k, v, slopes, sink):\n"
        "    raise ValueError(f'{q.shape} {k.shape} {v.shape} {slopes.shape} {sink.dtype}')\n"
    )
    found = flashwright.verify(
        f"{file}:attention",
        "alibi, sink, heads=4, kv_heads=2, head_dim=16, v_dim=8",
        device="cpu",
        lengths=[(3, 5)],
        sandbox=Inside,
    )
    assert "(2, 4, 3, 16) (2, 2, 5, 16) (2, 2, 5, 8) (4,) float32" in found.offences[0].message


def test_a_reference_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def reference(inputs, dims):\n"
        "    return inputs['Q'] * 2\n"
        "def attention(q, k, v):\n"
        "    return q * np.float16(2)\n"
        "def other(q, k, v):\n"
        "    return q * np.float16(3)\n"
    )
    spec = AttentionSpec.make(variant="own", heads=2, head_dim=16, reference="mine.py", lse=False)
    options: dict[str, Any] = {"device": "cpu", "base": tmp_path, "sandbox": Inside}
    assert flashwright.verify(f"{tmp_path / 'mine.py'}:attention", spec, **options).ok
    wrong = flashwright.verify(f"{tmp_path / 'mine.py'}:other", spec, **options)
    assert names(wrong) == ("wrong",)


def test_the_references_own_inputs_come_in_types_that_kernels_take(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def make_inputs(rng, dims):\n"
        "    shape = (1, 2, dims['q_len'], 16)\n"
        "    return {'Q': rng.standard_normal(shape), 'Number': rng.integers(0, 9, 3)}\n"
        "def reference(inputs, dims):\n"
        "    return inputs['Q'] * inputs['Number'][0]\n"
        "def attention(q, number):\n"
        "    assert number.dtype == np.int32\n"
        "    return (q.astype(np.float32) * number[0]).astype(np.float16)\n"
    )
    spec = AttentionSpec.make(variant="own", heads=2, head_dim=16, reference="mine.py", lse=False)
    found = flashwright.verify(
        f"{tmp_path / 'mine.py'}:attention", spec, device="cpu", base=tmp_path, sandbox=Inside
    )
    assert found.ok, found.offences


def test_bfloat16_and_fp8_arrive_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def attention(q, k, v):\n    raise ValueError(str(q.dtype))\n")
    for dtype, name in (("bf16", "bfloat16"), ("fp8", "float8_e4m3fn"), ("fp16", "float16")):
        found = flashwright.verify(
            f"{file}:attention", f"{TEXT}, dtype={dtype}", device="cpu", sandbox=Inside
        )
        assert name in found.offences[0].message


# --- the command ------------------------------------------------------------------------------


def command(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["verify", *words], env={"COLUMNS": "200"})
    return done.exit_code, done.output


CANDIDATE = "flashwright.selftest.kernels.honest:causal"
SHORT = ("--device", "cpu", "--q-len", "9")


def test_exit_codes() -> None:
    code, said = command(CANDIDATE, "--spec", TEXT, *SHORT)
    assert code == 0, said
    assert "accepted" in said
    code, said = command(
        "flashwright.selftest.kernels.cpu:zeros", "--spec", TEXT, *SHORT, "--seed", "4"
    )
    assert code == 1
    assert "FW861" in said
    assert "seed 4" in said
    for words in (
        ("no/such/file.py:f", "--spec", TEXT),
        (CANDIDATE,),  # nothing says what it should compute
        (CANDIDATE, "--spec", "head_dim=17"),
        (CANDIDATE, "--spec", TEXT, "--device", "tpu"),
    ):
        code, said = command(*words)
        assert code == 2, (words, said)
        assert "Traceback" not in said


def test_the_verdict_as_json() -> None:
    code, said = command(CANDIDATE, "--spec", TEXT, *SHORT, "--json")
    record = json.loads(said)
    assert (code, record["ok"], record["device"]) == (0, True, "cpu")
    assert record["spec"]["head_dim"] == 16
    assert {c["name"] for c in record["checks"]} == set(QUESTIONS)


def test_limits_are_taken_from_the_command_line() -> None:
    hangs = "flashwright.selftest.kernels.cpu_conduct:hangs"
    code, said = command(hangs, "--spec", TEXT, *SHORT, "--seconds", "0.3")
    assert code == 1
    assert "no answer after 0.3 s" in said


def test_libraries_are_allowed_where_that_is_said() -> None:
    one = f"{ROOT / 'flashwright' / 'selftest' / 'kernels' / 'calls_sdpa.py'}:attention"
    code, said = command(one, "--spec", TEXT, *SHORT)
    assert code == 1
    assert "FW870" in said
    code, said = command(one, "--spec", TEXT, *SHORT, "--libraries")
    assert code == 0, said


def test_the_example_says_what_is_missing(tmp_path: Path) -> None:
    """Without torch, or without a GPU: one line, exit code 2."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here', name='torch')\n")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "judge_your_own.py")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))},
    )
    assert done.returncode == 2
    assert done.stderr == "torch is not installed: pip install torch triton\n"
    assert done.stdout == ""


def test_fixed_inputs_for_the_tests_of_honest_code() -> None:
    """The honest attention of the tests is attention: by hand, for two keys."""
    q = np.zeros((1, 1, 2, 16), np.float16)
    k = np.ones((1, 1, 2, 16), np.float16)
    v = np.stack([np.full(16, 1.0), np.full(16, 3.0)]).astype(np.float16)[None, None]
    out = honest.causal(q, k, v)[0, 0]
    assert out[:, 0].tolist() == [1.0, 2.0]
