"""Splits the cases of a parametrised test: `make test` runs a part, the slow tests run the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], every: int = 2) -> list[Any]:
    """The cases, all but each `every`-th marked as slow; the first is quick."""
    return [
        one if number % every == 0 else pytest.param(one, marks=pytest.mark.slow)
        for number, one in enumerate(cases)
    ]


def wanted(request: pytest.FixtureRequest, parameter: str) -> set[Any]:
    """The values of a parameter in those tests of the fixture's file that are to run."""
    return {
        item.callspec.params.get(parameter)
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and hasattr(item, "callspec")
    }
