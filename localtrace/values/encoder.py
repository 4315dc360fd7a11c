"""Any value as MessagePack, without running code of the value and without ever failing."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from localtrace.field_names import DETAIL_NAMES, DROPPED_NAMES
from localtrace.values.arrays import extension
from localtrace.values.foreign import is_empty, memory_tensor, plain_int, plain_object, plain_text
from localtrace.values.kinds import (
    is_kind,
    is_loaded_kind,
    packages_of,
)
from localtrace.values.numpy_values import plain_numbers
from localtrace.values.objects import fields_of, length_of, listed, mapped
from localtrace.values.placeholder import Placeholder, left_out
from localtrace.values.plain import (
    ITEMS_PER_STEP,
    Budget,
    TooLarge,
    is_leaf,
    is_number,
    is_plain,
    leaf_size,
)
from localtrace.values.tagged_json import DEPTH_MAX
from localtrace.values.tensors import in_memory, is_freed, is_tensor

_LEAF_STEPS = 0.8
_CONTAINER_STEPS = 7
_OBJECT_STEPS = 16
_BUILTINS = frozenset({"builtins"})
_SMALL_FIELDS = 16
_SMALL_BYTES = 2**12


class _Key:
    """An encoded key of a dict; `msgspec.Raw`, the type of other encoded values, has no hash."""

    __slots__ = ("encoded",)

    def __init__(self, encoded: Any) -> None:
        self.encoded = encoded


class ValueEncoder:
    """An encoder of any value into MessagePack; what it cannot encode becomes a placeholder.

    Args:
        keep: names that are not dropped although `field_names.DROPPED_NAMES` holds them.
        on_placeholder: called with the reason of every placeholder but those of dropped names.
        copy_tensor: starts to copy a tensor from its device and returns its marker, or the reason
            of a placeholder; by default every such tensor becomes a placeholder.
        max_bytes: a value that encodes to more, or has too many parts, becomes a placeholder before
            it is encoded; None: there is no limit.
    """

    def __init__(
        self,
        keep: frozenset[str] = frozenset(),
        on_placeholder: Callable[[str], None] = lambda reason: None,
        copy_tensor: Callable[[Any], msgspec.msgpack.Ext | str] = lambda tensor: "device_tensor",
        max_bytes: int | None = None,
    ) -> None:
        self.dropped = DROPPED_NAMES - keep
        self.watched = self.dropped.union(DETAIL_NAMES)
        """Names of fields for whose sake `without_dropped` is called."""
        self._keep = keep
        self._on_placeholder = on_placeholder
        self._copy_tensor = copy_tensor
        self._max_bytes = max_bytes
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._of_own)
        self.try_encode: Callable[[Any], bytes] = self._encoder.encode
        """Encode what `plain` returned, or raise where MessagePack refuses a part of it."""

    def encode(self, value: Any) -> bytes:
        """Encode any value, even a cyclic, huge or hostile one; never raises."""
        try:
            return self._encoder.encode(self.plain(value))
        except Exception:
            pass
        try:
            return self._encoder.encode(self.converted(value))
        except Exception:
            return self._encoder.encode(left_out("unencodable", value))

    def is_small(self, fields: Any) -> bool:
        """Tell whether it is a dict of few texts and numbers, none under a name that is dropped.

        Most calls have such arguments and results: they need no other look.
        """
        if type(fields) is not dict or len(fields) > _SMALL_FIELDS:
            return fields is None
        size_bytes = 0
        for name, item in fields.items():
            kind = type(item)
            if type(name) is not str:
                return False
            if kind is str:
                size_bytes += len(item)
            elif not (kind is int or kind is float or kind is bool or item is None):
                return False
        return size_bytes < _SMALL_BYTES and self.watched.isdisjoint(fields)

    def plain(self, value: Any, per_token: AbstractSet[str] = frozenset()) -> Any:
        """Return what to give to `try_encode` for a value; never raises and asks no object.

        A `Placeholder` stands for a value that is too large. `try_encode` may still refuse numbers
        and texts that MessagePack has no form for; then take `converted`.

        Args:
            value: any value.
            per_token: names of its fields that hold a number per token, as for `is_plain`.
        """
        try:
            if is_plain(value, Budget(self._max_bytes), per_token):
                return value
        except TooLarge:
            return left_out("too_large", value)
        except Exception:  # another thread changed it meanwhile
            return self.converted(value)
        return self.converted(value)

    def converted(self, value: Any) -> Any:
        """Return a value in which all that MessagePack refuses has been converted; never raises."""
        try:
            return self._converted(value, Budget(self._max_bytes), set(), False)
        except TooLarge:
            return left_out("too_large", value)

    def without_dropped(self, fields: Any) -> Any:
        """Put placeholders in place of a dict's fields that are dropped because of their names.

        The details of a generation, such as `meta_info`, are looked through too, and so are the
        dicts of a list. What is no dict with texts as keys is returned as it is.
        """
        if type(fields) is list and fields and type(fields[0]) is dict:
            return [self.without_dropped(item) for item in fields]
        if type(fields) is not dict:
            return fields
        for name in fields:
            if type(name) is not str:
                return fields
        if self.watched.isdisjoint(fields):
            return fields
        changed = {
            name: self.without_dropped(fields[name])
            if name in DETAIL_NAMES
            else left_out("dropped", fields[name])
            for name in self.watched.intersection(fields)
            if name in DETAIL_NAMES or self._is_dropped(name, fields[name])
        }
        return {**fields, **changed} if changed else fields

    def _is_dropped(self, name: Any, value: Any) -> bool:
        if type(name) is not str or name not in self.dropped or type(value) is Placeholder:
            return False
        return not is_empty(value)

    def _of_own(self, value: Any) -> Any:
        if type(value) is _Key:
            return value.encoded
        if type(value) is Placeholder:
            return self._omitted(value)
        raise TypeError(type(value))

    def _omitted(self, placeholder: Placeholder) -> msgspec.msgpack.Ext:
        if placeholder.reason != "dropped":
            self._on_placeholder(placeholder.reason)
        return extension("omitted", *placeholder.parts().values())

    def _converted(self, value: Any, budget: Budget, above: set[int], kept: bool) -> Any:
        try:
            plain = self._convert(type(value), value, budget, above, kept)
        except TooLarge:
            raise
        except Exception:
            plain = left_out("unencodable", value)
        return self._omitted(plain) if type(plain) is Placeholder else plain

    def _convert(self, kind: type, value: Any, budget: Budget, above: set[int], kept: bool) -> Any:
        # `above`: ids of the enclosing values; `kept`: one of them has a name in `keep`.
        budget.take(_LEAF_STEPS)
        if is_kind(kind, str):
            budget.take(0, str.__len__(value))
            return plain_text(value)
        if kind is bool or value is None or is_kind(kind, float):
            return value if kind is bool or value is None else float.__float__(value)
        if is_kind(kind, int):
            return plain_int(int.__int__(value))
        if is_leaf(value):
            budget.take(0, leaf_size(value))
            return value if kind is Placeholder else msgspec.Raw(self._encoder.encode(value))
        is_container = kind is dict or kind is list or kind is tuple
        budget.take(_CONTAINER_STEPS if is_container else _OBJECT_STEPS, 1)
        if id(value) in above:
            return left_out("cycle", value)
        if len(above) >= DEPTH_MAX:
            return left_out("too_deep", value)
        above.add(id(value))
        try:
            return self._opened(kind, value, budget, above, kept)
        finally:
            above.discard(id(value))

    def _opened(self, kind: type, value: Any, budget: Budget, above: set[int], kept: bool) -> Any:
        is_container = kind is dict or kind is list or kind is tuple
        packages = _BUILTINS if is_container else packages_of(kind)
        fields = None if is_container else fields_of(value, packages)
        if fields is not None and "msgspec" in packages and is_plain([*fields.values()], budget):
            return msgspec.Raw(self._encoder.encode(value))
        pairs = mapped(value) if fields is None else fields
        if pairs is not None:
            return self._pairs(pairs, budget, above, kept)
        count = length_of(value)
        if count is not None:
            budget.take(count / ITEMS_PER_STEP, count)
            return self._items(listed(value), budget, above, kept)
        if "torch" in packages and is_tensor(value):
            plain = self._tensor(value, budget)
        else:
            plain = plain_object(value, packages, budget, kept)
        if type(plain) is msgspec.msgpack.Ext or type(plain) is Placeholder:
            return plain
        return plain if type(plain) is msgspec.Raw else self._converted(plain, budget, above, kept)

    def _pairs(
        self, pairs: dict[Any, Any], budget: Budget, above: set[int], kept: bool
    ) -> dict[Any, Any]:
        budget.take(dict.__len__(pairs) / ITEMS_PER_STEP, dict.__len__(pairs))
        plain = {}
        # The list is a copy, which no other thread can change.
        for key, item in list(dict.items(pairs)):
            encoded = _Key(self._converted(key, budget, above, False))
            if self._is_dropped(key, item):
                plain[encoded] = self._omitted(left_out("dropped", item))
            else:
                is_kept = kept or (type(key) is str and key in self._keep)
                plain[encoded] = self._converted(item, budget, above, is_kept)
        return plain

    def _items(self, items: list[Any], budget: Budget, above: set[int], kept: bool) -> Any:
        numbers = items
        if not all(map(is_number, items)):
            first = type(items[0])
            is_numpy = is_loaded_kind(first, "numpy", "generic")
            numbers = (plain_numbers(items) if is_numpy else None) or []
        if numbers:
            try:
                return msgspec.Raw(self._encoder.encode(numbers))
            except Exception:  # an integer of more than 64 bits
                pass
        return [self._converted(item, budget, above, kept) for item in items]

    def _tensor(self, value: Any, budget: Budget) -> Any:
        size_bytes = int(value.numel() * value.element_size())
        if is_freed(value):
            reason: msgspec.msgpack.Ext | str = "freed_tensor"
        elif not in_memory(value):
            reason = self._copy_tensor(value)
        elif size_bytes > budget.max_bytes:
            reason = "too_large"
        else:
            return memory_tensor(value, budget)
        return left_out(reason, value, size_bytes) if isinstance(reason, str) else reason
