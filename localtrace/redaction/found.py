"""Matches of rules in a text, and the marks that replace them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple


class Found(NamedTuple):
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


def apart(found: Iterable[Found]) -> list[Found]:
    """Return matches in order, overlapping ones joined under the name of the earlier rule."""
    found = list(found)
    if len(found) < 2:
        return found
    ranked = sorted(enumerate(found), key=lambda one: one[1].start)
    joined: list[tuple[int, Found]] = []
    for rank, one in ranked:
        if joined and one.start < joined[-1][1].end:
            first, last = joined[-1]
            leading = last if first < rank else one
            joined[-1] = (
                min(first, rank),
                leading._replace(start=last.start, end=max(last.end, one.end)),
            )
        else:
            joined.append((rank, one))
    return [one for _, one in joined]


def replaced(text: str, found: Iterable[Found]) -> str:
    """Return the text with every match replaced. The matches are in order and do not overlap."""
    parts, end = [], 0
    for one in found:
        parts += [
            text[end : one.start],
            mark(one.name) if one.replacement is None else one.replacement,
        ]
        end = one.end
    return "".join([*parts, text[end:]])


def with_pseudonyms(text: str, found: Iterable[Found]) -> str:
    """Return the text with a pseudonym in place of every match; equal matches get equal ones."""
    return replaced(
        text,
        [one._replace(replacement=_pseudonym(text[one.start : one.end])) for one in found],
    )


@lru_cache(1024)
def _pseudonym(secret: str) -> str:
    # Slow on purpose: a short secret could be guessed from a plain hash.
    digest = hashlib.scrypt(
        secret.encode("utf-8", "replace"), salt=b"localtrace", n=2**14, r=8, p=1, dklen=6
    )
    return f"redacted-{digest.hex()}"
