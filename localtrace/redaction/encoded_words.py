"""Secrets in encoded words: percent-encoded URLs and forms, and base64 of a text."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Iterator
from urllib.parse import unquote

from localtrace.redaction.found import Found

NAME = "secret in encoded text"

_BASE64 = re.compile(r"(?<![A-Za-z0-9+/_-])(?=[a-z0-9+/_-]{0,20}[A-Z])[A-Za-z0-9+/_-]{16,}+={0,2}")
"""Base64 of a text has a capital among its first letters; words and paths mostly have none."""
_FIRST_LETTERS = 24
"""Letters of base64 that tell whether the rest is worth decoding; they hold 18 bytes."""
_STANDARD = str.maketrans("-_", "+/")


def find_encoded(
    words: Iterable[re.Match[str]],
    known: Iterable[Found],
    search: Callable[[str, bool], Iterable[Found]],
) -> Iterator[Found]:
    """Yield the words of a text that hold more secrets once decoded than as they are.

    Args:
        words: the long words of the text.
        known: the secrets that were found in the text as it is.
        search: returns the secrets of a decoded text; the second argument asks to search strictly.
    """
    starts = sorted(one.start for one in known)
    for word in words:
        if "%" in word[0] and (plain := unquote(word[0])) != word[0]:
            shown = sum(word.start() <= start < word.end() for start in starts)
            if len(list(search(plain, False))) > shown:
                yield Found(*word.span(), NAME)
        for match in _BASE64.finditer(word.string, *word.span()):
            text = _text_of(match[0])
            if text is not None and any(True for _ in search(text, True)):
                yield Found(*match.span(), NAME)


def _text_of(letters: str) -> str | None:
    """Return the text that base64 letters stand for; None where they stand for other data."""
    letters = letters.rstrip("=").translate(_STANDARD)
    if _printable(letters[:_FIRST_LETTERS], "ignore") is None:
        return None
    return _printable(letters, "strict")


def _printable(letters: str, errors: str) -> str | None:
    try:
        data = base64.b64decode(letters + "=" * (-len(letters) % 4))
        text = data.decode("utf-8", errors)
    except ValueError:
        return None
    is_text = len(text.encode()) > len(data) - 4 and "".join(text.split()).isprintable()
    return text if is_text else None
