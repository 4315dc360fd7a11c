"""The columns of a row that hold the result of one generation."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pyarrow as pa

from localtrace.field_names import (
    FINISH_NAMES,
    LOGPROB_NAMES,
    MASK_NAMES,
    OUTPUT_NAMES,
    WEIGHT_NAMES,
    WEIGHT_RANGE_NAMES,
)
from localtrace.store.journal.results import (
    Fields,
    has_ids,
    message_of,
    named_value,
    token_lists,
    with_details,
)
from localtrace.values import codec
from localtrace.values.doubles import floats, rests
from localtrace.values.encoded import first_named
from localtrace.values.plain_json import valid_text
from localtrace.values.token_lists import TokenList, read_ids

Row = dict[str, Any]
"""A row of the table `spans`, by column name."""
_LISTS = {
    "output_ids": pa.int32(), "output_logprobs": pa.float32(), "response_mask": pa.int8(),
}  # fmt: skip
_NAMES = ("output_name", "logprobs_name", "mask_name")


def take_tokens(fields: Fields, row: Row) -> None:
    """Move a result's ids, log-probabilities and mask into columns, if it has ids.

    The result loses a list that the column holds exactly. What floats round away goes into
    `logprobs_rest`; where that is not exact either, the list stays in both places.
    """
    if not has_ids(fields):
        return
    names = [first_named(fields, names) for names in (OUTPUT_NAMES, LOGPROB_NAMES, MASK_NAMES)]
    exact = _add_lists(fields, row)
    for name, name_column, column in zip(names, _NAMES, _LISTS, strict=True):
        if name is not None and column in exact:
            row[name_column] = name
            del fields[name]


def _add_lists(fields: Fields, row: Row) -> set[str]:
    """Add the columns of a generation's lists; return those that hold what was recorded exactly."""
    lists = token_lists(fields)
    exact = set()
    for column, found in zip(_LISTS, (lists.ids, lists.logprobs, lists.mask), strict=True):
        if found is None:
            continue
        row[column], is_exact = _column(found, _LISTS[column]), found.is_exact
        if is_exact and column == "output_logprobs":
            left = rests(found.values)
            is_exact = left is not None
            if left and any(left):
                row["logprobs_rest"] = pa.array(left, pa.int32())
        if is_exact:
            exact.add(column)
    return exact


def _column(found: TokenList, kind: pa.DataType) -> pa.Array:
    if kind == pa.float32():
        return floats(found.values)
    numbers = found.values if isinstance(found.values, array) else array("i", found.values)
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])


def ids_column(data: bytes | msgspec.Raw) -> pa.Array | None:
    """Turn encoded token ids into a column's list; None where it could not hold them exactly."""
    found = read_ids(data)
    return _column(found, pa.int32()) if found is not None and found.is_exact else None


def told_columns(fields: Fields) -> Row:
    """Return the columns of a generation's finish reason and of its weights."""
    known = with_details(fields)
    return {
        "finish_reason": _text(named_value(known, FINISH_NAMES)),
        "weight_version": _text(_weights(known)),
    }


def add_generated(fields: Fields, row: Row) -> None:
    """Add the columns of one generation's result; columns that are filled already stay."""
    if row.get("output_ids") is None:
        # The result keeps these lists too, so no name says that they belong back into it.
        _add_lists(fields, row)
    row |= {name: value for name, value in told_columns(fields).items() if row.get(name) is None}
    message = message_of(fields)
    row["output_text"] = _text(message.text)
    parts = message.parts()
    row["output_message"] = None if parts is None else valid_text(codec.to_json(parts))


def _weights(known: Fields) -> Any:
    """Return the version of the weights that generated, or `first..last` where it changed."""
    first, last = (named_value(known, (name,)) for name in WEIGHT_RANGE_NAMES)
    if None not in (first, last) and first != last:
        return f"{first}..{last}"
    return named_value(known, WEIGHT_NAMES)


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return valid_text(value) if isinstance(value, str) else codec.to_json(value)
