"""A user's own function as what is right: by the inputs' names, in NumPy or in PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashwright.check.check import checked_program
from flashwright.judge import cpu, oracle
from flashwright.judge.inputs import make_inputs, narrowed
from flashwright.judge.reference import user_reference
from flashwright.judge.reference_process import ReferenceProcess
from flashwright.lang.parse import parse
from flashwright.spec import AttentionSpec, BadSpec
from tests.unit.test_cli import Outcome

CAUSAL = """\
import numpy as np

def attention(q, k, v, kv_len, scale=None):
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    p = np.arange(q.shape[2])[:, None] + kv_len - q.shape[2]
    s = np.where(np.arange(kv_len) <= p, s, -np.inf)
    with np.errstate(invalid="ignore"):
        w = np.exp(s - s.max(-1, keepdims=True))
        return (w / w.sum(-1, keepdims=True)) @ v
"""
TORCH = """\
import torch

def mine(Query, key, value):
    group = Query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    s = Query @ key.mT * Query.shape[-1] ** -0.5
    p = torch.arange(s.shape[2])[:, None] + s.shape[3] - s.shape[2]
    s = torch.where(torch.arange(s.shape[3]) <= p, s, float("-inf"))
    return torch.softmax(s, -1) @ value, torch.logsumexp(s, -1)
"""
SPEC = AttentionSpec.make(variant="gqa", heads=4, kv_heads=2, head_dim=16, causal=True)
DIMS = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 7, "kv_len": 5}


def saved(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(text)
    return path


def test_a_function_of_the_inputs_by_name(tmp_path: Path) -> None:
    reference = user_reference(saved(tmp_path, CAUSAL))
    inputs = make_inputs(SPEC, DIMS, 0)
    found, expected = reference(inputs, DIMS), oracle.attention(SPEC, inputs, DIMS)
    assert reference.by_name
    assert set(found) == {"O"}
    np.testing.assert_allclose(found["O"], expected["O"], rtol=1e-12)  # two rows see nothing: 0


def test_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    reference = user_reference(f"{saved(tmp_path, TORCH)}:mine")
    inputs = make_inputs(SPEC, DIMS, 0)
    found, expected = reference(inputs, DIMS), oracle.attention(SPEC, inputs, DIMS)
    for name in ("O", "LSE"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-12)


def test_pytorch_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    late = "def attention(q, k, v):\n    import torch\n    return torch.matmul(q, k)\n"
    with pytest.raises(BadSpec, match=r"mine\.py:1: PyTorch is not installed here: install it"):
        user_reference(saved(tmp_path, TORCH))
    with pytest.raises(BadSpec, match="PyTorch is not installed here"):
        user_reference(saved(tmp_path, late))(make_inputs(SPEC, DIMS, 0), DIMS)


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        ("return q", {"O"}),
        ("return q, q[..., 0]", {"O", "LSE"}),
        ("return {'out': q, 'lse': q[..., 0], 'extra': q}", {"O", "LSE", "extra"}),
    ],
)
def test_results(tmp_path: Path, body: str, outputs: set[str]) -> None:
    reference = user_reference(saved(tmp_path, f"def anything(q, **rest):\n    {body}\n"))
    assert set(reference(make_inputs(SPEC, DIMS, 0), DIMS)) == outputs


@pytest.mark.parametrize(
    ("text", "function", "line"),
    [
        (
            "def a(q): pass\ndef b(q): pass\n",
            "",
            "defines no reference: say which, as in mine.py:a",
        ),
        ("def a(q): pass\n", ":b", "defines no function b: there are a"),
        ("def attention(q, bias): pass\n", "", "takes bias, which is no input: there are K, Q, V"),
        ("def attention(q, /): pass\n", "", "inputs come by name"),
        ("def attention(q):\n    return q @ 3\n", "", ":2: "),
        ("def attention(q):\n    return 'text'\n", "", "returned no array of numbers for O"),
    ],
)
def test_what_is_wrong_with_a_function(tmp_path: Path, text: str, function: str, line: str) -> None:
    with pytest.raises(BadSpec) as caught:
        user_reference(f"{saved(tmp_path, text)}{function}")(make_inputs(SPEC, DIMS, 0), DIMS)
    assert line in caught.value.lines[0]


def test_only_rows_before_the_first_key_may_be_nan(tmp_path: Path) -> None:
    """Else a function that is NaN everywhere would accept a kernel of zeros."""
    reference = user_reference(saved(tmp_path, "def attention(q):\n    return q * float('nan')\n"))
    found = reference(make_inputs(SPEC, DIMS, 0), DIMS)["O"]
    assert (found[:, :, :2] == 0).all()
    assert np.isnan(found[:, :, 2:]).all()


# --- the command ------------------------------------------------------------------------------


@pytest.fixture
def no_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is tested elsewhere."""
    from flashwright.build import toolchain
    from flashwright.lang.diagnostic import Diagnostic, Failed

    def find() -> None:
        raise Failed(Diagnostic("FW821", "not in this test"))

    monkeypatch.setattr(toolchain, "find", find)


@pytest.mark.usefixtures("no_nvcc")
def test_generate_from_words(tmp_path: Path) -> None:
    words = "sliding window of 60 with two sink tokens and softcap 30, GQA 4/2, d64, causal"
    wanted = ("--gpu", "a100", "--alibi", "--until", "translate", "--out", str(tmp_path))
    done = Outcome("generate", words, *wanted)
    assert done.code == 0, done.err
    text = (tmp_path / "spec.toml").read_text()
    for line in (
        "window = 60",
        "sink_tokens = 2",
        "softcap = 30.0",
        "kv_heads = 2",
        "alibi = true",
    ):
        assert line in text
    assert "SinkTokens" in (tmp_path / "code.tl").read_text()


def test_generate_refuses_what_it_does_not_understand(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    done = Outcome("generate", "causal, dilated window", "--gpu", "a100", "--out", out)
    assert done.code == 2
    assert 'FW906]: no setting of a spec stands for "dilated window"' in done.err
    done = Outcome("generate", "causal, window 9", "--window", "8", "--gpu", "a100", "--out", out)
    assert done.code == 2
    assert 'FW901]: window: the description says both "9" and "--window 8"' in done.err
    done = Outcome("generate", "gqa", "--sink-tokens", "4", "--gpu", "a100", "--out", out)
    assert done.code == 2
    assert "add window = 512" in done.err
    assert not Path(out).exists()


@pytest.mark.usefixtures("no_nvcc")
@pytest.mark.slow
def test_generate_is_judged_by_the_reference(tmp_path: Path) -> None:
    """The words say more than the settings, and the function decides."""
    mine, out = saved(tmp_path, CAUSAL), tmp_path / "out"
    words = "GQA 4/2, d64, as mine.py has it"
    common = (words, "--gpu", "a100", "--until", "translate", "--out", str(out))
    done = Outcome("generate", *common, "--causal", "--reference", f"{mine}:attention")
    assert done.code == 0, done.err
    assert 'reference = "mine.py:attention"' in (out / "spec.toml").read_text()
    assert (out / "mine.py").read_text() == CAUSAL
    wrong = Outcome("generate", *common, "--reference", str(mine))  # not causal: not that function
    assert wrong.code == 1
    assert "FW801" in wrong.err
    assert not (out / "mine.py.bak").exists()
    gone = Outcome("generate", *common, "--reference", str(tmp_path / "none.py"))
    assert gone.code == 2
    assert "FW903" in gone.err


INTRUDER = """
import os, pathlib, sys
import numpy as np
from flashwright.judge import oracle
oracle.compare = lambda *a, **k: "fine"
sys.modules["flashwright.judge.expected"] = None
tried = []
for path in ({canary!r}, f"/proc/{{os.getppid()}}/environ", f"/proc/{{os.getppid()}}/mem"):
    try:
        tried.append(len(open(path, "rb").read(1)))
    except OSError:
        tried.append(0)
try:
    pathlib.Path({mark!r}).write_text("was here")
except OSError:
    pass
print("noise on stdout")

def reference(inputs, dims):
    return np.array([float(sum(tried))])
"""


def test_a_reference_reaches_nothing_but_its_answer(tmp_path: Path) -> None:
    canary, mark = tmp_path / "secret.txt", tmp_path / "mark.txt"
    canary.write_text("secret")
    beside = tmp_path / "package"
    beside.mkdir()
    file = beside / "r.py"
    file.write_text(INTRUDER.format(canary=str(canary), mark=str(mark)))
    before = oracle.compare
    found = ReferenceProcess(file)({"Q": np.ones(3)}, {"q_len": 1})
    assert found["O"] == 0
    assert oracle.compare is before
    assert not mark.exists()


@pytest.mark.parametrize(
    "answer",
    [
        "os.write(4, b'x' * 100)",
        "[os.write(n, b'\\0' * 8) for n in range(3, 9) if not os.closerange(99, 100)]",
        "os._exit(0)",
        "(_ for _ in ()).throw(SystemExit)",
    ],
)
def test_a_reference_that_answers_nonsense_is_told(tmp_path: Path, answer: str) -> None:
    file = tmp_path / "r.py"
    file.write_text(f"import os\ndef reference(inputs, dims):\n    {answer}\n    os._exit(1)\n")
    with pytest.raises(BadSpec, match=r"r\.py"):
        ReferenceProcess(file)({}, {"q_len": 1})


def test_a_reference_gets_the_numbers_that_the_kernel_gets(tmp_path: Path) -> None:
    """What make_inputs draws in float64 is rounded before either sees it."""
    draws = "def make_inputs(rng, dims):\n    return {'Q': rng.random((1, 1, dims['q_len'], 16))}\n"
    same = f"{draws}def reference(inputs, dims):\n    return inputs['Q']\n"
    place = "(Rows, Rows) in coordinate [B = batch_idx, H = head_idx, L = block_idx]"
    code = f"""\
param Rows = 16
grid block_idx = 0:q_len / Rows, head_idx = 0:heads, batch_idx = 0:batch
Allocate Q in global (batch, heads, q_len, Rows) as fp16
Allocate O in global (batch, heads, q_len, Rows) as fp16
Copy Q {place} from global to register
Copy Q {place} from register to global and get O
"""
    saved(tmp_path, same)
    program = checked_program(parse(code))
    spec = AttentionSpec.make(variant="x", heads=1, head_dim=16, reference="mine.py")
    dims = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 8, "kv_len": 8}
    verdict = cpu.judge(program, spec, cases=[dims], base=tmp_path)
    assert [case.comparison.max_abs for case in verdict.cases] == [0.0]


def test_numbers_beyond_a_type_stay_as_they_are() -> None:
    made = {"Far": np.array([1e6]), "Near": np.array([0.5]), "Count": np.array([3])}
    types = {name: str(array.dtype) for name, array in narrowed(made, "fp16").items()}
    assert types == {"Far": "float32", "Near": "float16", "Count": "int32"}
