"""A real model, kept to TL by our grammar: through llama.cpp's server and the openai SDK.

What it writes is TL; that it is sense is more than a model of this size can promise.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashwright.lang.gbnf import Level, gbnf
from flashwright.lang.parse import parse
from tests.unit.local_model import Local

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.local

PROMPT = (
    "TL copies and computes tiles:\nCopy Q from global to shared\nCompute GEMM Q, K.T and get S\n"
)


@pytest.fixture
def client(local_model: Local) -> Iterator[Any]:
    with openai.OpenAI(
        base_url=local_model.base_url, api_key="none", max_retries=0, timeout=120
    ) as sdk:
        yield sdk


def ask(client: Any, model: Local, grammar: str, limit: int, prompt: str = "TL") -> Any:
    return client.chat.completions.create(
        model=model.model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=limit,
        temperature=0,
        extra_body={"grammar": grammar},
    )


def test_the_server_is_up(client: Any, local_model: Local) -> None:
    assert local_model.model in [model.id for model in client.models.list()]
    assert local_model.base_url.startswith("http://127.0.0.1:")


@pytest.mark.slow
def test_a_reply_under_the_bounded_grammar_is_tl(client: Any, local_model: Local) -> None:
    reply = ask(client, local_model, gbnf("sketch", bounded=True), 400, PROMPT)
    (choice,) = reply.choices
    assert choice.finish_reason == "stop", "it ended by itself, not at the limit"
    tree = parse(choice.message.content)
    assert tree.level == "sketch"
    assert 0 < reply.usage.completion_tokens < 400


@pytest.mark.parametrize("level", ["sketch", "code"])
def test_llama_cpp_takes_the_whole_grammar(client: Any, local_model: Local, level: Level) -> None:
    """It reads it, and holds the model to it: the first word is one of TL's."""
    words = {"sketch": ("Copy", "Compute", "for", "if"), "code": ("param", "grid", "Allocate")}
    reply = ask(client, local_model, gbnf(level), 4).choices[0].message.content
    begins = (*words[level], "Reshape", "dim", "let", "//")
    assert any(reply.startswith(word) or word.startswith(reply) for word in begins), reply


def test_llama_cpp_refuses_what_is_no_grammar(client: Any, local_model: Local) -> None:
    with pytest.raises(openai.BadRequestError):
        ask(client, local_model, 'root ::= root "a" | "a"', 1)


def test_the_server_ends_when_its_parent_is_killed() -> None:
    script = (
        "import time\nfrom tests.unit.local_model import serving\n"
        "with serving(256) as s:\n  print(s.base_url, flush=True)\n  time.sleep(60)\n"
    )
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout
    url = parent.stdout.readline().strip()
    parent.kill()
    parent.wait()
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=5) as sdk:
        for _ in range(50):
            try:
                sdk.models.list()
            except openai.APIConnectionError:
                return
            time.sleep(0.1)
    pytest.fail("it still answers")
