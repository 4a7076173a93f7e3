"""Every parameter of the public functions is read, or is one that is known to change no result."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module

import pytest

pytest.importorskip("torch")
from flashwright.serving.wrappers import NO_EFFECT

MODULES = (
    *(f"serving.{name}" for name in ("decode_layers", "kvcache", "merge", "mla", "tree")),
    *("serving.varlen", "serving.wrappers", "flex.attention"),
)
NOT_READ = {
    "flex_attention": {"kernel_options"},
    "flash_mla_with_kvcache": {"tile_scheduler_metadata"},
    "get_mla_metadata": {"args", "kwargs"},
    "reset_workspace_buffer": {"buffers"},
}
"""Parameters that change no result, as the docstrings of their functions say."""


def functions(module: str) -> dict[str, ast.FunctionDef]:
    """The public functions and methods of a module."""
    tree = ast.parse(inspect.getsource(import_module(f"flashwright.{module}")))
    found = {}
    for owner in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
        prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and (
                node.name == "__init__" or not node.name.startswith("_")
            ):
                found[prefix + node.name] = node
    return found


def not_read(function: ast.FunctionDef) -> set[str]:
    """The parameters whose names do not stand in the body."""
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    named += [one for one in (given.vararg, given.kwarg) if one is not None]
    read = {
        node.id
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return {one.arg for one in named} - read - {"self", "_"}


ALL = {f"{m}.{name}": node for m in MODULES for name, node in functions(m).items()}


@pytest.mark.parametrize("name", ALL)
def test_every_parameter_is_read(name: str) -> None:
    known = NOT_READ.get(ALL[name].name, set())
    unread = not_read(ALL[name])
    assert (unread - NO_EFFECT.keys() if "wrappers" in name else unread) == known
    said = " ".join((ast.get_docstring(ALL[name]) or "").lower().split())
    assert not known or any(word in said for word in ("no effect", "nothing", "empty"))


def test_a_parameter_that_is_not_read_is_found() -> None:
    assert {"serving.varlen.flash_attn_varlen_func", "flex.attention.attention"} <= ALL.keys()
    assert "serving.wrappers.BatchDecodeWithPagedKVCacheWrapper.plan" in ALL
    sample = ast.parse("def f(a, *b, c=0, **d):\n    return a, d").body[0]
    assert isinstance(sample, ast.FunctionDef)
    assert not_read(sample) == {"b", "c"}


def test_what_has_no_effect_says_why() -> None:
    assert all(NO_EFFECT.values())
    heeded = {"head_dim_vo", "kv_data_type", "causal", "sm_scale", "window_left", "jit_args"}
    assert not heeded & NO_EFFECT.keys()
