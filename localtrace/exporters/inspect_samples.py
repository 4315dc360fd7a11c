"""Trajectories as samples of Inspect AI, built from Inspect's own models.

messages of all turns, each once                 -> the sample's messages
turn: prompt, answer, tools, usage, logprobs     -> model event
call of a tool, reward, any other call           -> tool, score and info event
call that others run in                          -> span around their events
reward, its parts                                -> scores
ids, step, outcomes, labels, attributes          -> the sample's metadata
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.event import (
    InfoEvent,
    ModelEvent,
    SampleInitEvent,
    ScoreEvent,
    SpanBeginEvent,
    SpanEndEvent,
    ToolEvent,
)
from inspect_ai.log import EvalError, EvalSample
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Logprob,
    Logprobs,
    ModelOutput,
    ModelUsage,
)
from inspect_ai.scorer import Score
from inspect_ai.tool import ToolCall, ToolCallError, ToolInfo
from pydantic import ValidationError

from localtrace.exporters.shape import (
    NO_ANSWER,
    NO_PROMPT,
    count_no_turn,
    finite_logprobs,
    plain,
    trajectory_fields,
)
from localtrace.field_names import LABEL_NAMES
from localtrace.read.turns import (
    Turn,
    argument_object,
    as_text,
    chat_form,
    fields_of,
    sendable,
    turns_of,
)
from localtrace.types import FAILED_STATUSES, Message, Span, Trajectory
from localtrace.values.codec import to_json
from localtrace.values.fields import Fields, known

UNKNOWN = "unknown"
UNFIT_TOOLS = "tools on offer that do not have the form of OpenAI's functions"
HALF_USAGE = "token counts of turns of which only the prompt's or the answer's is known"
NO_IDS = "token ids of turns: the format has no field for them"
_EXPECTED = "ground_truth"
_SCORES_MAX = 50
_SCORE_NAME = re.compile("reward|score", re.IGNORECASE)
"""Attributes of these names that hold numbers are parts of the reward."""
_STOPS = {"stop": "stop", "length": "max_tokens", "tool_calls": "tool_calls",
          "content_filter": "content_filter", "max_tokens": "max_tokens"}  # fmt: skip


def sample_of(
    trajectory: Trajectory, sample_id: str | int, epoch: int, left_out: Counter[str]
) -> EvalSample:
    """Return the sample of a trajectory.

    Args:
        left_out: counts of what the samples do not hold, by field.
    """
    turns = turns_of(trajectory)
    if not turns:
        count_no_turn(trajectory, left_out)
    events = _Events(trajectory, turns, left_out)
    expected = plain(trajectory.attributes.get(_EXPECTED))
    target = "" if expected is None else as_text(expected)
    prompt = list(events.prompts[0]) if turns else []
    output = events.outputs[-1] if turns else ModelOutput()
    scores = _scores(trajectory, output.completion)
    ends = [span.end_ns for span in trajectory.spans]
    end_ns = trajectory.end_ns or max(ends, default=trajectory.start_ns)
    total_s = max(0, end_ns - trajectory.start_ns) / 1e9
    init = SampleInitEvent(
        uuid="init",
        sample=Sample(id=sample_id, input=prompt or "", target=target),
        **_moment(trajectory, trajectory.start_ns),
    )
    return EvalSample(
        id=sample_id,
        epoch=epoch,
        input=prompt,
        target=target,
        messages=events.conversation,
        output=output,
        scores=scores,
        metadata=_metadata(trajectory, turns),
        events=[init, *events.of_calls(), *_score_events(trajectory, scores, end_ns)],
        model_usage=events.usage,
        started_at=iso_time(trajectory.start_ns),
        completed_at=iso_time(end_ns),
        total_time=total_s,
        working_time=total_s,
        uuid=trajectory.trace_id,
        error=_error(trajectory),
        turn_count=len(turns),
    )


class _Events:
    """The events of one trajectory, and its conversation."""

    def __init__(self, trajectory: Trajectory, turns: list[Turn], left_out: Counter[str]) -> None:
        self.usage: dict[str, ModelUsage] = {}
        self._trajectory = trajectory
        self._left_out = left_out
        self._made: dict[tuple[str, int], ChatMessage] = {}
        self._waiting: dict[str, list[str]] = {}
        """Ids of calls of tools that no event answers yet, by the tool's name."""
        self._token_text: dict[int, str] = {}
        models = (turn.model for turn in turns)
        self._model = trajectory.model or next(filter(None, models), None) or UNKNOWN
        self.prompts = [self._prompt(turn) for turn in turns]
        self.outputs = [self._output(turn) for turn in turns]
        self._turns = {(turn.span.span_id, turn.span.batch_index): turn for turn in turns}
        self.conversation: list[ChatMessage] = [
            message
            for turn, output in zip(turns, self.outputs, strict=True)
            for message in (*self._messages(turn.new or ()), output.message)
        ]

    def of_calls(self) -> Iterator[Any]:
        """Yield the events of all calls, those within a call between two marks of a span."""
        inner: dict[str | None, list[Span]] = {}
        known_ids = {span.span_id for span in self._trajectory.spans}
        for span in self._trajectory.every_span:
            parent_id = span.parent_id if span.parent_id in known_ids else None
            inner.setdefault(parent_id, []).append(span)
        waiting: list[Span | SpanEndEvent] = inner.pop(None, [])[::-1]
        while waiting:  # not by recursion: recorded calls may be nested without end
            span = waiting.pop()
            if isinstance(span, SpanEndEvent):
                yield span
                continue
            calls = inner.pop(span.span_id, None) if span.batch_index is None else None
            if calls is None:
                yield self._event(span, span.parent_id)
                continue
            moment = _moment(self._trajectory, span.start_ns)
            yield SpanBeginEvent(
                uuid=f"{span.span_id}-begin", id=span.span_id, span_id=span.span_id, name=span.op,
                parent_id=span.parent_id if span.parent_id in known_ids else None,
                type=span.kind, **moment,
            )  # fmt: skip
            yield self._event(span, span.span_id)
            moment = _moment(self._trajectory, span.end_ns)
            waiting.append(
                SpanEndEvent(
                    uuid=f"{span.span_id}-end", id=span.span_id, span_id=span.span_id, **moment
                )
            )
            waiting += calls[::-1]

    def _event(self, span: Span, within: str | None) -> Any:
        place = "" if span.batch_index is None else f"-{span.batch_index}"
        head: Fields = {
            "uuid": f"{span.span_id}{place}-call",
            "span_id": within,
            "metadata": plain(known({"op": span.op, "status": span.status, "error": span.error})),
            **_moment(self._trajectory, span.start_ns),
        }
        turn = self._turns.get((span.span_id, span.batch_index))
        if turn is not None:
            return self._model_event(turn, head)
        if span.kind == "tool":
            return self._tool_event(span, head)
        result = span.outputs if span.error is None else {"error": span.error}
        data = plain(known({"inputs": span.inputs, "outputs": result}))
        return InfoEvent(source=span.op, data=data, **head)

    def _model_event(self, turn: Turn, head: Fields) -> ModelEvent:
        span, output = turn.span, self.outputs[turn.number]
        self._left_out[NO_IDS] += span.prompt_ids is not None or span.output_ids is not None
        return ModelEvent(
            model=output.model,
            input=self.prompts[turn.number],
            tools=list(self._tools(turn)),
            tool_choice="auto",
            config=GenerateConfig(),
            output=output,
            error=span.error,
            completed=_time(span.end_ns),
            working_time=span.duration_ns / 1e9,
            **head,
        )

    def _tool_event(self, span: Span, head: Fields) -> ToolEvent:
        name = span.op.rpartition(".")[2]
        waiting = self._waiting.get(name)
        arguments = plain(span.inputs)
        failed = span.status != "ok"
        error = ToolCallError("unknown", sendable(span.error or span.status)) if failed else None
        return ToolEvent(
            id=waiting.pop(0) if waiting else span.span_id,
            function=name,
            arguments=arguments if isinstance(arguments, dict) else {"inputs": arguments},
            result="" if failed else sendable(plain(span.outputs)),
            error=error,
            failed=failed or None,
            completed=_time(span.end_ns),
            working_time=span.duration_ns / 1e9,
            **head,
        )

    def _prompt(self, turn: Turn) -> list[ChatMessage]:
        self._left_out[NO_PROMPT] += turn.prompt is None
        missing = [Message("user", f"[{turn.prompt_missing}]")]
        return self._messages(missing if turn.prompt is None else turn.prompt)

    def _output(self, turn: Turn) -> ModelOutput:
        span = turn.span
        self._left_out[NO_ANSWER] += turn.answer is None and bool(
            span.output_ids or span.status == "ok"
        )
        answer = turn.answer or Message("assistant", f"[{turn.answer_missing}]")
        message = self._message(answer, 0)
        assert isinstance(message, ChatMessageAssistant)
        for call in message.tool_calls or ():
            self._waiting.setdefault(call.function, []).append(call.id)
        stop = _STOPS.get(str(span.finish_reason), UNKNOWN)
        choice = ChatCompletionChoice(
            message=message, stop_reason=stop, logprobs=self._logprobs(span)
        )
        model, usage = turn.model or self._model, self._usage(turn)
        if usage is not None:
            self.usage[model] = self.usage.get(model, ModelUsage()) + usage
        return ModelOutput(
            model=model, choices=[choice], usage=usage, time=span.duration_ns / 1e9,
            error=span.error,
        )  # fmt: skip

    def _usage(self, turn: Turn) -> ModelUsage | None:
        prompt, answer = turn.usage
        if prompt is None or answer is None:
            self._left_out[HALF_USAGE] += (prompt is None) != (answer is None)
            return None
        return ModelUsage(input_tokens=prompt, output_tokens=answer, total_tokens=prompt + answer)

    def _logprobs(self, span: Span) -> Logprobs | None:
        ids, values = span.output_ids, finite_logprobs(span, self._left_out)
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
            decoded = self._trajectory.decode([token_id])
            text = f"<{token_id}>" if decoded is None else sendable(decoded)
            self._token_text[token_id] = text
        return text

    def _tools(self, turn: Turn) -> Iterator[ToolInfo]:
        for tool in turn.tools:
            function = fields_of(tool).get("function", tool)
            try:
                if not isinstance(function, Mapping):
                    raise ValueError("no function")
                fields = {"description": "", **known(plain(dict(function)))}
                yield ToolInfo.model_validate(fields)
            except (ValidationError, ValueError):
                self._left_out[UNFIT_TOOLS] += 1

    def _messages(self, messages: Any) -> list[ChatMessage]:
        seen: Counter[str] = Counter()
        made = []
        for message in messages:
            key = to_json(chat_form(message))
            made.append(self._message(message, seen[key]))
            seen[key] += 1
        return made

    def _message(self, message: Message, number: int) -> ChatMessage:
        """Return a message for Inspect; `number` tells equal ones of a list apart."""
        key = (to_json(chat_form(message)), number)
        made = self._made.get(key)
        if made is None:
            digest = sha256(f"{self._trajectory.trace_id} {number} {key[0]}".encode())
            made = self._made[key] = _inspect_message(message, digest.hexdigest()[:22])
        return made


def _inspect_message(message: Message, message_id: str) -> ChatMessage:
    form = chat_form(message)
    role, content = form["role"], form["content"]
    if role == "assistant":
        parts: list[Any] = [ContentText(text=content)] if content else []
        if "reasoning_content" in form:
            content = [ContentReasoning(reasoning=form["reasoning_content"]), *parts]
        calls = [
            _tool_call(argument_object(call), call_form)
            for call, call_form in zip(message.tool_calls, form.get("tool_calls", ()), strict=True)
        ]
        return ChatMessageAssistant(id=message_id, content=content, tool_calls=calls or None)
    if role in ("tool", "function"):
        return ChatMessageTool(
            id=message_id, content=content, tool_call_id=form.get("tool_call_id"),
            function=form.get("name"),
        )  # fmt: skip
    if role == "user":
        return ChatMessageUser(id=message_id, content=content)
    return ChatMessageSystem(id=message_id, content=content)


def _tool_call(arguments: dict[str, Any] | None, form: Fields) -> ToolCall:
    name, text = form["function"]["name"], form["function"]["arguments"]
    if arguments is not None:
        return ToolCall(form["id"], name, plain(arguments))
    return ToolCall(form["id"], name, {}, parse_error=f"the arguments are not an object: {text}")


def _score_events(
    trajectory: Trajectory, scores: Mapping[str, Score], end_ns: int
) -> Iterator[Any]:
    """Yield the events after all calls: the scores, within spans as Inspect has them."""
    for name, score in scores.items():
        span_id = f"scorer-{name}"
        head: Fields = _moment(trajectory, end_ns) | {"span_id": span_id}
        yield SpanBeginEvent(uuid=f"{span_id}-begin", id=span_id, name=name, type="scorer", **head)
        yield ScoreEvent(uuid=f"{span_id}-score", score=score, scorer=name, **head)
        yield SpanEndEvent(uuid=f"{span_id}-end", id=span_id, **head)


def _scores(trajectory: Trajectory, answer: str) -> dict[str, Score]:
    """Return the reward, then its parts: calls of rewards, and attributes named like them."""
    parts = [
        (span.op if span.op.endswith("reward") else span.op.rpartition(".")[2], span.outputs)
        for span in trajectory.spans
        if span.kind == "reward"
    ]
    parts += [part for part in trajectory.attributes.items() if _SCORE_NAME.search(part[0])]
    scores: dict[str, Score] = {}
    if trajectory.reward is not None:
        scores["reward"] = Score(value=trajectory.reward, answer=answer or None)
    for name, value in parts:
        score = _score_value(value)
        if score is not None and len(scores) < _SCORES_MAX:
            free, number = sendable(name), 1
            while free in scores:
                number += 1
                free = f"{sendable(name)} {number}"
            scores[free] = Score(value=score)
    return scores


def _score_value(value: Any) -> Any:
    """Return a number, or numbers by name; None: it is neither."""
    if isinstance(value, Mapping):
        numbers = {name: part for name, part in value.items() if type(part) in (int, float, bool)}
        return {sendable(name): part for name, part in numbers.items()} or None
    return value if type(value) in (int, float, bool) else None


def _metadata(trajectory: Trajectory, turns: list[Turn]) -> Fields:
    fields = trajectory_fields(trajectory)
    fields = {name: value for name, value in fields.items() if name not in ("reward", "error")}
    shown = {
        outcome.name: outcome.value
        for outcome in trajectory.outcomes
        if outcome.values is None and outcome.name not in (*LABEL_NAMES, "reward")
    }
    labels = [
        {"name": label.name, "value": label.value, "who": label.source}
        for label in trajectory.labels
    ]
    weights = {sendable(plain(v)) for turn in turns if (v := turn.weight_version) is not None}
    lists = {
        "policy_version": sorted(weights) or None,
        "labels": labels or None,
        "attributes": fields.pop("attributes") or None,
        "outcomes": fields.pop("outcomes") or None,
    }
    metadata: Fields = plain(known(shown | fields | lists))
    return metadata


def _error(trajectory: Trajectory) -> EvalError | None:
    if trajectory.status not in FAILED_STATUSES:
        return None
    message = sendable(trajectory.error or trajectory.status)
    return EvalError(message=message, traceback=message, traceback_ansi=message)


def _moment(trajectory: Trajectory, time_ns: int) -> Fields:
    since_s = max(0, time_ns - trajectory.start_ns) / 1e9
    return {"timestamp": _time(time_ns), "working_start": since_s}


def iso_time(time_ns: int) -> str:
    """Return a time as text; Inspect knows microseconds."""
    return _time(time_ns).isoformat()


def _time(time_ns: int) -> datetime:
    whole = datetime.fromtimestamp(time_ns // 10**9, UTC)
    return whole.replace(microsecond=time_ns % 10**9 // 1000)
