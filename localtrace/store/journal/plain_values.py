"""Values of records made plain: numbers, lists, texts, and the outcomes of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from localtrace.store.journal.records import OutcomeRecord
from localtrace.values import codec
from localtrace.values.arrays import read_array


def as_list(value: Any) -> Any:
    """Return an array as a list, and anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def as_number(value: Any) -> float | None:
    """Return a number as a double; None for anything else, or where it is too large."""
    try:
        return float(value) if isinstance(value, bool | int | float) else None
    except OverflowError:
        return None


def outcome_items(record: OutcomeRecord, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the outcome `name` of each trajectory that has one, as (trace id, value).

    Where all values of a batch are float32 arrays, they come as memoryviews of floats.
    """
    items: Any = _float_rows(record.values[name]) if record.batch else None
    if items is None:
        value = as_list(codec.decode(record.values[name]))
        in_batch = record.batch and isinstance(value, list)
        items = value if in_batch else [value] * len(record.trace_ids)
    for trace_id, item in zip(record.trace_ids, items, strict=False):
        if item is not None:
            yield trace_id, item


def _float_rows(data: msgspec.Raw) -> list[memoryview] | None:
    try:
        items = _LIST_DECODER.decode(data)
    except msgspec.MsgspecError:
        return None
    rows = []
    for item in items:
        array = read_array(item)
        if array is None or array.dtype != "<f4" or len(array.shape) != 1:
            return None
        rows.append(array.values())
    return rows


_LIST_DECODER = msgspec.msgpack.Decoder(list[msgspec.Raw])
