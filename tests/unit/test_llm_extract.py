"""The program in a reply, whatever else the model said."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashwright.author.llm import extract
from flashwright.author.llm.extract import LIMIT, NoCode, cuda, python, tl
from flashwright.author.llm.model import Reply

SKETCH = "Copy Q from global to shared\nCompute GEMM Q_shared, K_shared.T and get S\n"
CODE = "param BM = 64\ngrid block_idx = 0:q_len / BM\nCopy Q (BM, D) from global to shared\n"
KERNEL = '#include <fw/attention.cuh>\nextern "C" __global__ void attention() {\n\tint x = 1;\n}\n'


def block(text: str, label: str = "tl", fence: str = "```") -> str:
    return f"{fence}{label}\n{text}{fence}\n"


@pytest.mark.parametrize(
    "reply",
    [
        block(SKETCH),
        block(SKETCH, "TL"),
        block(SKETCH, ""),
        block(SKETCH, "text"),
        block(SKETCH, "tl", "~~~"),
        block(SKETCH, "tl", "`````"),
        block(SKETCH, 'tl title="mine"'),
        block(SKETCH, "{.tl}"),
        f"Sure! Here it is:\n\n{block(SKETCH)}\nI hope that this helps.",
        f"\ufeff{block(SKETCH)}",
        block(SKETCH).replace("\n", "\r\n"),
        block(SKETCH.replace("Copy", "Co\u200bpy")),
        block(SKETCH.replace("Copy Q", "Copy\u00a0Q")),
        f"<think>\n{block('Copy X from shared to register')}maybe</think>\n{block(SKETCH)}",
        f"the server ate the beginning {block('Copy X from')}</think>{block(SKETCH)}",
        f"1. First\n\n   ```tl\n{''.join('   ' + x for x in SKETCH.splitlines(True))}   ```\n",
        f"```tl\n{SKETCH.rstrip()}```\nthat is all",
        f"```tl\n{SKETCH}",  # the model forgot to close it, and was done
        block("Copy Old from global to shared\n") + block(SKETCH),
        block(SKETCH) + block("import torch\n", "python"),
        block("import torch\n", "python") + block(SKETCH) + block("x = 1", "json"),
        SKETCH,
        f"Here is the sketch.\n\n{SKETCH}\nIt keeps the queries.",
        f"```tl\nCopy Old from global\n```tl\n{SKETCH}```",
    ],
)
def test_tl_is_found_in(reply: str) -> None:
    assert tl(reply) == SKETCH


def test_of_a_sketch_and_a_code_the_one_asked_for_is_taken() -> None:
    for reply in (block(SKETCH) + block(CODE), block(CODE) + block(SKETCH)):
        assert tl(reply, "sketch") == SKETCH
        assert tl(reply, "code") == CODE
    assert tl(block(SKETCH), "code") == SKETCH  # the checker says best what it lacks


def test_a_named_block_goes_before_one_that_only_looks_like_it() -> None:
    assert tl(block(SKETCH) + block("Copy X from shared to register\n", "")) == SKETCH


def test_entities_and_tabs_stay_as_they_are() -> None:
    text = "if i &lt; Last\n\tCompute 0 and get S\nend\n"
    assert tl(block(text)) == text


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("", "empty"),
        (" \n\u200b\n", "empty|thoughts"),
        ("I cannot do that.", "no block of ```tl"),
        (block(KERNEL, "cuda"), "no block of ```tl; its blocks are of `cuda`"),
        (block("", "tl"), "is empty"),
        (f"<think>{block(SKETCH)}</think>", "nothing but thoughts"),
        ("x" * (LIMIT + 1), "longer than 256 KB"),
        ("\u4e2d" * (LIMIT // 2), "longer than 256 KB"),
    ],
)
def test_why_there_is_none(reply: str, why: str) -> None:
    with pytest.raises(NoCode, match=why):
        tl(reply)


@pytest.mark.parametrize("text", [f"```tl\n{SKETCH}", SKETCH, f"<think>{SKETCH}", "", "Let me see"])
@pytest.mark.parametrize("finish", ["length", "cut"])
def test_a_reply_that_was_cut_says_so(text: str, finish: str) -> None:
    with pytest.raises(NoCode, match="limit of tokens"):
        tl(Reply(text, finish=finish))  # type: ignore[arg-type]


def test_of_a_reply_that_was_cut_a_whole_block_is_taken_only_where_it_is_what_was_asked_for() -> (
    None
):
    cut = Reply(f"{block(SKETCH)}Now the code:\n```tl\nparam BM = 6", finish="length")
    assert tl(cut, "sketch") == SKETCH
    with pytest.raises(NoCode):
        tl(cut, "code")


@pytest.mark.parametrize(
    "reply",
    [
        block(KERNEL, "cuda"),
        block(KERNEL, "cpp"),
        block(KERNEL, "C++"),
        block(KERNEL, ""),
        block(KERNEL, "cuda") + "To compile:\n" + block("constexpr int x = 1;\n", "cpp"),
        block(SKETCH) + block(KERNEL, "cuda") + block("nvcc kernel.cu\n", "bash"),
        f"Here:\n{KERNEL}",
    ],
)
def test_cuda_is_found_in(reply: str) -> None:
    assert cuda(reply) == KERNEL


def test_cuda_that_is_not_there() -> None:
    with pytest.raises(NoCode, match="no block of ```cuda; its blocks are of `tl`"):
        cuda(block(SKETCH))


def test_python() -> None:
    source = "import torch\n\n\ndef attention(Q, K, V):\n    return Q\n"
    assert python(f"So:\n{block(source, 'python')}{block('pip install torch', 'sh')}") == source
    assert python(source) == source
    with pytest.raises(NoCode):
        python("I would use scaled_dot_product_attention.")


FUNCTIONS = (tl, cuda, python)


@given(
    st.text(alphabet=st.sampled_from("`~\n tlcuda<think>/Copy Q from=:\r\ufeff{}"), max_size=300)
)
@settings(max_examples=150, deadline=None)
def test_any_reply_ends_in_a_program_or_a_sentence(text: str) -> None:
    for function in FUNCTIONS:
        for finish in ("stop", "length"):
            try:
                found = function(Reply(text, finish=finish))  # type: ignore[arg-type]
                assert found.strip()
            except NoCode as none:
                found = none.why
            assert found.endswith((".", "\n"))
            assert "\r" not in found
            assert "\ufeff" not in found


_LINES = st.lists(
    st.sampled_from([*SKETCH.splitlines(), *CODE.splitlines(), "// a comment", "end", ""]),
    min_size=1,
    max_size=20,
)
_CHAT = st.text(
    alphabet=st.characters(blacklist_characters="`~<", blacklist_categories=("Cs",)), max_size=80
)


@given(_CHAT, _LINES, _CHAT, st.sampled_from(["```", "~~~", "````"]))
@settings(max_examples=150, deadline=None)
def test_a_closed_block_comes_back_whatever_is_said_around_it(
    before: str, lines: list[str], after: str, fence: str
) -> None:
    text = extract._trimmed("\n".join(lines))
    if text:
        assert tl(f"{before}\n{fence}tl\n{text}{fence}\n{after}") == text


@pytest.mark.parametrize(
    "part", ["<think>", "</think>", "```tl\n", "~~~", "`", "Copy Q from ", "if "]
)
def test_no_reply_takes_long(part: str) -> None:
    """A pattern that backtracks over the whole reply would take hours: then this does not end."""
    for function in FUNCTIONS:
        with contextlib.suppress(NoCode):
            function(part * (LIMIT // 4 // len(part)))
