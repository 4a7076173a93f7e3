"""TL's reference for a prompt: the sections that a stage needs.

prompts/language.md is the part of docs/language.md that a model may be shown; a test holds the two
together, section by section. What a model cannot use is left out: commands, codes and links.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

from flashwright.spec import AttentionSpec

_HEADING = re.compile(r"^#{2,3} (.+)$", re.MULTILINE)
_ERRORS = re.compile(r"[ \n]\*Errors:\*.*?(?=\n\n|\Z)", re.DOTALL)
_ASIDE = re.compile(r"\s\((?:FW\d{3}(?:, )?|\[[^\]]+\]\([^)#]+\))+\)")
_LINK = re.compile(r"\[([^\]]+)\]\(#[\w-]+\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_RECIPE = re.compile(r"^(?=\*\*)", re.MULTILINE)
_SEVERAL, _PARTS = "Several kernels", "Parts of a sum"
_SENTENCE = re.compile(r"((?<=[.!?])\s+(?=[A-Z`])|\n(?=[-|#*\n]))")


@cache
def sections() -> dict[str, str]:
    """All sections by heading, without their subsections and as they are written."""
    text = (resources.files(__package__) / "prompts" / "language.md").read_text(encoding="utf-8")
    return split(text)


def split(text: str) -> dict[str, str]:
    """A page cut at its headings of the second and third level."""
    found = list(_HEADING.finditer(text))
    ends = [*(m.start() for m in found[1:]), len(text)]
    return {m[1]: text[m.start() : end].strip() for m, end in zip(found, ends, strict=True)}


def chosen(*names: str, recipes: frozenset[str] | None = None) -> str:
    """The sections of these names, or all, one level down, as a model is shown them.

    `recipes` are those that are shown, by how their names begin; None: all.
    """
    every = dict(sections())
    if recipes is not None:
        begin, *found = _RECIPE.split(every["Recipes"])
        kept = [r for r in found if any(r.startswith(f"**{name}") for name in recipes)]
        every["Recipes"] = begin + "".join(kept)
    return "\n\n".join(_plain(every[name]) for name in names or every)


def of_code(spec: AttentionSpec, recipes: frozenset[str] | None) -> str:
    """The sections for code. Most operators are one kernel; a backward pass has several, and so has
    a decode whose keys are split."""
    left_out = {_SEVERAL, _PARTS}
    if spec.backward:
        left_out = {_PARTS}
    elif spec.decode is not None and not spec.unsplit:
        left_out = set()
    return chosen(*(name for name in sections() if name not in left_out), recipes=recipes)


def recipes_for(spec: AttentionSpec) -> frozenset[str]:
    """The recipes that an operator needs of which the spec says all there is to say."""
    needed = {
        "Grouped heads": spec.kv_heads != spec.heads,
        "Causal": spec.causal,
        "A sliding window": spec.window is not None,
        "Sink tokens": bool(spec.sink_tokens),
        "Softcap": spec.softcap is not None,
        "ALiBi": spec.alibi,
        "An attention sink": spec.sink,
        "Two parts": spec.value_dim != spec.head_dim,
        "Packed sequences": spec.packed or (spec.batch is not None and spec.page is None),
        "Pages": spec.page is not None,
        "Grouped rows": spec.decode is not None and spec.group > 1,
        "A cache in 8 bits": spec.kv_dtype is not None,
        "A latent cache": spec.latent,
    }
    return frozenset(name for name, is_needed in needed.items() if is_needed)


def without_commands(text: str) -> str:
    """A page without the sentences that name a command of ours: a model has no terminal."""
    return "".join(p if p.startswith("```") else _usable(p) for p in _FENCE.split(text))


def _usable(text: str) -> str:
    parts = _SENTENCE.split(text)  # sentences and list items, with what stands between them
    pairs = zip(["", *parts[1::2]], parts[::2], strict=True)
    return "".join(gap + part for gap, part in pairs if "`flashwright " not in part)


def _plain(text: str) -> str:
    text = text.replace(" [in place] [strided]", "")  # of tensors that no prompt asks for
    text = _LINK.sub(r"\1", _ASIDE.sub("", _ERRORS.sub("", text)))
    return re.sub(r"^##(#?) ", r"###\1 ", without_commands(text)).strip()
