"""OpenTelemetry's JSON: one request per line, the format of the collector's file exporter.

A trajectory is one request, or several where its turns repeat very long prompts.

The spans are those that `upload --to otlp` sends. Their ids are derived from the trajectories, so
that a second export gives the same ids.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

import click
import msgspec

from localtrace.errors import MissingDependency
from localtrace.uploader.records import model_name, wants_text, with_text
from localtrace.uploader.targets import Place
from localtrace.uploader.transcripts import transcript_of

if TYPE_CHECKING:
    from localtrace.exporters.source import Source
    from localtrace.types import Run, Trajectory

OPTIONS = (click.Option(["--service"], help="Name of the service.  [default: the run's project]"),)
_DESTINATION = "otlp file"
_IDS = ("traceId", "spanId", "parentSpanId")
_REQUEST_MAX_BYTES = 8 * 2**20
"""Bytes of spans after which a request ends."""


def write(source: Source, file: BinaryIO, service: str | None) -> None:
    """Write OpenTelemetry JSON, one request per line.

    The spans are those that upload --to otlp sends. A very long trajectory takes several lines.
    """
    source.failures |= source.choice.pruned
    for part in source.choice.runs:
        source.each_line(file, _lines_of(part.run, service), part.whole_ids)


def _lines_of(run: Run, service: str | None) -> Callable[[Trajectory], Iterator[bytes]]:
    """Return a function that yields the lines of a trajectory of this run.

    Args:
        service: the name of the service; None: the run's project.

    Raises:
        MissingDependency: OpenTelemetry's Protocol Buffers are not installed.
    """
    try:
        from google.protobuf import json_format

        from localtrace.uploader.targets import otlp_values
        from localtrace.uploader.targets.otlp_spans import each_span, resource_of
    except ImportError:
        raise MissingDependency.for_extra("opentelemetry-proto", "otlp") from None
    place = Place(_DESTINATION, service or run.project, run.run_id)
    as_text, model = wants_text(run.config), model_name(run.config)

    def lines(trajectory: Trajectory) -> Iterator[bytes]:
        if as_text:
            trajectory = with_text(trajectory)
        resource = resource_of(trajectory, place)
        spans = each_span(trajectory, place, transcript_of(replace(trajectory, model=model)))
        for batch in _batches(spans):
            message = otlp_values.request(batch, resource)
            request = json_format.MessageToDict(message, use_integers_for_enums=True)
            for span in request["resourceSpans"][0]["scopeSpans"][0]["spans"]:
                _hex_ids(span)
            yield msgspec.json.encode(request) + b"\n"

    return lines


def _batches(spans: Iterator[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    size_bytes = 0
    for span in spans:
        batch.append(span)
        size_bytes += span.ByteSize()
        if size_bytes >= _REQUEST_MAX_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _hex_ids(span: dict[str, Any]) -> None:
    """Turn the ids of a span from base64 (Protocol Buffers) into hex (OpenTelemetry)."""
    for name in _IDS:
        if name in span:
            span[name] = base64.b64decode(span[name]).hex()
