"""Whatever is thrown at the reader, it ends in a tree or in diagnostics that can be shown."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashwright.lang import fix, render
from flashwright.lang.diagnostic import Failed
from flashwright.lang.format import format_tree
from flashwright.lang.nodes import Tree
from flashwright.lang.parse import parse, read
from tests.share import some
from tests.unit.tl_trees import trees

PROGRAM = """\
// causal
param BM = 128  // rows
param Scale = 1 / sqrt(HeadDim)
grid block_idx = 0:q_len / BM, head_idx = 0:heads
Allocate K in shared (BN, HeadDim) as bf16 with stages 2
Copy Q (BM, HeadDim) in coordinate [H = head_idx, L = block_idx] from global to shared
for i in 0:kv_len / BN:
  Compute GEMM Q_shared, K_shared.T and get S
  if i < 3
    Compute Mask S where kv_idx <= q_idx + kv_len - q_len
  else
    Compute Softmax S with Smax and Ssum and rescale O_register
  end
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
Compute where(Ssum > 0, O_register / Ssum, 0) and get new O_register
"""
WORDS = [*PROGRAM.split(), "end", "else", "for", "if", ":", "(", "]", "\n", "\n  ", "//", ";", "é"]


def survives(source: str) -> None:
    try:
        tree = parse(source)
    except Failed as failed:
        found = failed.diagnostics
        assert 1 <= len(found) <= 20
        for color in (True, False):
            render.terminal(found, source, "a.tl", color)
        render.as_json(found, "a.tl")
        render.for_model(found, source)
        for d in found:
            assert d.span is None or 0 <= d.span.start <= d.span.end <= len(source)
        fix.apply(source, found)
    else:
        text = format_tree(tree)
        assert parse(text) == tree


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80))
def test_random_text(source: str) -> None:
    survives(source)


@settings(max_examples=250, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=40).map(" ".join))
def test_random_words(source: str) -> None:
    survives(source)


@pytest.mark.parametrize("seed", some(range(250), 5))
def test_mutated_programs(seed: int) -> None:
    rng = random.Random(seed)
    text = list(PROGRAM)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(text))
        kind = rng.random()
        if kind < 0.4:
            del text[at : at + rng.randint(1, 12)]
        elif kind < 0.7:
            text.insert(at, rng.choice(WORDS))
        else:
            other = rng.randrange(len(text))
            text[at], text[other] = text[other], text[at]
    survives("".join(text))


@settings(max_examples=60, deadline=None)
@given(trees(), st.data())
def test_a_tree_cut_anywhere(tree: Tree, data: st.DataObject) -> None:
    text = format_tree(tree)
    survives(text[: data.draw(st.integers(0, len(text)))])


def test_fixes_end() -> None:
    """Applying fixes again and again comes to an end."""
    for seed in range(60):
        rng = random.Random(seed)
        words = PROGRAM.split(" ")
        for _ in range(4):
            at = rng.randrange(len(words))
            word = list(words[at])
            rng.shuffle(word)
            words[at] = "".join(word)
        source = " ".join(words)
        for _ in range(12):
            try:
                parse(source)
                break
            except Failed as failed:
                source, count = fix.apply(source, failed.diagnostics)
                if not count:
                    break
        else:
            pytest.fail(f"seed {seed}: the fixes do not come to an end")


@settings(max_examples=80, deadline=None)
@given(data=st.binary(max_size=200))
def test_random_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.tl"
    file.write_bytes(data)
    try:
        source = read(file)
    except Failed as failed:
        codes = [d.code for d in failed.diagnostics]
    else:
        codes = ["FW002"]
        survives(source)
    assert codes == ["FW002"]
