"""The programs under examples/ check clean, run, and are what their specs say."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashwright.check.check import check
from flashwright.gpu import GPUS
from flashwright.judge.cpu import judge
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse, read
from flashwright.program.kernels import Kernels
from flashwright.spec import load
from tests.example_programs import EXAMPLES, PROGRAMS, SEVERAL
from tests.share import some


def test_there_are_examples() -> None:
    promised = {"sink_softcap", "softmax_by_hand", "sigmoid", "rope_split", "relative_bias"}
    promised |= {"forgetting", "side_by_side"}
    assert promised <= {p.stem for p in PROGRAMS}


@pytest.mark.parametrize("path", [*some(PROGRAMS, 5), *SEVERAL], ids=lambda p: p.stem)
def test_example(path: Path) -> None:
    source = read(path)
    tree = parse(source)
    assert format_tree(tree) == source, "run `flashwright fmt` on it"
    spec = load(path.with_suffix(".toml"))
    for gpu in {gpu.arch: gpu for gpu in GPUS.values()}.values():
        if gpu.takes(spec.input_dtype):
            verdict = check(tree, gpu)
            assert not verdict.diagnostics, (gpu.name, verdict.diagnostics)
    assert verdict.kernels is not None
    result = judge(Kernels(verdict.kernels), spec, base=EXAMPLES)
    assert result.ok, result.diagnostics
    assert not result.unreached
