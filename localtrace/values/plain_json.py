"""Values in the words of plain JSON, which every reader takes.

NaN and the infinities become the texts NaN, Infinity and -Infinity, so that they differ from null.
Halves of characters (lone surrogates), which no UTF-8 can hold, become question marks.
"""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec

_AS_THEY_ARE = frozenset({int, bool, type(None)})


def plain_json(value: Any) -> Any:
    """Return a number, a text, or a list or dict of such values, as plain JSON holds it."""
    kind = type(value)
    if kind is float:
        return json_number(value)
    if kind is str:
        return valid_text(value)
    if kind in (list, tuple):
        if _AS_THEY_ARE.issuperset(map(type, value)):
            return value
        return [plain_json(item) for item in value]
    if kind is dict:
        return {plain_json(key): plain_json(item) for key, item in value.items()}
    return value


def json_number(value: float) -> float | str:
    """Return a finite number as it is, and another one as a text."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def valid_text(text: str) -> str:
    """Return a text with a question mark for each lone surrogate."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def decode_json(data: bytes) -> Any:
    """Read JSON, including NaN and lone surrogates, which Python's `json` writes.

    Raises:
        ValueError, RecursionError: the data is not JSON, or nested too deeply.
    """
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return json.loads(data)
