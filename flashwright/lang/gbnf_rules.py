"""grammar.lark as data: its rules and terminals, for other forms of the grammar."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

FILE = Path(__file__).with_name("grammar.lark")


@dataclass(frozen=True)
class Symbol:
    """A rule (`_expr`), a word by its terminal (`COPY`), or a sign as it is written (`(`)."""

    name: str


@dataclass(frozen=True)
class Choice:
    """A choice: exactly one of several sequences."""

    among: tuple[Sequence, ...]


@dataclass(frozen=True)
class Many:
    """A choice that is optional (`?`) or repeated any number of times (`*`)."""

    among: tuple[Sequence, ...]
    sign: Literal["?", "*"]


Item = Symbol | Choice | Many
Sequence = tuple[Item, ...]


@dataclass(frozen=True)
class Rules:
    """The rules and the terminals of grammar.lark."""

    rules: dict[str, tuple[Sequence, ...]]
    """In the order of the file: each a choice of sequences."""
    words: dict[str, str]
    """The regular expression of each terminal that is not a plain sign."""

    def below(self, rule: str) -> set[str]:
        """The rule and every rule that it uses, directly or not."""
        found, open_ = {rule}, [rule]
        while open_:
            new = {s.name for seq in self.rules[open_.pop()] for s in symbols(seq)} & set(
                self.rules
            )
            open_ += sorted(new - found)
            found |= new
        return found


def symbols(items: Sequence) -> list[Symbol]:
    """All symbols of a sequence, in order."""
    found: list[Symbol] = []
    for item in items:
        if isinstance(item, Symbol):
            found.append(item)
        else:
            found += [symbol for one in item.among for symbol in symbols(one)]
    return found


def read(text: str | None = None) -> Rules:
    """The rules in the text of a lark grammar: grammar.lark's if none is given."""
    # The only access to a grammar's rules as written; lark's own tools use it too.
    from lark import load_grammar

    text = FILE.read_text(encoding="utf-8") if text is None else text
    load: Any = load_grammar.load_grammar
    grammar = load(text, FILE.name, [], False)[0]
    signs: dict[str, str] = {}
    words: dict[str, str] = {}
    for name, (tree, _priority) in grammar.term_defs:
        if tree is not None:  # VERB has no text of its own
            token = next(tree.scan_values(lambda _: True))
            if token.type == "STRING":
                signs[str(name)] = str(token)[1:-1]
            else:
                words[str(name)] = str(token).rstrip("i")[1:-1]
    rules = {
        str(name): tuple(_sequence(one, signs) for one in tree.children)
        for name, _params, tree, _options in grammar.rule_defs
    }
    return Rules(rules, words)


def _sequence(tree: Any, signs: dict[str, str]) -> Sequence:
    return tuple(_item(child, signs) for child in tree.children)


def _item(tree: Any, signs: dict[str, str]) -> Item:
    if tree.data == "value":
        (inner,) = tree.children
        if getattr(inner, "data", "") == "literal":
            return Symbol(str(inner.children[0])[1:-1])
        return Symbol(signs.get(str(inner.name), str(inner.name)))
    if tree.data == "expansions":
        return Choice(tuple(_sequence(one, signs) for one in tree.children))
    inner, sign = tree.children[0], str(tree.children[1]) if tree.data == "expr" else "?"
    if tree.data not in ("expr", "maybe") or sign not in ("?", "*"):
        raise ValueError(f"grammar.lark has a form that its readers do not know: {tree}")
    among = inner.children if inner.data == "expansions" else None
    one = tuple(_sequence(each, signs) for each in among) if among else ((_item(inner, signs),),)
    return Many(one, "*" if sign == "*" else "?")
