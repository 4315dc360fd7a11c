"""Remove the keys and passwords that a session sends from everything a server answers.

A server may repeat its requests, for debugging or on purpose. Without this, the keys in them would
reach the terminal, the ledger and the receipts, and the people who read those.
"""

from __future__ import annotations

import base64
import html
import re
from binascii import Error as NoBase64
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote
from urllib.request import getproxies

import httpx

SECRET_MIN_CHARS = 6
"""Shortest secret that is removed: shorter ones also occur in ordinary words."""
REMOVED = "…"
_HALVED_MIN_CHARS = 16
"""Length from which half a key is removed too: servers cut messages, and show the ends of keys."""
_DECODINGS_MAX = 4
_ROUNDS_MAX = 8
_SCHEMES = frozenset({"apikey", "api-key", "basic", "bearer", "digest", "token"})
_ESCAPED = re.compile(r"""\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|([nrt"'\\/]))""")


_HEXADECIMAL = re.compile("[0-9a-f]{,31}")
_CHARACTERS = {"n": "\n", "r": "\r", "t": "\t"}


class Secrets:
    """Secret words, in all encodings in which a server may repeat them."""

    def __init__(self, values: Iterable[str]) -> None:
        """Take whole values, such as those of headers, without schemes such as Bearer."""
        words = {word for value in values for word in _words(value)}
        forms = {form for word in words for form in _forms(word) if len(form) >= SECRET_MIN_CHARS}
        self._needles = sorted({part.lower() for form in forms for part in _parts(form)})
        patterns = [_pattern(form) for form in sorted(forms, key=len, reverse=True)]
        self._pattern = re.compile("|".join(patterns), re.IGNORECASE)

    def are_in(self, text: str) -> bool:
        """Return whether a text holds any secret, plain or encoded."""
        return bool(self._needles) and any(map(self._are_plain_in, _readings(text)))

    def removed_from(self, text: str) -> str:
        """Return the text without secrets. If one was encoded, the text comes back decoded."""
        for _ in range(_ROUNDS_MAX if self._needles else 0):
            found = next(filter(self._are_plain_in, _readings(text)), None)
            if found is None:
                return text
            text = self._pattern.sub(REMOVED, found)
        # Only someone who wants to get a secret through encodes it in so many ways.
        return REMOVED if self._needles else text

    def removed_from_all(self, value: Any) -> Any:
        """Return JSON without secrets in its texts; the keys of objects stay."""
        if isinstance(value, str):
            return self.removed_from(value)
        if isinstance(value, list):
            return [self.removed_from_all(one) for one in value]
        if isinstance(value, dict):
            return {name: self.removed_from_all(one) for name, one in value.items()}
        return value

    def _are_plain_in(self, text: str) -> bool:
        lowered = text.lower()  # in long answers much faster than a pattern that ignores case
        return any(needle in lowered for needle in self._needles)


def secrets_sent(
    url: httpx.URL,
    headers: Mapping[str, str],
    login: tuple[str, str] | None,
    more: Iterable[str],
    trust_env: bool,
) -> Secrets:
    """Return what a session sends that nobody else may see.

    Args:
        headers: all of their values are secret, except those that describe the content.
        trust_env: whether it uses the proxies that the environment names.
    """
    return Secrets(
        [
            *(value for name, value in headers.items() if not name.startswith("content-")),
            *((login[1] or login[0], _pair(login)) if login else ()),
            *_login_of(url),
            *more,
            *(_proxy_logins() if trust_env else ()),
        ]
    )


def _login_of(url: httpx.URL) -> Iterator[str]:
    """Yield the secrets in an address: password, or else user, and the query's values."""
    yield url.password or url.username
    yield from url.params.values()


def _pair(login: tuple[str, str]) -> str:
    return base64.b64encode(":".join(login).encode()).decode()


def _proxy_logins() -> Iterator[str]:
    for proxy in getproxies().values():
        with suppress(httpx.InvalidURL):
            yield from _login_of(httpx.URL(proxy))


def _words(value: str) -> Iterator[str]:
    for word in value.split():
        if len(word) < SECRET_MIN_CHARS or word.lower() in _SCHEMES:
            continue
        yield word
        user, _, password = _login(word).partition(":")
        yield from (part for part in (user, password) if password and len(part) >= SECRET_MIN_CHARS)


def _login(word: str) -> str:
    """Decode `user:password` from the word of a Basic header; empty for other words."""
    try:
        return base64.b64decode(word, validate=True).decode()
    except (NoBase64, ValueError):
        return ""


def _forms(word: str) -> Iterator[str]:
    data = word.encode("utf-8", "surrogateescape")
    yield word
    yield data.hex()
    for before in range(3):  # base64 depends on how many bytes come before, modulo 3
        encoded = base64.b64encode(b"\0" * before + data).decode()
        known = encoded[-(-before * 8 // 6) : (before + len(data)) * 8 // 6]
        yield known
        yield known.replace("+", "-").replace("/", "_")


def _parts(form: str) -> tuple[str, ...]:
    # Half a short password in hexadecimal could be a part of any id.
    if len(form) < _HALVED_MIN_CHARS or _HEXADECIMAL.fullmatch(form):
        return (form,)
    middle = len(form) // 2
    return form[:middle], form[middle:]


def _pattern(form: str) -> str:
    head, *tail = _parts(form)
    if not tail:
        return re.escape(head)
    # After the first half of a key, as many characters go as the rest has, whatever they are.
    return rf"{re.escape(head)}\S{{0,{len(tail[0])}}}|{re.escape(tail[0])}"


def _readings(text: str) -> Iterator[str]:
    """Yield the text, its decodings up to several layers, and the result without white space."""
    yield text
    for _ in range(_DECODINGS_MAX):
        before = text
        for decode in _DECODERS:
            decoded = decode(text)
            if decoded != text:
                yield decoded  # after each decoder, since a key itself may look encoded
            text = decoded
        if text == before:
            break
    yield "".join(text.split())


def _unescape(text: str) -> str:
    return _ESCAPED.sub(_unescaped, text)


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2]
    return chr(int(code, 16)) if code else _CHARACTERS.get(match[3], match[3])


_DECODERS = (_unescape, unquote, html.unescape)
