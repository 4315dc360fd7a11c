"""Lists that are or may be token ids, from which redacted text could be decoded."""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

from localtrace.field_names import OUTPUT_NAMES, PROMPT_NAMES
from localtrace.values.placeholder import Placeholder

REASON = "redacted"
IDS = Placeholder(REASON, "list")
_ID_NAMES = frozenset({*PROMPT_NAMES, *OUTPUT_NAMES})
_IDS_AT_LEAST = 9
"""Length from which a list of whole numbers is taken for ids, whatever its name."""


def without_ids(value: Any, rows: list[list[list[int]]]) -> Any:
    """Return a value without lists that may be token ids; the same object if it has none.

    Log-probabilities and masks stay.

    Args:
        value: any value.
        rows: gets the rows of each such list, so that their text can be searched.
    """
    kind = type(value)
    if kind is dict:
        if value.get("$type") == "ndarray":  # an array, read where NumPy is not installed
            return IDS
        edited = {
            key: _without_named(part, rows) if key in _ID_NAMES else without_ids(part, rows)
            for key, part in value.items()
        }
        return value if all(map(is_, edited.values(), value.values())) else edited
    ids = _id_rows(value, _IDS_AT_LEAST)
    if ids is not None:
        rows.append(ids)
        return IDS
    if kind is not list and kind is not tuple:
        return value
    if len(value) >= _IDS_AT_LEAST and all(map(_is_token, value)):
        return IDS
    parts = [without_ids(part, rows) for part in value]
    return value if all(map(is_, parts, value)) else kind(parts)


def _without_named(value: Any, rows: list[list[list[int]]]) -> Any:
    """Return the mark of a list under a name of token ids, also of one that cannot be rebuilt."""
    is_damaged = isinstance(value, Placeholder) and value.reason == "damaged"
    if not (is_damaged or type(value) in (list, tuple) or hasattr(value, "dtype")):
        return without_ids(value, rows)
    ids = _id_rows(value, 1)
    rows += [] if ids is None else [ids]
    return IDS


def _id_rows(value: Any, at_least: int) -> list[list[int]] | None:
    """Return the rows of an array or list of whole numbers, at most nested once; else None.

    Negative numbers are padding. A list without a number above 1 is a mask.
    """
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        value = value.reshape(-1, value.shape[-1]).tolist() if value.dtype.kind in "iuf" else []
    if type(value) not in (list, tuple):
        return None
    is_nested = bool(value) and all(type(row) in (list, tuple) for row in value)
    rows = value if is_nested else [value]
    numbers = [*chain.from_iterable(rows)]
    if len(numbers) < at_least or not set(map(type, numbers)) <= {int, float}:
        return None
    if not all(type(n) is int or n.is_integer() for n in numbers) or max(numbers) <= 1:
        return None
    if len(numbers) < _IDS_AT_LEAST * len(rows):  # short rows, such as pairs, are one text
        rows = [numbers]
    return [[int(number) for number in row if number >= 0] for row in rows]


def _is_token(row: Any) -> bool:
    """Tell whether it is a token beside its log-probability, as engines list them."""
    if type(row) is dict:
        return "token" in row or "token_id" in row or any(type(key) is int for key in row)
    return type(row) in (list, tuple) and {int, float} <= set(map(type, row))
