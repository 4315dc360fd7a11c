"""Any value as MessagePack, without running code of the value and without ever failing."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from localtrace.field_names import DROPPED_NAMES
from localtrace.values.arrays import extension, in_memory, is_freed, is_tensor
from localtrace.values.encoded import list_bytes, map_bytes
from localtrace.values.kinds import is_kind
from localtrace.values.objects import memory_tensor, plain_form, plain_numbers, shape_of
from localtrace.values.placeholder import Placeholder, is_image, left_out
from localtrace.values.plain import (
    DEPTH_MAX,
    Budget,
    TooLarge,
    is_leaf,
    is_number,
    is_plain,
    leaf_size,
)

_LEAF_STEPS = 0.8
_CONTAINER_STEPS = 7
_OBJECT_STEPS = 16
_SMALL_FIELDS = 16
_SMALL_BYTES = 2**12
_NO_NAMES: frozenset[str] = frozenset()


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
        keep: frozenset[str] = _NO_NAMES,
        on_placeholder: Callable[[str], None] = lambda reason: None,
        copy_tensor: Callable[[Any], msgspec.msgpack.Ext | str] = lambda tensor: "device_tensor",
        max_bytes: int | None = None,
    ) -> None:
        self.keep = keep
        self.dropped = DROPPED_NAMES - keep
        self.on_placeholder = on_placeholder
        self.copy_tensor = copy_tensor
        self.max_bytes = max_bytes
        self.try_encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
        """Encode what `plain` returned, or raise where MessagePack refuses a part of it."""

    def encode(self, value: Any, per_token: AbstractSet[str] = _NO_NAMES) -> bytes:
        """Encode any value, even a cyclic, huge or hostile one; never raises."""
        try:
            return self.try_encode(self.plain(value, per_token))
        except Exception:
            return _Conversion(self).whole(value)

    def plain(self, value: Any, per_token: AbstractSet[str] = _NO_NAMES) -> Any:
        """Return what to give to `try_encode` for a value; never raises and asks no object.

        `try_encode` may still refuse numbers and texts that MessagePack has no form for; then take
        `encode`.

        Args:
            value: any value.
            per_token: names of its fields that hold a number per token, as for `is_plain`.
        """
        try:
            if value is None or _is_small(value, self.dropped):
                return value
            if is_plain(value, Budget(self.max_bytes), self.dropped, per_token):
                return value
        except TooLarge:  # converting it would take longer still
            return msgspec.Raw(_Conversion(self).omitted(left_out("too_large", value)))
        except Exception:  # another thread changed it meanwhile
            pass
        return msgspec.Raw(_Conversion(self).whole(value))


def _is_small(fields: Any, dropped: AbstractSet[str]) -> bool:
    """Tell whether it is a dict of few texts and numbers, as most arguments and results are.

    These need no other look, which would take longer than the rest of the recorded call.
    """
    if type(fields) is not dict or len(fields) > _SMALL_FIELDS:
        return False
    size_bytes = 0
    for name, item in fields.items():
        if type(name) is not str or name in dropped:
            return False
        if type(item) is str:
            size_bytes += len(item)
        elif not is_number(item):
            return False
    return size_bytes < _SMALL_BYTES


class _Conversion:
    """The encoding of one value that is not plain, part by part."""

    def __init__(self, encoder: ValueEncoder) -> None:
        self._encoder = encoder
        self._encode = encoder.try_encode
        self._budget = Budget(encoder.max_bytes)
        self._above: set[int] = set()
        """The ids of the enclosing values."""

    def whole(self, value: Any) -> bytes:
        """Encode the value; never raises."""
        try:
            return self._encoded(value, False)
        except TooLarge:
            return self.omitted(left_out("too_large", value))

    def _encoded(self, value: Any, is_kept: bool) -> bytes:
        """Encode a part.

        Args:
            value: the part.
            is_kept: whether an enclosing value stands under a name in `keep`.
        """
        try:
            self._budget.take(_LEAF_STEPS)
            if is_leaf(value):
                self._budget.take(0, leaf_size(value))
                try:
                    return self._encode(value)
                except Exception:  # a lone surrogate, or an integer of more than 64 bits
                    pass
            if type(value) is Placeholder:
                return self.omitted(value)
            if type(value) is msgspec.msgpack.Ext:
                return self._encode(value)
            return self._opened(value, is_kept)
        except TooLarge:
            raise
        except Exception:
            return self.omitted(left_out("unencodable", value))

    def _opened(self, value: Any, is_kept: bool) -> bytes:
        kind = type(value)
        is_container = kind is dict or kind is list or kind is tuple
        self._budget.take(_CONTAINER_STEPS if is_container else _OBJECT_STEPS, 1)
        if id(value) in self._above:
            return self.omitted(left_out("cycle", value))
        if len(self._above) >= DEPTH_MAX:
            return self.omitted(left_out("too_deep", value))
        self._above.add(id(value))
        try:
            form = plain_form(value, self._budget) if is_container else self._form(value, is_kept)
            if is_kind(type(form), dict):
                return self._map(form, is_kept)
            if type(form) is list:
                return self._list(form, is_kept)
            return self._encoded(form, is_kept)
        finally:
            self._above.discard(id(value))

    def _form(self, value: Any, is_kept: bool) -> Any:
        if is_tensor(value):
            return self._tensor(value)
        if not is_kept and is_image(value):
            return left_out("dropped", value)
        return plain_form(value, self._budget)

    def _map(self, fields: dict[Any, Any], is_kept: bool) -> bytes:
        parts = []
        # The list is a copy, which no other thread can change.
        for key, item in list(dict.items(fields)):
            name = key if type(key) is str else ""
            parts.append(self._encoded(key, False))
            if name in self._encoder.dropped and not _is_empty(item):
                item = item if type(item) is Placeholder else left_out("dropped", item)
            parts.append(self._encoded(item, is_kept or name in self._encoder.keep))
        return map_bytes(len(parts) // 2, b"".join(parts))

    def _list(self, items: list[Any], is_kept: bool) -> bytes:
        numbers = plain_numbers(items)
        if numbers is not None:
            try:
                return self._encode(numbers)
            except OverflowError:  # an integer of more than 64 bits
                pass
        return list_bytes(len(items), b"".join([self._encoded(item, is_kept) for item in items]))

    def _tensor(self, value: Any) -> Any:
        size_bytes = int(value.numel() * value.element_size())
        if is_freed(value):
            copy: msgspec.msgpack.Ext | str = "freed_tensor"
        elif not in_memory(value):
            copy = self._encoder.copy_tensor(value)
        elif size_bytes > self._budget.max_bytes:
            copy = "too_large"
        else:
            return memory_tensor(value, self._budget)
        return left_out(copy, value, size_bytes) if isinstance(copy, str) else copy

    def omitted(self, placeholder: Placeholder) -> bytes:
        """Encode a placeholder, and count it unless it stands under a dropped name."""
        if placeholder.reason != "dropped":
            self._encoder.on_placeholder(placeholder.reason)
        return self._encode(extension("omitted", *placeholder.parts().values()))


def _is_empty(value: Any) -> bool:
    """Tell whether a value is None, or has no items or bytes."""
    for base in (list, tuple, dict, str, bytes):
        if is_kind(type(value), base):
            return not base.__len__(value)
    return value is None or 0 in shape_of(value)
