"""Requests of OpenTelemetry, in the form of OTLP's JSON, as spans and events.

Log records that name a span are its events: instrumentations write messages there, too.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Any

import msgspec

from localtrace.importers.intake import Report
from localtrace.importers.lines import BadLine
from localtrace.importers.times import is_time

_CODES = {"STATUS_CODE_ERROR": 2, "STATUS_CODE_OK": 1}
_ERROR = 2
_OTHER_SIGNALS = ("resourceMetrics", "resourceProfiles")


class Event(msgspec.Struct, array_like=True):
    """An event of a span."""

    name: str
    time_ns: int
    attributes: dict[str, Any]


class SpanIn(msgspec.Struct, array_like=True):
    """One span, or only events of one, which has no name then."""

    trace_id: str
    """32 hex digits."""
    span_id: str
    """16 hex digits."""
    name: str | None
    parent_id: str | None = None
    start_ns: int = 0
    end_ns: int = 0
    attributes: dict[str, Any] = {}
    events: list[Event] = []
    links: list[dict[str, Any]] = []
    error: str | None = None
    """The message of a status that says error; may be empty. None: no error."""
    resource: dict[str, Any] = {}
    """Attributes of the service that the span comes from."""


def spans_of(request: dict[str, Any], place: str, report: Report) -> Iterator[SpanIn]:
    if not {"resourceSpans", "resourceLogs", *_OTHER_SIGNALS} & request.keys():
        if request:
            raise BadLine("no request of OpenTelemetry: it has no resourceSpans")
        return
    for name in _OTHER_SIGNALS:
        if name in request:
            report.left_out[f"requests with {name}"] += 1
    for kind, scopes, items, read in (
        ("resourceSpans", ("scopeSpans", "instrumentationLibrarySpans"), "spans", _span),
        ("resourceLogs", ("scopeLogs",), "logRecords", _log_record),
    ):
        for block in _objects(request.get(kind)):
            resource = _guarded(block.get("resource"))
            held = (part for name in scopes for part in _objects(block.get(name)))
            for number, item in enumerate(
                one for part in held for one in _objects(part.get(items))
            ):
                try:
                    found = read(item, resource)
                except BadLine as error:
                    report.refuse(f"{place}: {items} {number + 1}", str(error))
                    continue
                if found is None:
                    report.left_out["log records that belong to no span"] += 1
                else:
                    yield found


def _guarded(resource: Any) -> dict[str, Any]:
    try:
        return _attributes(_object(resource).get("attributes"))
    except BadLine:
        return {}


def _span(item: dict[str, Any], resource: dict[str, Any]) -> SpanIn:
    start_ns, end_ns = _time_ns(item, "startTimeUnixNano"), _time_ns(item, "endTimeUnixNano")
    if not start_ns:
        raise BadLine("a span without a start time")
    status = _object(item.get("status"))
    code = _CODES.get(str(status.get("code")), status.get("code"))
    return SpanIn(
        trace_id=_id(item.get("traceId"), 16),
        span_id=_id(item.get("spanId"), 8),
        name=_text(item.get("name")),
        parent_id=_id(item["parentSpanId"], 8, none=True) if item.get("parentSpanId") else None,
        start_ns=start_ns,
        end_ns=max(start_ns, end_ns),
        attributes=_attributes(item.get("attributes")),
        events=[
            Event(_text(one.get("name")), _time_ns(one, "timeUnixNano") or end_ns or start_ns,
                  _attributes(one.get("attributes")))
            for one in _objects(item.get("events"))
        ],
        links=[_link(one) for one in _objects(item.get("links"))],
        error=_text(status.get("message")) if code == _ERROR else None,
        resource=resource,
    )  # fmt: skip


def _log_record(item: dict[str, Any], resource: dict[str, Any]) -> SpanIn | None:
    if not item.get("traceId") or not item.get("spanId"):
        return None
    attributes = _attributes(item.get("attributes"))
    body = _value(item.get("body"))
    attributes |= body if isinstance(body, dict) else {} if body is None else {"body": body}
    name = _text(item.get("eventName") or attributes.pop("event.name", ""))
    time_ns = _time_ns(item, "timeUnixNano") or _time_ns(item, "observedTimeUnixNano")
    trace_id, span_id = _id(item["traceId"], 16), _id(item["spanId"], 8)
    return SpanIn(trace_id, span_id, None, events=[Event(name, time_ns, attributes)],
                  resource=resource)  # fmt: skip


def _link(item: dict[str, Any]) -> dict[str, Any]:
    link = {"trace_id": _id(item.get("traceId"), 16), "span_id": _id(item.get("spanId"), 8)}
    attributes = _attributes(item.get("attributes"))
    return link | ({"attributes": attributes} if attributes else {})


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    yield from (one for one in value if isinstance(one, dict)) if isinstance(value, list) else ()


def _id(value: Any, size_bytes: int, *, none: bool = False) -> str:
    """Return an id as hex; JSON made by Protocol Buffers' own tools has base64 instead."""
    if isinstance(value, str):
        try:
            hexed = len(value) == 2 * size_bytes
            found = bytes.fromhex(value) if hexed else base64.b64decode(value, validate=True)
        except (ValueError, binascii.Error):
            found = b""
        if len(found) == size_bytes and (none or any(found)):
            return found.hex()
    raise BadLine(f"an id that is not of {size_bytes} bytes")


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise BadLine("a name or value that is not text")
    return (value or "").encode("utf-8", "backslashreplace").decode()


def _time_ns(item: dict[str, Any], name: str) -> int:
    """Return a time; 0 where there is none."""
    value = item.get(name) or 0
    found = (
        int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else value
    )
    if not is_time(found):
        raise BadLine(f"{name} is not a time")
    return found


def _attributes(listed: Any) -> dict[str, Any]:
    try:
        return {_text(one.get("key")): _value(one.get("value")) for one in _objects(listed)}
    except RecursionError:
        raise BadLine("nested too deeply") from None


def _value(value: Any) -> Any:
    if not isinstance(value, dict) or not value:
        return None
    kind, content = next(iter(value.items()))
    if kind == "arrayValue":
        return [_value(one) for one in _objects(_object(content).get("values"))]
    if kind == "kvlistValue":
        return _attributes(_object(content).get("values"))
    if kind == "intValue":
        return _integer(content)
    if kind == "doubleValue":
        return _double(content)
    if kind in ("stringValue", "bytesValue"):
        return _text(content)
    return content if type(content) is bool else None


def _integer(content: Any) -> int:
    try:
        found = int(content) if isinstance(content, str) and len(content) < 32 else content
    except ValueError:
        found = None
    if type(found) is not int or not -(2**63) <= found < 2**63:
        raise BadLine("an integer that is none, or too large")
    return found


def _double(content: Any) -> float:
    try:
        return float(content)
    except (TypeError, ValueError, OverflowError):
        raise BadLine("a number that is none") from None
