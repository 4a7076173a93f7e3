"""The options for budgets of language models, shared by `generate` and `study`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from flashwright.author.llm.budget import Budget, Prices
    from flashwright.author.llm.line import Limits

MODELS = "Language models"
"""The panel of `--help` that lists these options."""
ATTEMPTS, TOKENS, MINUTES = 6, 400_000, 30.0
"""Defaults of a stage."""


def model_option(*names: str, **settings: Any) -> Any:
    """An option in the panel of the language models."""
    return typer.Option(*names, rich_help_panel=MODELS, **settings)


BaseUrl = Annotated[str | None, model_option(metavar="URL", help="Of an OpenAI-compatible server.")]
Attempts = Annotated[
    int, model_option(metavar="N", min=1, max=100, help="Replies for a stage, repairs included.")
]
Tokens = Annotated[int, model_option(metavar="N", min=1000, help="For a stage, read and written.")]
Minutes = Annotated[float, model_option(metavar="X", min=0.1, help="For a stage.")]
ReplyTimeout = Annotated[
    float | None,
    model_option(
        metavar="SECONDS",
        min=1.0,
        show_default=False,
        help="How long a server may send nothing, not even a keep-alive (1800).",
    ),
]
Dollars = Annotated[
    float | None, model_option(metavar="X", min=0.0, help="For a stage; needs --price.")
]
Price = Annotated[
    str | None, model_option(metavar="IN/OUT", help="Dollars for a million tokens, as in 3/15.")
]


def read_budget(
    attempts: int, tokens: int, minutes: float, dollars: float | None, price: str | None
) -> tuple[Budget, Prices | None]:
    """The budget of a stage, and the price of tokens if one is given."""
    from flashwright.author.llm.budget import Budget, Prices

    if dollars is not None and price is None:
        why = "say what a million tokens cost: --price IN/OUT"
        raise typer.BadParameter(why, param_hint="--dollars")
    prices = Prices(*read_price(price)) if price is not None else None
    return Budget(attempts, tokens, dollars, 60 * minutes), prices


def read_limits(reply_timeout: float | None, minutes: float) -> Limits:
    """The limits of a server: the defaults, or with the user's limit on its silence."""
    from flashwright.author.llm.line import Limits

    if reply_timeout is None:
        return Limits()
    if reply_timeout > 60 * minutes:
        why = f"a stage ends after --minutes {minutes:g}, {60 * minutes:g} seconds: give it more"
        raise typer.BadParameter(why, param_hint="--reply-timeout")
    return Limits(silence=reply_timeout)


def read_price(text: str) -> tuple[float, float]:
    """Dollars for a million tokens read and written, from `3/15`."""
    try:
        read, written = (float(part) for part in text.split("/"))
    except ValueError:
        why = f"{text!r} is not IN/OUT, dollars for a million tokens read and written, as in 3/15"
        raise typer.BadParameter(why, param_hint="--price") from None
    return read, written
