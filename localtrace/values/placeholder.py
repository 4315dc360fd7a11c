"""Placeholders, which stand in a record for values that were left out."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

from localtrace.values.images import is_image, pixel_bytes
from localtrace.values.kinds import is_kind, is_loaded_kind, names_of
from localtrace.values.tensors import has_storage, in_memory, is_readable, is_tensor

_BUFFERS: tuple[Any, ...] = (bytes, bytearray, memoryview, array)
_HASH_MAX_BYTES = 2**20
"""Largest dropped value that is hashed, as hashing must not stall the rollout."""


class Placeholder:
    """A mark that stands for a value that was left out.

    Reasons: dropped, too_large, unsupported, device_tensor, device_memory, freed_tensor, cycle,
    too_deep, unencodable, damaged, redacted.
    """

    # Neither a dataclass nor a Struct: the encoder would write those as a plain dict.
    __slots__ = ("python_type", "reason", "sha256", "size_bytes")

    def __init__(
        self,
        reason: str,
        python_type: str,
        size_bytes: int | None = None,
        sha256: str | None = None,
    ) -> None:
        self.reason = reason
        self.python_type = python_type
        self.size_bytes = size_bytes
        self.sha256 = sha256

    def parts(self) -> dict[str, Any]:
        """Return the fields by name, as the tables hold them."""
        return {
            "reason": self.reason,
            "python_type": self.python_type,
            "size_bytes": self.size_bytes,
            "sha256": self.sha256,
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placeholder) and self.parts() == other.parts()

    def __hash__(self) -> int:
        return hash(tuple(self.parts().values()))

    def __repr__(self) -> str:
        size = "" if self.size_bytes is None else f", {self.size_bytes} bytes"
        return f"<left out: {self.reason}, {self.python_type}{size}>"


def left_out(reason: str, value: Any, size_bytes: int | None = None) -> Placeholder:
    """Make the placeholder of a value: its type and, where cheap, its size and sha256."""
    digest = None
    if size_bytes is None:
        size_bytes, buffer = _measured(value)
        if buffer is not None and buffer.nbytes <= _HASH_MAX_BYTES:
            digest = hashlib.sha256(buffer).hexdigest()
    return Placeholder(reason, type_name(value), size_bytes, digest)


def type_name(value: Any) -> str:
    """Return the name of a value's type as placeholders give it."""
    module, name = names_of(type(value))
    text = f"{module}.{name}".removeprefix("builtins.") if name else "object"
    return text.encode("utf-8", "replace").decode()[:200]


def _measured(value: Any) -> tuple[int | None, memoryview | None]:
    """Return the size of a value and its bytes, as far as they are had without a large copy."""
    try:
        if is_image(value):
            return pixel_bytes(value), None
        if not is_kind(type(value), str):
            buffer = _buffer_of(value)
            return None if buffer is None else buffer.nbytes, buffer
        if str.__len__(value) > _HASH_MAX_BYTES:
            return str.__len__(value) if str.isascii(value) else None, None
        buffer = memoryview(str.encode(value, "utf-8", "surrogatepass"))
        return buffer.nbytes, buffer
    except Exception:
        return None, None


def _buffer_of(value: Any) -> memoryview | None:
    kind = type(value)
    if is_tensor(value):
        if not (has_storage(value) and in_memory(value) and is_readable(value)):
            return None
        value = value.detach().numpy()
    elif not (is_kind(kind, *_BUFFERS) or is_loaded_kind(kind, "numpy", "ndarray")):
        return None
    return memoryview(value).cast("B")
