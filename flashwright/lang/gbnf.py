"""TL's grammar as GBNF, which constrains a model in llama.cpp to valid TL.

It is generated from grammar.lark, so that the two cannot diverge. GBNF's own needs are added here:
white space as the formatter writes it, each clause once and in the formatter's order, and no left
recursion (which llama.cpp rejects). Indented blocks need rules for each depth: DEPTH of them, far
more than any program has.

`bounded` is for a model too small to stop on its own: names, numbers, lists, expressions and the
number of statements are limited, so that every output is short and valid TL.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from flashwright.lang import gbnf_rules, gbnf_words
from flashwright.lang.gbnf_rules import Choice, Item, Many, Rules, Sequence, Symbol, symbols
from flashwright.lang.gbnf_words import Lit, literal

Level = Literal["sketch", "code"]

DEPTH = 6
# Statements that make a program code, and those allowed above the first of them.
_CODE = ("param", "grid", "allocate", "reshape")
_ABOVE = {"sketch": ("comment",), "code": ("comment", "dim", "let")}
# What the parser accepts and the formatter never writes: (rule, symbol).
_UNWRITTEN = {("loop", "IN"), ("state", ","), ("space", "MEMORY"), ("loop", ":?"), ("branch", ":?")}
_SIZES = tuple((Symbol(name),) for name in ("tile", "column", "turn"))  # of a Copy in code only
_RARE = (
    Symbol("ELSE"),
    Symbol("column"),
    Symbol("turn"),
    Symbol("along"),
    Symbol("added"),
)  # not in a bounded grammar
_SAME_CLAUSE = {"accumulate": "target"}  # of these a statement has one
_WORD_RULES = {"NAME": "name", "VERB": "name", "NUMBER": "number", "COMPARE": "compare"}


@dataclass(frozen=True)
class Limits:
    """The limits of a bounded grammar."""

    name: int = 10
    items: int = 2
    """Items of a list."""
    steps: int = 1
    """Nested operators, brackets or calls."""
    opening: int = 4
    """Statements at the top of code, such as param."""
    lines: int = 3
    """Further statements before the loop, in it, and after it."""


@dataclass(frozen=True)
class _Context:
    """The context of a rule: block depth, remaining expression steps, after a verb or not."""

    indent: int = 0
    steps: int | None = None
    plain: bool = False


def gbnf(level: Level = "code", bounded: bool = False) -> str:
    """The grammar of a sketch or of code, as GBNF."""
    return translate(gbnf_rules.read(), level, Limits() if bounded else None)


def translate(rules: Rules, level: Level, limits: Limits | None = None) -> str:
    """The rules of a lark grammar as GBNF; with limits, it derives only short texts."""
    made = _Writer(rules, level, limits).run()
    kind = f"{level}, bounded" if limits else level
    head = f"# TL ({kind}) for constrained decoding, made from Flashwright's grammar.lark\n"
    return head + "".join(f"{name} ::= {text}\n" for name, text in made.items())


class _Writer:
    def __init__(self, rules: Rules, level: Level, limits: Limits | None) -> None:
        self.rules, self.level, self.limits = rules, level, limits
        self.expressions = rules.below("_expr")
        self.blocks = {rule for rule in rules.rules if "body" in rules.below(rule)}
        dropped = _CODE if level == "sketch" else ()
        self.statements = [
            symbol.name
            for sequence in rules.rules["_statement"]
            for symbol in symbols(sequence)
            if symbol.name not in dropped and not (limits and symbol.name == "comment")
        ]
        self.out: dict[str, str] = {}
        self.same: dict[str, str] = {}

    def run(self) -> dict[str, str]:
        """All rules that are reachable from root, root first."""
        self.out["root"] = ""
        self.out["root"] = self._bounded_root(self.limits) if self.limits else self._root()
        words = gbnf_words.rules(self.rules.words, self.limits.name if self.limits else None)
        if self.limits:
            del words["comment-text"]
        return {**self.out, **words}

    # --- lines ----------------------------------------------------------------------------

    def _root(self) -> str:
        above = self._lines("above", _ABOVE[self.level])
        kinds = _CODE if self.level == "code" else self._but("comment")
        first = self._lines("first", kinds)
        return f'({above} "\\n"?)* {first} ("\\n"? {self._any_line(0)})*'

    def _bounded_root(self, limits: Limits) -> str:
        flat = self._lines("line", self._but(*self.blocks))
        block = self._lines("block", [s for s in self.statements if s in self.blocks])
        most = limits.lines
        if self.level == "sketch":
            return f"{flat}{{1,{most}}} ({block} {flat}{{0,{most}}})?"
        first = self._lines("first", _CODE)
        return f"{first}{{1,{limits.opening}}} {flat}{{0,{most}}} ({block} {flat}{{0,{most}}})?"

    def _but(self, *others: str) -> list[str]:
        return [name for name in self.statements if name not in others]

    def _any_line(self, indent: int) -> str:
        deepest = DEPTH if self.limits is None else 1
        return self._lines("line", self._but(*(self.blocks if indent == deepest else ())), indent)

    def _lines(self, name: str, kinds: Iterable[str], indent: int = 0) -> str:
        """A rule for a line, or a block, of one of these kinds; its name."""
        name = f"{name}-{indent}" if indent else name
        if name not in self.out:
            self.out[name] = ""
            ways = [self._line(kind, indent) for kind in kinds]
            margin = [literal("  " * indent)] if indent else []
            self.out[name] = _joined(
                [*margin, _grouped(_either(ways)) if margin else _either(ways)]
            )
        return name

    def _line(self, kind: str, indent: int) -> str:
        if kind == "comment":
            return _joined(["comment-text", literal("\n")])
        inside = kind in self.blocks
        end = literal("\n") if inside else self._line_end()
        return _joined([self._ref(kind, _Context(indent if inside else 0)), end])

    def _line_end(self) -> str:
        if self.limits:
            return literal("\n")
        # Comments behind a run of params line up, so there may be more than two spaces.
        self.out.setdefault("line-end", '("  " " "* comment-text)? "\\n"')
        return "line-end"

    def _body(self, indent: int) -> str:
        name, line = f"body-{indent}", self._any_line(indent)
        some = f"{line}{{1,{self.limits.lines}}}" if self.limits else ""
        self.out.setdefault(name, some or f'({line} ("\\n"? {line})*)?')
        return name

    # --- rules ----------------------------------------------------------------------------

    def _ref(self, rule: str, place: _Context) -> str:
        """The GBNF name of a rule in a context; writes the rule if it is new."""
        parts = [rule.strip("_").replace("_", "-"), *(["plain"] if place.plain else [])]
        if rule in self.blocks:
            parts += [str(place.indent)] if place.indent else []
        elif rule in self.expressions and place.steps is not None:
            parts += [str(place.steps)]
        name = "-".join(parts)
        if name not in self.out and name not in self.same:
            self.out[name] = ""  # keeps its place above those that it leads to
            make = self._expression if rule in self.expressions else self._plain_rule
            self.out[name] = make(rule, place)
            if self.out[name] in self.out:  # nothing but another rule
                self.same[name] = self.out.pop(name)
        return self.same.get(name, name)

    def _plain_rule(self, rule: str, place: _Context) -> str:
        ways = [way for sequence in self.rules.rules[rule] for way in _without_verb(sequence)]
        return _either(self._sequence(rule, way, place) for way in ways)

    def _expression(self, rule: str, place: _Context) -> str:
        ways = self._ways(rule)
        if place.plain:  # what begins with a sign or a bracket would make the verb an operand
            ways = [w for w in ways if isinstance(w[1][0], Symbol) and w[1][0].name not in "-("]
        if place.steps is not None:
            return self._few_steps(ways, place, place.steps)
        again = [(r, way) for r, way in ways if way[0] == Symbol(rule)]
        heads: dict[Item, list[tuple[str, Sequence]]] = {}
        for r, way in ways:
            if way[0] != Symbol(rule):
                heads.setdefault(way[0], []).append((r, way))
        ways_in = [self._from_head(head, found, place) for head, found in heads.items()]
        if not again:
            return _either(ways_in)
        more = _either(self._sequence(r, w[1:], _Context(), w[0]) for r, w in again)
        return f"{_grouped(_either(ways_in))} ({more})*"

    def _from_head(self, head: Item, found: list[tuple[str, Sequence]], place: _Context) -> str:
        """Alternatives with the same beginning, which stands once: what follows may differ."""
        if len(found) == 1:
            return self._sequence(*found[0], place)
        first = self._sequence(found[0][0], (head,), place)
        tails = [self._sequence(r, way[1:], _Context(), head) for r, way in found if way[1:]]
        return _joined([first, f"({_either(tails)})" + ("?" if len(tails) < len(found) else "")])

    def _few_steps(self, ways: list[tuple[str, Sequence]], place: _Context, steps: int) -> str:
        """An expression within the limits: all that an operator or a call holds has a step less."""
        made = []
        for rule, way in ways:
            nested = any(s.name in self.expressions for s in symbols(way))
            if len(way) > 1 and nested and not steps:
                continue
            inner = _Context(0, steps - 1 if len(way) > 1 and nested else steps, place.plain)
            made.append(self._sequence(rule, way, inner))
        return _either(made)

    def _ways(self, rule: str) -> list[tuple[str, Sequence]]:
        """The alternatives of an expression's rule, with those of the nodes that it stands for."""
        found: list[tuple[str, Sequence]] = []
        for way in self.rules.rules[rule]:
            node = way[0].name if len(way) == 1 and isinstance(way[0], Symbol) else "_"
            is_node = node in self.rules.rules and not node.startswith("_")
            found += [(node, w) for w in self.rules.rules[node]] if is_node else [(rule, way)]
        return found

    # --- sequences ------------------------------------------------------------------------

    def _sequence(
        self, rule: str, items: Sequence, place: _Context, before: Item | None = None
    ) -> str:
        """Items one after the other, with the formatter's spaces; `before` stands ahead of them."""
        parts: list[str] = []
        for item in _written(rule, items):
            plain = before == Symbol("VERB") or (place.plain and before is None)
            here = replace(place, plain=plain)
            if isinstance(item, Many):
                parts += self._many(rule, item, here, before)
                continue
            if isinstance(item, Symbol):
                parts += self._symbol(rule, before, item, here)
            else:
                ways = _either(self._sequence(rule, one, here) for one in item.among)
                parts += [literal(_space(rule, before, item)), f"({ways})" if items[1:] else ways]
            before = item
        return _joined(parts)

    def _many(self, rule: str, item: Many, place: _Context, before: Item | None) -> list[str]:
        if item.sign == "*" and len(item.among) > 1:
            groups = [g for g in _clauses(item) if not (self.limits and g[0][0] in _RARE)]
            return [self._clause(rule, group, place, before) for group in groups]
        dropped = _SIZES if self.level == "sketch" else ()
        rare = _RARE if self.limits else ()
        ways = [one for one in item.among if one not in dropped and one[0] not in rare]
        if item.sign == "?":
            return [self._clause(rule, ways, place, before)] if ways else []
        (one,) = ways
        sign = f"{{0,{self.limits.items - 1}}}" if self.limits and item.sign == "*" else item.sign
        return [f"({self._sequence(rule, one, place, before)}){sign}"]

    def _clause(self, rule: str, group: Iterable[Sequence], place: _Context, b: Item | None) -> str:
        return f"({_either(self._sequence(rule, one, place, b) for one in group)})?"

    def _symbol(self, rule: str, before: Item | None, item: Symbol, place: _Context) -> list[str]:
        name = item.name
        if name == "body":
            return [self._line_end(), self._body(place.indent + 1)]
        if name in ("ELSE", "END"):
            return [literal("  " * place.indent + gbnf_words.spelled(name, self.rules.words))]
        space = literal(_space(rule, before, item))
        if name in self.rules.rules:
            return [space, self._ref(name, self._entering(rule, name, place))]
        if name == "NAME" and place.plain:
            return [space, "operand-name"]
        if name in _WORD_RULES:
            return [space, _WORD_RULES[name]]
        known = name in self.rules.words
        return [space, literal(gbnf_words.spelled(name, self.rules.words) if known else name)]

    def _entering(self, rule: str, name: str, place: _Context) -> _Context:
        """The place of a rule used in another: an expression in a statement has all its steps."""
        if self.limits and name in self.expressions and rule not in self.expressions:
            # Shapes and coordinates, of which there are lists, are plain.
            listed = rule in ("axis", "tile", "coord", "within", "operands")
            return _Context(0, 0 if listed else self.limits.steps, place.plain)
        return place


def _space(rule: str, before: Item | None, after: Item) -> str:
    """What the formatter puts between two symbols of a rule."""
    left = before.name if isinstance(before, Symbol) else ""
    right = after.name if isinstance(after, Symbol) else ""
    tight = (
        before is None
        or right in (",", ":", ")", "]", "TRANSPOSE")
        or left in ("(", "[")
        or (left == ":" and rule != "axis")
        or (rule in ("call", "index") and right in ("(", "["))
        or (rule == "negative" and left == "-")
    )
    return "" if tight else " "


def _written(rule: str, items: Sequence) -> Sequence:
    """The items without what the formatter never writes."""
    found: list[Item] = []
    for item in items:
        if isinstance(item, Symbol):
            found.append(item)
            continue
        optional = "?" if isinstance(item, Many) and item.sign == "?" else ""
        gone = {(Symbol(name),) for r, name in _UNWRITTEN if r == rule and name != ":?"}
        gone |= {(Symbol(":"),)} if optional and (rule, ":?") in _UNWRITTEN else set()
        left = tuple(one for one in item.among if one not in gone)
        if isinstance(item, Choice) and len(left) == 1:
            found += left[0]
        elif left:
            found.append(replace(item, among=left))
    return tuple(found)


def _without_verb(items: Sequence) -> list[Sequence]:
    """The sequence with its first optional part, if that stands in front or is a verb, and without:
    what follows is written otherwise then."""
    for n, item in enumerate(items[:2]):
        if isinstance(item, Many) and item.sign == "?":
            (one,) = item.among
            if n == 0 or one == (Symbol("VERB"),):
                return [items[:n] + one + items[n + 1 :], items[:n] + items[n + 1 :]]
    return [items]


def _clauses(item: Many) -> list[list[Sequence]]:
    """The clauses in their order; those of which a statement has only one, together."""
    groups: dict[str, list[Sequence]] = {}
    for one in item.among:
        name = symbols(one)[0].name
        groups.setdefault(_SAME_CLAUSE.get(name, name), []).append(one)
    return list(groups.values())


def _joined(parts: Iterable[str]) -> str:
    """Parts in a row, neighbouring quoted texts made one."""
    row: list[str] = []
    for part in parts:
        if part == literal("") or not part:
            continue
        if row and isinstance(part, Lit) and isinstance(row[-1], Lit):
            row[-1] = Lit(row[-1][:-1] + part[1:])
        else:
            row.append(part)
    return row[0] if len(row) == 1 else " ".join(row)


def _either(ways: Iterable[str]) -> str:
    return " | ".join(dict.fromkeys(ways))


def _grouped(text: str) -> str:
    return f"({text})" if " | " in text else text
