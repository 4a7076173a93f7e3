"""The reference pages of the site as Markdown, made from the code: nothing is written twice.

`docs/make/site.py` puts them where a page asks for them.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import resources

from flashwright import gpu, spec
from flashwright.lang.codes import CODES
from flashwright.spec import AttentionSpec

EXAMPLES = {
    "variant": 'variant = "gqa"',
    "heads": "heads = 32",
    "kv_heads": "kv_heads = 8",
    "head_dim": "head_dim = 128",
    "v_dim": "v_dim = 64",
    "dtype": 'dtype = "bf16"',
    "kv_dtype": 'kv_dtype = "fp8"',
    "latent": "latent = true",
    "causal": "causal = true",
    "window": "window = 512",
    "sink_tokens": "sink_tokens = 4",
    "softcap": "softcap = 30.0",
    "alibi": "alibi = true",
    "sink": "sink = true",
    "scale": "scale = 0.125",
    "lse": "lse = false",
    "backward": "backward = true",
    "branch": 'branch = "compressed"',
    "block": "block = 32",
    "stride": "stride = 16",
    "selected_block": "selected_block = 64",
    "top_k": "top_k = 16",
    "packed": "packed = true",
    "decode": "decode = 1",
    "unsplit": "unsplit = true",
    "cache": "cache = true",
    "page": "page = 16",
    "reference": 'reference = "mine.py"',
    "tolerance": "tolerance = 0.01",
    "repeatable": "repeatable = false",
    "dims": "dims = {pages = 9}",
}
NEEDS = {"sink_tokens": "window", "latent": "v_dim", "unsplit": "decode"}
"""Keys that mean something only beside another one."""


def example(key: str) -> str:
    """A whole spec, as TOML, that uses a key."""
    keys = dict.fromkeys(("variant", NEEDS.get(key, key), key))
    return "".join(f"{EXAMPLES[k]}\n" for k in keys)


# --- the spec ---------------------------------------------------------------------------------


def spec_keys() -> str:
    """A table of the spec's keys."""
    return "\n".join(_spec_keys())


def _spec_keys() -> Iterator[str]:
    yield "| key | required | default | example | meaning |"
    yield "|---|---|---|---|---|"
    meanings = _docstrings(AttentionSpec)
    for key, field in AttentionSpec.model_fields.items():
        required = "yes" if field.is_required() else "no"
        meaning = meanings[key].replace("|", "\\|")
        yield f"| `{key}` | {required} | {_default(key)} | `{EXAMPLES[key]}` | {meaning} |"


def _default(key: str) -> str:
    """The default as TOML writes it; what a None stands for is in the key's meaning."""
    field = AttentionSpec.model_fields[key]
    if field.is_required():
        return ""
    if key == "kv_heads":
        return "`heads`"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    return f"`{spec._toml(value)}`" if value != {} else "`{}`"


def _docstrings(of: type) -> dict[str, str]:
    """What is written below each field of a class, on one line."""
    (body,) = ast.parse(inspect.getsource(of)).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = below.value if isinstance(below, ast.Expr) else None
            assert isinstance(text, ast.Constant), f"{field.target.id} has no docstring"
            found[field.target.id] = " ".join(str(text.value).split())
    return found


# --- the command ------------------------------------------------------------------------------


def command() -> str:
    """Every command with its arguments and options, as Typer tells them."""
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from flashwright.cli.main import app

    found = get_command(app)
    told = get_docs_for_click(
        obj=found, ctx=found.context_class(found, info_name="flashwright"), name="flashwright"
    )
    # The list of commands cuts its lines; the page has its own contents.
    told = re.sub(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+\n?", "", told)
    return told.replace("# `flashwright`\n", "", 1)


# --- diagnostics ------------------------------------------------------------------------------


def codes() -> str:
    """A table of all diagnostics."""
    rows = [f"| {code} | {known.severity} | {known.title} |" for code, known in CODES.items()]
    return "\n".join(["| code | severity | title |", "|---|---|---|", *rows])


def explained(*wanted: str) -> str:
    """The long form of some codes, without their examples."""
    return "\n\n".join(_explained(code) for code in wanted)


def _explained(code: str) -> str:
    page = resources.files("flashwright.lang") / "explain" / f"{code}.md"
    head, _, rest = page.read_text(encoding="utf-8").partition("\n")
    return f"##{head}\n\n{rest.partition('## Wrong')[0].strip()}"


# --- GPUs -------------------------------------------------------------------------------------


def gpus() -> str:
    """A table of the GPUs that kernels can be written for."""
    rows = [
        f"| `{card.name}` | {card.title} | {card.arch} | "
        f"{'wgmma, TMA' if card.wgmma else 'mma.sync'} |"
        for card in gpu.GPUS.values()
    ]
    return "\n".join(["| name | card | architecture | instructions |", "|---|---|---|---|", *rows])
