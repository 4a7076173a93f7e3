"""Every built-in program, and programs outside the built-in set: right against fp64, on the GPU.

Kernels for older GPUs are run by their PTX, which the driver compiles for the card at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flashwright.author.builtin.variants import make_spec
from flashwright.cli.main import app
from flashwright.judge.verdict import Verdict
from flashwright.spec import AttentionSpec
from tests.example_programs import PROGRAMS
from tests.gpu.made import code_of, example, package_of
from tests.inside import judged

DTYPES = {
    "a100": ("fp16", "bf16"),
    "t4": ("fp16",),
    "l40s": ("fp16", "bf16", "fp8"),
    "h200": ("fp16", "bf16", "fp8"),
}
HEAD_DIMS = (64, 96, 128, 256)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 300},
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi": True},
}
SHARING = ("mha", "gqa", "mqa")


def matrix() -> Iterator[Any]:
    for gpu, dtypes in DTYPES.items():
        for dtype in dtypes:
            for name, option in OPTIONS.items():
                for causal in (False, True):
                    mask = "causal" if causal else "full"
                    settings = {"dtype": dtype, "causal": causal, **option}
                    for width in HEAD_DIMS:
                        label = f"{gpu}-{dtype}-d{width}-{mask}-{name}"
                        yield pytest.param(gpu, SHARING, {**settings, "head_dim": width}, id=label)
                    label = f"{gpu}-{dtype}-mla-{mask}-{name}"
                    yield pytest.param(gpu, ("mla",), settings, id=label)


def agrees(found: Verdict) -> None:
    assert not found.diagnostics, "\n".join(f"{d.code}: {d.message}" for d in found.diagnostics)
    assert found.ok
    assert found.cases


@pytest.mark.parametrize(("gpu", "variants", "settings"), list(matrix()))
def test_built_in(gpu: str, variants: tuple[str, ...], settings: dict[str, Any]) -> None:
    """The sharings of heads are mostly one kernel: it is made once, and run with each."""
    for variant in variants:
        spec: AttentionSpec = make_spec(variant, **settings)
        agrees(judged(package_of(code_of(spec, gpu), gpu), spec))


@pytest.mark.parametrize("gpu", ["a100", "l40s", "h200"])
@pytest.mark.parametrize("path", [p for p in PROGRAMS if p.stem != "append"], ids=lambda p: p.stem)
def test_examples(path: Path, gpu: str) -> None:
    """Outputs in place (append.tl) are judged by emulation; test_kvcache.py runs such kernels."""
    package, spec = example(path, gpu)
    agrees(judged(package, spec, base=path.parent))


def test_another_attention_than_the_specs_is_refused() -> None:
    spec = make_spec("gqa", head_dim=64, dtype="fp16")
    package = package_of(code_of(spec, "a100"), "a100")
    wrong = judged(package, spec.model_copy(update={"scale": 0.1}))
    assert [o.name for o in wrong.offences][:1] == ["wrong"]
    masked = judged(package, spec.model_copy(update={"causal": True}))
    assert [o.name for o in masked.offences][:1] == ["mask_ignored"]


def test_generate_then_verify(tmp_path: Path) -> None:
    """The two commands, as a user has them."""
    folder = str(tmp_path / "kernel")
    options = ["--gpu", "a100", "--causal", "--head-dim", "64", "--dtype", "bf16"]
    made = CliRunner().invoke(app, ["generate", "gqa", *options, "--out", folder])
    assert made.exit_code == 0, made.output
    done = CliRunner().invoke(app, ["verify", folder])
    assert done.exit_code == 0, done.output
    assert "accepted" in done.output
    assert "times that of torch's flash backend" in " ".join(done.output.split())
