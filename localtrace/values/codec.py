"""Values to bytes and back, without ever failing.

On the rollout path a value becomes MessagePack at once (`encode`), so later changes by the trainer
do not reach the record. Where MessagePack has no word for a value, an extension of type 1 stands
in; its payload is a MessagePack list `[kind, …]`. In the tables the same values are JSON text
(`to_json`, `from_json`); `tagged_json` describes the tags.

Containers come back as JSON's own: tuples, sets, deques, named tuples and `array.array` as lists
(as tuples where they are keys), dataclasses, attrs classes, pydantic models, namespaces and
configurations of OmegaConf as dicts, HTTP responses as dicts of status and body (see `responses`),
enums as their values, half floats as float32, arrays without dimensions as their one value, naive
datetimes and dates as text.

A tensor on a device is encoded as a marker. The recorder replaces it by the tensor's numbers once
they have been copied from the device.

This module knows nothing of trajectories, files or threads.
"""

from __future__ import annotations

import dataclasses
import sys
from array import array
from collections import UserList, deque
from collections.abc import Callable, Mapping, ValuesView
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from localtrace.field_names import DETAIL_NAMES, DROPPED_NAMES
from localtrace.values.arrays import EXT, extension
from localtrace.values.images import image_fields, is_copyable, is_image
from localtrace.values.placeholder import Placeholder, left_out
from localtrace.values.responses import response_fields
from localtrace.values.tagged_json import DEPTH_MAX, Tag, from_tagged, omitted, to_tagged
from localtrace.values.tensors import in_memory, is_freed, is_stand_in, is_tensor, text_of

_CONTAINERS = (Mapping, list, tuple, AbstractSet, array, deque, UserList, ValuesView)
_NAMESPACES = {("types", "SimpleNamespace"), ("argparse", "Namespace")}
_INT_MAX_BITS = 14_000
"""Longest integer: Python refuses to write or read decimal ones of more than 4,300 digits."""


class _Key:
    """An encoded key of a dict; `msgspec.Raw`, the type of other encoded values, has no hash."""

    __slots__ = ("encoded",)

    def __init__(self, encoded: Any) -> None:
        self.encoded = encoded


def _refuse(value: Any) -> Any:
    # Python code that runs while msgspec walks a list lets other threads change the list, and
    # msgspec does not look whether it became shorter. So nothing is converted here.
    if type(value) is _Key:
        return value.encoded
    raise TypeError(type(value))


class ValueEncoder:
    """An encoder of any value into MessagePack; what it cannot encode becomes a placeholder.

    Args:
        keep: names that are not dropped although `field_names.DROPPED_NAMES` holds them.
        on_placeholder: called with the reason of every placeholder but those of dropped names.
        copy_tensor: starts to copy a tensor from its device and returns its marker, or the reason
            of a placeholder; by default every such tensor becomes a placeholder.
    """

    def __init__(
        self,
        keep: frozenset[str] = frozenset(),
        on_placeholder: Callable[[str], None] = lambda reason: None,
        copy_tensor: Callable[[Any], msgspec.msgpack.Ext | str] = lambda tensor: "device_tensor",
    ) -> None:
        self.dropped = DROPPED_NAMES - keep
        self.watched = self.dropped.union(DETAIL_NAMES)
        """Names of fields for whose sake `without_dropped` is called."""
        self._keep = keep
        self._on_placeholder = on_placeholder
        self._copy_tensor = copy_tensor
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_refuse)
        self.try_encode: Callable[[Any], bytes] = self._encoder.encode
        """Encode, or raise where MessagePack refuses a part of the value."""

    def encode(self, value: Any) -> bytes:
        """Encode any value, even a cyclic, huge or hostile one; never raises."""
        try:
            return self._encoder.encode(value)
        except Exception:
            return self.encode_anyway(value)

    def encode_anyway(self, value: Any) -> bytes:
        """Encode a value that `try_encode` refused, converting only the parts it refuses."""
        return self._encoder.encode(self._converted(value, frozenset(), False))

    def without_dropped(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Put placeholders in place of fields that are dropped because of their names.

        The details of a generation, such as `meta_info`, are looked through too.
        """
        for name in DETAIL_NAMES:
            details = fields.get(name)
            if type(details) is dict and not self.dropped.isdisjoint(details):
                fields = {**fields, name: self.without_dropped(details)}
        for name in self.dropped.intersection(fields):
            if type(fields[name]) is not Placeholder and not _is_empty(fields[name]):
                fields = {**fields, name: left_out("dropped", fields[name])}
        return fields

    def _encoded(self, value: Any, above: frozenset[int], kept: bool) -> Any:
        try:
            return msgspec.Raw(self._encoder.encode(value))
        except Exception:
            return self._converted(value, above, kept)

    def _converted(self, value: Any, above: frozenset[int], kept: bool) -> Any:
        try:
            plain = self._convert(type(value), value, above, kept)
        except Exception:
            plain = left_out("unencodable", value)
        if type(plain) is not Placeholder:
            return plain
        if plain.reason != "dropped":
            self._on_placeholder(plain.reason)
        return extension("omitted", *plain.parts().values())

    def _convert(self, kind: type, value: Any, above: frozenset[int], kept: bool) -> Any:
        # Asks the type, never the value: `__class__` can be anything.
        # `above`: ids of the enclosing values; `kept`: one of them has a name in `keep`.
        if kind is Placeholder:
            return value
        if issubclass(kind, str):
            return _plain_text(value)
        if issubclass(kind, int):
            return _plain_int(value)
        if id(value) in above:
            return left_out("cycle", value)
        if len(above) >= DEPTH_MAX:
            return left_out("too_deep", value)
        above |= {id(value)}
        fields = _fields_of(value)
        if fields is not None:
            value = self.without_dropped(fields)
        elif not issubclass(kind, _CONTAINERS) or _is_config(kind):
            plain = self._tensor(value) if is_tensor(value) else _foreign(value, kept)
            final = type(plain) in (msgspec.msgpack.Ext, Placeholder)
            return plain if final else self._encoded(plain, above, kept)
        # The lists are copies, which no other thread can change.
        if isinstance(value, Mapping):
            if isinstance(value, dict) and fields is None:
                value = self.without_dropped(value)
            return {
                _Key(self._encoded(key, above, False)): self._encoded(
                    item, above, kept or (type(key) is str and key in self._keep)
                )
                for key, item in list(value.items())
            }
        return [self._encoded(item, above, kept) for item in list(value)]

    def _tensor(self, value: Any) -> Any:
        if is_freed(value):
            found: msgspec.msgpack.Ext | str = "freed_tensor"
        elif in_memory(value):
            return _memory_tensor(value)
        else:
            found = self._copy_tensor(value)
        if not isinstance(found, str):
            return found
        return left_out(found, value, int(value.numel() * value.element_size()))


def _is_empty(value: Any) -> bool:
    try:
        return value is None or len(value) == 0
    except Exception:
        return False


def _fields_of(value: Any) -> dict[str, Any] | None:
    """Return the fields of a model, dataclass, namespace or HTTP response; else None."""
    kind = type(value)
    if hasattr(kind, "__pydantic_root_model__"):
        return {**value.__dict__, **(value.__pydantic_extra__ or {})}
    if dataclasses.is_dataclass(kind) and not issubclass(kind, dict):
        names = [field.name for field in dataclasses.fields(kind)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    if any((base.__module__, base.__name__) in _NAMESPACES for base in kind.__mro__):
        return dict(vars(value))
    return response_fields(value)


def _foreign(value: Any, kept: bool) -> Any:
    """Return what to encode in place of a value whose type MessagePack does not know."""
    kind = type(value)
    module = kind.__module__.partition(".")[0]
    if module == "numpy":
        return _numpy(value)
    if _is_config(kind):
        return _plain_config(value)
    if module == "openai" and kind.__name__ in ("NotGiven", "Omit"):
        return None  # what stands for an argument that was not given
    if is_image(value):
        if kept and is_copyable(value):
            return image_fields(value)
        return left_out("unsupported" if kept else "dropped", value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return extension("complex", value.real, value.imag)
    if isinstance(value, BaseException):
        return f"{kind.__qualname__}: {text_of(value)}"
    if hasattr(value, "__fspath__"):
        return str(value)
    return left_out("unsupported", value)


def _is_config(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "omegaconf"


def _plain_config(value: Any) -> Any:
    """Return a configuration with its references resolved if all of them can be."""
    to_container = sys.modules["omegaconf"].OmegaConf.to_container
    try:
        return to_container(value, resolve=True)
    except Exception:
        return to_container(value, resolve=False)


def _memory_tensor(value: Any) -> Any:
    if is_stand_in(value):
        raise TypeError("a tensor without memory")
    value = value.detach()
    if str(value.dtype) in ("torch.bfloat16", "torch.float16"):
        value = value.float()
    return _numpy(value.numpy())


def _numpy(value: Any) -> Any:
    if not hasattr(value, "ndim") or value.dtype.hasobject or value.dtype.names or _masked(value):
        return left_out("unsupported", value) if not hasattr(value, "tolist") else value.tolist()
    if value.dtype.str[1:] == "f2":
        value = value.astype("<f4")
    if value.ndim == 0:
        plain = str(value) if value.dtype.kind in "mM" else value.item()
        return left_out("unsupported", value) if type(plain) is type(value) else plain
    little = value.astype(value.dtype.newbyteorder("<"), copy=False)
    return extension("ndarray", little.dtype.str, list(little.shape), little.tobytes())


def _masked(value: Any) -> bool:
    return hasattr(value, "mask")


def _plain_text(value: str) -> Any:
    try:
        value.encode()
        return str.__str__(value)
    except UnicodeEncodeError:
        return extension("str", value.encode("utf-8", "surrogatepass"))


def _plain_int(value: int) -> Any:
    if -(2**63) <= value < 2**64:
        return int(value)
    if value.bit_length() > _INT_MAX_BITS:
        return left_out("too_large", value, value.bit_length() // 8)
    return extension("int", hex(value))


_DEFAULT = ValueEncoder()
encode = _DEFAULT.encode
"""Turn any value into MessagePack; never raises."""


def decode(data: bytes | msgspec.Raw) -> Any:
    """Read what `encode` wrote; see `from_json` for what the values become."""
    return from_tagged(_tagged(data))


def _ext_hook(code: int, data: memoryview) -> Any:
    if code != EXT:
        return Placeholder("unsupported", f"msgpack extension {code}", len(data))
    kind, *parts = msgspec.msgpack.decode(data)
    return Tag(kind, tuple(parts))


_DECODER = msgspec.msgpack.Decoder(ext_hook=_ext_hook)


def msgpack_to_json(data: bytes | msgspec.Raw) -> str:
    """Turn encoded bytes into the tagged JSON text of the tables."""
    return msgspec.json.encode(_tagged(data)).decode()


def to_json(value: Any) -> str:
    """Turn any value into tagged JSON text; never fails."""
    return msgpack_to_json(encode(value))


def from_json(text: str | bytes) -> Any:
    """Read tagged JSON text.

    Arrays come back as numpy arrays where numpy is installed, else as `{"$type": "ndarray", …}`.
    A value that was left out comes back as a `Placeholder`, and so does a text that is not JSON or
    is nested too deeply.
    """
    try:
        return parse_json(text)
    except ValueError:  # localtrace did not write it
        return Placeholder("damaged", "object", len(text))


def parse_json(text: str | bytes) -> Any:
    """Read tagged JSON text as `from_json` does, but raise where it cannot be read.

    Raises:
        ValueError: it is not JSON, or is nested too deeply.
    """
    try:
        return from_tagged(msgspec.json.decode(text))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not JSON of localtrace: {error}") from error


def fields_from_json(text: str | None) -> dict[str, Any]:
    """Read a tagged JSON object; any other value comes back under the key `unreadable`."""
    value = from_json(text) if text else {}
    return value if isinstance(value, dict) else {"unreadable": value}


def _tagged(data: bytes | msgspec.Raw) -> Any:
    """Decode bytes to tagged values; bytes that cannot be read become a placeholder."""
    try:
        return to_tagged(_DECODER.decode(data))
    except RecursionError:
        reason = "too_deep"
    except Exception:  # `encode` did not write it: a caller's own msgspec.Raw or Ext
        reason = "damaged"
    return omitted(Placeholder(reason, "object", len(bytes(data))))
