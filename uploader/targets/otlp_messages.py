"""Messages to and from a model in the form of OpenTelemetry's conventions, as JSON text.

OpenTelemetry's messages have a role and parts. Recorded ones look like OpenAI's, or like anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from localtrace.types import Span
from localtrace.uploader.transcripts import Message
from localtrace.values.codec import to_json


def input_messages(turn: Span) -> str | None:
    """Return a turn's input messages, or its prompt; None if neither is known as text."""
    if turn.messages is not None:
        return to_json([_message(message) for message in turn.messages])
    prompt = turn.outputs.get("prompt_text") if isinstance(turn.outputs, Mapping) else None
    return to_json([{"role": "user", "parts": [_text(prompt)]}]) if prompt else None


def output_messages(turn: Span) -> str | None:
    """Return a turn's output message; None if it is not known as text."""
    if turn.output_text is None and turn.output_message is None:
        return None
    said = turn.output_message or {"role": "assistant", "content": turn.output_text}
    message = _message(said)
    if turn.finish_reason is not None:
        message["finish_reason"] = turn.finish_reason
    return to_json([message])


def in_parts(messages: Sequence[Message], finish_reason: str | None = None) -> str:
    """Return chat messages in the form of the conventions; the last one has the finish reason."""
    # Beside calls of tools, no text is no part.
    found = [_message(one if one["content"] else {**one, "content": None}) for one in messages]
    if finish_reason is not None:
        found[-1]["finish_reason"] = finish_reason
    return to_json(found)


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        return {"role": "user", "parts": [_text(message)]}
    role = message.get("role", "user")
    if role == "tool":
        answer = {
            "type": "tool_call_response",
            "id": message.get("tool_call_id"),
            "response": message.get("content"),
        }
        return {"role": role, "parts": [answer]}
    return {"role": role, "parts": [*_reasoning(message), *_content(message), *_calls(message)]}


def _reasoning(message: Mapping[Any, Any]) -> Iterator[dict[str, Any]]:
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        yield {"type": "reasoning", "content": reasoning}


def _content(message: Mapping[Any, Any]) -> Iterator[dict[str, Any]]:
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, Mapping) and part.get("type") == "text":
            yield _text(part.get("text"))
        elif isinstance(part, Mapping) and "type" in part:
            yield dict(part)  # such as an image: the conventions leave other types of parts open
        elif part is not None:
            yield _text(part)


def _calls(message: Mapping[Any, Any]) -> Iterator[dict[str, Any]]:
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            name, arguments = function.get("name"), function.get("arguments")
            yield {"type": "tool_call", "id": call.get("id"), "name": name, "arguments": arguments}


def _text(value: Any) -> dict[str, Any]:
    return {"type": "text", "content": value}
