"""The order in which thread blocks add to a gradient, so that it has the same bits in every run."""

from __future__ import annotations

from flashwright.grad.algebra import ONE, ZERO, add, mul, sub
from flashwright.grad.declare import Scope, place_names
from flashwright.grad.normalise import refuse
from flashwright.grad.owner import Owner
from flashwright.lang import nodes as tl


def find_turn(scope: Scope, owner: Owner, copy: tl.Copy, tensor: str) -> tl.Expr | None:
    """How many thread blocks of the main kernel add to the tile of a Copy before this one does;
    None if no other does, or if the order is left open. Failed with FW908 if there is no order."""
    if not scope.deterministic:
        return None
    places = _places(owner, copy)
    missing = [a.name.id for a in owner.grid.axes if a.name.id not in places]
    if not missing:
        return None
    key, looped = owner.grid.axes[0].name, bool(places & owner.inside)
    turn, why = None, ""
    if any(c.in_elements for c in copy.coords or ()):
        why = "its tiles begin at any element"
    elif missing == [key.id] and owner.query.id in places:
        turn = sub(key, owner.first_key)
    elif key.id not in missing and looped == (owner.query.id in places):
        turn = _others(scope, owner, places, len(missing))
    if turn is None:
        blocks = f"thread blocks that differ in {' and '.join(missing)} add to the same tile"
        text = f"the additions to the gradient of `{tensor}` have no order: {why or blocks}"
        raise refuse(copy.span, text, "derive it without --deterministic")
    return turn


def _places(owner: Owner, copy: tl.Copy) -> set[str]:
    """The scalars that the place of a Copy depends on, also through those of an iteration."""
    found = place_names(copy)
    for let in reversed(owner.inner):
        if let.name.id in found:
            found |= {n.id for n in tl.value_names(let.value)}
    return found


def _others(scope: Scope, owner: Owner, places: set[str], count: int) -> tl.Expr | None:
    """The number of a block among those of other heads and batch elements, all of which visit the
    same tiles; None if they do not, or if not all of them add."""
    forward, turn, size = scope.forward, ZERO, ONE
    open_axes = 0
    bounds = {n.id for let in owner.lets for n in tl.value_names(let.value)}
    for axis in forward.program.grid.axes:
        index = owner.names.get(axis.name.id, axis.name)
        if axis is forward.query or (isinstance(index, tl.Name) and index.id in places):
            continue
        if axis.name.id in bounds:
            return None
        turn, size = add(turn, mul(index, size)), mul(size, sub(axis.high, axis.low))
        open_axes += 1
    return turn if open_axes == count else None
