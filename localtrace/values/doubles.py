"""Doubles stored as floats and rests: what rounding took away, so that both together are exact."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from localtrace.values.arrow_arrays import array_of

_TOGETHER = 12
"""Lists converted at once, so few that a cache holds them."""


def floats(values: Sequence[Any]) -> pa.Array:
    """Return doubles as floats, null where they are; those beyond floats become infinite."""
    if isinstance(values, array) and values.typecode == "f":
        return pa.Array.from_buffers(pa.float32(), len(values), [None, pa.py_buffer(values)])
    if isinstance(values, list | tuple) and None in values:
        return array_of(values, pa.float64()).cast(pa.float32(), safe=False)
    return _doubles(values).cast(pa.float32(), safe=False)


def _doubles(values: Sequence[float]) -> pa.Array:
    is_packed = isinstance(values, array) and values.typecode == "d"
    doubles = values if is_packed else array("d", values)
    return pa.Array.from_buffers(pa.float64(), len(doubles), [None, pa.py_buffer(doubles)])


def rests(values: Sequence[float]) -> pa.Array | None:
    """Return how far each double is from its float, in units in the last place of the double.

    None where a distance is too large to store, as for a double beyond the range of floats.
    """
    import pyarrow.compute as pc  # reading alone does without

    if isinstance(values, array) and values.typecode == "f":
        return pa.nulls(0, pa.int32())
    exact = _doubles(values).view(pa.int64())
    kept = floats(values).cast(pa.float64()).view(pa.int64())
    try:
        return pc.subtract(exact, kept).cast(pa.int32())  # both have one sign: in 64 bits
    except pa.ArrowInvalid:
        return None


def all_floats(lists: Sequence[Any]) -> list[Any]:
    """Return lists of which arrays of doubles have become floats."""
    return _converted(lists, floats)


def all_rests(lists: Sequence[Any]) -> list[Any]:
    """Return lists of which arrays of doubles have become rests; null where none is other than 0.

    The doubles are near floats.
    """
    return [part if part and _has_any(part) else None for part in _converted(lists, rests)]


def _converted(lists: Sequence[Any], convert: Callable[[Any], Any]) -> list[Any]:
    """Convert the arrays of doubles, many at once: a call of Arrow takes as long as 16,000."""
    result = list(lists)
    places = [place for place, part in enumerate(lists) if isinstance(part, array)]
    for start in range(0, len(places), _TOGETHER):
        together = places[start : start + _TOGETHER]
        whole, end = convert(array("d", b"".join(lists[place] for place in together))), 0
        for place in together:
            result[place] = whole.slice(end, len(lists[place]))
            end += len(lists[place])
    return result


def _has_any(rests: pa.Array) -> bool:
    data = rests.buffers()[1].slice(4 * rests.offset, 4 * len(rests))
    return bool(data.to_pybytes().strip(b"\0"))


def exact(floats: Sequence[float], rests: Sequence[int]) -> list[float]:
    """Return the doubles that floats were before rounding."""
    bits = array("q", map(int.__add__, _bits(array("d", floats).tobytes()), rests))
    return array("d", bits.tobytes()).tolist()


def _bits(doubles: bytes) -> list[int]:
    return array("q", doubles).tolist()
