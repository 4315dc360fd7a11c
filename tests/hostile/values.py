"""Values that do something wherever they are asked anything: they note it, and raise.

Their classes behave while they are made. Afterwards `armed` notes every method that is called.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import enum
import itertools
import random
import threading
import types
import unittest.mock
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attr
import msgspec
import numpy as np
import pydantic
import torch
import yaml  # type: ignore[import-untyped]

ASKED: list[str] = []
"""Names of the methods that were called while the values were armed."""
_state = threading.local()


class Stop(BaseException):
    """No Exception."""


ERRORS = (RuntimeError, Stop, SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration,
          RecursionError, MemoryError)  # fmt: skip
METHODS = (
    "__getattribute__", "__str__", "__repr__", "__len__", "__iter__", "__bool__", "__eq__",
    "__ne__", "__lt__", "__ge__", "__hash__", "__int__", "__float__", "__index__", "__fspath__",
    "__getitem__", "__contains__", "__array__", "__array_finalize__", "__format__", "__call__",
    "__next__", "__reversed__", "__length_hint__", "__bytes__", "__complex__", "__trunc__",
    "__sizeof__", "__radd__", "__add__", "__copy__", "__deepcopy__", "__reduce_ex__",
    "__getstate__", "__dir__", "__array_interface__", "__torch_function__", "__get__", "__enter__",
    "__exit__", "__await__", "__instancecheck__", "__subclasscheck__", "items", "keys", "values",
    "get", "copy", "tolist", "detach", "numpy", "item", "encode", "isoformat", "utcoffset",
    "tzname", "dst", "model_dump", "dict", "read", "astype", "tobytes", "bit_length",
)  # fmt: skip

_LIES = ("__fspath__", "__iter__", "__len__", "__index__", "detach", "items", "tolist")
"""Methods that every class has, whatever its base."""

_LIES = ("__fspath__", "__iter__", "__len__", "__index__", "detach", "items", "tolist")
"""Methods that every class gets, whatever its base."""


@contextlib.contextmanager
def armed() -> Iterator[None]:
    """Note every method that is called inside the with block, in this thread."""
    _state.armed = True
    try:
        yield
    finally:
        _state.armed = False


def _ask(name: str, error: type[BaseException]) -> None:
    if getattr(_state, "armed", False):
        ASKED.append(name)
        raise error(name)


def _method(base: type, name: str, error: type[BaseException]) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        _ask(f"{base.__name__}.{name}", error)
        return getattr(base, name)(*args, **kwargs)

    return method


def hostile_class(base: type, error: type[BaseException]) -> Any:
    """A subclass each of whose methods is noted and raises; so is its metaclass."""
    kind = type(base)
    if issubclass(base, BaseException):
        return type(
            f"Hostile{base.__name__}",
            (base,),
            {name: _method(base, name, error) for name in METHODS if hasattr(base, name)},
        )  # raising one asks its metaclass
    asked = ("__hash__", "__eq__", "__getattribute__", "__instancecheck__", "__subclasscheck__",
             "__call__", "__repr__", "__len__", "__iter__", "__bool__")  # fmt: skip
    meta: Any = type("Meta", (kind,), {name: _method(kind, name, error) for name in asked})
    names = [name for name in METHODS if hasattr(base, name) or name in _LIES]
    fields = {name: _method(base, name, error) for name in names}

    def lie(self: Any) -> Any:
        _ask("__class__", error)
        return base

    fields["__class__"] = property(lie)  # type: ignore[assignment]

    def missing(self: Any, name: str) -> Any:
        _ask(name, error)
        return object.__getattribute__(self, name)

    fields["__getattr__"] = missing
    return meta(f"Hostile{base.__name__}", (base,), fields)


class Fields(Mapping):  # type: ignore[type-arg]
    """A map of no known type."""

    def __getitem__(self, key: Any) -> Any:
        return key

    def __iter__(self) -> Iterator[Any]:
        return itertools.count()

    def __len__(self) -> int:
        return 1


class Rows(Sequence):  # type: ignore[type-arg]
    """A sequence of no known type, without end."""

    def __getitem__(self, key: Any) -> Any:
        return key

    def __len__(self) -> int:
        return 2**62


class Plain:
    """An object like any other."""


@dataclasses.dataclass
class Data:
    inner: Any = None

    @property
    def other(self) -> Any:
        _ask("property", Stop)


@attr.s
class Attrs:
    inner: Any = attr.ib(default=None)


class Struct(msgspec.Struct):
    inner: Any = None


class Model(pydantic.BaseModel):
    model_config = {"arbitrary_types_allowed": True}
    inner: Any = None


class Zone(datetime.tzinfo):
    def utcoffset(self, moment: Any) -> Any:
        _ask("utcoffset", Stop)
        return datetime.timedelta(0)

    dst = tzname = utcoffset


class Color(enum.Enum):
    RED = Plain()


BASES: tuple[Any, ...] = (
    Plain, str, int, float, complex, bytes, bytearray, dict, list, tuple, set, frozenset,
    collections.OrderedDict, collections.Counter, collections.deque, collections.UserDict,
    collections.UserList, types.SimpleNamespace, Fields, Rows, Data, Attrs, ValueError, OSError,
    datetime.datetime, datetime.date, np.ndarray, np.float64, torch.Tensor, Zone,
)  # fmt: skip


def _instance(base: type, kind: Any) -> Any:
    make: Any = lambda *args: type.__call__(kind, *args)  # noqa: E731
    if base is np.ndarray:
        return np.arange(3).view(kind)
    if base is torch.Tensor:
        return torch.arange(3).as_subclass(kind)
    if base is datetime.datetime or base is datetime.date:
        return make(2026, 1, 2)
    if base is str:
        return make("text")
    if base in (bytes, bytearray):
        return make(b"bytes")
    if base in (int, float, complex, np.float64):
        return make(1)
    return make()


def _bomb(width: int, kind: str) -> Any:
    value: Any = ["end"]
    for _ in range(40):
        made: dict[str, Any] = {
            "list": lambda v=value: [v] * width,
            "dict": lambda v=value: {str(n): v for n in range(width)},
            "tuple": lambda v=value: (v,) * width,
            "data": lambda v=value: [Data(v)] * width,
        }
        value = made[kind]()
    return value


def _yaml_bomb(chance: random.Random) -> Any:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for name, before in itertools.pairwise("abcdefghijkl"):
        lines.append(f"{before}: &{before} [{', '.join([f'*{name}'] * 9)}]")
    return yaml.safe_load("\n".join(lines))


def _cycle() -> Any:
    cycle: list[Any] = [1]
    cycle.append({"again": cycle, "pair": (cycle, cycle)})
    return cycle


def _held_lock() -> Any:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _proxy() -> Any:
    kept = Plain()
    proxy = weakref.proxy(kept)
    del kept
    return proxy


def _rows(chance: random.Random) -> Any:
    rows: Any = np.empty(3, object)
    rows[:] = [hostile(chance, Plain), 1, hostile(chance, str)]
    return rows


OTHERS: tuple[Callable[[random.Random], Any], ...] = (
    lambda c: _bomb(10, c.choice(["list", "dict", "tuple", "data"])),
    _yaml_bomb,
    lambda c: [1, _bomb(10, "list"), "\ud800"],
    lambda c: _cycle(),
    lambda c: _held_lock(),
    lambda c: _proxy(),
    lambda c: itertools.count(),
    lambda c: (n for n in itertools.count()),
    lambda c: unittest.mock.MagicMock(),
    lambda c: unittest.mock.Mock(spec=torch.Tensor),
    lambda c: unittest.mock.AsyncMock(),
    lambda c: np.broadcast_to(np.int8(1), (2**40,)),
    lambda c: np.zeros(4, [("a", "i4"), ("b", "O")]),
    lambda c: np.ma.array([1, 2], mask=[True, False]),
    _rows,
    lambda c: torch.empty(2**40, device="meta"),
    lambda c: torch.zeros(1).expand(2**40),
    lambda c: datetime.datetime(2026, 1, 2, tzinfo=Zone()),
    lambda c: datetime.time(1, tzinfo=Zone()),
    lambda c: Color.RED,
    lambda c: 10**5000,
    lambda c: {10**5000: "\ud800", (1, ("\ud800",)): b"x"},
    lambda c: open("/dev/zero", "rb"),  # noqa: SIM115
    lambda c: range(2**62),
    lambda c: [0.5] * 3_000_000,
    lambda c: "x" * 70_000_000,
    lambda c: memoryview(bytearray(4)).cast("B", (2, 2)),
    lambda c: types.MappingProxyType(hostile(c, dict)),
    lambda c: ExceptionGroup("several", [ValueError(hostile(c))]),
    lambda c: type(hostile(c, Plain)),
)


def hostile(chance: random.Random, base: Any = None) -> Any:
    """One object whose methods are noted and raise."""
    base = base or chance.choice(BASES)
    value = _instance(base, hostile_class(base, chance.choice(ERRORS)))
    with contextlib.suppress(Exception):
        object.__setattr__(value, "inner", 1)
    return value


def hostile_value(chance: random.Random) -> Any:
    """A hostile object, or one inside something, or something else that does harm."""
    kind = chance.random()
    if kind < 0.4:
        return hostile(chance)
    if kind < 0.6:
        return chance.choice(OTHERS)(chance)
    inner = hostile_value(chance)
    around: tuple[Callable[[], Any], ...] = (
        lambda: [1, inner, "\ud800"],
        lambda: (inner, inner),
        lambda: {"a": inner, "images": inner, "meta_info": {"hidden_states": inner}},
        lambda: collections.deque([inner]),
        lambda: Data(inner),
        lambda: Attrs(inner),
        lambda: Struct(inner),
        lambda: Model.model_construct(inner=inner),
        lambda: types.SimpleNamespace(inner=inner),
        lambda: collections.UserDict(inner=inner),
        lambda: {"key": [inner] * 50},
        lambda: ValueError("text", inner),
        lambda: {hostile(chance, Plain): inner, 1: 2},
        lambda: {"output_ids": [1, 2, inner, 3]},
    )
    return chance.choice(around)()
