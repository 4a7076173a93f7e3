"""The pages that the site makes from the code say what the code says."""

from __future__ import annotations

import pytest

from docs.make import reference
from flashwright import spec
from flashwright.cli.main import app
from flashwright.spec import AttentionSpec


@pytest.mark.parametrize("key", AttentionSpec.model_fields)
def test_the_example_of_a_key_is_a_spec_that_uses_it(key: str) -> None:
    made = spec.parse(reference.example(key))
    assert key in made.model_fields_set
    (row,) = (line for line in reference.spec_keys().splitlines() if line.startswith(f"| `{key}` "))
    required = "yes" if AttentionSpec.model_fields[key].is_required() else "no"
    assert row.split("|")[2].strip() == required
    assert len(row.split("|")[5].strip()) > 8  # what it means


def test_the_command_reference_has_every_command_and_option() -> None:
    page = reference.command()
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__.replace("_", "-")
        assert f"## `flashwright {name}`" in page
    assert "`--window N`" in page
    assert "**Commands**" not in page  # Typer cuts its lines


def test_explained_leaves_the_examples_out() -> None:
    text = reference.explained("FW812", "FW813")
    assert text.startswith("### FW812: ")
    assert "### FW813: " in text
    assert "```" not in text
