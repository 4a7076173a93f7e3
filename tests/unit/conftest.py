"""What several files of tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit import local_model as local


@pytest.fixture(scope="session")
def local_model() -> Iterator[local.Local]:
    """A real model behind an API on loopback: `base_url` and `model`."""
    if why := local.missing():
        pytest.skip(why)
    with local.serving() as server:
        yield server
