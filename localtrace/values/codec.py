"""Values to bytes and back, without ever failing.

On the rollout path a value becomes MessagePack at once (`encode`), so later changes by the trainer
do not reach the record. Where MessagePack has no word for a value, an extension of type 1 stands
in; its payload is a MessagePack list `[kind, …]`. In the tables the same values are JSON text
(`to_json`, `from_json`); `tagged_json` describes the tags.

Containers come back as JSON's own: tuples, sets, deques, named tuples and `array.array` as lists
(as tuples where they are keys), dataclasses, attrs classes, pydantic models, namespaces and
configurations of OmegaConf as dicts, HTTP responses as dicts of status and body,
enums as their values, half floats as float32, arrays without dimensions as their one value, naive
datetimes and dates as text.

A tensor on a device is encoded as a marker. The recorder replaces it by the tensor's numbers once
they have been copied from the device.

This module knows nothing of trajectories, files or threads.
"""

from __future__ import annotations

from typing import Any

import msgspec

from localtrace.field_names import DROPPED_NAMES
from localtrace.values.arrays import EXT
from localtrace.values.encoder import ValueEncoder
from localtrace.values.placeholder import Placeholder
from localtrace.values.tagged_json import Tag, from_tagged, omitted, to_tagged

encode = ValueEncoder(keep=DROPPED_NAMES).encode
"""Turn any value into MessagePack, and drop nothing; never raises."""


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
