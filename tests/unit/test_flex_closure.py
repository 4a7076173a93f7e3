"""What a score_mod or a mask_mod sees outside of itself, and whether a change of it is noticed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from flashwright.flex.capture import Watch, capture  # noqa: E402
from flashwright.flex.form import form_of  # noqa: E402

Function = Callable[..., Any]
Change = Callable[[], None]

REACH = 5
LIMIT = torch.tensor([10, 20])
SETTINGS = ModuleType("settings")


@pytest.fixture(autouse=True)
def as_at_first() -> None:
    here("REACH", 5)
    here("LIMIT", torch.tensor([10, 20]))
    vars(SETTINGS)["reach"] = 5


def here(name: str, value: Any) -> None:
    setattr(sys.modules[__name__], name, value)


def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q - kv < REACH


def global_number() -> tuple[Function, Change]:
    return near, lambda: here("REACH", 6)


def global_in_an_inner_lambda() -> tuple[Function, Change]:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (lambda reach: q - kv < REACH + reach)(1)

    return mask, lambda: here("REACH", 6)


def tensor_in_an_inner_function() -> tuple[Function, Change]:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        def shown() -> Any:
            return kv < LIMIT[b]

        return shown()

    return mask, lambda: here("LIMIT", torch.tensor([5, 40]))


def closure() -> tuple[Function, Change]:
    limit = torch.tensor([10, 20])

    def change() -> None:
        nonlocal limit
        limit = torch.tensor([5, 40])

    return lambda b, h, q, kv: kv < limit[b], change


def function_in_a_tuple() -> tuple[Function, Change]:
    both = (near, near)
    return lambda b, h, q, kv: both[0](b, h, q, kv), lambda: here("REACH", 6)


def default() -> tuple[Function, Change]:
    def mask(b: Any, h: Any, q: Any, kv: Any, reach: int = 5) -> Any:
        return q - kv < reach

    def change() -> None:
        mask.__defaults__ = (6,)

    return mask, change


def keyword_default() -> tuple[Function, Change]:
    def mask(b: Any, h: Any, q: Any, kv: Any, *, limit: Any = LIMIT) -> Any:
        return kv < limit[b]

    return mask, lambda: mask.__kwdefaults__.update(limit=torch.tensor([5, 40]))


def function_as_a_default() -> tuple[Function, Change]:
    def mask(b: Any, h: Any, q: Any, kv: Any, rule: Function = near) -> Any:
        return rule(b, h, q, kv)

    return mask, lambda: here("REACH", 6)


def of_a_table(b: Any, h: Any, q: Any, kv: Any, limit: Any = None) -> Any:
    return (kv < limit[b]) & (q - kv < REACH)


def keyword_of_a_partial() -> tuple[Function, Change]:
    mask = partial(of_a_table, limit=torch.tensor([10, 20]))
    return mask, lambda: mask.keywords.update(limit=torch.tensor([5, 40]))


def global_of_a_partial() -> tuple[Function, Change]:
    return partial(of_a_table, limit=torch.tensor([10, 20])), lambda: here("REACH", 6)


def empty_cell() -> tuple[Function, Change]:
    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return q - kv < (later if REACH > 5 else REACH)

    def change() -> None:
        nonlocal later
        later = 6

    if REACH > 5:
        later = 7
    return mask, change


def emptied_cell() -> tuple[Function, Change]:
    reach = 5

    def change() -> None:
        nonlocal reach
        del reach

    return lambda b, h, q, kv: q - kv < reach, change


def attribute_of_a_module() -> tuple[Function, Change]:
    return lambda b, h, q, kv: q - kv < SETTINGS.reach, lambda: setattr(SETTINGS, "reach", 6)


def attribute_of_a_class() -> tuple[Function, Change]:
    class Settings:
        reach = 5

    return lambda b, h, q, kv: q - kv < Settings.reach, lambda: setattr(Settings, "reach", 6)


def weight_of_a_module() -> tuple[Function, Change]:
    table = torch.nn.Embedding(2, 1)

    def change() -> None:
        table.weight = torch.nn.Parameter(torch.ones(2, 1))

    return lambda b, h, q, kv: table.weight[b, 0] > 0, change


SEEN = (
    *(global_number, global_in_an_inner_lambda, tensor_in_an_inner_function, closure),
    *(function_in_a_tuple, default, keyword_default, function_as_a_default),
    *(keyword_of_a_partial, global_of_a_partial, empty_cell, emptied_cell),
    *(attribute_of_a_module, attribute_of_a_class),
)


@pytest.mark.parametrize("made", [*SEEN, weight_of_a_module], ids=lambda made: made.__name__)
def test_a_change_is_noticed(made: Callable[[], tuple[Function, Change]]) -> None:
    function, change = made()
    watch = Watch(function)
    assert watch.same() is (made in SEEN)
    change()
    assert not watch.same()


@pytest.mark.parametrize("made", SEEN, ids=lambda made: made.__name__)
def test_a_change_is_another_form(made: Callable[[], tuple[Function, Change]]) -> None:
    """Another number is another key; another tensor the same key with that tensor."""
    function, change = made()
    first, again = form_of(function), form_of(function)
    change()
    second = form_of(function)
    assert first is not None
    assert again is not None
    assert second is not None
    assert first.key == again.key
    tensors = [[id(t) for t in form.tensors] for form in (first, again, second)]
    assert tensors[0] == tensors[1]
    assert (first.key == second.key) is (tensors[0] != tensors[2])


def test_functions_that_come_again_keep_their_places() -> None:
    def within(reach: int) -> Function:
        return lambda b, h, q, kv: q - kv < reach

    def both(*rules: Function) -> Function:
        return lambda b, h, q, kv: rules[0](b, h, q, kv) & ~rules[2](b, h, q, kv)

    one, two = within(1), within(2)
    forms = [form_of(both(one, two, last)) for last in (one, two, one)]
    assert None not in forms
    assert forms[0] == forms[2] != forms[1]


def test_a_function_that_names_itself_can_be_watched() -> None:
    def mask(b: Any, h: Any, q: Any, kv: Any, again: bool = True) -> Any:
        return mask(b, h, q, kv, False) if again else q - kv < REACH

    watch = Watch(mask)
    assert watch.same()
    here("REACH", 6)
    assert not watch.same()


def test_what_may_change_inside_is_named() -> None:
    config = {"reach": 5}

    def by_default(b: Any, h: Any, q: Any, kv: Any, own: Any = config) -> Any:
        return q - kv < own["reach"]

    assert Watch(lambda b, h, q, kv: q - kv < config["reach"]).blind == "config"
    assert Watch(by_default).blind == "own"
    assert Watch(partial(of_a_table, limit=[1, 2])).blind == "limit"
    assert not Watch(partial(of_a_table, limit=(1, 2)), near, None).blind


def test_a_tensor_is_named_as_in_the_functions_text() -> None:
    table = torch.tensor([10, 20])

    def mask(b: Any, h: Any, q: Any, kv: Any, first: Any = table) -> Any:
        return (kv >= first[b]) & of_a_table(b, h, q, kv, limit=LIMIT)

    dims = {"batch": 2, "heads": 1, "q_len": 8, "kv_len": 8}
    found = capture(None, partial(mask), dims).sources
    assert list(found) == ["First", "LIMIT"]
