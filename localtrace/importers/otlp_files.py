"""OpenTelemetry's trace files as spans and events, one after the other.

The file exporter of OpenTelemetry's collector writes one request per line as JSON. As Protocol
Buffers, or compressed with zstd, each request stands behind its length of four bytes. A file may
also be a single request, in JSON of any layout or in Protocol Buffers.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from localtrace.errors import MissingDependency
from localtrace.importers.intake import Report
from localtrace.importers.lines import (
    LINE_MAX_BYTES,
    BadLine,
    OnBytes,
    read_documents,
    read_json,
    read_whole,
)
from localtrace.importers.otlp_spans import SpanIn, spans_of
from localtrace.importers.source import Source

_FRAME_BYTES = 4
_ZSTD = b"\x28\xb5\x2f\xfd"
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
    if start[:1] <= b"\x04" and start:
        parts = _framed(path, on_bytes)
    elif start.startswith(_PROTOBUF) and not _CONTROL.isdisjoint(start):
        parts = iter([(str(path), lambda: _whole(path, on_bytes))])
    elif start.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b""):
        parts = ((line.place, line.fields) for line in read_documents(path, on_bytes))
    else:
        report.refuse(
            str(path), f"neither JSON nor Protocol Buffers of OpenTelemetry{_hint(start)}"
        )
        on_bytes(path.stat().st_size)
        return
    for place, read in parts:
        try:
            yield place, read()
        except BadLine as error:
            report.refuse(place, str(error))


def _hint(start: bytes) -> str:
    packed = start.startswith((b"\x1f\x8b", _ZSTD, b"PK"))
    return ": it is compressed, so unpack it first" if packed else ""


def _whole(path: Path, on_bytes: OnBytes) -> dict[str, Any]:
    on_bytes(path.stat().st_size)
    line = read_whole(path)
    if line.is_too_long:
        raise BadLine(f"one request longer than {LINE_MAX_BYTES // 2**20} MiB")
    return _of_protobuf(line.data)


def _framed(path: Path, on_bytes: OnBytes) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the requests that stand behind their lengths; a broken length ends the file."""
    number = 0
    with path.open("rb") as file:
        while head := file.read(_FRAME_BYTES):
            number += 1
            size_bytes = int.from_bytes(head, "big")
            data = file.read(min(size_bytes, LINE_MAX_BYTES + 1))
            on_bytes(len(head) + len(data))
            place = f"{path}: request {number}"
            if len(head) < _FRAME_BYTES or size_bytes != len(data):
                yield place, _cut_off
                return
            yield place, partial(_of_frame, data)


def _cut_off() -> dict[str, Any]:
    raise BadLine("it is cut off, or its length is not that of a request")


def _of_frame(data: bytes) -> dict[str, Any]:
    if data.startswith(_ZSTD):
        try:
            with pa.input_stream(io.BytesIO(data), compression="zstd") as stream:
                data = stream.read(LINE_MAX_BYTES + 1)
        except (pa.ArrowException, OSError) as error:
            raise BadLine(f"its zstd cannot be unpacked ({error})") from None
        if len(data) > LINE_MAX_BYTES:
            raise BadLine(f"unpacked, it is longer than {LINE_MAX_BYTES // 2**20} MiB")
    if data.startswith(b"{"):
        found = read_json(data)
        return found if isinstance(found, dict) else {}
    return _of_protobuf(data)


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
