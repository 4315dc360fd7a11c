"""Recorded prompts for Inspect AI: equal messages are made once, and repeated ids are told once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

import msgspec
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    ContentReasoning,
    ContentText,
)
from inspect_ai.tool import ToolCall

from localtrace.exporters.shape import arguments_of, plain
from localtrace.field_names import REASONING_NAMES
from localtrace.read.messages import Message, messages_of
from localtrace.store.whole_prompts import shared_prefix
from localtrace.types import Span
from localtrace.values.fields import Fields

_OWN_FIELDS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", *REASONING_NAMES})
_ROLES = frozenset({"system", "user", "assistant", "tool"})
_ID_CHARS = 22
_encode = msgspec.json.Encoder(order="sorted").encode


class Messages:
    """The messages of one trajectory.

    Args:
        trace_id: its id, from which those of the messages are derived.
    """

    def __init__(self, trace_id: str) -> None:
        self._trace_id = trace_id
        self._made: dict[tuple[bytes, int], ChatMessage] = {}

    def all(self, recorded: Iterable[Any]) -> list[ChatMessage]:
        """Return a list of recorded messages; a prompt's text in its parts."""
        seen: Counter[bytes] = Counter()
        found = []
        for one in recorded:
            more = _other_fields(one)
            for message in messages_of([one]):
                key = _encode([message, more])
                found.append(self._one(key, seen[key], message, more))
                seen[key] += 1
        return found

    def one(self, said: Message) -> ChatMessage:
        """Return the message of an answer."""
        return self._one(_encode([said, None]), 0, said, None)

    def _one(
        self, key: bytes, number: int, message: Message, more: dict[str, Any] | None
    ) -> ChatMessage:
        made = self._made.get((key, number))
        if made is None:
            digest = sha256(f"{self._trace_id} {number} ".encode() + key)
            made = _made(message, digest.hexdigest()[:_ID_CHARS], more)
            self._made[key, number] = made
        return made


class PromptIds:
    """The prompts of one trajectory as lists of ids, each without what it repeats.

    Whole, the prompts of a long rollout are too much for Inspect, which walks through every value.
    """

    def __init__(self) -> None:
        self._ends: dict[str, list[int]] = {}
        """Ids up to and with an answer, by its turn's span id; only those that none continues."""

    def told(self, turn: Span) -> list[int] | Fields | None:
        """Return the ids, or which turn's prompt and answer they repeat, how many, and the rest."""
        ids = turn.prompt_ids
        if ids is None:
            return None
        shared = {one: shared_prefix(ids, whole) for one, whole in self._ends.items()}
        base = max(shared, key=lambda one: shared[one], default=None)
        kept = 0 if base is None else shared[base]
        if turn.batch_index is None:
            for one, count in shared.items():
                if count == len(self._ends[one]):
                    del self._ends[one]
            self._ends[turn.span_id] = ids + (turn.output_ids or [])
        return {"of": base, "kept": kept, "new": ids[kept:]} if kept else ids


def _made(message: Message, message_id: str, more: dict[str, Any] | None) -> ChatMessage:
    role, content = message["role"], message["content"]
    head: dict[str, Any] = {"id": message_id, "content": content, "metadata": more}
    if role == "assistant":
        if "reasoning_content" in message:
            thought = ContentReasoning(reasoning=message["reasoning_content"])
            head["content"] = [thought, *([ContentText(text=content)] if content else [])]
        calls = [_tool_call(call) for call in message.get("tool_calls", ())]
        return ChatMessageAssistant(tool_calls=calls or None, **head)
    if role in ("tool", "function"):
        return ChatMessageTool(
            tool_call_id=message.get("tool_call_id"), function=message.get("name"), **head
        )
    if role == "user":
        return ChatMessageUser(**head)
    return ChatMessageSystem(**head)


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    arguments = arguments_of(function)
    if isinstance(arguments, dict):
        return ToolCall(call["id"], function["name"], arguments)
    why = f"the arguments are no JSON object: {arguments}"
    return ToolCall(call["id"], function["name"], {}, parse_error=why)


def _other_fields(recorded: Any) -> dict[str, Any] | None:
    """Return what a recorded message says besides, or otherwise than, Inspect's can."""
    if not isinstance(recorded, Mapping) or recorded.get("role") == "prompt":
        return None
    fields = {str(name): one for name, one in recorded.items() if name not in _OWN_FIELDS}
    if recorded.get("role") not in _ROLES:
        fields["role"] = recorded.get("role")
    content = recorded.get("content")
    if content is None:
        fields["no_content"] = "null" if "content" in recorded else "absent"
    elif not isinstance(content, str):
        fields["content"] = content
    calls = recorded.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and calls and all(map(_is_plain, calls))):
        fields["tool_calls"] = calls
    fields |= {name: recorded[name] for name in REASONING_NAMES[1:] if name in recorded}
    found: dict[str, Any] | None = plain(fields) if fields else None
    return found


def _is_plain(call: Any) -> bool:
    """Return whether Inspect's form of a call says the same."""
    function = call.get("function") if isinstance(call, Mapping) else None
    return (
        isinstance(function, Mapping)
        and set(call) == {"id", "type", "function"}
        and call["type"] == "function"
        and set(function) == {"name", "arguments"}
        and isinstance(function["arguments"], dict)
    )
