"""The events of one trajectory for Inspect AI: calls of models and tools, nested as they ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from inspect_ai.event import (
    InfoEvent,
    ModelEvent,
    SpanBeginEvent,
    SpanEndEvent,
    ToolEvent,
)
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    GenerateConfig,
    Logprob,
    Logprobs,
    ModelOutput,
    ModelUsage,
)
from inspect_ai.tool import ToolCallError, ToolInfo
from pydantic import ValidationError

from localtrace.exporters.inspect_messages import Messages, PromptIds
from localtrace.exporters.shape import (
    NO_PROMPT,
    answer_of,
    completion_tokens,
    finite_logprobs,
    plain,
    prompt_tokens,
)
from localtrace.field_names import PROMPT_TEXT_NAMES
from localtrace.read.conversation import Conversation
from localtrace.read.flat_rows import named_lists
from localtrace.read.messages import answer_lacks, model_of, prompt_lacks, sendable
from localtrace.read.turns import prompt_text
from localtrace.store.tokenizers import Decode
from localtrace.types import Span, Trajectory
from localtrace.values.fields import Fields, known

UNFIT_TOOLS = "tools on offer that do not have the form of OpenAI's functions"
HALF_USAGE = "token counts of turns of which only the prompt's or the answer's is known"
UNKNOWN = "unknown"
_STOPS = {"stop": "stop", "length": "max_tokens", "tool_calls": "tool_calls",
          "content_filter": "content_filter", "max_tokens": "max_tokens"}  # fmt: skip


class Events:
    """The events of one trajectory, and its conversation."""

    def __init__(
        self, trajectory: Trajectory, decode: Decode, model: str, left_out: Counter[str]
    ) -> None:
        self.prompts: dict[tuple[str, int | None], list[ChatMessage]] = {}
        self.outputs: dict[tuple[str, int | None], ModelOutput] = {}
        """Prompt and answer of each turn, by span id and place in its batch."""
        self.usage: dict[str, ModelUsage] = {}
        self._trajectory = trajectory
        self._decode = decode
        self._left_out = left_out
        self._messages = Messages(trajectory.trace_id)
        self._token_text: dict[int, str] = {}
        self._prompt_ids = PromptIds()
        self._asked: dict[str, list[str]] = {}
        """Ids of calls of tools that no event answers yet, by the tool's name."""
        for turn in trajectory.turns:
            self.prompts[turn.span_id, turn.batch_index] = self._prompt(turn)
            self.outputs[turn.span_id, turn.batch_index] = self._output(turn, model)

    def conversation(self) -> list[ChatMessage]:
        """Return the messages of all turns in order, each once."""
        new = Conversation(self._trajectory, self._decode).turns
        found: list[ChatMessage] = []
        for turn in self._trajectory.turns:
            if self.prompts[turn.span_id, turn.batch_index]:
                found += self._messages.all(new[turn.span_id].new)
            found.append(self.outputs[turn.span_id, turn.batch_index].message)
        return found

    def of_calls(self) -> Iterator[Any]:
        """Yield the events of all calls, those within a call between two marks of a span."""
        inner: dict[str | None, list[Span]] = {}
        known = {span.span_id for span in self._trajectory.spans}
        for span in self._trajectory.every_span:
            parent_id = span.parent_id if span.parent_id in known else None
            inner.setdefault(parent_id, []).append(span)
        waiting: list[Span | SpanEndEvent] = inner.pop(None, [])[::-1]
        while waiting:  # not by recursion: recorded calls may be nested without end
            one = waiting.pop()
            if isinstance(one, SpanEndEvent):
                yield one
                continue
            calls = inner.pop(one.span_id, None) if one.batch_index is None else None
            if calls is None:
                yield self._event(one, one.parent_id)
                continue
            at: Fields = self._when(one, one.start_ns, "begin") | {"span_id": one.span_id}
            parent_id = one.parent_id if one.parent_id in known else None
            yield SpanBeginEvent(
                id=one.span_id, parent_id=parent_id, name=one.op, type=one.kind, **at
            )
            yield self._event(one, one.span_id)
            at = self._when(one, one.end_ns, "end") | {"span_id": one.span_id}
            waiting.append(SpanEndEvent(id=one.span_id, **at))
            waiting += calls[::-1]

    def _when(self, span: Span, time_ns: int, what: str) -> Fields:
        place = "" if span.batch_index is None else f"-{span.batch_index}"
        return {
            "uuid": f"{span.span_id}{place}-{what}",
            **event_at(self._trajectory, time_ns),
        }

    def _event(self, span: Span, within: str | None) -> Any:
        head: Fields = self._when(span, span.start_ns, "call")
        head["span_id"] = within
        details = {name: getattr(span, name) for name in ("op", "status", "error", "start_ns",
                   "duration_ns", "seq", "parent_id", "batch_index")}  # fmt: skip
        if not span.kind_derived:
            details["kind"] = span.kind
        head["metadata"] = plain(known({"localtrace_id": span.span_id} | details))
        if span.is_turn:
            return self._model_event(span, head)
        if span.kind == "tool":
            return self._tool_event(span, head)
        said = span.outputs if span.error is None else {"error": span.error}
        data = plain(known({"inputs": span.inputs, "outputs": said}))
        return InfoEvent(source=span.op, data=data, **head)

    def _model_event(self, turn: Span, head: Fields) -> ModelEvent:
        inputs, outputs = named_lists(turn)
        lists: Fields = {
            "messages": turn.messages, "prompt_ids": turn.prompt_ids,
            "output_ids": turn.output_ids, "output_logprobs": turn.output_logprobs,
        }  # fmt: skip
        tools = self._tools(turn)
        if tools:
            inputs = _without(inputs, ("tools",))
            lists["tools"] = turn.inputs["tools"]
        if turn.messages is not None or turn.prompt_ids is not None:
            inputs = _without(inputs, PROMPT_TEXT_NAMES)
        more: Fields = {
            "inputs": inputs or None, "outputs": outputs,
            "inputs_lists": _names(turn.inputs, inputs, lists),
            "outputs_lists": _names(turn.outputs, outputs, lists),
            "prompt_ids": self._prompt_ids.told(turn), "output_ids": turn.output_ids,
        }  # fmt: skip
        output = self.outputs[turn.span_id, turn.batch_index]
        head["metadata"] |= plain(known(more))
        return ModelEvent(
            model=output.model,
            input=self.prompts[turn.span_id, turn.batch_index],
            tools=tools,
            tool_choice="auto",
            config=GenerateConfig(),
            output=output,
            error=turn.error,
            completed=time_of(turn.end_ns),
            working_time=turn.duration_ns / 1e9,
            **head,
        )

    def _tool_event(self, span: Span, head: Fields) -> ToolEvent:
        name = span.op.rpartition(".")[2]
        waiting = self._asked.get(name)
        arguments = plain(span.inputs)
        head["metadata"] |= known({"outputs": None if isinstance(span.outputs, str)
                                    else plain(span.outputs)})  # fmt: skip
        failed = span.status != "ok"
        error = ToolCallError("unknown", sendable(span.error or span.status)) if failed else None
        return ToolEvent(
            id=waiting.pop(0) if waiting else span.span_id,
            function=name,
            arguments=arguments if isinstance(arguments, dict) else {"inputs": arguments},
            result="" if failed else sendable(plain(span.outputs)),
            error=error,
            failed=failed or None,
            completed=time_of(span.end_ns),
            working_time=span.duration_ns / 1e9,
            **head,
        )

    def _prompt(self, turn: Span) -> list[ChatMessage]:
        if turn.messages is not None:
            return self._messages.all(turn.messages)
        text = prompt_text(turn, partial(self._decode, self._trajectory.run_id))
        if text is None:
            self._left_out[NO_PROMPT] += 1
            return self._messages.all([{"role": "user", "content": f"[{prompt_lacks(turn)}]"}])
        return self._messages.all([{"role": "prompt", "content": text}])

    def _output(self, turn: Span, model: str) -> ModelOutput:
        said = answer_of(turn, self._trajectory.run_id, self._decode, self._left_out)
        lacks = f"[{answer_lacks(turn)}]"
        message = self._messages.one(said or {"role": "assistant", "content": lacks})
        assert isinstance(message, ChatMessageAssistant)
        for call in message.tool_calls or ():
            self._asked.setdefault(call.function, []).append(call.id)
        reason = str(turn.finish_reason)
        choice = ChatCompletionChoice(
            message=message, stop_reason=_STOPS.get(reason, UNKNOWN), logprobs=self._logprobs(turn)
        )
        name = model_of(turn) or model
        usage = self._usage(turn)
        if usage is not None:
            self.usage[name] = self.usage.get(name, ModelUsage()) + usage
        return ModelOutput(
            model=name, choices=[choice], usage=usage, time=turn.duration_ns / 1e9,
            error=turn.error,
        )  # fmt: skip

    def _usage(self, turn: Span) -> ModelUsage | None:
        prompt = prompt_tokens(turn)
        answer = completion_tokens(turn)
        if prompt is None or answer is None:
            self._left_out[HALF_USAGE] += (prompt is None) != (answer is None)
            return None
        return ModelUsage(input_tokens=prompt, output_tokens=answer, total_tokens=prompt + answer)

    def _logprobs(self, turn: Span) -> Logprobs | None:
        ids, values = turn.output_ids, finite_logprobs(turn, self._left_out)
        if values is None:
            return None
        texts = map(self._text, ids) if ids and len(ids) == len(values) else [""] * len(values)
        return Logprobs(
            content=[
                Logprob(token=text, logprob=value)
                for text, value in zip(texts, values, strict=True)
            ]
        )

    def _text(self, token_id: int) -> str:
        text = self._token_text.get(token_id)
        if text is None:
            found = self._decode(self._trajectory.run_id, [token_id])
            text = self._token_text[token_id] = (
                f"<{token_id}>" if found is None else sendable(found)
            )
        return text

    def _tools(self, turn: Span) -> list[ToolInfo]:
        tools = turn.inputs.get("tools") if isinstance(turn.inputs, Mapping) else None
        found = []
        for tool in tools if isinstance(tools, list) else ():
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            try:
                if not isinstance(function, Mapping):
                    raise ValueError("no function")
                fields = {"description": "", **known(plain(dict(function)))}
                found.append(ToolInfo.model_validate(fields))
            except (ValidationError, ValueError):
                self._left_out[UNFIT_TOOLS] += 1
        return found


def _names(whole: Any, rest: Any, lists: Mapping[str, Any]) -> dict[str, str] | None:
    """Return which list each name held that is no longer in a value."""
    if not isinstance(whole, dict):
        return None
    gone = [name for name in whole if not isinstance(rest, dict) or name not in rest]
    found = {
        str(name): what for name in gone for what, known in lists.items()
        if known is not None and whole[name] == known
    }  # fmt: skip
    return found or None


def event_at(trajectory: Trajectory, time_ns: int) -> Fields:
    since_s = max(0, time_ns - trajectory.start_ns) / 1e9
    return {"timestamp": time_of(time_ns), "working_start": since_s}


def iso_time(time_ns: int) -> str:
    """Return a time as text; Inspect knows microseconds."""
    return time_of(time_ns).isoformat()


def time_of(time_ns: int) -> datetime:
    return datetime.fromtimestamp(time_ns // 10**9, UTC).replace(
        microsecond=time_ns % 10**9 // 1000
    )


def _without(value: Any, names: Iterable[str]) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if name not in set(names)} or None
