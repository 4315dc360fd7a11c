"""A trajectory as spans and tags for MLflow.

Names follow verl's own MLflow backend, so filters such as `tags.step = '1'` work on both. A root
span `agent_loop` has five tags, and each traced call is a span under its qualified name. Functions
under verl's decorator that are no coroutines have only the last part of that name.

What live tracing lacks is added: reward, run, status and outcomes; the messages, tools and model of
turns; types of spans. Where the trace has neither inputs nor outputs, it gets the prompt and the
answer with the reward, which MLflow lists. This module knows no routes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from localtrace.types import Span, Trajectory
from localtrace.uploader.identity import derive_id, digests_of, lone_call
from localtrace.uploader.targets import AND_REWARD, Entry, Place, Record, end_of, otlp_values
from localtrace.uploader.targets import mlflow_assessments as feedback
from localtrace.uploader.transcripts import Chat, Message, Transcript
from localtrace.values.codec import to_json

DIGEST_TAG = "localtrace.digest"
"""Trace tag with the digest of the record, which is read back."""
ROOT_NAME = "agent_loop"
SESSION_MAX_CHARS = 250
"""Longest session: MLflow refuses a trace with a longer one."""
_DIGEST_CHARS = 16
_LEVEL_DEBUG, _LEVEL_ERROR = 10, 40
_TYPES = {"generation": "CHAT_MODEL", "tool": "TOOL", "reward": "EVALUATOR", "agent": "AGENT"}
"""MLflow's span types by kind. Live tracing by verl leaves all of them UNKNOWN."""


def encode(
    trajectory: Trajectory, place: Place, transcript: Transcript, *, assessments: bool
) -> Record:
    """Build the record of a trajectory; equal input gives equal bytes.

    Args:
        transcript: the trajectory in a form to read, which is added.
        assessments: send the reward and the right answer as assessments too, in a request of its
            own, as labels always are.
    """
    seed = (place.destination, trajectory.trace_id)
    trace_id = derive_id(16, "mlflow trace", *seed)
    root_id = derive_id(8, "root", *seed)
    ids = {span.span_id: derive_id(8, "span", *seed, span.span_id) for span in trajectory.spans}
    lone = lone_call(trajectory)
    if lone is not None:
        ids[lone.span_id] = root_id
    digest = digests_of(trajectory).whole + (AND_REWARD if assessments else "")
    root = _root(trajectory, transcript, lone, digest)
    root.span_id = root_id
    spans = [root]
    for span in trajectory.spans:
        if span is lone:
            continue
        values = _call(span, transcript.chats.get(span.span_id), "CHAIN")
        call = _span(_name(span), span, span.end_ns, values)
        call.span_id = ids[span.span_id]
        # A call whose caller was not recorded belongs directly under the trajectory.
        call.parent_span_id = ids.get(span.parent_id or "", root_id)
        spans.append(call)
    for span in spans:
        span.trace_id = trace_id
    remote_id = f"tr-{trace_id.hex()}"
    end_ns = max(span.end_time_unix_nano for span in spans)
    judged = [*feedback.judgements(trajectory, place, end_ns, assessments=assessments)]
    first_id = judged[0]["assessment_id"] if judged else None
    entry = Entry(place, trajectory.trace_id, remote_id, digest, len(spans), first_id)
    body = feedback.body(trajectory, place, remote_id, spans, judged) if judged else None
    return Record(entry, (otlp_values.serialized(otlp_values.request(spans)),), assessment=body)


def _root(
    trajectory: Trajectory, transcript: Transcript, lone: Span | None, digest: str
) -> OtlpSpan:
    name = otlp_values.utf8((trajectory.name if lone is None else _name(lone)) or ROOT_NAME)
    facts = _facts(trajectory)
    tags = {"mlflow.traceName": name, **{key: str(value) for key, value in facts.items()}}
    values = _unspecified(trajectory.status, "AGENT")
    if lone is not None:
        values = _call(lone, transcript.chats.get(lone.span_id), "AGENT")
    values |= {f"mlflow.traceTag.{key}": otlp_values.short(value) for key, value in tags.items()}
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
    if transcript.conversation:
        values["mlflow.chat.messages"] = list(map(_shown, transcript.conversation))
    if transcript.prompt is not None:
        name_of_prompt = "messages" if isinstance(transcript.prompt, list) else "prompt"
        values.setdefault("mlflow.spanInputs", {name_of_prompt: transcript.prompt})
    if transcript.answer is not None:
        values.setdefault("mlflow.spanOutputs", transcript.answer_with(trajectory.reward))
    values[f"mlflow.traceTag.{DIGEST_TAG}"] = digest
    return _span(name, trajectory, end_of(trajectory), values)


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


def _call(span: Span, chat: Chat | None, usual_type: str) -> dict[str, Any]:
    values = {
        **_unspecified(span.status, _TYPES.get(span.kind, usual_type)),
        "mlflow.spanInputs": span.inputs,
        "mlflow.spanOutputs": span.outputs,
        "localtrace.seq": span.seq,
    }
    if span.status != "ok" and span.outputs is None:
        del values["mlflow.spanOutputs"]
    if span.is_async is False:
        values["mlflow.spanFunctionName"] = _name(span)
    if span.kind_derived:
        values["localtrace.kind_derived"] = True
    if span.output_text is not None:
        values["localtrace.output_text"] = span.output_text
    if span.finish_reason is not None:
        values["localtrace.finish_reason"] = span.finish_reason
    return values if chat is None else values | _chat(chat)


def _chat(chat: Chat) -> dict[str, Any]:
    """Return the messages, tools and model of a turn."""
    values: dict[str, Any] = {}
    if chat.messages:
        values["mlflow.chat.messages"] = list(map(_shown, chat.messages))
    if tools := [tool for tool in chat.tools if _is_tool(tool)]:
        values["mlflow.chat.tools"] = tools
    read, made = chat.usage
    if read is not None and made is not None:
        total = {"input_tokens": read, "output_tokens": made, "total_tokens": read + made}
        values["mlflow.chat.tokenUsage"] = total
    if chat.model is not None:
        values["mlflow.llm.model"] = otlp_values.utf8(chat.model)
    return values


def _shown(message: Message) -> Message:
    """Return a message with its reasoning under the name that MLflow's page reads."""
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    thought = message.get("reasoning_content")
    return rest if thought is None else rest | {"reasoning": thought}


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _unspecified(status: str, span_type: str) -> dict[str, Any]:
    """Return the type, and the log level that MLflow's client sets, because verl sets neither."""
    level = _LEVEL_ERROR if status in otlp_values.RAISED else _LEVEL_DEBUG
    return {"mlflow.spanType": span_type, "mlflow.spanLogLevel": level}


def _span(
    name: str, recorded: Span | Trajectory, end_ns: int, values: Mapping[str, Any]
) -> OtlpSpan:
    """Return a span without ids; the class of its exception has no module, as in MLflow's client.

    Text that looks like JSON is encoded once more, because MLflow decodes such text once. Looks are
    enough: MLflow's parser fails on deep nesting, such as a thousand opening brackets from a model,
    and then refuses the whole batch.
    """
    error = recorded.error
    if error is not None:
        kind, colon, message = error.partition(": ")
        error = kind.rpartition(".")[2] + colon + message
    quoted = {
        key: to_json(value)
        if isinstance(value, str) and value.lstrip().startswith(('"', "[", "{"))
        else value
        for key, value in values.items()
    }
    return otlp_values.span(name, recorded, end_ns, error, quoted)


def _session(group_id: str) -> str:
    """Shorten a group id to a session id; the digest keeps groups apart that begin alike."""
    text = otlp_values.utf8(group_id)
    if len(text) <= SESSION_MAX_CHARS:
        return text
    digest = hashlib.sha256(group_id.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_CHARS]
    return f"{text[: SESSION_MAX_CHARS - 1 - _DIGEST_CHARS]}-{digest}"
