"""A candidate's tensors lie in the judge's memory: views, guards, outputs that are not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwright.judge.judge import judge
from flashwright.judge.verdict import Verdict
from flashwright.sandbox import memory
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.layout import VIEWED, Layout
from flashwright.sandbox.limits import Limits
from flashwright.sandbox.process import Ended, Sandbox
from flashwright.spec import AttentionSpec

SPEC = AttentionSpec.make(variant="mha", heads=2, head_dim=16, dtype="fp16", causal=True)
LENGTHS = [(9, 9), (40, 70)]
HEAD = "import numpy as np\nfrom flashwright.selftest.kernels.honest import causal\n"


def written(folder: Path, text: str) -> Candidate:
    (folder / "candidate.py").write_text(HEAD + text)
    return Candidate("python", str(folder / "candidate.py"), "attention")


def judged(folder: Path, text: str) -> Verdict:
    return judge(written(folder, text), SPEC, seed=1, lengths=LENGTHS, device="cpu")


def names(found: Verdict) -> list[str]:
    return [offence.name for offence in found.offences]


def inputs() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((2, 2, 9, 16)).astype(np.float16) for name in "QKV"}


# --- views ------------------------------------------------------------------------------------


def test_q_k_and_v_may_be_views(tmp_path: Path) -> None:
    text = "def attention(q, k, v):\n    return causal(q, k, v)\n"
    found = judged(tmp_path, text)
    assert found.ok, found
    assert next(c for c in found.checks if c.name == "views").passed


def test_whoever_takes_all_inputs_for_contiguous_is_found(tmp_path: Path) -> None:
    text = """
def plain(x):
    steps = np.empty(x.shape, x.dtype).strides
    return np.lib.stride_tricks.as_strided(x, x.shape, steps)

def attention(q, k, v):
    return causal(plain(q), plain(k), plain(v))
"""
    found = judged(tmp_path, text)
    assert names(found) == ["special_inputs"]
    assert "other strides" in found.offences[0].message
    assert next(c for c in found.checks if c.name == "views").passed is False


def test_whoever_asks_for_contiguous_inputs_is_taken_at_its_word(tmp_path: Path) -> None:
    text = """
def attention(q, k, v):
    if not q.flags.c_contiguous:
        raise ValueError("only contiguous tensors")
    return causal(q, k, v)
"""
    found = judged(tmp_path, text)
    assert found.ok
    assert any("contiguous inputs only" in note for note in found.notes)


def test_what_is_written_between_the_elements_of_a_view_shows(tmp_path: Path) -> None:
    text = """
def attention(q, k, v):
    whole = q
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    at = q.ctypes.data - whole.ctypes.data + q.shape[1] * q.strides[1]
    if not q.flags.c_contiguous:
        whole[at] ^= 1
    return causal(q, k, v)
"""
    with Sandbox(written(tmp_path, text), SPEC, "cpu", Limits()) as sandbox:
        assert sandbox.call(inputs()).spilled == ()
        assert sandbox.call(inputs(), viewed=VIEWED).spilled == ("Q",)


@pytest.mark.parametrize("viewed", [(), VIEWED, ("K",)])
@pytest.mark.parametrize("late", [False, True])
def test_a_layout_tells_elements_from_what_is_around_them(
    viewed: tuple[str, ...], late: bool
) -> None:
    given = inputs()
    layout = Layout.of(given, {"O": ((2, 2, 9, 16), "fp16")}, False, late, viewed=viewed, place=1)
    right = layout.after(given)
    assert np.array_equal(layout.inputs["K"].elements(right), given["K"])
    assert np.array_equal(layout.image(given), right) is not late
    key = layout.inputs["K"]
    for at, changed, spilled in (
        (key.at, ["K"], []),
        (key.at - 1, [], ["K"]),
        (key.high - 1, [], ["K"]),
        (layout.outputs["O"].at, [], []),
        (layout.outputs["O"].high - 1, [], ["O"]),
    ):
        found = right.copy()
        found[at] ^= 1
        assert list(layout.changed(found, right)) == changed
        assert list(layout.spilled(found, right)) == spilled


# --- outputs ----------------------------------------------------------------------------------

LAZY = """
class Lazy(np.ndarray):
    def __array_function__(self, *args, **options):
        self.work()
        return super().__array_function__(*args, **options)

    def __array_ufunc__(self, *args, **options):
        self.work()
        return super().__array_ufunc__(*args, **options)

    def __getitem__(self, *args):
        self.work()
        return super().__getitem__(*args)

    def tobytes(self, *args):
        self.work()
        return super().tobytes(*args)

    def work(self):
        self.view(np.ndarray)[:] = causal(*self.todo)

def attention(q, k, v):
    out = np.full(q.shape, np.nan, q.dtype).view(Lazy)
    out.todo = q.copy(), k.copy(), v.copy()
    return out
"""


def test_what_would_be_computed_when_somebody_looks_is_not_there(tmp_path: Path) -> None:
    assert names(judged(tmp_path, LAZY)) == ["nonfinite"]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("out, None, 3", "output 3 is no array, but int"),
        pytest.param("out, 'lse'", "LSE is no array, but str", marks=pytest.mark.slow),
        pytest.param("{'O': out}", "O is no array, but dict", marks=pytest.mark.slow),
        pytest.param("None", "O is no array, but NoneType", marks=pytest.mark.slow),
        pytest.param("[[out]]", "O is no array, but list", marks=pytest.mark.slow),
        ("()", "there is no output"),
    ],
)
def test_what_is_no_tensor_is_said_to_be_none(tmp_path: Path, result: str, words: str) -> None:
    text = f"def attention(q, k, v):\n    out = causal(q, k, v)\n    return {result}\n"
    found = judged(tmp_path, text)
    assert names(found) == ["wrong_form"]
    assert words in found.offences[0].message


def test_an_output_larger_than_its_place_is_of_a_wrong_form(tmp_path: Path) -> None:
    text = "def attention(q, k, v):\n    return np.zeros((*q.shape, 100), q.dtype)\n"
    assert names(judged(tmp_path, text)) == ["wrong_form"]


def test_an_output_with_other_strides_is_as_good(tmp_path: Path) -> None:
    text = """
def attention(q, k, v):
    return causal(q, k, v).transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)
"""
    assert judged(tmp_path, text).ok


# --- the memory itself ------------------------------------------------------------------------


def test_memory_is_read_by_its_owner_whatever_becomes_of_it() -> None:
    made = memory.HostMemory(1 << 20)
    made.write(100, np.arange(50, dtype=np.uint8))
    theirs = memory.mapped("cpu", made.handle, made.size)
    theirs[100] = 77
    assert made.read(100, 3).tolist() == [77, 1, 2]
    made.close()


def test_memory_that_was_cut_short_is_said_to_be() -> None:
    import os

    made = memory.HostMemory(1 << 20)
    os.ftruncate(made.handle, 100)
    with pytest.raises(memory.Short):
        made.read(90, 20)
    made.close()


def test_a_problem_that_needs_more_memory_starts_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def attention(q, k, v):\n    return causal(q, k, v)\n"
    monkeypatch.setattr(memory, "HOST_ROOM", 1 << 20)
    with Sandbox(written(tmp_path, text), SPEC, "cpu", Limits()) as sandbox:
        before = sandbox.memory.size
        first = sandbox.call(inputs())
        large = {n: np.tile(x, (1, 1, 200, 1)) for n, x in inputs().items()}
        assert sandbox.call(large).outputs["O"].array.shape == (2, 2, 1800, 16)
        assert sandbox.memory.size > before
        again = sandbox.call(inputs())
        assert np.array_equal(again.outputs["O"].array, first.outputs["O"].array)


def test_an_exception_of_a_call_leaves_the_next_one_possible(tmp_path: Path) -> None:
    text = """
def attention(q, k, v):
    if q.shape[2] == 9:
        raise ValueError("no nine")
    return q.copy()
"""
    with Sandbox(written(tmp_path, text), SPEC, "cpu", Limits()) as sandbox:
        with pytest.raises(Ended, match="no nine"):
            sandbox.call(inputs())
        other = {name: array[:, :, :8] for name, array in inputs().items()}
        assert np.array_equal(sandbox.call(other).outputs["O"].array, other["Q"])


OFFSETS = """
def element(x, place):
    whole = x
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    start = x.ctypes.data - whole.ctypes.data
    offset = np.array(sum(n * s // x.itemsize for n, s in zip(place, x.strides)))
    at = start + int(offset.astype(KIND)) * x.itemsize
    return whole[at : at + x.itemsize].view(x.dtype)[0] if 0 <= at < whole.size else x.dtype.type(0)

def attention(q, k, v):
    out = causal(q, k, v)
    for b in range(q.shape[0]):
        if q.size and element(q, (b, 0, 0, 0)) != q[b, 0, 0, 0]:
            out[b] = 0
    return out
"""


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        pytest.param("int64", [], marks=pytest.mark.slow),
        ("int32", ["special_inputs"]),
    ],
)
def test_offsets_of_32_bits_are_too_small(tmp_path: Path, kind: str, found: list[str]) -> None:
    """The third batch lies 2^31 elements behind the first."""
    text = OFFSETS.replace("KIND", f"np.{kind}")
    verdict = judge(written(tmp_path, text), SPEC, seed=1, device="cpu")
    assert names(verdict) == found, verdict


@pytest.mark.parametrize("least", [250, pytest.param(10**9, marks=pytest.mark.slow)])
def test_whoever_is_wrong_after_many_calls_is_found(tmp_path: Path, least: int) -> None:
    text = f"""
calls = 0

def attention(q, k, v):
    global calls
    calls += 1
    return causal(q, k, v) * np.float16(0 if calls > {least} else 1)
"""
    found = judge(written(tmp_path, text), SPEC, seed=1, device="cpu")
    assert names(found)[:1] == (["not_repeatable"] if least < 10**9 else []), found
