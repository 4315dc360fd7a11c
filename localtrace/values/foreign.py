"""Objects of other libraries, moments, numbers and texts, as what MessagePack has a form for."""

from __future__ import annotations

import enum
import sys
from collections.abc import Set as AbstractSet
from datetime import datetime, time, timezone
from pathlib import PurePath
from typing import Any

import msgspec

from localtrace.values.arrays import extension
from localtrace.values.exceptions import message_of
from localtrace.values.images import image_fields, is_copyable
from localtrace.values.kinds import (
    is_kind,
    is_loaded_kind,
    loaded,
    names_of,
    own_fields,
    package_of,
)
from localtrace.values.numpy_values import plain_numpy
from localtrace.values.objects import length_of, mapped
from localtrace.values.placeholder import left_out
from localtrace.values.plain import (
    Budget,
    is_leaf,
    leaf_size,
)
from localtrace.values.tensors import is_stand_in, is_tensor

_encode = msgspec.msgpack.Encoder().encode
_INT_MAX_BITS = 14_000
"""Longest integer: Python refuses to write or read decimal ones of more than 4,300 digits."""
_ZONES = ("dateutil", "pytz")
"""Packages whose time zones may be asked."""
_real: Any = complex.__dict__["real"].__get__
_imaginary: Any = complex.__dict__["imag"].__get__


def plain_object(value: Any, packages: AbstractSet[str], budget: Budget, kept: bool) -> Any:
    """Return what to encode in place of an object that is neither a map nor a list.

    Args:
        packages: the `packages_of` its type.
        budget: what is left for it.
        kept: whether images are kept.

    Raises:
        TooLarge: the budget is too small.
    """
    kind = type(value)
    name = names_of(kind)[1]
    if "numpy" in packages and (
        is_loaded_kind(kind, "numpy", "ndarray") or is_loaded_kind(kind, "numpy", "generic")
    ):
        return plain_numpy(value, budget)
    if "omegaconf" in packages and is_loaded_kind(kind, "omegaconf.basecontainer", "BaseContainer"):
        return _plain_config(value)
    if package_of(kind) == "openai" and name in ("NotGiven", "Omit"):
        return None  # what stands for an argument that was not given
    if "PIL" in packages:
        if kept and is_copyable(value):
            return image_fields(value)
        return left_out("unsupported" if kept else "dropped", value)
    if is_kind(kind, enum.Enum):
        return own_fields(value)["_value_"]
    if is_kind(kind, complex):
        return extension("complex", _real(value), _imaginary(value))
    if is_kind(kind, BaseException):
        return f"{name}: {message_of(value)}"
    if kind is datetime or kind is time:
        return _moment(value)
    if kind is memoryview:
        budget.take(1, value.nbytes)
        return msgspec.Raw(_encode(value))
    if kind is msgspec.msgpack.Ext:
        budget.take(1, len(value.data))
        return value
    if package_of(kind) == "pathlib" and is_kind(kind, PurePath):
        return str(value)
    return left_out("unsupported", value)


def _moment(value: datetime | time) -> Any:
    try:
        if _has_known_zone(value):
            return msgspec.Raw(_encode(value))
    except Exception:  # UTC has no such moment
        pass
    return left_out("unsupported", value)


def is_empty(value: Any) -> bool:
    """Tell whether a value is None, or has no items or bytes."""
    pairs, kind = mapped(value), type(value)
    if pairs is not None:
        return not dict.__len__(pairs)
    if is_tensor(value):
        return not value.numel()
    if is_loaded_kind(kind, "numpy", "ndarray"):
        return not sys.modules["numpy"].ndarray.size.__get__(value)
    if is_leaf(value):
        return value is None or not leaf_size(value)
    return length_of(value) == 0


def _has_known_zone(value: datetime | time) -> bool:
    zone = value.tzinfo
    if zone is None or type(zone) is timezone:
        return True
    return type(zone) is loaded("zoneinfo", "ZoneInfo") or package_of(type(zone)) in _ZONES


def _plain_config(value: Any) -> Any:
    """Return a configuration with its references resolved if all of them can be."""
    to_container = sys.modules["omegaconf"].OmegaConf.to_container
    try:
        return to_container(value, resolve=True)
    except BaseException:  # a resolver of the caller's own may raise anything
        return to_container(value, resolve=False)


def memory_tensor(value: Any, budget: Budget) -> Any:
    """Return what to encode in place of a tensor in memory.

    Raises:
        TypeError: it has no memory of its own.
    """
    if is_stand_in(value):
        raise TypeError("a tensor without memory")
    value = value.detach()
    if str(value.dtype) in ("torch.bfloat16", "torch.float16"):
        value = value.float()
    return plain_numpy(value.numpy(), budget)


def plain_text(value: str) -> Any:
    """Return a text of Python's own type, or what stands for one with lone surrogates."""
    try:
        str.encode(value)
        return str.__str__(value)
    except UnicodeEncodeError:
        return extension("str", str.encode(value, "utf-8", "surrogatepass"))


def plain_int(value: int) -> Any:
    """Return an integer, or what stands for one of more than 64 bits."""
    if -(2**63) <= value < 2**64:
        return value
    if value.bit_length() > _INT_MAX_BITS:
        return left_out("too_large", value, value.bit_length() // 8)
    return extension("int", hex(value))
