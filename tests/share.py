"""Which cases of a parametrised test are quick: `make test` has a few minutes, CI has more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], every: int = 2) -> list[Any]:
    """One case of `every`, from the first on; the others are among the slow tests."""
    return [
        one if number % every == 0 else pytest.param(one, marks=pytest.mark.slow)
        for number, one in enumerate(cases)
    ]
