"""GBNF read from its text, by other means than the code that wrote it: match, walk, measure."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

TOKENS = re.compile(
    r"""(?P<rule>^[a-zA-Z][\w-]*\s*::=)|(?P<ref>[a-zA-Z][\w-]*)|(?P<lit>"(?:\\.|[^"\\])*")
    |(?P<cls>\[(?:\\.|[^\]\\])*\])|(?P<times>[?*+]|\{\d+,?\d*\})|(?P<sign>[()|])|(?P<skip>\s+|\#.*)""",
    re.VERBOSE | re.MULTILINE,
)
ENDLESS = 10**9
NOWHERE: frozenset[int] = frozenset()
DEEP = 12


@dataclass(frozen=True, eq=False)
class Lit:
    text: str


@dataclass(frozen=True, eq=False)
class Class:
    pattern: str


@dataclass(frozen=True, eq=False)
class Ref:
    name: str


@dataclass(frozen=True, eq=False)
class Alt:
    ways: tuple[tuple, ...]


@dataclass(frozen=True, eq=False)
class Rep:
    item: object
    least: int
    most: int


class Gbnf:
    """A grammar; a mistake in its text is an error."""

    def __init__(self, text: str) -> None:
        self.rules: dict[str, Alt] = {}
        tokens, at = [], 0
        while at < len(text):
            m = TOKENS.match(text, at)
            assert m, f"not GBNF: {text[at : at + 40]!r}"
            at = m.end()
            if m.lastgroup != "skip":
                tokens.append((m.lastgroup, m[0]))
        self.tokens = tokens
        while self.tokens:
            kind, word = self.tokens.pop(0)
            assert kind == "rule", word
            name = word.split("::=")[0].strip()
            assert name not in self.rules, f"{name} twice"
            self.rules[name] = self._alt()
        known = set(self.rules)
        assert self._refs() <= known, self._refs() - known
        assert known - {"root"} <= self._refs(), known - self._refs()
        self.root, self.shortest = Ref("root"), self._lengths(min)

    def _refs(self) -> set[str]:
        found: set[str] = set()
        todo: list = list(self.rules.values())
        while todo:
            node = todo.pop()
            if isinstance(node, Ref):
                found.add(node.name)
            elif isinstance(node, Alt):
                todo += [n for way in node.ways for n in way]
            elif isinstance(node, Rep):
                todo.append(node.item)
        return found

    def _alt(self) -> Alt:
        ways: list[list] = [[]]
        while self.tokens and self.tokens[0][0] != "rule" and self.tokens[0][1] != ")":
            kind, word = self.tokens.pop(0)
            if word == "|" and kind == "sign":
                ways.append([])
            elif word == "(" and kind == "sign":
                ways[-1].append(self._alt())
                assert self.tokens.pop(0)[1] == ")"
            elif kind == "times":
                ways[-1].append(Rep(ways[-1].pop(), *_times(word)))
            elif kind == "lit":
                ways[-1].append(Lit(word[1:-1].encode().decode("unicode_escape")))
            else:
                ways[-1].append(Ref(word) if kind == "ref" else Class(word))
        return Alt(tuple(tuple(way) for way in ways))

    # --- match ----------------------------------------------------------------------------

    def accepts(self, text: str) -> bool:
        """Whether root derives the text: where each part can end, remembered for each place."""
        self.memo: dict = {}
        self.reading = text
        return len(text) in self._ends(self.root, 0)

    def _ends(self, node: object, at: int) -> frozenset[int]:
        if isinstance(node, Lit):
            ok = self.reading.startswith(node.text, at)
            return frozenset((at + len(node.text),)) if ok else NOWHERE
        if isinstance(node, Class):
            ok = at < len(self.reading) and _has(node.pattern, self.reading[at])
            return frozenset((at + 1,)) if ok else NOWHERE
        if isinstance(node, Ref):
            node = self.rules[node.name]
        key = (node, at)
        if key not in self.memo:
            self.memo[key] = self._found(node, at)
        return self.memo[key]

    def _next(self, node: object, places: Iterable[int]) -> set[int]:
        return {e for a in places for e in self._ends(node, a)}

    def _found(self, node: object, at: int) -> frozenset[int]:
        ends: set[int] = set()
        if isinstance(node, Rep):
            now, seen, count = {at}, {at}, 0
            while now and count <= node.most:
                if count >= node.least:
                    ends |= now
                count += 1
                now = self._next(node.item, now)
                if node.most == ENDLESS:
                    now -= seen
                seen |= now
            return frozenset(ends)
        assert isinstance(node, Alt)
        for way in node.ways:
            if not way:
                ends.add(at)
                continue
            now: Iterable[int] = self._ends(way[0], at)
            for part in way[1:]:
                if not now:  # most alternatives end at their first word
                    break
                now = self._next(part, now)
            ends.update(now)
        return frozenset(ends)

    # --- walk and measure -----------------------------------------------------------------

    def walk(self, rng: random.Random) -> str:
        """A random text of the grammar; the deeper it is, the more it keeps to what is short."""
        return self._walk(self.root, rng, 0)

    def _walk(self, node: object, rng: random.Random, depth: int) -> str:
        if isinstance(node, Lit):
            return node.text
        if isinstance(node, Class):
            return rng.choice(_members(node.pattern))
        if isinstance(node, Ref):
            return self._walk(self.rules[node.name], rng, depth + 1)
        if isinstance(node, Rep):
            count = node.least
            while depth < DEEP and count < node.most and rng.random() < 0.35:
                count += 1
            return "".join(self._walk(node.item, rng, depth) for _ in range(count))
        assert isinstance(node, Alt)
        way = rng.choice(node.ways)
        if depth >= DEEP and not isinstance(node.ways[0][0], Class):
            way = min(node.ways, key=lambda w: sum(self._size(n, self.shortest, min) for n in w))
        return "".join(self._walk(part, rng, depth) for part in way)

    def longest(self) -> float:
        """Characters of the longest text; infinite if there is no such thing."""
        return self._lengths(max)["root"]

    def _lengths(self, pick) -> dict[str, float]:
        sizes = dict.fromkeys(self.rules, float("inf") if pick is min else 0.0)
        for _ in range(len(sizes) + 1):
            new = {name: self._size(alt, sizes, pick) for name, alt in self.rules.items()}
            if new == sizes:
                return sizes
            sizes = new
        return dict.fromkeys(sizes, float("inf"))  # it still grows: there is a recursion

    def _size(self, node: object, sizes: dict[str, float], pick) -> float:
        if isinstance(node, Lit):
            return len(node.text)
        if isinstance(node, Class):
            return 1
        if isinstance(node, Ref):
            return sizes[node.name]
        if isinstance(node, Rep):
            times = node.least if pick is min else node.most
            return times * self._size(node.item, sizes, pick) if times else 0
        assert isinstance(node, Alt)
        return pick(sum(self._size(n, sizes, pick) for n in way) for way in node.ways)


def _times(word: str) -> tuple[int, int]:
    if word in "?*+":
        return {"?": (0, 1), "*": (0, ENDLESS), "+": (1, ENDLESS)}[word]
    least, _, most = word[1:-1].partition(",")
    return int(least), int(most) if most else ENDLESS


@lru_cache(None)
def _has(pattern: str, char: str) -> bool:
    return _pattern(pattern).match(char) is not None


@lru_cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text)


@lru_cache
def _members(pattern: str) -> list[str]:
    return [c for c in map(chr, range(32, 127)) if _pattern(pattern).match(c)]
