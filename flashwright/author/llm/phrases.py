"""The phrases that words.py knows: what they state, and the patterns that say it.

The text is in lower case, with single spaces and no hyphens inside of compounds. Numbers are whole
ones, or the words one to twelve; a number that anything else hangs on to (512k, 2 x 64, 1/8) is
none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

Settings = dict[str, Any]
Meaning = Callable[[re.Match[str]], Settings | None]

_COUNTED = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NUMBER_WORDS = {word: n for n, word in enumerate((*_COUNTED, "eleven", "twelve"), 1)}
NUMBER_WORDS["single"] = 1
VARIANTS = {
    "gqa": ("gqa", "grouped query attention", "grouped query"),
    "mqa": ("mqa", "multi query attention", "multi query"),
    "mha": ("mha", "multi head attention", "multihead attention", "multi head"),
    "mla": ("mla", "multi head latent attention", "multihead latent attention"),
}

# --- parts of patterns ------------------------------------------------------------------------

_ALONE = r"(?![\w%])(?!\.\d)(?!,\d)(?! ?(?:[/*^]|x\b) ?\d)"
N = rf"(?P<n>\d+{_ALONE}|(?:{'|'.join(NUMBER_WORDS)})\b)"
X = rf"(?P<x>\d+(?:\.\d+)?(?:e[+-]?\d+)?{_ALONE})"
PAIR = r"(?P<a>\d+) ?/ ?(?P<b>\d+)(?![\w%])(?!\.\d)(?! ?[/*^] ?\d)"
OF = r"(?: (?:of|at|is|to|by|size|width)\b| ?[:=])* ?"
"""Between a name and its number."""
NOT = r"(?:no|not|non|without(?: an?| any)?) "
UNIT = r"(?: (?:tokens?|keys?|positions?)\b)?"
DIM = r"(?:(?:head ?)?(?:dims?|dimensions?)|head ?(?:size|width))"
KV = r"(?:kv|k/v|key[ /]?value|key and value)"
EACH_HEAD = r"(?:per|for each|for every|in each|in every)(?: query)? head"
SINK = r"(?:attention )?sink"
ONE_SINK = rf"(?:(?:an?|one|the) )?(?:learn(?:ed|able) )?{SINK}"
KEYS = r"(?:tokens?|keys?|positions?)"
DTYPE = rf"(?:dtype{OF})?"
TYPED = r"(?: (?:precision|inputs?|elements?))?"
LSE = r"(?:lse|log ?sum ?exp)"
GROUPED = "|".join(name for v in ("gqa", "mqa", "mha") for name in VARIANTS[v])


# --- meanings ---------------------------------------------------------------------------------


def _whole(found: re.Match[str]) -> int:
    text = found["n"]
    return NUMBER_WORDS[text] if text in NUMBER_WORDS else int(text[:18])


def _count(name: str, **more: Any) -> Meaning:
    return lambda found: {name: _whole(found), **more}


def _factor(name: str) -> Meaning:
    return lambda found: {name: float(found["x"])}


def _says(**settings: Any) -> Meaning:
    return lambda found: settings


def _two(one: str, other: str, **more: Any) -> Meaning:
    return lambda found: {one: int(found["a"][:18]), other: int(found["b"][:18]), **more}


def _named_pair(found: re.Match[str]) -> Settings:
    (variant,) = (v for v, names in VARIANTS.items() if found["name"] in names)
    return {"variant": variant, "heads": int(found["a"][:18]), "kv_heads": int(found["b"][:18])}


def _bare_pair(found: re.Match[str]) -> Settings | None:
    """192/128 can only be widths, and 32/2 only heads; 32/8 could be either, and says nothing."""
    a, b = int(found["a"][:18]), int(found["b"][:18])
    heads = b > 0 and a % b == 0
    dims = a % 8 == b % 8 == 0 and min(a, b) > 0 and max(a, b) <= 512
    if heads == dims:
        return None
    return {"heads": a, "kv_heads": b} if heads else {"head_dim": a, "v_dim": b}


# --- the tables -------------------------------------------------------------------------------

_HEADS: tuple[tuple[Meaning, tuple[str, ...]], ...] = (
    *((_says(variant=variant), names) for variant, names in VARIANTS.items()),
    (
        _named_pair,
        (
            rf"(?P<name>{GROUPED})(?:[ ,:=(]+| (?:with|of|at|heads) ){PAIR}(?: heads)?",
            rf"{PAIR} (?P<name>{GROUPED})",
        ),
    ),
    (_two("heads", "kv_heads"), (rf"(?:heads{OF})?{PAIR} heads", rf"heads{OF}{PAIR}")),
    (_bare_pair, (PAIR,)),
    (
        _count("heads"),
        (
            rf"{N} (?:(?:query|q) )?heads?",
            rf"(?:(?:query|q) )?heads{OF}{N}",
            rf"{N} (?:query|q)(?= ?(?:/|,|and|on|over) ?\w+ {KV}\b)",
        ),
    ),
    (_count("kv_heads"), (rf"{N} {KV} heads?", rf"{KV} heads?{OF}{N}")),
)
_WIDTHS: tuple[tuple[Meaning, tuple[str, ...]], ...] = (
    (
        _count("head_dim"),
        (
            rf"(?:d|{DIM}|h(?:ead)?dim){OF}{N}",
            rf"{N} (?:wide|dim(?:ensional)? heads|{DIM})",
            rf"(?:q ?k|q and k|query key) {DIM}{OF}{N}",
        ),
    ),
    (
        _two("head_dim", "v_dim"),
        (rf"(?:d|{DIM}|h(?:ead)?dim){OF}{PAIR}", rf"{PAIR} (?:wide|{DIM})"),
    ),
    (_two("head_dim", "v_dim", variant="mla"), (rf"mla{OF}{PAIR}",)),
    (_count("v_dim"), (rf"(?:v|value)(?: {DIM})?{OF}{N}(?: wide)?",)),
    (_says(dtype="fp16"), (rf"{DTYPE}(?:fp|f|float) ?16{TYPED}", r"half(?: precision)?")),
    (_says(dtype="bf16"), (rf"{DTYPE}(?:bf|bfloat) ?16{TYPED}", "bfloat")),
    (_says(dtype="fp8"), (rf"{DTYPE}(?:fp|f|float) ?8{TYPED}", "e4m3", "fp8 in,? bf16 out")),
)
_MASKS: tuple[tuple[Meaning, tuple[str, ...]], ...] = (
    (
        _says(causal=True),
        (r"(?:causal(?:ly)?|autoregressive)(?: mask(?:ing|ed)?)?", "decoder(?: (?:only|style))?"),
    ),
    (
        _says(causal=False),
        (
            rf"(?:{NOT}|non)causal(?: mask(?:ing)?)?",
            r"bi ?directional",
            "encoder(?: (?:only|style))?",
        ),
    ),
    (
        _says(causal=False, window=None),
        (
            rf"{NOT}mask(?:ing|s)?|unmasked|full attention",
            r"(?:every|each) key(?: is)? visible|all keys(?: are)? visible",
        ),
    ),
    (
        _count("window"),
        (
            rf"(?:(?:sliding|local) )?window(?:ed)?(?: attention)?{OF}{N}{UNIT}",
            rf"(?:local attention|swa){OF}{N}{UNIT}",
            rf"{N} (?:(?:token|key|position) )?(?:(?:sliding|local) )?window",
        ),
    ),
    (_count("window", causal=False), (rf"(?:sliding )?window{OF}{N}{UNIT} to both sides",)),
    (_says(window=None), (rf"{NOT}(?:(?:sliding|local) )?window(?:s|ing)?",)),
)
_SCORES: tuple[tuple[Meaning, tuple[str, ...]], ...] = (
    (
        _factor("softcap"),
        (
            rf"(?:(?:tanh|logits?|scores?) )?soft ?cap(?:s|ped|ping)?{OF}{X}",
            rf"(?:logits?|scores?) (?:are )?cap(?:ped|ping)?{OF}{X}",
            rf"{X} soft ?cap(?:ping)?",
        ),
    ),
    (_says(softcap=None), (rf"{NOT}(?:(?:logits?|scores?) )?soft ?cap(?:s|ping)?",)),
    (_says(alibi=True), (r"alibi(?: (?:slopes?|bias(?:es)?))?",)),
    (_says(alibi=False), (rf"{NOT}alibi",)),
    (_factor("scale"), (rf"(?:(?:softmax|score) )?scaled?{OF}{X}",)),
    (
        _says(scale=1.0),
        (
            r"unscaled(?: (?:logits?|scores?))?",
            rf"{NOT}(?:(?:softmax|score) )?(?:scaled?|scaling)(?! {X})",
        ),
    ),
    (
        _says(scale=None),
        (rf"(?:(?:softmax|score) )?scaled?{OF}1 ?/ ?sqrt ?\(?(?:d|head ?dim)\b\)?",),
    ),
    (_says(lse=True), (rf"returns? (?:the )?{LSE}|{LSE}",)),
    (_says(lse=False), (rf"{NOT}{LSE}",)),
)
_SINKS: tuple[tuple[Meaning, tuple[str, ...]], ...] = (
    (
        _says(sink=True),
        (
            rf"{ONE_SINK} logits?(?: {EACH_HEAD})?",
            rf"{ONE_SINK}s? {EACH_HEAD}",
            rf"per head {SINK}(?: logits?|s)?",
        ),
    ),
    (_says(sink=False), (rf"{NOT}{SINK} logits?",)),
    (_says(sink=False, sink_tokens=None), (rf"{NOT}{SINK}s?",)),
    (_says(sink_tokens=None), (rf"{NOT}{SINK} {KEYS}",)),
    (
        _count("sink_tokens"),
        (
            rf"{N} {SINK} {KEYS}",
            rf"{SINK} {KEYS}{OF}{N}",
            rf"{SINK}s? of {N} {KEYS}",
            rf"(?:the )?first {N} {KEYS} (?:(?:are|is|stay|remain) )?always visible",
            rf"(?:the )?first {N} {KEYS} (?:(?:are|is) )?visible (?:to|from) every query",
            rf"always sees? (?:the )?first {N} {KEYS}",
        ),
    ),
    (_says(sink_tokens=1), (rf"(?:the )?first {KEYS} (?:(?:is|stays) )?always visible",)),
)


_SEQUENCES: tuple[tuple[Meaning, tuple[str, ...]], ...] = (
    (
        _says(packed=True),
        (
            r"packed(?: (?:sequences|batch(?:es)?|queries))?",
            r"var ?len",
        ),
    ),
    (_count("decode"), (rf"decod(?:e|ing) (?:of|with) {N} (?:query|queries|tokens?)",)),
    (_says(decode=1), (r"decod(?:e|ing)",)),
    (
        _count("page"),
        (
            rf"(?:keys (?:lie )?in )?pages of {N}(?: (?:positions|tokens|keys))?",
            rf"page size{OF}{N}",
        ),
    ),
    *(
        (
            _says(kv_dtype=f"{kind}8"),
            (
                rf"{kind} ?8 (?:(?:{KV} )?cache|keys and values)",
                rf"{KV}(?: cache)? in {kind} ?8",
            ),
        )
        for kind in ("fp", "int")
    ),
)


def _rules() -> Iterator[tuple[re.Pattern[str], Meaning]]:
    for meaning, patterns in (*_HEADS, *_WIDTHS, *_MASKS, *_SCORES, *_SINKS, *_SEQUENCES):
        for pattern in patterns:
            yield re.compile(rf"(?<!\w)(?:{pattern})(?!\w)"), meaning


RULES = tuple(_rules())
_FILLERS = (
    "a an the of with and plus also but for in on",
    "over to at by as is are has have having uses use",
    "using that which it its i we me want need would like",
    "please write make generate give build create kernel kernels operator operation attention",
    "attn self flash softmax scaled dot product variant sharing share fused forward",
    "pass",
)
FILLERS = frozenset(word for line in _FILLERS for word in line.split())
"""Words that change nothing. None that negates, limits or offers a choice is among them."""
SEPARATORS = re.compile(r" +|[,;.:=()\[\]\"'`/]+|(?<= )[+&-](?= )")
WORD = re.compile(r"[^ ,;:=()\[\]\"'`/]+(?<!\.)|[^ ]")
