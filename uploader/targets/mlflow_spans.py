"""A trajectory as spans, tags and assessments for MLflow.

Names follow verl's own MLflow backend, so filters such as `tags.step = '1'` work on both. A root
span `agent_loop` has five tags, and each traced call is a span under its qualified name. Functions
under verl's decorator that are no coroutines have only the last part of that name. Reward, run,
status and outcomes, which live tracing lacks, are added. This module knows no routes.
"""

from __future__ import annotations

import hashlib
from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from localtrace.types import Span, Trajectory
from localtrace.uploader.digests import digests_of
from localtrace.uploader.ids import derive_id
from localtrace.uploader.lone import lone_call
from localtrace.uploader.targets import AND_REWARD, Entry, Place, Record, otlp_values
from localtrace.uploader.targets import mlflow_assessments as feedback
from localtrace.uploader.targets.mlflow_chat import read_call, read_root
from localtrace.uploader.transcripts import Transcript
from localtrace.values.codec import to_json

DIGEST_TAG = "localtrace.digest"
"""Trace tag with the digest of the record, which is read back."""
ROOT_NAME = "agent_loop"
TAG_MAX_CHARS = 4096
"""Longest tag value. MLflow cuts longer ones silently; this module cuts them with a mark."""
SESSION_MAX_CHARS = 250
"""Longest session: MLflow refuses a trace with a longer one."""
_DIGEST_CHARS = 16
_RAISED = {"error", "cancelled"}
_LEVEL_DEBUG, _LEVEL_ERROR = 10, 40


def encode(
    trajectory: Trajectory, place: Place, transcript: Transcript, *, assessments: bool
) -> Record:
    """Build the record of a trajectory; equal input gives equal bytes.

    Args:
        transcript: the trajectory in a form to read, which is added.
        assessments: send the reward and the right answer as assessments too, in a request of its
            own, as labels always are.
    """
    spans = _spans(trajectory, place.destination)
    root, *shown = spans
    remote_id = _remote_id(place.destination, trajectory.trace_id)
    end_ns = max(span.end_time_unix_nano for span in spans)
    judged = feedback.of_reward(trajectory, place, end_ns) if assessments else []
    judged += feedback.of_labels(trajectory, place)
    judged += feedback.expectations(trajectory, place, end_ns) if assessments else []
    read_root(root, trajectory, transcript)
    for otlp_span, span in zip(shown, _calls(trajectory), strict=True):
        read_call(otlp_span, span, transcript)
    digest = digests_of(trajectory).whole + (AND_REWARD if assessments else "")
    root.attributes.extend(otlp_values.attributes({f"mlflow.traceTag.{DIGEST_TAG}": digest}))
    first_id = judged[0]["assessment_id"] if judged else None
    entry = Entry(place, trajectory.trace_id, remote_id, digest, len(spans), first_id)
    body = feedback.body(trajectory, place, remote_id, spans, judged) if judged else None
    return Record(entry, (otlp_values.request(spans),), assessment=body)


def _trace_id(destination: str, trace_id: str) -> bytes:
    return derive_id(16, "mlflow trace", destination, trace_id)


def _remote_id(destination: str, trace_id: str) -> str:
    return f"tr-{_trace_id(destination, trace_id).hex()}"


def _calls(trajectory: Trajectory) -> list[Span]:
    """Return the calls that are spans of their own, in order."""
    lone = lone_call(trajectory)
    return [span for span in trajectory.spans if span is not lone]


def _spans(trajectory: Trajectory, destination: str) -> list[OtlpSpan]:
    trace_id = _trace_id(destination, trajectory.trace_id)
    root_id = derive_id(8, "root", destination, trajectory.trace_id)
    ids = {
        span.span_id: derive_id(8, "span", destination, trajectory.trace_id, span.span_id)
        for span in trajectory.spans
    }
    lone = lone_call(trajectory)
    if lone is not None:
        ids[lone.span_id] = root_id
    spans = [_root(trajectory, trace_id, root_id, lone)]
    for span in _calls(trajectory):
        # A call whose caller was not recorded belongs directly under the trajectory.
        parent_id = ids.get(span.parent_id or "", root_id)
        spans.append(_call(span, trace_id, ids[span.span_id], parent_id))
    return spans


def _root(trajectory: Trajectory, trace_id: bytes, root_id: bytes, lone: Span | None) -> OtlpSpan:
    known_ends = [span.end_ns for span in trajectory.spans]
    end_ns = trajectory.end_ns or max([trajectory.start_ns, *known_ends])
    name = otlp_values.utf8((trajectory.name if lone is None else _name(lone)) or ROOT_NAME)
    facts = _facts(trajectory)
    tags = {"mlflow.traceName": name, **{key: str(value) for key, value in facts.items()}}
    values = _unspecified(trajectory.status) | ({} if lone is None else _call_values(lone))
    values |= {f"mlflow.traceTag.{key}": _tag(value) for key, value in tags.items()}
    values |= facts
    values["localtrace.trace_id"] = trajectory.trace_id
    values["localtrace.project"] = trajectory.project
    if trajectory.group_id is not None:
        # MLflow shows this as the session of the trace: all rollouts of a group are one session.
        values["session.id"] = session = _session(trajectory.group_id)
        if session != trajectory.group_id:
            values["localtrace.group_id"] = trajectory.group_id
    values |= {f"attributes.{key}": value for key, value in trajectory.attributes.items()}
    for outcome in trajectory.outcomes:
        values[f"outcomes.{outcome.name}"] = outcome.value
    return OtlpSpan(
        trace_id=trace_id,
        span_id=root_id,
        name=name,
        kind=OtlpSpan.SPAN_KIND_INTERNAL,
        start_time_unix_nano=trajectory.start_ns,
        end_time_unix_nano=end_ns,
        attributes=otlp_values.attributes({key: _quoted(value) for key, value in values.items()}),
        **_ending(trajectory.status, trajectory.error, end_ns),
    )


def _facts(trajectory: Trajectory) -> dict[str, Any]:
    """Return the facts for the trace's tags and the root's attributes; verl's five come first."""
    facts = {
        "sample_index": trajectory.sample_index,
        "step": trajectory.step,
        "rollout_n": trajectory.rollout_n,
        "validate": trajectory.validate,
        "experiment_name": trajectory.experiment,
        "reward": trajectory.reward,
        "status": trajectory.status,
        "attempt": trajectory.attempt,
        "group_id": trajectory.group_id,
        "agent": trajectory.agent,
        "data_source": trajectory.data_source,
        "localtrace.run_id": trajectory.run_id,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _name(span: Span) -> str:
    """Return the name that live tracing shows: of plain functions only the last part."""
    return span.op.rpartition(".")[2] if span.is_async is False else span.op


def _call_values(span: Span) -> dict[str, Any]:
    values = {
        **_unspecified(span.status),
        "mlflow.spanType": _TYPES[span.kind],
        "mlflow.spanInputs": span.inputs,
        "mlflow.spanOutputs": span.outputs,
        "localtrace.seq": span.seq,
    }
    if span.status != "ok" and span.outputs is None:
        del values["mlflow.spanOutputs"]
    if usage := _token_usage(span):
        values["mlflow.chat.tokenUsage"] = usage
    if span.is_async is False:
        values["mlflow.spanFunctionName"] = _name(span)
    if span.kind_derived:
        values["localtrace.kind_derived"] = True
    if span.output_text is not None:
        values["localtrace.output_text"] = span.output_text
    if span.finish_reason is not None:
        values["localtrace.finish_reason"] = span.finish_reason
    return values


def _call(span: Span, trace_id: bytes, span_id: bytes, parent_id: bytes) -> OtlpSpan:
    values = _call_values(span)
    return OtlpSpan(
        trace_id=trace_id,
        span_id=span_id,
        parent_span_id=parent_id,
        name=otlp_values.utf8(_name(span)),
        kind=OtlpSpan.SPAN_KIND_INTERNAL,
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        attributes=otlp_values.attributes({key: _quoted(value) for key, value in values.items()}),
        **_ending(span.status, span.error, span.end_ns),
    )


_TYPES = {
    "generation": "CHAT_MODEL", "tool": "TOOL", "reward": "EVALUATOR", "agent": "AGENT",
    "other": "UNKNOWN",
}  # fmt: skip
"""MLflow's span types by kind. Live tracing by verl leaves all of them UNKNOWN."""


def _token_usage(span: Span) -> dict[str, int] | None:
    written = span.generated_count
    if not span.is_turn or span.prompt_ids is None or written is None:
        return None
    read = len(span.prompt_ids)
    return {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}


def _unspecified(status: str) -> dict[str, Any]:
    """Return the type and log level that MLflow's client sets, because verl sets neither."""
    return {
        "mlflow.spanType": "UNKNOWN",
        "mlflow.spanLogLevel": _LEVEL_ERROR if status in _RAISED else _LEVEL_DEBUG,
    }


def _ending(status: str, error: str | None, time_ns: int) -> dict[str, Any]:
    """Return the status and the exception event; the class has no module, as in MLflow's client."""
    events = []
    if error is not None:
        kind, colon, message = error.partition(": ")
        error = kind.rpartition(".")[2] + colon + message
        if status in _RAISED:
            events.append(otlp_values.exception_event(time_ns, error))
    return {"status": otlp_values.span_status(status, error), "events": events}


def _session(group_id: str) -> str:
    """Shorten a group id to a session id; the digest keeps groups apart that begin alike."""
    text = otlp_values.utf8(group_id)
    if len(text) <= SESSION_MAX_CHARS:
        return text
    digest = hashlib.sha256(group_id.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_CHARS]
    return f"{text[: SESSION_MAX_CHARS - 1 - _DIGEST_CHARS]}-{digest}"


def _tag(value: str) -> str:
    text = otlp_values.utf8(value)
    return text if len(text) <= TAG_MAX_CHARS else text[: TAG_MAX_CHARS - 1] + "…"


def _quoted(value: Any) -> Any:
    """Encode text that looks like JSON once more, because MLflow decodes such text once.

    Looks are enough. MLflow's parser fails on deep nesting, such as a thousand opening brackets
    from a model, and then refuses the whole batch.
    """
    looks_like_json = isinstance(value, str) and value.lstrip().startswith(('"', "[", "{"))
    return to_json(value) if looks_like_json else value
