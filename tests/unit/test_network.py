"""The tests stay on this machine (conftest.py), also where an SDK is asked for the real address."""

from __future__ import annotations

import socket

import pytest

from flashwright.author.llm.connect import connect
from flashwright.author.llm.model import Message, NoAnswer, Question


@pytest.mark.parametrize("host", ["192.0.2.1", "api.example.com"])
def test_a_socket_does_not_leave_this_machine(host: str) -> None:
    with pytest.raises(OSError, match="a test wants to reach"):
        socket.create_connection((host, 443), timeout=5)


@pytest.mark.parametrize(
    ("name", "key"), [("gpt", "OPENAI_API_KEY"), ("anthropic:claude", "ANTHROPIC_API_KEY")]
)
def test_nor_does_an_sdk_with_its_own_address(name: str, key: str) -> None:
    model = connect(name, None, env={key: "not-a-key"})
    with pytest.raises(NoAnswer) as none:
        model.ask(Question((Message("user", "hello"),), limit=10, seconds=20))
    assert "not-a-key" not in str(none.value)
