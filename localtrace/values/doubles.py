"""Doubles stored as floats and rests: what rounding took away, so that both together are exact."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pyarrow as pa


def floats(values: Sequence[Any]) -> pa.Array:
    """Return doubles as floats, null where they are; those beyond floats become infinite."""
    if isinstance(values, array) and values.typecode == "f":
        return pa.Array.from_buffers(pa.float32(), len(values), [None, pa.py_buffer(values)])
    if isinstance(values, list | tuple) and None in values:
        return pa.array(values, pa.float64()).cast(pa.float32(), safe=False)
    doubles = array("d", values)
    whole = pa.Array.from_buffers(pa.float64(), len(doubles), [None, pa.py_buffer(doubles)])
    return whole.cast(pa.float32(), safe=False)


def rests(values: Sequence[float]) -> pa.Array | None:
    """Return how far each double is from its float, in units in the last place of the double.

    None where a distance is too large to store, as for a double beyond the range of floats.
    """
    import pyarrow.compute as pc  # reading alone does without

    if isinstance(values, array) and values.typecode == "f":
        return pa.nulls(0, pa.int32())
    doubles = array("d", values)
    exact = pa.Array.from_buffers(pa.int64(), len(doubles), [None, pa.py_buffer(doubles)])
    kept = floats(doubles).cast(pa.float64()).view(pa.int64())
    try:
        return pc.subtract_checked(exact, kept).cast(pa.int32())
    except pa.ArrowInvalid:
        return None


def exact(floats: Sequence[float], rests: Sequence[int]) -> list[float]:
    """Return the doubles that floats were before rounding."""
    bits = array("q", map(int.__add__, _bits(array("d", floats).tobytes()), rests))
    return array("d", bits.tobytes()).tolist()


def _bits(doubles: bytes) -> list[int]:
    return array("q", doubles).tolist()
