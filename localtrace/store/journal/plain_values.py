"""Values of records made plain: numbers, lists, texts, and the outcomes of batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from localtrace.field_names import TOKEN_OUTCOMES
from localtrace.store.journal.records import OutcomeRecord
from localtrace.values import codec
from localtrace.values.encoded import is_list, is_list_of_lists, raw_items
from localtrace.values.token_lists import read_numbers


def as_number(value: Any) -> float | None:
    """Return a number as a double; None for anything else, or where it is too large."""
    try:
        return float(value) if isinstance(value, bool | int | float) else None
    except OverflowError:
        return None


def outcome_items(record: OutcomeRecord, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the outcome `name` of each trajectory that has one, as (trace id, value).

    A list of numbers comes as a sequence that is no list. Values per token, by their name, may be
    the one row of an array, and null where they are not known.
    """
    data, is_per_token = record.values[name], name in TOKEN_OUTCOMES
    if not record.batch:
        value = _plain(data, is_per_token)
        items = [value] * len(record.trace_ids)
    elif _has_lists(data):
        items = [_plain(item, is_per_token) for item in raw_items(data) or ()]
    else:
        value = codec.decode(data)
        value = value.tolist() if hasattr(value, "tolist") else value
        items = value if isinstance(value, list) else [value] * len(record.trace_ids)
    for trace_id, item in zip(record.trace_ids, items, strict=False):
        if item is not None:
            yield trace_id, item


def unusable_lists(record: OutcomeRecord) -> int:
    """Count the lists of per-token values that are no lists of numbers."""
    found = 0
    for name in TOKEN_OUTCOMES.intersection(record.values):
        data = record.values[name]
        items = (raw_items(data) or ()) if record.batch else (data,)
        found += sum(is_list(item) and read_numbers(item) is None for item in items)
    return found


def _has_lists(data: msgspec.Raw) -> bool:
    """Tell whether a batch has a list for one of its trajectories at least."""
    return any(map(is_list, raw_items(data) or ()))


def _plain(data: msgspec.Raw, is_per_token: bool) -> Any:
    numbers = read_numbers(data)
    if numbers is None or not (is_per_token or _is_plain_list(data, numbers)):
        value = codec.decode(data)
        return value.tolist() if hasattr(value, "tolist") else value
    return tuple(numbers) if isinstance(numbers, list) else numbers


def _is_plain_list(data: msgspec.Raw, numbers: Sequence[float | None]) -> bool:
    """Tell whether numbers are all there is to a list: it has no second dimension and no null."""
    has_null = isinstance(numbers, list) and None in numbers
    return not has_null and not is_list_of_lists(data)
