"""Tests that run kernels. Where that cannot be, each is skipped, with the reason.

On a machine with a GPU: python -m pytest tests/gpu -n 8 --ignore-glob '*test_[bt]*'
and then, with nothing beside them: python -m pytest tests/gpu/test_bench.py tests/gpu/test_tune.py
tests/gpu/test_timed*.py
"""

from __future__ import annotations

import importlib.util

import pytest

from flashwright.build import driver, toolchain
from flashwright.lang.diagnostic import Failed


def reason() -> str | None:
    """Why no kernel can be compiled and run here."""
    missing = driver.missing()
    if missing:
        return f"no GPU: {missing}"
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    try:
        toolchain.find()
    except Failed as failed:
        return str(failed)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if "tests/gpu/" in item.path.as_posix()]
    why = reason() if ours else None
    if why:
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=why))
