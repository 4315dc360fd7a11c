"""Matches of rules in a text, and the marks that replace them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple


class Match(NamedTuple):
    """A part of a text that a rule found."""

    start: int
    end: int
    name: str
    """Name of the rule."""
    replacement: str | None = None
    """Text to stand there instead; None for the mark of the rule."""


def mark(name: str) -> str:
    """Return the mark that replaces what the rule of this name found."""
    return f"[redacted: {name}]"


def apart(matches: Iterable[Match]) -> list[Match]:
    """Return matches in order, overlapping ones joined under the name of the first."""
    joined: list[Match] = []
    for match in sorted(matches, key=lambda match: match.start):
        if joined and match.start < joined[-1].end:
            joined[-1] = joined[-1]._replace(end=max(joined[-1].end, match.end))
        else:
            joined.append(match)
    return joined


def replaced(text: str, matches: Iterable[Match]) -> str:
    """Return the text with every match replaced. The matches are in order and do not overlap."""
    parts, end = [], 0
    for match in matches:
        new = mark(match.name) if match.replacement is None else match.replacement
        parts += [text[end : match.start], new]
        end = match.end
    return "".join([*parts, text[end:]])


def with_pseudonyms(text: str, matches: Iterable[Match]) -> str:
    """Return the text with a pseudonym in place of every match; equal matches get equal ones."""
    return replaced(
        text, [match._replace(replacement=_pseudonym(text[slice(*match[:2])])) for match in matches]
    )


@lru_cache(1024)
def _pseudonym(secret: str) -> str:
    # Slow on purpose: a short secret could be guessed from a plain hash.
    digest = hashlib.scrypt(
        secret.encode("utf-8", "replace"), salt=b"localtrace", n=2**14, r=8, p=1, dklen=6
    )
    return f"redacted-{digest.hex()}"
