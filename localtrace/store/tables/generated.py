"""The columns of a row that hold the result of one generation."""

from __future__ import annotations

from array import array
from typing import Any

import pyarrow as pa

from localtrace.field_names import (
    FINISH_NAMES,
    LOGPROB_NAMES,
    MASK_NAMES,
    OUTPUT_NAMES,
    WEIGHT_NAMES,
    WEIGHT_RANGE_NAMES,
)
from localtrace.store.journal.plain_values import as_list
from localtrace.store.journal.results import (
    Fields,
    engine_logprobs,
    message_of,
    named_value,
    with_details,
)
from localtrace.values import codec
from localtrace.values.doubles import read_doubles, rests, rounded
from localtrace.values.encoded import first_named
from localtrace.values.plain_json import valid_text

Row = dict[str, Any]
"""A row of the table `spans`, by column name."""
_CODES = {pa.int32(): "i", pa.int8(): "b"}
_NAMES = ("output_name", "logprobs_name", "logprobs_rest", "mask_name")


def take_tokens(fields: Fields, row: Row) -> None:
    """Move a result's ids, log-probabilities and mask into columns, if it has ids."""
    _take(fields, OUTPUT_NAMES, row, "output_name", "output_ids", pa.int32())
    if "output_ids" in row:
        _take(fields, LOGPROB_NAMES, row, "logprobs_name", "output_logprobs", pa.float32())
        _take(fields, MASK_NAMES, row, "mask_name", "response_mask", pa.int8())


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
        found: Row = {}
        take_tokens(dict(fields), found)
        # The result keeps these lists too, so no name says that they belong back into it.
        row |= {name: value for name, value in found.items() if name not in _NAMES}
    if row.get("output_ids") is not None and row.get("output_logprobs") is None:
        row["output_logprobs"] = narrow(engine_logprobs(fields), pa.float32())
    row |= {name: value for name, value in told_columns(fields).items() if row.get(name) is None}
    message = message_of(fields)
    row["output_text"] = _text(message.text)
    parts = message.parts()
    row["output_message"] = None if parts is None else valid_text(codec.to_json(parts))


def narrow(values: Any, kind: pa.DataType) -> pa.Array | None:
    """Turn a list of numbers into a column's list; None where it is not one, or does not fit."""
    if isinstance(values, array):  # of doubles
        return rounded(values)
    wanted = {float} if kind == pa.float32() else {int}
    if not isinstance(values, list) or not set(map(type, values)) <= wanted:
        return None
    if kind == pa.float32():
        return rounded(values)
    try:
        numbers = array(_CODES[kind], values)
    except OverflowError:
        return None
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])


def _take(
    fields: Fields,
    names: tuple[str, ...],
    row: Row,
    name_column: str,
    column: str,
    kind: pa.DataType,
) -> None:
    """Copy a list of numbers from a result into a column.

    The result loses the list if the column holds it exactly. What floats round away goes into
    `logprobs_rest`; where that is not exact either, the list stays in both places.
    """
    name = first_named(fields, names)
    if name is None:
        return
    values = read_doubles(bytes(fields[name])) if kind == pa.float32() else None
    values = as_list(codec.decode(fields[name])) if values is None else values
    narrowed = narrow(values, kind)
    if narrowed is None:
        return
    row[column] = narrowed
    left = rests(values) if kind == pa.float32() else []
    if left is None:
        return
    row[name_column] = name
    del fields[name]
    if any(left):
        row["logprobs_rest"] = pa.array(left, pa.int32())


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
