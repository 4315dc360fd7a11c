"""Objects as plain containers: models, dataclasses, namespaces, lists and maps of known types.

Only what an object stores is read; none of its own methods or properties runs.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from localtrace.values.kinds import (
    bases_of,
    declared,
    is_kind,
    is_loaded_kind,
    own_fields,
    package_of,
    slot,
    stored_fields,
)
from localtrace.values.responses import RESPONSE_PACKAGES, response_fields
from localtrace.values.tensors import is_tensor

_DATACLASS_FIELD: Any = dataclasses._FIELD  # type: ignore[attr-defined]
_ROWS_MAX = 2**17
_LISTS: tuple[Any, ...] = (list, tuple, deque, set, frozenset)


def fields_of(value: Any, packages: AbstractSet[str]) -> dict[str, Any] | None:
    """Return the fields of a model, dataclass, namespace or HTTP response; else None.

    Args:
        packages: the `packages_of` its type.
    """
    kind = type(value)
    if "pydantic" in packages and is_loaded_kind(kind, "pydantic.main", "BaseModel"):
        try:
            extra = slot(value, "__pydantic_extra__")
        except AttributeError:
            extra = None
        return {**own_fields(value), **(extra if type(extra) is dict else {})}
    is_arguments = "argparse" in packages and is_loaded_kind(kind, "argparse", "Namespace")
    if is_arguments or is_kind(kind, types.SimpleNamespace):
        return {**own_fields(value)}
    if is_kind(kind, dict):
        return None
    if "msgspec" in packages and is_kind(kind, msgspec.Struct):
        return _struct_fields(value)
    fields = declared(kind, "__dataclass_fields__")
    if type(fields) is dict:
        names = [
            name
            for name, field in fields.items()
            if type(field) is dataclasses.Field and field._field_type is _DATACLASS_FIELD  # type: ignore[attr-defined]
        ]
        return stored_fields(value, names)
    if declared(kind, "__attrs_attrs__") is not None:
        return _attrs_fields(value)
    return None if packages.isdisjoint(RESPONSE_PACKAGES) else response_fields(value)


def _struct_fields(value: Any) -> dict[str, Any]:
    names: Any = type(msgspec.Struct).__dict__["__struct_fields__"].__get__(type(value))
    given: Any = type(msgspec.Struct).__dict__["__struct_encode_fields__"].__get__(type(value))
    stored = stored_fields(value, list(names))
    return {shown: stored[name] for name, shown in zip(names, given, strict=True) if name in stored}


def _attrs_fields(value: Any) -> dict[str, Any]:
    names = [
        name
        for base in reversed(bases_of(type(value)))
        for name, where in type.__dict__["__dict__"].__get__(base).items()
        if type(where) is types.MemberDescriptorType
    ]
    fields = {**stored_fields(value, names), **own_fields(value)}
    return {name: item for name, item in fields.items() if not name.startswith("_")}


def mapped(value: Any) -> dict[Any, Any] | None:
    """Return the dict that a map of a known type is, or wraps; None for anything else."""
    kind = type(value)
    if is_kind(kind, dict):
        return value  # type: ignore[no-any-return]
    name = None
    if is_kind(kind, UserDict):
        name = "data"
    elif package_of(kind) == "tensordict" and is_loaded_kind(kind, "tensordict", "TensorDict"):
        name = "_tensordict"
    inner = None if name is None else own_fields(value).get(name)
    return inner if is_kind(type(inner), dict) else None


def length_of(value: Any) -> int | None:
    """Return the length of a list, or of another sequence or set of a known type; else None."""
    for base in _LISTS:
        if is_kind(type(value), base):
            return int(base.__len__(value))
    if is_kind(type(value), array):
        return array.__len__(value)
    if is_kind(type(value), UserList):
        return length_of(own_fields(value).get("data"))
    return len(value) if type(value) is type({}.values()) else None


def listed(value: Any) -> list[Any]:
    """Return the items of what has a `length_of`, in a list of their own."""
    for base in _LISTS:
        if is_kind(type(value), base):
            return [*base.__iter__(value)]
    if is_kind(type(value), array):
        return array.tolist(value)
    return [*value] if type(value) is type({}.values()) else listed(own_fields(value)["data"])


def row_count(value: Any) -> int | None:
    """Return the length of a list, a tuple, or an array or tensor with dimensions; else None."""
    if is_kind(type(value), list, tuple):
        return length_of(value)
    shape = shape_of(value)
    return int(shape[0]) if shape else None


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of an array or tensor; no dimensions for anything else."""
    if is_loaded_kind(type(value), "numpy", "ndarray"):
        return tuple(sys.modules["numpy"].ndarray.shape.__get__(value))
    return tuple(value.shape) if is_tensor(value) else ()


def rows_of(value: Any) -> list[Any]:
    """Return the items of what has a `row_count`.

    Raises:
        TypeError: it has none, or too many.
    """
    count = row_count(value)
    if count is None or count > _ROWS_MAX:
        raise TypeError("not a list or array of rows")
    if is_kind(type(value), list, tuple):
        return listed(value)
    if is_tensor(value):
        return [*value]
    numpy = sys.modules["numpy"]
    return [*numpy.ndarray.view(value, numpy.ndarray)]
