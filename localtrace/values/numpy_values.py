"""Arrays and scalars of NumPy as plain values, without importing it: that one exists proves that
it is loaded."""

from __future__ import annotations

import sys
from typing import Any

from localtrace.values.arrays import extension
from localtrace.values.kinds import is_kind, loaded, package_of
from localtrace.values.placeholder import left_out
from localtrace.values.plain import Budget, is_number


def plain_numpy(value: Any, budget: Budget) -> Any:
    """Return what to encode in place of an array or a scalar; its size is asked before its data.

    Raises:
        TooLarge: the budget is too small.
    """
    numpy: Any = sys.modules["numpy"]
    kind = type(value)
    if is_kind(kind, numpy.generic):
        # NumPy looks up the type of a scalar by its hash, for which a metaclass may have code.
        is_own = type(kind) is type
        return _plain_scalar(numpy, value, budget) if is_own else left_out("unsupported", value)
    masked = loaded("numpy.ma", "MaskedArray")
    is_masked = masked is not None and is_kind(kind, masked)
    if is_masked and kind is not masked:
        return left_out("unsupported", value)
    array = numpy.ndarray.view(value, numpy.ndarray)  # without the methods of a subclass
    dtype, size_bytes = array.dtype, int(array.nbytes)
    if size_bytes > budget.max_bytes:
        return left_out("too_large", value, size_bytes)
    if is_masked or dtype.hasobject or dtype.names:
        budget.take(array.size * len(dtype.names or ("",)) / 4, array.size)
        return value.tolist() if is_masked else array.tolist()
    if array.ndim == 0:
        return _plain_scalar(numpy, array[()], budget)
    budget.take(1, size_bytes)
    if dtype.str[1:] == "f2":
        array = array.astype("<f4")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return extension("ndarray", little.dtype.str, list(little.shape), little.tobytes())


def _plain_scalar(numpy: Any, value: Any, budget: Budget) -> Any:
    dtype = numpy.generic.dtype.__get__(value)
    budget.take(1, dtype.itemsize)
    if dtype.kind in "mM":
        return str(value) if package_of(type(value)) == "numpy" else left_out("unsupported", value)
    plain = numpy.generic.item(value)
    return left_out("unsupported", value) if is_kind(type(plain), numpy.generic) else plain


def plain_numbers(items: list[Any]) -> list[Any] | None:
    """Return a list of NumPy's and Python's numbers as Python's own; None where it holds more."""
    generic: Any = loaded("numpy", "generic")
    if generic is None:
        return None
    plain = [
        generic.item(item) if is_kind(type(item), generic) and type(type(item)) is type else item
        for item in items
    ]
    return plain if all(map(is_number, plain)) else None
