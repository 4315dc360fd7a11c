"""A trajectory as spans that any OpenTelemetry backend can show.

Model calls, tools and agents follow OpenTelemetry's conventions for generative AI (`gen_ai.*`).
Inputs and outputs are repeated as `input.value` and `output.value`, which OpenInference defines and
Phoenix shows. Neither convention covers reinforcement learning, so its facts have names under
`localtrace.*`.

On the root:

    localtrace.step, .sample_index, .rollout_n, .group_id, .validate, .data_source, .attempt
    localtrace.status           ok, error, cancelled, interrupted, dropped or running
    localtrace.reward           also as an event `gen_ai.evaluation.result`, where it is finite
    localtrace.advantage, .fate, .trained_step
    localtrace.outcome.NAME     every other outcome
    localtrace.outcomes         time, step and source of each outcome but labels, as JSON
    localtrace.turns            number of model calls
    localtrace.output_tokens    number of tokens that they generated

On calls:

    localtrace.seq              place in the order in which the calls began
    localtrace.span_id, .status as recorded
    localtrace.generations      number of generations of a call that made several
    localtrace.weight_version   version of the policy's weights

Other attributes of the trajectory are in OpenInference's JSON object `metadata`. This module knows
no routes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from localtrace.read.turns import as_text, fields_of, weight_version
from localtrace.types import FAILED_STATUSES, Outcome, Span, Trajectory
from localtrace.uploader.digests import digests_of
from localtrace.uploader.ids import derive_id
from localtrace.uploader.targets import Entry, Place, Record, otlp_values
from localtrace.uploader.targets.otlp_chat import EVALUATION, read_call, read_root, show_chat
from localtrace.uploader.transcripts import Transcript
from localtrace.values.codec import to_json

ROOT_NAME = "agent_loop"
_REQUEST: dict[str, tuple[str, type[str] | type[float] | type[int]]] = {
    "model": ("model", str),
    "temperature": ("temperature", float),
    "top_p": ("top_p", float),
    "top_k": ("top_k", int),
    "max_tokens": ("max_tokens", int),
    "max_new_tokens": ("max_tokens", int),
    "frequency_penalty": ("frequency_penalty", float),
    "presence_penalty": ("presence_penalty", float),
    "seed": ("seed", int),
    "n": ("choice.count", int),
}
"""Name after `gen_ai.request.`, and type, by argument or sampling parameter."""
_OUTCOMES = {"reward", "advantage", "fate", "trained_step"}


def encode(
    trajectory: Trajectory,
    place: Place,
    transcript: Transcript,
    *,
    for_langfuse: bool = False,
) -> Record:
    """Build the record of a trajectory; equal input gives equal bytes.

    Args:
        transcript: the trajectory in a form to read, which is added.
        for_langfuse: whether Langfuse's own names for it are added, too.
    """
    spans = list(each_span(trajectory, place, transcript))
    if for_langfuse:
        for shown, span in zip(spans[1:], trajectory.spans, strict=True):
            show_chat(shown, transcript.chats.get(span.span_id))
    body = otlp_values.request(spans, resource_of(trajectory, place))
    digest = digests_of(trajectory).whole
    entry = Entry(place, trajectory.trace_id, spans[0].trace_id.hex(), digest, len(spans))
    return Record(entry, (body,))


def each_span(trajectory: Trajectory, place: Place, transcript: Transcript) -> Iterator[OtlpSpan]:
    """Yield the spans of a trajectory: the root, then the calls in order."""
    made = Counter(span.parent_id for span in trajectory.generations)
    root, *calls = _spans(trajectory, place)
    read_root(root, trajectory, transcript)
    yield root
    for call, span in zip(calls, trajectory.spans, strict=True):
        read_call(call, span, transcript, made[span.span_id])
        yield call


def _spans(trajectory: Trajectory, place: Place) -> Iterator[OtlpSpan]:
    """Yield the root, then the calls in order."""
    trace_id = derive_id(16, "otlp trace", place.destination, trajectory.trace_id)
    ids = {
        span.span_id: derive_id(8, "otlp span", place.destination, span.trace_id, span.span_id)
        for span in trajectory.spans
    }
    root_id = derive_id(8, "otlp root", place.destination, trajectory.trace_id)
    common: dict[str, Any] = {"trace_id": trace_id, "kind": OtlpSpan.SPAN_KIND_INTERNAL}
    root = _root(trajectory)
    root.MergeFrom(OtlpSpan(span_id=root_id, **common))
    yield root
    for span in trajectory.spans:
        call = _call(span, _session(trajectory))
        # A call whose caller was not recorded belongs directly under the trajectory.
        parent_id = ids.get(span.parent_id or "", root_id)
        call.MergeFrom(OtlpSpan(span_id=ids[span.span_id], parent_span_id=parent_id, **common))
        yield call


def resource_of(trajectory: Trajectory, place: Place) -> dict[str, Any]:
    """Return the attributes that all spans of a trajectory share."""
    return {
        "service.name": place.experiment,
        "openinference.project.name": place.experiment,
        "localtrace.project": trajectory.project,
        "localtrace.experiment": trajectory.experiment,
        "localtrace.run_id": trajectory.run_id,
    }


def _session(trajectory: Trajectory) -> str:
    """Return the session, by which backends group: the rollouts of one sample at one step."""
    return trajectory.group_id or trajectory.trace_id


def _root(trajectory: Trajectory) -> OtlpSpan:
    ends = [span.end_ns for span in trajectory.spans]
    end_ns = trajectory.end_ns or max([trajectory.start_ns, *ends])
    turns = [span for span in trajectory.spans if span.is_turn]
    generated = [one for turn in turns if (one := turn.generated_count) is not None]
    values = {
        "openinference.span.kind": "AGENT",
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": trajectory.agent,
        "gen_ai.conversation.id": _session(trajectory),
        "session.id": _session(trajectory),
        "metadata": to_json(trajectory.attributes) if trajectory.attributes else None,
        "localtrace.trace_id": trajectory.trace_id,
        "localtrace.step": trajectory.step,
        "localtrace.sample_index": trajectory.sample_index,
        "localtrace.rollout_n": trajectory.rollout_n,
        "localtrace.group_id": trajectory.group_id,
        "localtrace.validate": trajectory.validate,
        "localtrace.data_source": trajectory.data_source,
        "localtrace.attempt": trajectory.attempt,
        "localtrace.status": trajectory.status,
        "localtrace.reward": trajectory.reward,
        "localtrace.turns": len(turns),
        "localtrace.output_tokens": sum(generated) if generated else None,
    }
    for outcome in trajectory.outcomes:
        values |= _outcome(outcome)
    root = _span(trajectory.name or ROOT_NAME, trajectory, end_ns, values)
    if trajectory.reward is not None and math.isfinite(trajectory.reward):
        score = {
            "gen_ai.evaluation.name": "reward",
            "gen_ai.evaluation.score.value": trajectory.reward,
        }
        root.events.add(
            name=EVALUATION,
            time_unix_nano=end_ns,
            attributes=otlp_values.attributes(score),
        )
    return root


def _outcome(outcome: Outcome) -> dict[str, Any]:
    known = outcome.name in _OUTCOMES and outcome.values is None
    key = f"localtrace.{outcome.name}" if known else f"localtrace.outcome.{outcome.name}"
    return {key: outcome.value}


def _call(span: Span, session: str) -> OtlpSpan:
    values: dict[str, Any] = {
        "openinference.span.kind": "CHAIN",
        "input.value": to_json(span.inputs),
        "input.mime_type": "application/json",
        "localtrace.seq": span.seq,
    }
    if span.status == "ok" or span.outputs is not None:
        values["output.value"] = to_json(span.outputs)
        values["output.mime_type"] = "application/json"
    if span.is_turn:
        values |= _turn(span) | {"gen_ai.conversation.id": session}
    elif span.kind == "tool":
        values |= {
            "openinference.span.kind": "TOOL",
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": _tool_name(span),
        }
    elif span.kind == "agent":
        values |= {"openinference.span.kind": "AGENT", "gen_ai.operation.name": "invoke_agent"}
    elif span.kind == "reward":
        values["openinference.span.kind"] = "EVALUATOR"
    if span.kind_derived:
        values["localtrace.kind_derived"] = True
    return _span(span.op, span, span.end_ns, values)


def _turn(span: Span) -> dict[str, Any]:
    version = weight_version(span)
    values: dict[str, Any] = {
        "openinference.span.kind": "LLM",
        "gen_ai.operation.name": "text_completion" if span.messages is None else "chat",
        "gen_ai.response.finish_reasons": (span.finish_reason,) if span.finish_reason else None,
        "localtrace.weight_version": None if version is None else as_text(version),
    }
    for name, ids in (("input", span.prompt_ids), ("output", span.output_ids)):
        if ids is not None:
            values[f"gen_ai.usage.{name}_tokens"] = len(ids)
    return values | _request(span.inputs)


def _request(inputs: Any) -> dict[str, Any]:
    """Return the attributes for the model and the sampling parameters among the arguments."""
    arguments = fields_of(inputs)
    arguments = {**arguments, **fields_of(arguments.get("sampling_params"))}
    found: dict[str, Any] = {}
    for argument, (name, kind) in _REQUEST.items():
        value = arguments.get(argument)
        # Some backends would make another column for an int where a float belongs.
        if type(value) is kind or (kind is float and type(value) is int):
            found[f"gen_ai.request.{name}"] = kind(value)
    return found


def _tool_name(span: Span) -> str:
    arguments = fields_of(span.inputs)
    names = (fields_of(arguments.get("tool_call")).get("name"), arguments.get("tool_name"))
    found = next((name for name in (*names, arguments.get("name")) if isinstance(name, str)), None)
    if found is not None:
        return found
    *owners, function = span.op.split(".")
    return owners[-1] if owners and owners[-1].endswith("Tool") else function


def _span(
    name: str, recorded: Span | Trajectory, end_ns: int, values: Mapping[str, Any]
) -> OtlpSpan:
    status, error = recorded.status, recorded.error
    known = {key: value for key, value in values.items() if value is not None}
    events = []
    if status in FAILED_STATUSES:
        known["error.type"] = error.partition(":")[0] if error else status
        if error is not None and status in ("error", "cancelled"):
            events = [otlp_values.exception_event(end_ns, error)]
    return OtlpSpan(
        name=otlp_values.utf8(name),
        start_time_unix_nano=recorded.start_ns,
        end_time_unix_nano=end_ns,
        attributes=otlp_values.attributes(known),
        status=otlp_values.span_status(status, error),
        events=events,
    )
