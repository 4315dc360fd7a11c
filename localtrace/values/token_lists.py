"""Lists with one number per token, brought to one form whatever form they came in.

Such a list is a list, tuple, array or tensor of one dimension; one of two dimensions with a single
row is that row. Its numbers are booleans, integers or floats of any width. All of it works on
encoded values, and decodes no more of a usual list than its numbers.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from localtrace.values.arrays import EXT_CODES, Array, array_hook
from localtrace.values.encoded import list_elements

_DOUBLE = b"\xcb"
"""The first byte of a double in MessagePack; eight more follow, the highest first."""
_INT32 = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
_IDS_DECODER = msgspec.msgpack.Decoder(list[_INT32])
_NUMBERS = frozenset({bool, int, float, type(None)})
_AS_NUMBER = bytes.maketrans(b"\xc2\xc3", b"\x00\x01")
"""The number that the one byte of an encoded boolean or small integer stands for."""
_SMALL = bytes(range(128))
_BOOLEANS = b"\xc2\xc3"


class TokenList(NamedTuple):
    """The numbers of a list, one per token."""

    values: Sequence[Any]
    """Ids, or an array of an 8-bit mask; log-probabilities as an array of doubles or floats, or as
    a list where some are null."""
    is_exact: bool
    """Whether these values as a list are all that was recorded; arrays are recorded as lists."""


def read_ids(data: bytes | msgspec.Raw) -> TokenList | None:
    """Return token ids; None where they are no list, or not all whole numbers of 32 bits."""
    try:
        return TokenList(_IDS_DECODER.decode(data), True)
    except msgspec.MsgspecError:
        found = _read(data)
    return None if found is None or _holds(found, bool) else _whole(found, "i")


def read_mask(data: bytes | msgspec.Raw) -> TokenList | None:
    """Return a mask; None where it is no list, or not all booleans or whole numbers of 8 bits."""
    listed = list_elements(bytes(data))
    if listed is not None and len(listed[1]) == listed[0]:  # one byte each
        left = listed[1].translate(None, _SMALL)
        if not left.strip(_BOOLEANS):
            return TokenList(array("b", listed[1].translate(_AS_NUMBER)), not left)
    found = _read(data)
    return None if found is None else _whole(found, "b")


def read_logprobs(data: bytes | msgspec.Raw, ids: Sequence[int]) -> TokenList | None:
    """Return log-probabilities, null where none is known; None where they cannot be used.

    Args:
        data: numbers, or of each token several alternatives, as vLLM, SGLang and OpenAI give them.
        ids: ids of the tokens, which tell the sampled one among alternatives.
    """
    doubles = _doubles(data)
    if doubles is not None:
        return TokenList(doubles, True)
    found = _read(data)
    if found is None:
        return _sampled(_decoded(data), ids)
    values, is_exact = found
    if _holds(found, bool):
        return None
    if isinstance(values, memoryview) and values.format in ("f", "d"):
        return TokenList(array(values.format, values.tobytes()), is_exact)
    return TokenList([None if one is None else float(one) for one in values], False)


def read_numbers(data: bytes | msgspec.Raw) -> Sequence[float | None] | None:
    """Return the numbers of a list or array, with those that are null; None for anything else."""
    doubles = _doubles(data)
    if doubles is not None:
        return doubles
    found = _read(data)
    return None if found is None else found.values


def read_doubles(data: bytes) -> array[float] | None:
    """Return an encoded list of doubles, many times faster than a decoder; None for others."""
    found = list_elements(data)
    if found is None:
        return None
    count, elements = found
    if len(elements) != 9 * count or elements[::9] != _DOUBLE * count:
        return None
    packed = bytearray(8 * count)
    for place in range(8):
        packed[place::8] = elements[1 + place :: 9]
    doubles = array("d", packed)
    if sys.byteorder == "little":
        doubles.byteswap()
    return doubles


def _doubles(data: bytes | msgspec.Raw) -> array[float] | None:
    is_array = memoryview(data)[:1] in EXT_CODES  # not copied, as it may be large
    return None if is_array else read_doubles(bytes(data))


# -- every form ----------------------------------------------------------------------------------


class _Unreadable:
    """A stand-in for a value of a type that is no number."""


def _hook(code: int, data: memoryview) -> Array | _Unreadable:
    return array_hook(code, data) or _Unreadable()


_DECODER = msgspec.msgpack.Decoder(ext_hook=_hook)


def _decoded(data: bytes | msgspec.Raw) -> Any:
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, TypeError, RecursionError):  # TypeError: a list that is a key
        return None


def _read(data: bytes | msgspec.Raw) -> TokenList | None:
    """Return numbers of whatever types as they are."""
    value, is_exact = _decoded(data), True
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list | Array):
        value, is_exact = value[0], False
    if isinstance(value, list):
        return TokenList(value, is_exact) if _NUMBERS.issuperset(map(type, value)) else None
    if not isinstance(value, Array) or value.dtype[1] not in "biuf":
        return None
    *rows, _ = value.shape
    if rows not in ([], [1]):
        return None
    try:
        return TokenList(value.values(), is_exact and not rows)
    except (KeyError, TypeError, ValueError):  # floats of 16 bytes, say
        return None


def _holds(found: TokenList, kind: type) -> bool:
    if isinstance(found.values, memoryview):
        return found.values.format == "?" and kind is bool
    return kind in set(map(type, found.values))


def _whole(found: TokenList, code: str) -> TokenList | None:
    """Return whole numbers as an array of this type; None where they are none, or do not fit."""
    values = list(found.values)
    is_ints = isinstance(found.values, memoryview) and found.values.format in "bBhHiIqQ"
    kinds = {int} if is_ints else set(map(type, values))
    try:
        numbers = array(code, values if kinds <= {int} else map(_whole_number, values))
    except (OverflowError, ValueError):
        return None
    return TokenList(numbers, found.is_exact and kinds <= {int})


def _whole_number(value: float | None) -> int:
    if value is None or int(value) != value:  # int refuses what is not finite
        raise ValueError(value)
    return int(value)


# -- alternatives to the sampled token -----------------------------------------------------------


def _sampled(value: Any, ids: Sequence[int]) -> TokenList | None:
    """Return the values of the sampled tokens among alternatives; None where there are none."""
    if isinstance(value, dict):  # OpenAI's: of a chat, or of a completion
        value = value.get("content") or value.get("token_logprobs")
    if not isinstance(value, list) or len(value) != len(ids):
        return None
    found = [_value_of(one, chosen) for one, chosen in zip(value, ids, strict=True)]
    kinds = set(map(type, found))
    if not kinds <= {float, int, type(None)} or (kinds == {type(None)} and any(value)):
        return None
    return TokenList([None if one is None else float(one) for one in found], False)


def _value_of(entry: Any, chosen: int) -> Any:
    """Return the value of the sampled token: a number, or null where it is not there."""
    if isinstance(entry, Mapping):
        if "logprob" in entry:  # OpenAI's entry of the sampled token
            return entry["logprob"]
        value = entry.get(chosen, entry.get(str(chosen)))
        return value.get("logprob") if isinstance(value, Mapping) else value
    if isinstance(entry, list):  # SGLang's (logprob, id, text)
        return entry[0] if len(entry) > 1 and entry[1] == chosen else None
    return entry
