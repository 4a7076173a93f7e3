"""From a model's name to a Model: which provider, at which address, with which key."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from flashwright.author.llm.line import Limits, Line
from flashwright.lang.diagnostic import Diagnostic, Failed

if TYPE_CHECKING:
    from flashwright.author.llm.model import Model


@dataclass(frozen=True)
class _Provider:
    """Where a provider is found, and what it needs."""

    extra: str
    key: str
    url: str
    own: str


_OPENAI = _Provider("models", "OPENAI_API_KEY", "OPENAI_BASE_URL", "https://api.openai.com/v1")
_ANTHROPIC = _Provider(
    "anthropic", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "https://api.anthropic.com"
)


def connect(
    name: str,
    base_url: str | None = None,
    *,
    env: Mapping[str, str] = os.environ,
    limits: Limits = Limits(),  # noqa: B008 - frozen
) -> Model:
    """The model of this name: `NAME` at a server that speaks OpenAI's API, or `anthropic:NAME`.

    Nothing is sent yet. Failed (FW911) says what is missing.
    """
    prefix, _, rest = name.partition(":")
    provider, own_name = (_ANTHROPIC, rest) if prefix == "anthropic" else (_OPENAI, name)
    if not own_name.strip() or not name.isprintable():
        raise _failed("a model needs a name", "NAME, or anthropic:NAME")
    line = _line(provider, base_url, env, limits)
    try:
        if provider is _ANTHROPIC:
            from flashwright.author.llm.anthropic_api import AnthropicModel

            return AnthropicModel(own_name, line)
        from flashwright.author.llm.openai_api import OpenAIModel

        return OpenAIModel(own_name, line)
    except ImportError:
        sdk = "Anthropic's" if provider is _ANTHROPIC else "OpenAI's"
        text = f"{sdk} SDK, which speaks to this model's server, is not installed or too old"
        hint = f"pip install 'flashwright[{provider.extra}]'"
    raise _failed(text, hint)


def _line(
    provider: _Provider, base_url: str | None, env: Mapping[str, str], limits: Limits
) -> Line:
    source = "the base URL" if base_url else provider.url
    url = base_url or env.get(provider.url, "").strip() or provider.own
    where, local = _address(url, source)
    key = env.get(provider.key, "").strip()
    if not key and not local:
        hint = f"set {provider.key} in the environment"
        if url == provider.own:
            hint += ", or --base-url URL for a server of your own"
        raise _failed(f"no key is set for {where}", hint)
    if not (key.isascii() and key.isprintable() and " " not in key):
        text = f"{provider.key} holds characters that no key has"
        raise _failed(text, "set it to the key alone, without quotes or line breaks")
    return Line(url, where, provider.key, key, local, limits)


def _address(url: str, source: str) -> tuple[str, bool]:
    """Host and port of a URL, and whether it is this machine. No message repeats the URL: what is
    wrong with it may be a secret in it."""
    hint = "give it as in http://127.0.0.1:8080/v1"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if "@" in parts.netloc:
        text = f"{source} carries a user name or a password"
        raise _failed(text, "leave them out; a key belongs in the environment")
    if parts.query or parts.fragment or "?" in url:
        text = f"{source} carries a query, where a key would end up in logs"
        raise _failed(text, "leave it out; a key belongs in the environment")
    if parts.scheme not in ("http", "https") or not host or not url.isprintable() or " " in url:
        raise _failed(f"{source} is no URL of a server", hint)
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{port}" if port else shown, _loopback(host)


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _failed(text: str, hint: str) -> Failed:
    return Failed(Diagnostic("FW911", text, help=hint))
