"""The calls of a sample of Inspect: turns, tools, and the agents that others ran in."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from inspect_ai.event import InfoEvent, ModelEvent, SpanBeginEvent, SpanEndEvent, ToolEvent
from inspect_ai.log import EvalSample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    ModelOutput,
)

from localtrace.importers.imported_rollouts import CallIn, derived_span_id
from localtrace.importers.inspect_messages import sent_of, tool_of, usage_of
from localtrace.importers.lines import BadLine
from localtrace.importers.times import TIME_MAX_NS, is_time, time_ns
from localtrace.store.journal.records import KINDS, STATUSES
from localtrace.values.fields import Fields, known
from localtrace.values.tagged_json import from_tagged

OP = "inspect.generate"
_IDS_MAX = 2**27
"""Token ids of the whole prompts of one sample."""
_MORE_CHOICES = "answers after the first of a call that asked for several"
_HEX_16, _HEX_32 = re.compile(r"[0-9a-f]{16}"), re.compile(r"[0-9a-f]{32}")
_STOPS = {"max_tokens": "length", "unknown": None}
_EVENTS = (ModelEvent, ToolEvent, InfoEvent)


class Calls:
    """The calls of one sample.

    Args:
        trace_id: its trajectory's id, unless localtrace exported it.
        default_ns: the time of the sample where it has none.
        is_own: whether localtrace exported it, so that metadata of events tell the calls.
    """

    def __init__(self, sample: EvalSample, trace_id: str, default_ns: int, *, is_own: bool) -> None:
        self.calls: list[CallIn] = []
        self.left_out: Counter[str] = Counter()
        uuid = str(sample.uuid)
        self.trace_id = uuid if is_own and _HEX_32.fullmatch(uuid) else trace_id
        self._is_own = is_own
        self._ids: dict[str, list[int]] = {}
        """Ids of exported prompts and answers, by the turns' span ids."""
        self._ids_left = _IDS_MAX
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
        events = [one for one in sample.events if not isinstance(one, SpanEndEvent)]
        if any(isinstance(one, ModelEvent) for one in events):
            ends = {one.id: one for one in sample.events if isinstance(one, SpanEndEvent)}
            for event in events:
                self._add_event(event, ends)
        else:
            self._add_messages(sample)
        if is_own:
            own = (sample.metadata.get(name) for name in ("start_ns", "end_ns"))
            start_ns, end_ns = (one if is_time(one) else None for one in own)
            self.start_ns = self.start_ns if start_ns is None else start_ns
            self.end_ns = self.end_ns if end_ns is None else end_ns

    def _add_event(self, event: Any, ends: dict[str, SpanEndEvent]) -> None:
        if isinstance(event, SpanBeginEvent):
            self._within[event.id] = event.parent_id
            if event.type == "agent" and not self._is_own:
                end = ends.get(event.id)
                start_ns = time_ns(event.timestamp)
                until_ns = start_ns if end is None else time_ns(end.timestamp)
                parent_id = self._callers.get(event.id, self._parent(event.parent_id))
                call = self._add(
                    event.name, start_ns, max(0, until_ns - start_ns), {}, None,
                    {"parent_id": parent_id, "kind": "agent"},
                )  # fmt: skip
                self._agents[event.id] = call.span_id
        elif isinstance(event, _EVENTS):
            start_ns = time_ns(event.timestamp)
            place: Fields = {"parent_id": self._parent(event.span_id)}
            if self._is_own:
                place = self._own_place(event, place)
                start_ns = place.pop("start_ns", start_ns)
            if isinstance(event, ModelEvent) and "batch_index" not in place:
                self._add_turn(event, start_ns, place)
            elif isinstance(event, ToolEvent):
                self._add_tool(event, start_ns, place)
            elif isinstance(event, InfoEvent):
                data = from_tagged(event.data)
                data = data if isinstance(data, dict) else {}
                outputs = data.get("outputs") if "error" not in place else None
                self._add(event.source or "call", start_ns, 0, data.get("inputs"), outputs, place,
                          takes_prompt=True)  # fmt: skip

    def _parent(self, span_id: str | None) -> int | None:
        """Return the agent around a span."""
        for _ in range(len(self._within) + 1):
            if span_id is None or span_id in self._agents:
                break
            span_id = self._within.get(span_id)
        return self._agents.get(span_id or "")

    def _own_place(self, event: Any, place: Fields) -> Fields:
        """Return where an exported call stood, as the metadata of its event say."""
        told = event.metadata or {}
        found = dict(place)
        for name, field in (("localtrace_id", "span_id"), ("parent_id", "parent_id")):
            value = told.get(name)
            if isinstance(value, str) and _HEX_16.fullmatch(value):
                found[field] = int(value, 16)
        checks: dict[str, Callable[[Any], bool]] = {
            "start_ns": is_time, "duration_ns": is_time, "seq": _is_place,
            "batch_index": _is_place, "op": _is_text, "error": _is_text,
            "status": lambda status: status in STATUSES[:-1], "kind": lambda kind: kind in KINDS,
        }  # fmt: skip
        return found | {
            name: told[name] for name, is_fit in checks.items()
            if told.get(name) is not None and is_fit(told[name])
        }  # fmt: skip

    def _add_turn(self, event: ModelEvent, start_ns: int, place: Fields) -> None:
        if self._is_own:
            inputs, outputs = self._own_turn(event)
        else:
            rest = event.config.model_dump(exclude_none=True)
            inputs = known({
                "messages": self._messages(event.input),
                "tools": [tool_of(tool) for tool in event.tools] or None,
                "model": event.model, "role": event.role, "config": rest or None,
            })  # fmt: skip
            outputs = self._said(event.output) | known({"retries": event.retries})
        fate: Fields = {}
        if event.error:
            fate = {"status": "error", "error": event.error}
            outputs = None if outputs is None or not outputs.get("content") else outputs
        duration_s = event.output.time or event.working_time or 0.0
        if event.completed is not None:
            duration_s = max(0.0, (event.completed - event.timestamp).total_seconds())
        self._add(OP, start_ns, _duration_ns(duration_s), inputs, outputs, fate | place,
                  takes_prompt=True)  # fmt: skip

    def _own_turn(self, event: ModelEvent) -> tuple[Any, Any]:
        """Return arguments and result of an exported turn, as they were recorded."""
        told = from_tagged(event.metadata or {})
        choice = event.output.choices[0] if event.output.choices else None
        logprobs = None if choice is None or choice.logprobs is None else choice.logprobs.content
        lists = {
            "messages": self._messages(event.input), "prompt_ids": self._prompt_ids(told),
            "tools": [tool_of(tool) for tool in event.tools], "output_ids": told.get("output_ids"),
            "output_logprobs": None if logprobs is None else [one.logprob for one in logprobs],
        }  # fmt: skip
        found = []
        for side in ("inputs", "outputs"):
            value, names = told.get(side), told.get(f"{side}_lists")
            names = names if isinstance(names, dict) else {}
            recorded = {name: lists.get(str(what)) for name, what in names.items()}
            if names and (value is None or isinstance(value, dict)):
                value = {**(value or {}), **known(recorded)}
            found.append(value)
        return found[0], found[1]

    def _prompt_ids(self, told: Fields) -> Any:
        """Return the ids of an exported prompt, of which another turn may have the first.

        Raises:
            BadLine: the prompts are too long together.
        """
        ids = told.get("prompt_ids")
        if isinstance(ids, dict):
            kept, new = ids.get("kept"), ids.get("new")
            base = self._ids.get(str(ids.get("of")), [])
            if type(kept) is not int or not 0 <= kept <= len(base) or not isinstance(new, list):
                return None
            ids = [*base[:kept], *new]
        if isinstance(ids, list):
            self._ids_left -= len(ids)
            if self._ids_left < 0:
                raise BadLine(f"its prompts have more than {_IDS_MAX} token ids together")
            said = told.get("output_ids")
            whole = [*ids, *said] if isinstance(said, list) else ids
            self._ids[str(told.get("localtrace_id"))] = whole
        return ids

    def _said(self, output: ModelOutput) -> Fields:
        if not output.choices:
            return known({"error": output.error})
        if len(output.choices) > 1:
            self.left_out[_MORE_CHOICES] += len(output.choices) - 1
        choice = output.choices[0]
        said = self._message(choice.message)
        logprobs = choice.logprobs.content if choice.logprobs is not None else None
        found: Fields = {name: one for name, one in said.items() if name != "role"} | {
            "model": output.model, "metadata": output.metadata, "error": output.error,
            "finish_reason": _STOPS.get(choice.stop_reason, choice.stop_reason),
            "usage": usage_of(output.usage),
        }  # fmt: skip
        if logprobs is not None:
            # Without ids of tokens they are no column of a turn.
            found["token_logprobs"] = [one.model_dump(exclude_none=True) for one in logprobs]
        return known(found)

    def _add_tool(self, event: ToolEvent, start_ns: int, place: Fields) -> None:
        result: Any = event.result
        if not isinstance(result, str | int | float | bool | None):
            result = event.model_dump(mode="json", include={"result"}, exclude_none=True)["result"]
        fate: Fields = {}
        if event.error is not None or event.failed:
            error = event.error.message if event.error is not None else "failed"
            fate = {"status": "error", "error": error}
            result = None
        duration_s = event.working_time or 0.0
        if event.completed is not None:
            duration_s = max(0.0, (event.completed - event.timestamp).total_seconds())
        inputs: Any = event.arguments
        if self._is_own:
            told = from_tagged(event.metadata or {})
            inputs, result = told.get("inputs", inputs), told.get("outputs", result)
        else:
            fate["kind"] = "tool"
        call = self._add(event.function, start_ns, _duration_ns(duration_s), inputs, result,
                         fate | place)  # fmt: skip
        if event.agent_span_id is not None:
            self._callers[event.agent_span_id] = call.span_id

    def _add_messages(self, sample: EvalSample) -> None:
        """Add a turn for each message of the assistant, and a call for each answer of a tool."""
        before: list[ChatMessage] = []
        asked: Fields = {}
        last = max((at for at, one in enumerate(sample.messages)
                    if isinstance(one, ChatMessageAssistant)), default=-1)  # fmt: skip
        for at, message in enumerate(sample.messages):
            if isinstance(message, ChatMessageAssistant) and message.source != "input":
                said = self._message(message)
                outputs = {name: one for name, one in said.items() if name != "role"}
                if at == last and sample.output.choices:
                    outputs |= self._said(sample.output)
                inputs: Fields = {"messages": self._messages(before)}
                self._add(OP, self.start_ns, 0, inputs, known(outputs), takes_prompt=True)
                asked |= {call.id: call for call in message.tool_calls or ()}
            elif isinstance(message, ChatMessageTool) and message.tool_call_id in asked:
                call = asked.pop(message.tool_call_id)
                error = message.error.message if message.error is not None else None
                self._add(
                    call.function, self.start_ns, 0, call.arguments,
                    None if error else message.text,
                    {"status": "ok" if error is None else "error", "error": error, "kind": "tool"},
                )  # fmt: skip
            before.append(message)

    def _add(
        self, op: str, start_ns: int, duration_ns: int, inputs: Any, outputs: Any,
        place: Fields | None = None, *, takes_prompt: bool = False,
    ) -> CallIn:  # fmt: skip
        """Add a call; `place` may hold any of its fields, and comes first."""
        seq = len(self.calls)
        fields: Fields = {
            "span_id": derived_span_id("span", self.trace_id, str(seq)), "seq": seq, "op": op,
            "duration_ns": duration_ns, "start_ns": start_ns,
        } | (place or {})  # fmt: skip
        fields.pop("batch_index", None)
        inputs = inputs if isinstance(inputs, dict) else {}
        call = CallIn(inputs=inputs, outputs=outputs, takes_prompt=takes_prompt, **fields)
        self.calls.append(call)
        return call

    def _messages(self, messages: Iterable[ChatMessage]) -> list[Fields]:
        return [self._message(one) for one in messages]

    def _message(self, message: ChatMessage) -> Fields:
        sent = self._sent.get(id(message))
        if sent is None:
            sent = self._sent[id(message)] = sent_of(message, is_own=self._is_own)
        return sent


def _duration_ns(duration_s: float) -> int:
    return int(duration_s * 1e9) if 0 <= duration_s < TIME_MAX_NS / 1e9 else 0


def _is_place(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
