"""A description in plain English, read into the settings of a spec. No model takes part.

    understand("sliding window of 512 with two sink tokens, softcap 30, GQA 32/8, d128")

The judge's reference is made from these settings, so nothing is guessed: what is not a phrase of
the tables below, nor a word without meaning of its own ("a", "with", "please"), is given back as
unknown; what is said twice must be the same.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flashwright.author.llm.phrases import FILLERS, RULES, SEPARATORS, WORD, Settings
from flashwright.lang.diagnostic import Diagnostic, Failed

LONGEST = 2000  # characters of a description
THOUSANDS = re.compile(r"(?<![\w.,/])[1-9]\d{0,2}(?:,\d{3})+(?![\w/]|[.,]\d)")
MOST_SHOWN, WIDEST_SHOWN = 6, 48  # unknown phrases, and characters of one


@dataclass(frozen=True)
class Understood:
    """What a description says."""

    spec_settings: Mapping[str, Any]
    """Settings of a spec; None where it says that there is none ("no window")."""
    variant: str
    """The built-in variant that it is one of."""
    unknown: tuple[str, ...] = ()
    """Phrases that no setting stands for, as they were written."""
    named: str = ""
    """The variant that is named, where one is."""


def is_description(text: str) -> bool:
    """Whether what was given for a variant is words: no variant's name has a space or a comma."""
    return bool(re.search(r"[\s,]", text.strip()))


def understand(text: str) -> Understood:
    """The settings that a description states; Failed where it contradicts itself."""
    if len(text) > LONGEST:
        why = f"a description of {len(text)} characters, and {LONGEST} are the most"
        raise Failed(Diagnostic("FW906", why, help="say what it computes, and no more"))
    plain = _plain(text)
    said: dict[str, tuple[Any, str]] = {}
    for stated, phrase in _statements(plain):
        for name, value in stated.items():
            if name in said and said[name][0] != value:
                raise _contradiction(name, said[name][1], phrase)
            said.setdefault(name, (value, phrase))
    settings = {name: value for name, (value, _) in said.items()}
    named = settings.pop("variant", "")
    return Understood(settings, _variant(named, settings), tuple(_unknown(plain)), named)


def combined(found: Understood, options: Mapping[str, Any]) -> Understood:
    """The description with options beside it, which agree with it or add to it."""
    settings = dict(found.spec_settings)
    for name, value in options.items():
        if value is None:
            continue
        if name in settings and settings[name] != value:
            option = f"--{name.replace('_', '-')}"
            raise _contradiction(name, _shown(settings[name]), f"{option} {_shown(value)}")
        settings[name] = value
    return replace(found, spec_settings=settings, variant=_variant(found.named, settings))


def refuse_unknown(found: Understood) -> None:
    """Failed where something was said that no setting stands for, or nothing at all."""
    if not found.unknown:
        if found.named or found.spec_settings:
            return
        text = "the description does not say which attention it is"
        hint = 'name it ("GQA 32/8, d128, causal"), or say "MHA" for the plain one'
        raise Failed(Diagnostic("FW906", text, help=hint))
    shown = [f'"{phrase}"' for phrase in found.unknown[:MOST_SHOWN]]
    if len(found.unknown) > MOST_SHOWN:
        shown.append(f"and {len(found.unknown) - MOST_SHOWN} more")
    text = f"no setting of a spec stands for {', '.join(shown)}"
    hint = (
        "say it in settings (`flashwright explain FW906` lists the words), or give --reference "
        "FILE.py with the operator as a function: what is right must not be guessed"
    )
    if any(re.search(r"\bsinks?\b", phrase) for phrase in found.unknown):
        hint = 'a "sink logit" joins each row\'s softmax, "4 sink tokens" stay visible; ' + hint
    raise Failed(Diagnostic("FW906", text, help=hint))


# --- reading ----------------------------------------------------------------------------------


def _plain(text: str) -> str:
    """Lower case and single spaces; hyphens inside of compounds are spaces too, those of numbers
    stay; 4,096 is 4096."""
    text = " ".join(unicodedata.normalize("NFKC", text).lower().split())
    text = re.sub(r"[‐-―]", "-", text)
    text = THOUSANDS.sub(_whole, text)
    text = re.sub(r"(?<=[a-z])[-_](?=[a-z])|(?<=\d)-(?=[a-z])", " ", text)
    return re.sub(r"(?<=[a-z])(?<!\de)(?<!\.e)[-_](?=\d)", " ", text)


def _whole(found: re.Match[str]) -> str:
    """4,096 is 4096; what could be two numbers (256,256) stays as it is."""
    digits = found[0].replace(",", "")
    power = int(digits) & (int(digits) - 1) == 0
    return digits if power or digits.endswith("000") else found[0]


def _pieces(text: str) -> Iterator[tuple[str, int, int, Settings | None]]:
    """The text from left to right: a statement (the longest phrase that begins here), a filler, a
    separator, or an unknown word."""
    place = 0
    while place < len(text):
        gap = SEPARATORS.match(text, place)
        if gap:
            yield "stop" if set(gap[0]) & set(",;.()") else "gap", place, gap.end(), None
            place = gap.end()
            continue
        end, stated = _statement(text, place)
        kind = "statement"
        if stated is None:
            word = WORD.match(text, place)
            end = word.end() if word else place + 1
            kind = "filler" if text[place:end] in FILLERS else "unknown"
        yield kind, place, end, stated
        place = end


def _statement(text: str, place: int) -> tuple[int, Settings | None]:
    end, best = place, None
    for pattern, meaning in RULES:
        found = pattern.match(text, place)
        if found and found.end() > end:
            stated = meaning(found)
            if stated is not None:
                end, best = found.end(), stated
    return end, best


def _statements(text: str) -> Iterator[tuple[Settings, str]]:
    for _, start, end, stated in _pieces(text):
        if stated is not None:
            yield stated, text[start:end].strip()


def _unknown(text: str) -> Iterator[str]:
    """Runs of unknown words; fillers between two of them belong to the run."""
    first, last = -1, -1
    for kind, start, end, _ in _pieces(text):
        if kind == "unknown":
            first, last = (start if first < 0 else first), end
        elif kind in ("statement", "stop") and first >= 0:
            yield _clean(text[first:last])
            first = -1
    if first >= 0:
        yield _clean(text[first:last])


def _clean(phrase: str) -> str:
    """Fit for a terminal: the text may come from anywhere."""
    seen = "".join(c if c.isprintable() else " " for c in phrase)
    seen = " ".join(seen.split()) or "?"
    return seen if len(seen) <= WIDEST_SHOWN else seen[: WIDEST_SHOWN - 3] + "..."


# --- what it comes to -------------------------------------------------------------------------


def _variant(named: str, settings: Mapping[str, Any]) -> str:
    """The one that is named, else the one that the heads make it."""
    heads, kv_heads = settings.get("heads"), settings.get("kv_heads")
    if named or kv_heads is None:
        return named or "mha"
    if kv_heads == heads:
        return "mha"
    return "mqa" if kv_heads == 1 else "gqa"


def _contradiction(name: str, one: str, other: str) -> Failed:
    text = f'{name}: the description says both "{_clean(one)}" and "{_clean(other)}"'
    return Failed(Diagnostic("FW901", text, help="say one of them"))


def _shown(value: object) -> str:
    return (
        "none" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"
    )
