"""Types, asked without running any code of a value, of its class or of its metaclass.

Attributes are looked up where they are stored: in a type's own namespace, in an object's `__dict__`
and in its slots. Nothing here calls a property, `__getattr__`, `__class__` or a metaclass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

_mro: Any = type.__dict__["__mro__"].__get__
_namespace: Any = type.__dict__["__dict__"].__get__
_module: Any = type.__dict__["__module__"].__get__
_qualname: Any = type.__dict__["__qualname__"].__get__
_is_subclass: Any = type.__subclasscheck__
_MISSING: Any = object()


def is_kind(kind: type, *bases: type) -> bool:
    """Tell whether a type is one of these or inherits from one, whatever it claims."""
    for base in bases:  # noqa: SIM110  (a generator costs more than the answer)
        if _is_subclass(base, kind):
            return True
    return False


def names_of(kind: type) -> tuple[str, str]:
    """Return the module and the qualified name of a type; empty texts where it has odd ones."""
    try:
        module, name = _module(kind), _qualname(kind)
    except AttributeError:  # a type without a module
        return "", ""
    return (module, name) if type(module) is str and type(name) is str else ("", "")


def package_of(kind: type) -> str:
    """Return the top-level package of a type."""
    return names_of(kind)[0].partition(".")[0]


def bases_of(kind: type) -> tuple[type, ...]:
    """Return the type and all that it inherits from, in the order of lookups."""
    return _mro(kind)  # type: ignore[no-any-return]


def loaded(module: str, name: str) -> type | None:
    """Return a class of a module that is loaded; None where either is missing."""
    kind = getattr(sys.modules.get(module), "__dict__", {}).get(name)
    return kind if isinstance(kind, type) else None


def is_loaded_kind(kind: type, module: str, name: str) -> bool:
    """Tell whether a type is, or inherits from, a class of a module that may not be loaded."""
    base = loaded(module, name)
    return base is not None and is_kind(kind, base)


def declared(kind: type, name: str) -> Any:
    """Return what a type or the first of its bases stores under a name; None where none does."""
    for base in _mro(kind):
        value = _namespace(base).get(name, _MISSING)
        if value is not _MISSING:
            return value
    return None


def own_fields(value: Any) -> dict[str, Any]:
    """Return the `__dict__` of an object; empty where it has none."""
    where = declared(type(value), "__dict__")
    of_c = type(where) is GetSetDescriptorType or type(where) is MemberDescriptorType
    fields = where.__get__(value) if of_c else None
    return fields if type(fields) is dict else {}


def stored_fields(value: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return those of the named fields that an object stores, in its `__dict__` or in slots."""
    own, fields = own_fields(value), {}
    for name in names:
        where = declared(type(value), name)
        if name in own:
            fields[name] = own[name]
        elif type(where) is MemberDescriptorType:
            with suppress(AttributeError):  # an empty slot
                fields[name] = where.__get__(value)
    return fields
