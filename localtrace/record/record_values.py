"""Values that callers give, in the forms that records hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from localtrace.record.losses import Losses, logger
from localtrace.values.codec import ValueEncoder
from localtrace.values.placeholder import left_out
from localtrace.values.tensors import refuse_freed, text_of


class RecordValues(ValueEncoder):
    """The encoder of a recorder: values as bytes, 64-bit numbers or text.

    Its methods never raise. A value that cannot be used is counted as lost.
    """

    def __init__(
        self,
        keep: frozenset[str],
        losses: Losses,
        copy_tensor: Callable[[Any], msgspec.msgpack.Ext | str],
    ) -> None:
        super().__init__(keep, losses.value, copy_tensor)
        self._losses = losses

    def as_int(self, value: Any) -> int | None:
        """Return a whole number of at most 64 bits; None for anything else, also for 7.9."""
        if value is None or (type(value) is int and -(2**63) <= value < 2**63):
            return value
        try:
            refuse_freed(value)
            number = int(value)
            is_whole = isinstance(value, str | bytes) or bool(number == value)
            if is_whole and -(2**63) <= number < 2**63:
                return number
        except Exception:
            logger.debug("localtrace: not a whole number: %s", type(value), exc_info=True)
        self._losses.value("bad_argument")
        return None

    def as_text(self, value: Any) -> str | None:
        """Return a value as text without lone surrogates; None where it has no text."""
        if value is None:
            return None
        try:
            return text_of(value).encode("utf-8", "replace").decode()
        except Exception:
            self._losses.value("bad_argument")
            return None

    def too_large(self, value: Any, size_bytes: int) -> bytes:
        """Return the encoded placeholder of a value over `record_max_bytes`."""
        return self.encode(left_out("too_large", value, size_bytes))
