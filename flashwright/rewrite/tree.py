"""Edits of syntax trees: statements exchanged, expressions replaced, comments put back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from flashwright.lang import nodes as tl
from flashwright.lang.parse import parse

Part = TypeVar("Part")
Body = tuple[tl.Statement, ...]


def names_in(body: Iterable[tl.Statement]) -> set[str]:
    """All names of statements."""
    every = (e for s in tl.statements(tuple(body)) for e in tl.expressions(s))
    return {e.id for e in every if isinstance(e, tl.Name)}


def fresh(name: str, used: set[str]) -> str:
    """A name like this one that is not used yet; now it is."""
    while name in used:
        name += "_"
    used.add(name)
    return name


def written(text: str) -> Body:
    """Statements from text, without spans: their lines are not those of the program."""
    return tuple(_without_span(stmt) for stmt in parse(text).body)


def _without_span(stmt: tl.Statement) -> tl.Statement:
    if isinstance(stmt, tl.For):
        stmt = replace(stmt, body=tuple(map(_without_span, stmt.body)))
    return replace(stmt, span=tl.NOWHERE)


def edited(body: Iterable[tl.Statement], changes: Mapping[int, Body]) -> Body:
    """Statements with others in place of some, which are named by their id; also those in loops and
    branches. A branch without statements goes."""
    made: list[tl.Statement] = []
    for stmt in body:
        if id(stmt) in changes:
            made += changes[id(stmt)]
        elif isinstance(stmt, tl.For):
            made.append(replace(stmt, body=edited(stmt.body, changes)))
        elif isinstance(stmt, tl.If):
            arms = edited(stmt.then, changes), edited(stmt.orelse, changes)
            made += [replace(stmt, then=arms[0], orelse=arms[1])] if any(arms) else []
        else:
            made.append(stmt)
    return tuple(made)


def substituted(node: Part, changes: Mapping[tl.Expr, tl.Expr]) -> Part:
    """A statement or expression with other expressions in place of some, in its body too."""
    if isinstance(node, tl.Expr) and node in changes:
        return changes[node]  # type: ignore[return-value]
    made: dict[str, Any] = {}
    for part in fields(node):  # type: ignore[arg-type]
        value = getattr(node, part.name)
        if isinstance(value, tuple):
            made[part.name] = tuple(substituted(v, changes) if _is_node(v) else v for v in value)
        elif _is_node(value):
            made[part.name] = substituted(value, changes)
    return replace(node, **made) if made else node  # type: ignore[type-var]


def _is_node(value: object) -> bool:
    return hasattr(value, "__dataclass_fields__") and not isinstance(value, tl.Span)


def path_to(body: Body, stmt: tl.Statement) -> tuple[Body, Body]:
    """What comes before a statement that may be in branches, and what comes behind it."""
    for n, one in enumerate(body):
        if one is stmt:
            return body[:n], body[n + 1 :]
        if isinstance(one, tl.If):
            for arm in (one.then, one.orelse):
                if any(s is stmt for s in tl.statements(arm)):
                    before, behind = path_to(arm, stmt)
                    return (*body[:n], *before), (*behind, *body[n + 1 :])
    raise ValueError(stmt)


def up_to(body: Body, stmt: tl.Statement) -> Body:
    """The statements up to one that may be in branches, without what comes behind it or instead."""
    made: list[tl.Statement] = []
    for one in body:
        if one is stmt:
            return (*made, one)
        for arm in (one.then, one.orelse) if isinstance(one, tl.If) else ():
            if any(s is stmt for s in tl.statements(arm)):
                kept = up_to(arm, stmt)
                assert isinstance(one, tl.If)
                sides = (kept, ()) if arm is one.then else (one.then[:0], kept)
                return (*made, replace(one, then=sides[0], orelse=sides[1]))
        made.append(one)
    return tuple(made)


# --- comments -------------------------------------------------------------------------------------


@dataclass
class Comments:
    """The comments of a program, each with the statement that it stands above or below."""

    above: dict[tl.Span, list[tl.Comment]]
    below: dict[tl.Span, list[tl.Comment]]

    @staticmethod
    def of(body: Body) -> Comments:
        """The comments of a program."""
        found = Comments({}, {})
        found._gather(body)
        return found

    def _gather(self, body: Body) -> None:
        waiting: list[tl.Comment] = []
        for stmt in body:
            if isinstance(stmt, tl.Comment):
                waiting.append(stmt)
                continue
            if waiting:
                self.above[stmt.span] = waiting
            waiting = []
            for inner in _bodies(stmt):
                self._gather(inner)
        if waiting and len(waiting) < len(body):
            last = next(s for s in reversed(body) if not isinstance(s, tl.Comment))
            self.below[last.span] = waiting

    def put_back(self, body: Sequence[tl.Statement]) -> Body:
        """Statements with their comments. Each comment is put back once."""
        made: list[tl.Statement] = []
        for stmt in body:
            above = self.above.pop(stmt.span, [])
            if above and stmt.gap:
                above, stmt = [replace(above[0], gap=True), *above[1:]], replace(stmt, gap=False)
            below = self.below.pop(stmt.span, [])
            if isinstance(stmt, tl.For):
                stmt = replace(stmt, body=self.put_back(stmt.body))
            elif isinstance(stmt, tl.If):
                arms = self.put_back(stmt.then), self.put_back(stmt.orelse)
                stmt = replace(stmt, then=arms[0], orelse=arms[1])
            made += [*above, stmt, *below]
        return tuple(made)


def _bodies(stmt: tl.Statement) -> tuple[Body, ...]:
    if isinstance(stmt, tl.For):
        return (stmt.body,)
    return (stmt.then, stmt.orelse) if isinstance(stmt, tl.If) else ()


def without_comments(body: Body) -> Body:
    """Statements without the comments on lines of their own."""
    return edited(body, {id(s): () for s in tl.statements(body) if isinstance(s, tl.Comment)})
