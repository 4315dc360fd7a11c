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

DEPTH_MAX = 100
"""Deepest nesting; a deeper value could overflow the stack of its reader."""
STEPS_MAX = 20_000
"""Most steps for one value, some 10 ms. A container is a step, and so are 64 numbers or keys in
it, or 16 other items; an object that is turned into a plain value is several."""
ITEMS_PER_STEP = 64
_NO_NAMES: frozenset[str] = frozenset()
_SIZED = frozenset(map(id, (str, bytes, bytearray, msgspec.Raw)))
"""The ids of types: the hash or the comparison of another type may be code of its metaclass."""
_OTHERS = frozenset(map(id, (date, timedelta, Decimal, UUID)))


class TooLarge(Exception):
    """A value has more bytes or more parts than are recorded."""


class Budget:
    """The bytes and steps that are left for a value.

    Args:
        max_bytes: limit on the encoded bytes; None where neither bytes nor steps are limited.
        steps: limit on the steps.
    """

    __slots__ = ("bytes", "max_bytes", "steps")

    def __init__(self, max_bytes: int | None, steps: float = STEPS_MAX) -> None:
        self.max_bytes: float = math.inf if max_bytes is None else max_bytes
        self.bytes = self.max_bytes
        self.steps = math.inf if max_bytes is None else steps

    def take(self, steps: float, size_bytes: int = 0) -> None:
        """Use up a part of it.

        Raises:
            TooLarge: so much is not left.
        """
        self.steps -= steps
        self.bytes -= size_bytes
        if self.steps < 0 or self.bytes < 0:
            raise TooLarge


def is_plain(
    value: Any,
    budget: Budget,
    dropped: AbstractSet[str] = _NO_NAMES,
    per_token: AbstractSet[str] = _NO_NAMES,
) -> bool:
    """Tell whether a value can be encoded as it is, in one call and within the budget.

    No code of the value runs: types are compared by identity, never hashed or asked.

    Args:
        value: any value.
        budget: what is left for it.
        dropped: names of fields that are left out, so that a value with one of them is not plain.
        per_token: names of the value's own fields whose lists are known to hold a number per token.
            A look at each of them would cost more than the encoding, so one that begins and ends
            with a number counts as plain.

    Raises:
        TooLarge: the budget is too small.
    """
    level = [value]
    if not _is_container(value):
        budget.take(0, leaf_size(value))
        return is_leaf(value)
    for _ in range(DEPTH_MAX):
        below: list[Any] = []
        for container in level:
            items = container
            if type(container) is dict:
                items = _values(container, budget, dropped, per_token)
            if items is None or not _are_plain(items, budget, below):
                return False
        if not below:
            return True
        level, per_token = below, _NO_NAMES
    return False


def _values(
    fields: dict[Any, Any], budget: Budget, dropped: AbstractSet[str], per_token: AbstractSet[str]
) -> list[Any] | None:
    """Return the values to look at; None where the fields are not plain."""
    items, size_bytes = [], 0
    for name, item in fields.items():
        if type(name) is str:
            size_bytes += len(name)
            if name in dropped and item is not None:
                return None
            if name in per_token and _is_numbers_at_its_ends(item):
                size_bytes += len(item)
                continue
        elif not is_leaf(name):
            return None
        items.append(item)
    budget.take(len(fields) / ITEMS_PER_STEP, size_bytes)
    return items


def _is_numbers_at_its_ends(items: Any) -> bool:
    return type(items) is list and bool(items) and is_number(items[0]) and is_number(items[-1])


def _are_plain(items: Any, budget: Budget, below: list[Any]) -> bool:
    """Tell whether all items are plain; add to `below` those that are containers."""
    size_bytes = len(items)
    budget.take(1 + size_bytes / ITEMS_PER_STEP, size_bytes)  # before any look at so many items
    # Quicker for lists of numbers than any function written in C that does not ask the items.
    others = [item for item in items if type(item) is not int and type(item) is not float]
    budget.take(4 * len(others) / ITEMS_PER_STEP)
    size_bytes = 0
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


def _is_container(value: Any) -> bool:
    kind = type(value)
    return kind is dict or kind is list or kind is tuple


def is_leaf(value: Any) -> bool:
    """Tell whether a value is one that msgspec encodes without looking into anything else."""
    kind = id(type(value))
    return kind in _SIZED or is_number(value) or kind in _OTHERS


def is_number(value: Any) -> bool:
    """Tell whether a value is None or of one of Python's own types of numbers."""
    kind = type(value)
    return kind is int or kind is float or kind is bool or value is None


def leaf_size(leaf: Any) -> int:
    """Return the least size of such a value in bytes."""
    return len(leaf) if id(type(leaf)) in _SIZED else 1
