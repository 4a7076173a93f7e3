"""The words of TL in GBNF: keywords as the formatter writes them, numbers, and names.

GBNF has no "any name but these", so the rule for names excludes reserved words letter by letter:
a name that begins like a reserved word must continue differently.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

from flashwright.lang.parse import SOFT
from flashwright.lang.recover import STATEMENTS

_SPELLED = {**STATEMENTS, "COORDINATE": "coordinate", "TRANSPOSE": ".T"}
# Patterns of grammar.lark and their GBNF: a change of one without the other must fail.
_PATTERNS = {
    "NUMBER": r"[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
    "NAME": "[A-Za-z_][A-Za-z0-9_]*",
    "COMMENT": r"\/\/[^\n]*",
    "COMPARE": "<=|>=|==|!=|<|>",
}
_NUMBER = '[0-9]+ ("." [0-9]+)? ([eE] [+-]? [0-9]+)?'
_SHORT_NUMBER = '[0-9]{1,3} ("." [0-9])?'
_COMMENT = r'"//" [^\x00-\x08\x0A-\x1F\x7F]*'
_LETTERS = string.ascii_uppercase + "_" + string.ascii_lowercase
_TAIL = "[A-Za-z0-9_]"


class Lit(str):
    """A quoted text in GBNF: two in a row can be made one."""


def literal(text: str) -> Lit:
    """The text as GBNF quotes it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return Lit(f'"{escaped}"')


def spelled(word: str, patterns: dict[str, str]) -> str:
    """A keyword as the formatter writes it."""
    if word.startswith("AND_"):
        return f"and {word.removeprefix('AND_').lower()}"
    return _SPELLED.get(word) or _forms(patterns[word])[0]


def reserved(patterns: dict[str, str]) -> set[str]:
    """The words that no name may be, in lower case."""
    apart = {*_PATTERNS, *SOFT, "TRANSPOSE", "WS"}
    clauses = {word for word in patterns if word.startswith("AND_")}
    found = {form for w in set(patterns) - apart - clauses for form in _forms(patterns[w])}
    # `a and get` is no expression: the reader takes the two words for a clause.
    return found | {word.removeprefix("AND_").lower() for word in clauses}


def _forms(pattern: str) -> list[str]:
    r"""The words that a keyword's pattern matches: `registers?\b` is `register` and `registers`."""
    plain = re.fullmatch(r"([a-z]+?)(?:([a-z])\?)?\\b", pattern)
    if plain is None:
        raise ValueError(f"grammar.lark has a word that gbnf_words.py cannot read: {pattern}")
    return [plain[1], plain[1] + plain[2]] if plain[2] else [plain[1]]


def rules(patterns: dict[str, str], longest: int | None) -> dict[str, str]:
    """GBNF of numbers, comparisons, comments and names; names of `longest` letters at most."""
    for word, pattern in _PATTERNS.items():
        if patterns.get(word) != pattern:
            raise ValueError(f"{word} has changed in grammar.lark: gbnf_words.py has to follow")
    return {
        "number": _NUMBER if longest is None else _SHORT_NUMBER,
        "compare": " | ".join(literal(sign) for sign in _PATTERNS["COMPARE"].split("|")),
        "comment-text": _COMMENT,
        **_names(reserved(patterns), longest),
    }


def _names(words: set[str], longest: int | None) -> dict[str, str]:
    """The rules for names, one for each first letter of a reserved word.

    Behind a verb `where` would begin a clause, so the first operand there has a rule of its own.
    """
    first = sorted({word[0] for word in words} | {"w"})
    free = f"{_letters(first, digits=False)} {_tail(1, longest)}"
    rules = {letter: f"name-{letter}" for letter in first}
    made = {"name": " | ".join([free, *rules.values()])}
    made["operand-name"] = " | ".join([free, *{**rules, "w": "operand-name-w"}.values()])
    for letter, rule in rules.items():
        made[rule] = f"[{letter.upper()}{letter}] {_after(letter, words, longest)}"
    made["operand-name-w"] = f"[Ww] {_after('w', {*words, 'where'}, longest)}"
    return made


def _after(prefix: str, words: set[str], longest: int | None) -> str:
    """What may follow the prefix so that the whole is not reserved; "!" if nothing can."""
    size = len(prefix)
    may_end = prefix not in words
    if size == longest:
        return "" if may_end else "!"
    nexts = sorted({w[size] for w in words if w.startswith(prefix) and len(w) > size})
    ways = [f"{_letters(nexts)} {_tail(size + 1, longest)}".rstrip()]
    for letter in nexts:
        rest = _after(prefix + letter, words, longest)
        if rest != "!":  # a reserved word that the limit keeps from becoming another
            ways.append(f"[{letter.upper()}{letter}] {rest}".rstrip())
    return f"({' | '.join(ways)})" + ("?" if may_end else "")


def _tail(size: int, longest: int | None) -> str:
    if longest is None:
        return f"{_TAIL}*"
    return f"{_TAIL}{{0,{longest - size}}}" if longest > size else ""


def _letters(but: Iterable[str], digits: bool = True) -> str:
    """A class of the characters of names without these letters, in either case."""
    out = {c for letter in but for c in (letter.upper(), letter)}
    left = [c for c in (string.digits if digits else "") + _LETTERS if c not in out]
    runs: list[list[str]] = []
    for c in left:
        if runs and ord(c) == ord(runs[-1][-1]) + 1 and c != "_" and runs[-1][-1] != "_":
            runs[-1].append(c)
        else:
            runs.append([c])
    return f"[{''.join(''.join(r) if len(r) < 3 else f'{r[0]}-{r[-1]}' for r in runs)}]"
