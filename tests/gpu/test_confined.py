"""A function in PyTorch: it has the GPU, its compiler and libraries, and no other file."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashwright.author.builtin.variants import make_spec
from flashwright.confine import landlock
from flashwright.judge.judge import judge
from flashwright.sandbox.candidate import Candidate

SPEC = make_spec("gqa", heads=8, kv_heads=2, head_dim=64, causal=True, dtype="bf16", lse=False)

PLAIN = """
import torch
def attention(q, k, v):
    groups = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q.float() @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    n, m = scores.shape[-2:]
    later = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(m - n + 1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1).nan_to_num()
    return (weights @ v).to(q.dtype)
"""

# Compiled when it is called: Triton writes files, and runs a C compiler.
COMPILED = (
    PLAIN.replace("def attention", "def _attention") + "attention = torch.compile(_attention)"
)


def candidate(tmp_path: Path, text: str, untrusted: bool) -> Candidate:
    file = tmp_path / "mine" / "attention.py"
    file.parent.mkdir()
    file.write_text(text)
    return Candidate("python", str(file), "attention", untrusted=untrusted)


WHOSE = pytest.mark.parametrize("untrusted", [False, True], ids=["user's", "model's"])


@WHOSE
@pytest.mark.parametrize("text", [PLAIN, COMPILED], ids=["plain", "compiled"])
def test_it_is_judged_right(text: str, untrusted: bool, tmp_path: Path) -> None:
    verdict = judge(candidate(tmp_path, text, untrusted), SPEC, seed=1, libraries=True)
    assert verdict.ok, [d.message for d in verdict.diagnostics]
    assert verdict.cases


@WHOSE
def test_it_opens_no_file_of_the_users(untrusted: bool, tmp_path: Path) -> None:
    if not landlock.available():
        pytest.skip("this system has no Landlock")
    secret = tmp_path / "secret"
    secret.write_text("hush")
    text = f"open({str(secret)!r}).read()\n{PLAIN}"
    verdict = judge(candidate(tmp_path, text, untrusted), SPEC, seed=1, libraries=True)
    assert not verdict.ok
    assert "Permission denied" in str([d.message for d in verdict.diagnostics])
