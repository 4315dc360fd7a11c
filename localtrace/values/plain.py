"""Proof that a value is plain: made of Python's own types alone, and small enough to be encoded.

msgspec encodes a value in one call, in which no other thread runs. It asks objects for attributes,
and writes a list as often as it is referred to: a few hundred bytes of YAML are gigabytes then. So
nothing is given to it that has not been looked through here, level by level, within a budget.
"""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet
from datetime import date, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from localtrace.values.placeholder import Placeholder
from localtrace.values.tagged_json import DEPTH_MAX

STEPS_MAX = 20_000
"""Most steps for one value, some 10 ms. A container is a step, and so are 64 numbers in it, or 16
other items; an object that is turned into a plain value is several."""
ITEMS_PER_STEP = 64
_SIZED = (bytes, bytearray, msgspec.Raw)
_OTHERS = (date, timedelta, Decimal, UUID, Placeholder)


class TooLarge(Exception):
    """A value has more bytes or more parts than are recorded."""


class Budget:
    """The bytes and steps that are left for a value.

    Args:
        max_bytes: limit on the encoded bytes; None where neither bytes nor steps are limited.
    """

    __slots__ = ("bytes", "max_bytes", "steps")

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes: float = math.inf if max_bytes is None else max_bytes
        self.bytes = self.max_bytes
        self.steps: float = math.inf if max_bytes is None else STEPS_MAX

    def take(self, steps: float, size_bytes: int = 0) -> None:
        """Use up a part of it.

        Raises:
            TooLarge: so much is not left.
        """
        self.steps -= steps
        self.bytes -= size_bytes
        if self.steps < 0 or self.bytes < 0:
            raise TooLarge


def is_plain(value: Any, budget: Budget, per_token: AbstractSet[str] = frozenset()) -> bool:
    """Tell whether a value can be encoded as it is, in one call and within the budget.

    No code of the value runs: types are compared by identity, never hashed or asked.

    Args:
        value: any value.
        budget: what is left for it.
        per_token: names of the value's fields whose lists are known to hold a number per token. A
            look at each of them would cost more than the encoding, so one that begins and ends with
            a number counts as plain.

    Raises:
        TooLarge: the budget is too small.
    """
    if is_leaf(value):
        budget.take(0, leaf_size(value))
        return True
    level: list[Any] = [value]
    if type(value) is dict and per_token:
        level = [_without_per_token(value, budget, per_token)]
    elif not (type(value) is dict or type(value) is list or type(value) is tuple):
        return False
    for _ in range(DEPTH_MAX):
        below: list[Any] = []
        for container in level:
            budget.take(1 + len(container) / ITEMS_PER_STEP, len(container))
            if not _looked_through(container, budget, below):
                return False
        if not below:
            return True
        level = below
    return False


def is_leaf(value: Any) -> bool:
    """Tell whether a value is one that msgspec encodes without looking into anything else."""
    kind = type(value)
    return is_number(value) or kind is str or any(kind is k for k in (*_SIZED, *_OTHERS))


def is_number(value: Any) -> bool:
    """Tell whether a value is None or of one of Python's own types of numbers."""
    kind = type(value)
    return kind is int or kind is float or kind is bool or value is None


def leaf_size(leaf: Any) -> int:
    """Return the least size of such a value in bytes."""
    kind = type(leaf)
    return len(leaf) if kind is str or any(kind is sized for sized in _SIZED) else 1


def _without_per_token(
    value: dict[Any, Any], budget: Budget, names: AbstractSet[str]
) -> dict[Any, Any]:
    """Return the fields that have to be looked at."""
    rest = {}
    for name, items in value.items():
        if type(name) is not str:
            return value
        is_listed = type(items) is list and len(items) > 0 and name in names
        if is_listed and is_number(items[0]) and is_number(items[-1]):
            budget.take(0, len(items))
        else:
            rest[name] = items
    return rest


def _looked_through(container: Any, budget: Budget, below: list[Any]) -> bool:
    """Tell whether all items are plain; add to `below` those that are containers themselves."""
    size_bytes, items = 0, container
    if type(container) is dict:
        items = container.values()
        for key in container:
            if type(key) is str:
                size_bytes += len(key)
            elif not is_leaf(key):
                return False
    # Quicker for lists of numbers than any function written in C that does not ask the items.
    others = [item for item in items if type(item) is not int and type(item) is not float]
    budget.take(4 * len(others) / ITEMS_PER_STEP)
    for item in others:
        kind = type(item)
        if kind is str:
            size_bytes += len(item)
        elif kind is dict or kind is list or kind is tuple:
            below.append(item)
        elif item is not None and kind is not bool:
            if not is_leaf(item):
                return False
            size_bytes += leaf_size(item)
    budget.take(0, size_bytes)
    return True
