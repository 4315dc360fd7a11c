"""The calls of a sample of Inspect: turns, tools, and the agents that others ran in.

Messages become those of OpenAI's form, in which localtrace keeps them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from inspect_ai.event import ModelEvent, SpanBeginEvent, SpanEndEvent, ToolEvent
from inspect_ai.log import EvalSample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    ModelOutput,
    ModelUsage,
)

from localtrace.importers.imported_rollouts import CallIn, derived_span_id
from localtrace.importers.times import TIME_MAX_NS, time_ns
from localtrace.values.fields import Fields, known

OP = "inspect.generate"
_MORE_CHOICES = "answers after the first of a call that asked for several"
_STOPS = {"max_tokens": "length", "unknown": None}


class Calls:
    """The calls of one sample.

    Args:
        trace_id: its trajectory's id.
        default_ns: the time of the sample where it has none.
    """

    def __init__(self, sample: EvalSample, trace_id: str, default_ns: int) -> None:
        self.calls: list[CallIn] = []
        self.left_out: Counter[str] = Counter()
        self._trace_id = trace_id
        self._sent: dict[int, Fields] = {}
        """Messages by the identity of Inspect's: calls share them."""
        self._agents: dict[str, int] = {}
        """Span ids of the agents, by the id of Inspect's span."""
        self._callers: dict[str, int] = {}
        """Span ids of the calls of tools that an agent answers, by the id of Inspect's span."""
        self._within: dict[str, str | None] = {}
        """The span around a span, by Inspect's ids."""
        started, completed = (
            None if text is None else time_ns(datetime.fromisoformat(text))
            for text in (sample.started_at, sample.completed_at)
        )
        self.start_ns = default_ns if started is None else started
        self.end_ns = self.start_ns if completed is None else completed
        if any(isinstance(event, ModelEvent) for event in sample.events):
            ends = {event.id: event for event in sample.events if isinstance(event, SpanEndEvent)}
            for event in sample.events:
                self._add_event(event, ends)
        else:
            self._add_messages(sample)

    def _add_event(self, event: Any, ends: dict[str, SpanEndEvent]) -> None:
        if isinstance(event, SpanBeginEvent):
            self._within[event.id] = event.parent_id
            if event.type == "agent":
                self._add_agent(event, ends.get(event.id))
        elif isinstance(event, ModelEvent):
            self._add_turn(event)
        elif isinstance(event, ToolEvent):
            self._add_tool(event)

    def _add_agent(self, event: SpanBeginEvent, end: SpanEndEvent | None) -> None:
        start_ns = time_ns(event.timestamp)
        end_ns = start_ns if end is None else time_ns(end.timestamp)
        call = self._add(
            event.name, start_ns, max(0, end_ns - start_ns), {}, None, kind="agent",
            parent_id=self._callers.get(event.id, self._parent(event.parent_id)),
        )  # fmt: skip
        self._agents[event.id] = call.span_id

    def _parent(self, span_id: str | None) -> int | None:
        """Return the agent around a span."""
        for _ in range(len(self._within) + 1):
            if span_id is None or span_id in self._agents:
                break
            span_id = self._within.get(span_id)
        return self._agents.get(span_id or "")

    def _add_turn(self, event: ModelEvent) -> None:
        config = event.config.model_dump(exclude_none=True)
        inputs = known({
            "messages": self._messages(event.input),
            "tools": [_tool(tool) for tool in event.tools] or None,
            "model": event.model, "role": event.role, "config": config or None,
        })  # fmt: skip
        outputs: Fields | None = self._answer(event.output) | known({"retries": event.retries})
        if event.error and not (outputs or {}).get("content"):
            outputs = None
        self._add(
            OP, time_ns(event.timestamp), _duration_ns(event, event.output.time), inputs, outputs,
            parent_id=self._parent(event.span_id), takes_prompt=True,
            status="error" if event.error else "ok", error=event.error,
        )  # fmt: skip

    def _answer(self, output: ModelOutput) -> Fields:
        if not output.choices:
            return known({"error": output.error})
        self.left_out[_MORE_CHOICES] += len(output.choices) - 1
        choice = output.choices[0]
        message = self._message(choice.message)
        answer: Fields = {name: value for name, value in message.items() if name != "role"} | {
            "model": output.model, "metadata": output.metadata, "error": output.error,
            "finish_reason": _STOPS.get(choice.stop_reason, choice.stop_reason),
            "usage": _usage(output.usage),
        }  # fmt: skip
        if choice.logprobs is not None:
            # Without ids of tokens they are no column of a turn.
            logprobs = choice.logprobs.content
            answer["token_logprobs"] = [one.model_dump(exclude_none=True) for one in logprobs]
        return known(answer)

    def _add_tool(self, event: ToolEvent) -> None:
        result: Any = event.result
        if not isinstance(result, str | int | float | bool | None):
            result = event.model_dump(mode="json", include={"result"}, exclude_none=True)["result"]
        error = event.error.message if event.error is not None else None
        error = "failed" if error is None and event.failed else error
        call = self._add(
            event.function, time_ns(event.timestamp), _duration_ns(event), event.arguments,
            result if error is None else None, kind="tool", parent_id=self._parent(event.span_id),
            status="ok" if error is None else "error", error=error,
        )  # fmt: skip
        if event.agent_span_id is not None:
            self._callers[event.agent_span_id] = call.span_id

    def _add_messages(self, sample: EvalSample) -> None:
        """Add a turn for each message of the assistant, and a call for each answer of a tool."""
        before: list[ChatMessage] = []
        waiting: Fields = {}
        last = max((place for place, message in enumerate(sample.messages)
                    if isinstance(message, ChatMessageAssistant)), default=-1)  # fmt: skip
        for place, message in enumerate(sample.messages):
            if isinstance(message, ChatMessageAssistant) and message.source != "input":
                answer = self._message(message)
                outputs = {name: value for name, value in answer.items() if name != "role"}
                if place == last and sample.output.choices:
                    outputs |= self._answer(sample.output)
                inputs: Fields = {"messages": self._messages(before)}
                self._add(OP, self.start_ns, 0, inputs, known(outputs), takes_prompt=True)
                waiting |= {call.id: call for call in message.tool_calls or ()}
            elif isinstance(message, ChatMessageTool) and message.tool_call_id in waiting:
                call = waiting.pop(message.tool_call_id)
                error = message.error.message if message.error is not None else None
                self._add(
                    call.function, self.start_ns, 0, call.arguments,
                    None if error else message.text, kind="tool",
                    status="ok" if error is None else "error", error=error,
                )  # fmt: skip
            before.append(message)

    def _add(
        self, op: str, start_ns: int, duration_ns: int, inputs: Any, outputs: Any, *,
        takes_prompt: bool = False, **fields: Any,
    ) -> CallIn:  # fmt: skip
        seq = len(self.calls)
        call = CallIn(
            span_id=derived_span_id("span", self._trace_id, str(seq)),
            op=op,
            seq=seq,
            start_ns=start_ns,
            duration_ns=duration_ns,
            inputs=inputs if isinstance(inputs, dict) else {},
            outputs=outputs,
            takes_prompt=takes_prompt,
            **fields,
        )
        self.calls.append(call)
        return call

    def _messages(self, messages: Iterable[ChatMessage]) -> list[Fields]:
        return [self._message(message) for message in messages]

    def _message(self, message: ChatMessage) -> Fields:
        sent = self._sent.get(id(message))
        if sent is None:
            sent = self._sent[id(message)] = _sent(message)
        return sent


def _duration_ns(event: ModelEvent | ToolEvent, reported_s: float | None = None) -> int:
    duration_s = reported_s or event.working_time or 0.0
    if event.completed is not None:
        duration_s = max(0.0, (event.completed - event.timestamp).total_seconds())
    return int(duration_s * 1e9) if 0 <= duration_s < TIME_MAX_NS / 1e9 else 0


def _sent(message: ChatMessage) -> Fields:
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
    return sent | ({"metadata": message.metadata} if message.metadata else {})


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


def _usage(usage: ModelUsage | None) -> Fields | None:
    """Return counts of tokens under the names of OpenAI's."""
    if usage is None:
        return None
    cached = (usage.input_tokens_cache_read or 0) + (usage.input_tokens_cache_write or 0)
    rest = usage.model_dump(exclude_none=True, exclude={"input_tokens", "output_tokens"})
    counts = {"prompt_tokens": usage.input_tokens + cached,
              "completion_tokens": usage.output_tokens}  # fmt: skip
    return {**counts, **rest}


def _tool(tool: Any) -> Fields:
    return {"type": "function", "function": tool.model_dump(mode="json", exclude_none=True)}
