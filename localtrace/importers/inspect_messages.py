"""Messages of Inspect in the form of OpenAI's, in which localtrace keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from inspect_ai.model import ChatMessage, ChatMessageAssistant, ChatMessageTool, ModelUsage

from localtrace.field_names import REASONING_NAMES
from localtrace.values.fields import Fields, known
from localtrace.values.tagged_json import from_tagged

_NO_CONTENT = "no_content"
"""Metadata of an exported message that had none: null or absent."""


def sent_of(message: ChatMessage, *, is_own: bool) -> Fields:
    """Return a message in the form of OpenAI's."""
    content, thoughts = _content(message.content)
    sent: Fields = {"role": message.role, "content": content}
    if thoughts:
        sent["reasoning_content"] = "\n".join(thoughts)
    if isinstance(message, ChatMessageAssistant) and message.tool_calls:
        sent["tool_calls"] = [
            {"id": call.id, "type": "function",
             "function": {"name": call.function, "arguments": call.arguments}}
            | ({"parse_error": call.parse_error} if call.parse_error else {})
            for call in message.tool_calls
        ]  # fmt: skip
    if isinstance(message, ChatMessageTool):
        error = message.error and {"type": message.error.type, "message": message.error.message}
        sent |= known({"tool_call_id": message.tool_call_id, "name": message.function,
                        "error": error})  # fmt: skip
    if message.metadata:
        sent |= _as_recorded(message.metadata, sent) if is_own else {"metadata": message.metadata}
    return sent


def _as_recorded(metadata: Fields, sent: Fields) -> Fields:
    """Return what an exported message has of its own, and take away what it did not have."""
    more = dict(from_tagged(metadata))
    no_content = more.pop(_NO_CONTENT, None)
    if no_content == "absent":
        sent.pop("content")
    elif no_content == "null":
        more["content"] = None
    if not more.keys().isdisjoint(REASONING_NAMES):
        sent.pop("reasoning_content", None)
    return more


def _content(content: Any) -> tuple[Any, list[str]]:
    """Return what a message says, and what was thought before it."""
    if isinstance(content, str):
        return content, []
    thoughts = [part.reasoning for part in content if part.type == "reasoning"]
    parts = list(_parts(content))
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts), thoughts
    return parts, thoughts


def _parts(content: Iterable[Any]) -> Iterator[Fields]:
    for part in content:
        if part.type == "text":
            yield {"type": "text", "text": part.text}
        elif part.type != "reasoning":
            yield part.model_dump(mode="json", exclude_none=True)


def usage_of(usage: ModelUsage | None) -> Fields | None:
    """Return counts of tokens under the names of OpenAI's."""
    if usage is None:
        return None
    cached = (usage.input_tokens_cache_read or 0) + (usage.input_tokens_cache_write or 0)
    rest = usage.model_dump(exclude_none=True, exclude={"input_tokens", "output_tokens"})
    counts = {"prompt_tokens": usage.input_tokens + cached,
              "completion_tokens": usage.output_tokens}  # fmt: skip
    found: Fields = counts | rest
    return found


def tool_of(tool: Any) -> Fields:
    return {"type": "function", "function": tool.model_dump(mode="json", exclude_none=True)}
