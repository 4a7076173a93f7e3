"""What several files of tests share."""

from __future__ import annotations

import functools
import ipaddress
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import typer.testing

from flashwright.confine import landlock
from flashwright.confine.start import UNCONFINED
from tests.unit import local_model as local
from tests.unit import remembered


@pytest.fixture(scope="session")
def local_model() -> Iterator[local.Local]:
    """A real model behind an API on loopback: `base_url` and `model`."""
    if why := local.missing():
        pytest.skip(why)
    with local.serving() as server:
        yield server


@pytest.fixture(autouse=True, scope="session")
def one_command_line() -> Iterator[None]:
    """typer's runner reads the signatures of all commands in every call, which takes longer than
    most commands: here they are read once."""
    with pytest.MonkeyPatch.context() as patch:
        read = getattr(typer.testing, "_get_command", typer.main.get_command)
        patch.setattr(typer.testing, "_get_command", functools.cache(read), raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def compile_for_models() -> Iterator[None]:
    """What the tests give as a model's code is ours: it is compiled without Landlock too."""
    with pytest.MonkeyPatch.context() as patch:
        if not landlock.available():
            patch.setenv(UNCONFINED, "1")
        yield


@pytest.fixture(autouse=True, scope="session")
def right_once() -> Iterator[None]:
    """What is the same in hundreds of tests is done once in a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashwright.check.flow.check_flow", remembered.flow)
        patch.setattr("flashwright.judge.cpu.CpuTrial", remembered.trial)
        yield


@pytest.fixture
def checked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's TL is checked and run in this process: a new one imports the package again, which
    takes longer. test_isolate.py and test_model_trouble.py have the processes."""
    monkeypatch.setattr(
        "flashwright.confine.isolate.call", lambda work, *given, **limits: work(*given)
    )


class NoNetwork(OSError):
    """A test that would leave this machine."""


@pytest.fixture(autouse=True, scope="session")
def loopback_only() -> Iterator[None]:
    """No test of ours speaks to anybody but itself, whatever an SDK has in mind."""
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def connect_here(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            _stay(address[0])
        connect(self, address)

    def look_up_here(host: Any, *rest: Any, **more: Any) -> Any:
        _stay(host)
        return look_up(host, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect_here)
        patch.setattr(socket, "getaddrinfo", look_up_here)
        yield


def _stay(host: Any) -> None:
    name = host.decode() if isinstance(host, bytes) else host
    if name in (None, "", "localhost"):
        return
    try:
        here = ipaddress.ip_address(name).is_loopback
    except ValueError:
        here = False
    if not here:
        raise NoNetwork(f"a test wants to reach {name}")
