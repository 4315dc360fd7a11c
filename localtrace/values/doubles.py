"""Doubles stored as floats and rests: what rounding took away, so that both together are exact."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

_REST_MAX = 2**31


def floats(values: Sequence[Any]) -> pa.Array:
    """Return doubles as floats, null where they are; those beyond floats become infinite."""
    if isinstance(values, array) and values.typecode == "f":
        return pa.Array.from_buffers(pa.float32(), len(values), [None, pa.py_buffer(values)])
    if isinstance(values, list | tuple) and None in values:
        return pa.array(values, pa.float64()).cast(pa.float32(), safe=False)
    doubles = array("d", values)
    whole = pa.Array.from_buffers(pa.float64(), len(doubles), [None, pa.py_buffer(doubles)])
    return whole.cast(pa.float32(), safe=False)


def rests(values: Sequence[float]) -> list[int] | None:
    """Return how far each double is from its float, in units in the last place of the double.

    None where a distance is too large to store, as for a double beyond the range of floats.
    """
    if isinstance(values, array) and values.typecode == "f":
        return []
    exact = array("d", values).tobytes()
    kept = floats(values).cast(pa.float64()).buffers()[1].to_pybytes()
    if exact == kept:
        return [0] * len(values)
    rests = [a - b for a, b in zip(_bits(exact), _bits(kept), strict=True)]
    return rests if all(-_REST_MAX <= rest < _REST_MAX for rest in rests) else None


def exact(floats: Sequence[float], rests: Sequence[int]) -> list[float]:
    """Return the doubles that floats were before rounding."""
    bits = array("q", map(int.__add__, _bits(array("d", floats).tobytes()), rests))
    return array("d", bits.tobytes()).tolist()


def _bits(doubles: bytes) -> list[int]:
    return array("q", doubles).tolist()
