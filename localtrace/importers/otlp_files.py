"""OpenTelemetry's trace files as spans and events, one after the other.

The file exporter of OpenTelemetry's collector writes one request per line as JSON. A file may also
be a single request, in JSON of any layout or in Protocol Buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from localtrace.errors import MissingDependency
from localtrace.importers.intake import Report
from localtrace.importers.lines import (
    LINE_MAX_BYTES,
    BadLine,
    OnBytes,
    read_documents,
    read_whole,
)
from localtrace.importers.otlp_spans import SpanIn, spans_of
from localtrace.importers.source import Source

_PROTOBUF = b"\x0a"
"""First byte of a request as Protocol Buffers: its first field. Text may begin with it, too."""
_CONTROL = frozenset(range(32)) - frozenset(b"\t\r\n")
"""Bytes that no text has."""
_START_BYTES = 256


def read_spans(source: Source) -> Iterator[SpanIn]:
    """Yield the spans of all files; what cannot be read is counted in the report."""
    for path in source.files:
        for place, request in _requests(path, source.report, source.on_bytes):
            try:
                yield from spans_of(request, place, source.report)
            except BadLine as error:
                source.report.refuse(place, str(error))


def _requests(
    path: Path, report: Report, on_bytes: OnBytes
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and content of each request in a file, in the form of OTLP's JSON."""
    with path.open("rb") as file:
        start = file.read(_START_BYTES)
    parts: Iterator[tuple[str, Callable[[], Any]]]
    if start.startswith(_PROTOBUF) and not _CONTROL.isdisjoint(start):
        parts = iter([(str(path), lambda: _whole(path, on_bytes))])
    elif start.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b""):
        parts = ((line.place, line.fields) for line in read_documents(path, on_bytes))
    else:
        report.refuse(
            str(path),
            "neither JSON nor one request as Protocol Buffers: unpack it, or let the collector "
            "write JSON",
        )
        on_bytes(path.stat().st_size)
        return
    for place, read in parts:
        try:
            yield place, read()
        except BadLine as error:
            report.refuse(place, str(error))


def _whole(path: Path, on_bytes: OnBytes) -> dict[str, Any]:
    on_bytes(path.stat().st_size)
    line = read_whole(path)
    if line.is_too_long:
        raise BadLine(f"one request longer than {LINE_MAX_BYTES // 2**20} MiB")
    return _of_protobuf(line.data)


def _of_protobuf(data: bytes) -> dict[str, Any]:
    """Turn a request into the form of OTLP's JSON, with ids as hex.

    Raises:
        BadLine: it is no request.
        MissingDependency: OpenTelemetry's Protocol Buffers are not installed.
    """
    try:
        from google.protobuf import json_format
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )
    except ImportError:
        raise MissingDependency.for_extra("opentelemetry-proto", "otlp") from None
    try:
        request = ExportTraceServiceRequest.FromString(data)
        found: dict[str, Any] = json_format.MessageToDict(request, use_integers_for_enums=True)
    except Exception as error:  # Protocol Buffers raises errors of a type that cannot be imported
        raise BadLine(f"no request with traces ({error})") from None
    return found
