"""Chat attributes for spans of OpenTelemetry, with the names of its conventions.

Messages, tools and the model are added to turns, arguments and results to tools, labels as events
to the root. The root gets the question, and the answer with the reward, which backends list.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from localtrace.field_names import LABEL_NAMES
from localtrace.types import Outcome, Span, Trajectory
from localtrace.uploader.targets import otlp_values
from localtrace.uploader.transcripts import Chat, Message, Transcript
from localtrace.values.codec import to_json

EVALUATION = "gen_ai.evaluation.result"


def read_root(root: OtlpSpan, trajectory: Trajectory, transcript: Transcript) -> None:
    """Add question, answer, messages and labels."""
    values: dict[str, Any] = {}
    if isinstance(transcript.prompt, list):
        values["gen_ai.input.messages"] = _in_parts(transcript.prompt)
        asked = [one["content"] for one in transcript.prompt if one["role"] == "user"]
        values["input.value"] = (asked or [transcript.prompt[-1]["content"]])[-1]
    elif transcript.prompt is not None:
        values["input.value"] = transcript.prompt
    if transcript.answer is not None:
        answer: dict[str, Any] = {"answer": transcript.answer}
        if trajectory.reward is not None:
            reward = trajectory.reward
            answer["reward"] = reward if math.isfinite(reward) else str(reward)
        values["output.value"], values["output.mime_type"] = to_json(answer), "application/json"
    last = trajectory.turns[-1:]
    if last and (said := transcript.chats[last[0].span_id].said) is not None:
        values["gen_ai.output.messages"] = _in_parts([said], last[0].finish_reason)
    usage = [chat.usage for chat in transcript.chats.values() if chat.usage is not None]
    if usage:
        values["localtrace.output_tokens"] = sum(made for _, made in usage)
    told = {
        one.name: [one.time_ns, one.step, one.source]
        for one in trajectory.outcomes
        if one.name not in LABEL_NAMES
    }
    if told:
        values["localtrace.outcomes"] = to_json(told)
    otlp_values.put(root, values)
    for label in trajectory.labels:
        _judge(root, label)


def read_call(shown: OtlpSpan, span: Span, transcript: Transcript, generations: int) -> None:
    """Add the messages, tools and model of a turn, or what a tool was given and gave.

    Args:
        generations: how many a call made that made several.
    """
    made = {"localtrace.generations": generations} if generations else {}
    otlp_values.put(
        shown, {"localtrace.span_id": span.span_id, "localtrace.status": span.status, **made}
    )
    chat = transcript.chats.get(span.span_id)
    if chat is not None:
        otlp_values.put(shown, _chat(chat, span))
    elif span.kind == "tool":
        result = {} if span.outputs is None else {"gen_ai.tool.call.result": to_json(span.outputs)}
        otlp_values.put(shown, {"gen_ai.tool.call.arguments": to_json(span.inputs), **result})


def show_chat(shown: OtlpSpan, chat: Chat | None) -> None:
    """Add a turn's messages under Langfuse's names: it prefers `input.value` to `gen_ai.*`."""
    if chat is None:
        return
    given: Any = {"tools": chat.tools, "messages": chat.given} if chat.tools else chat.given
    values = {"input": given if chat.given else None, "output": chat.said}
    otlp_values.put(shown, {
        f"langfuse.observation.{name}": to_json(one) for name, one in values.items() if one
    })  # fmt: skip


def _in_parts(messages: Sequence[Message], finish_reason: str | None = None) -> str:
    """Return chat messages in the form of the conventions; the last one has the finish reason."""
    parts = [_message(message) for message in messages]
    if finish_reason is not None:
        parts[-1]["finish_reason"] = finish_reason
    return to_json(parts)


def _message(message: Message) -> dict[str, Any]:
    role, content = message["role"], message["content"]
    if role == "tool":
        call_id = message.get("tool_call_id")
        answer = {"type": "tool_call_response", "id": call_id, "response": content}
        return {"role": role, "parts": [answer]}
    parts = []
    if reasoning := message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": reasoning})
    if content:  # beside calls of tools, no text is no part
        parts.append({"type": "text", "content": content})
    for call in message.get("tool_calls", ()):
        parts.append({"type": "tool_call", "id": call["id"], **call["function"]})
    return {"role": role, "parts": parts}


def _chat(chat: Chat, span: Span) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if chat.given:
        values["gen_ai.operation.name"] = "chat"
        values["gen_ai.input.messages"] = _in_parts(chat.given)
    if chat.said is not None:
        values["gen_ai.output.messages"] = _in_parts([chat.said], span.finish_reason)
    if chat.usage is not None:
        values["gen_ai.usage.input_tokens"], values["gen_ai.usage.output_tokens"] = chat.usage
    if chat.tools:
        values["gen_ai.tool.definitions"] = to_json(chat.tools)
    if chat.model is not None:
        values["gen_ai.request.model"] = otlp_values.utf8(chat.model)
    return values


def _judge(root: OtlpSpan, label: Outcome) -> None:
    values: dict[str, Any] = {"gen_ai.evaluation.name": label.name}
    if label.number is not None and math.isfinite(label.number):
        values["gen_ai.evaluation.score.value"] = label.number
    elif label.text is not None:
        is_comment = label.name == "comment"
        key = "explanation" if is_comment else "score.label"
        values[f"gen_ai.evaluation.{key}"] = label.text
    else:
        return
    if label.source is not None:
        values["localtrace.source"] = label.source
    attributes = otlp_values.attributes(values)
    root.events.add(name=EVALUATION, time_unix_nano=label.time_ns, attributes=attributes)
