"""HTTP responses as plain values: the status, and the body as far as the caller has read it.

Nothing is read from the network here. Headers and the URL are left out, as they may hold keys.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from localtrace.values.kinds import bases_of, names_of, own_fields
from localtrace.values.placeholder import left_out

_TYPES = {
    ("httpx", "Response"): ("status_code", "_content"),
    ("requests", "Response"): ("status_code", "_content"),
    ("aiohttp", "ClientResponse"): ("status", "_body"),
}
"""Attributes that hold the status and the body, by package and class."""
RESPONSE_PACKAGES = frozenset(package for package, _ in _TYPES)
_BODY_MAX_BYTES = 16 * 2**20
"""Largest body that is parsed, on the rollout path; of a larger one only the size is kept."""
_decode = msgspec.json.Decoder().decode


def decode_json(data: bytes) -> Any:
    """Read JSON, including NaN and lone surrogates, which Python's `json` writes.

    Raises:
        ValueError, RecursionError: the data is not JSON, or nested too deeply.
    """
    try:
        return _decode(data)
    except msgspec.DecodeError:
        return json.loads(data)


def response_fields(value: Any) -> dict[str, Any] | None:
    """Return `status_code` and, if it was read, `body` of an HTTP response; else None."""
    kinds = map(names_of, bases_of(type(value)))
    names = (_TYPES.get((module.partition(".")[0], name)) for module, name in kinds)
    found = next(filter(None, names), None)
    if found is None:
        return None
    fields = own_fields(value)
    status, body = (fields.get(name) for name in found)
    return {"status_code": status, **({"body": _body(body)} if type(body) is bytes else {})}


def _body(data: bytes) -> Any:
    if len(data) > _BODY_MAX_BYTES:
        return left_out("too_large", data, len(data))
    try:
        return decode_json(data)
    except (ValueError, RecursionError):
        pass
    try:
        return data.decode()
    except UnicodeDecodeError:
        return left_out("unsupported", data)
