"""OpenTelemetry's requests in a form that people can compare."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

_ID_NAMES = {"traceId", "spanId", "parentSpanId"}


def decoded(body: bytes) -> dict[str, Any]:
    """Return a request that was sent as protobuf, with ids in hex as OTLP's own JSON has them."""
    request: dict[str, Any] = plain_attributes(
        _ids_in_hex(MessageToDict(ExportTraceServiceRequest.FromString(body)))
    )
    return request


def plain_attributes(value: Any) -> Any:
    """Return attributes as one object by name, and their values without a wrapper of their type."""
    if isinstance(value, list):
        if value and all(isinstance(one, dict) and set(one) == {"key", "value"} for one in value):
            names = [one["key"] for one in value]
            assert len(set(names)) == len(names), names
            return {one["key"]: _plain(one["value"]) for one in value}
        return list(map(plain_attributes, value))
    if isinstance(value, dict):
        return {name: plain_attributes(inside) for name, inside in value.items()}
    return value


def _plain(value: dict[str, Any]) -> Any:
    ((kind, inside),) = value.items() or [("nullValue", None)]
    if kind == "arrayValue":
        return [_plain(one) for one in inside.get("values", [])]
    if kind == "kvlistValue":
        return {one["key"]: _plain(one["value"]) for one in inside.get("values", [])}
    # A whole number in OTLP's JSON is a text: without its type it would pass for one.
    if kind == "intValue":
        return {kind: inside}
    if kind == "stringValue" and inside[:1] in ("{", "["):
        with suppress(ValueError):
            return {"JSON": json.loads(inside)}
    return inside


def _ids_in_hex(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_ids_in_hex, value))
    if isinstance(value, dict):
        return {
            name: base64.b64decode(inside).hex() if name in _ID_NAMES else _ids_in_hex(inside)
            for name, inside in value.items()
        }
    return value
