"""ATIF, Harbor's format of agents' trajectories: one JSON document per trajectory and line.

    system or user message that a prompt adds       -> step of this source
    tool's message in a prompt                      -> observation of the step that asked for it
    assistant's message that no turn here generated -> agent step, `is_copied_context`
    turn: text, reasoning, tool calls, ids, logprobs-> agent step with `metrics`
    recorded call of a tool that no message answers -> observation of the step before it
    reward, step, group, outcomes, attributes, …    -> `extra`, named as in `export jsonl`

`localtrace import atif` makes the same trajectory of a document. So a turn's `extra` has the whole
`messages` of its prompt where the steps before do not add up to them; they are empty where their
text is not known.

The documents are of version 1.7: what 1.8 adds is audio. Harbor's tools read a file of one
document, which a file of one line is. Texts and lists of ids are whole. A field whose value is not
known is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import Any

from localtrace.exporters.answers import AGAIN, discarded
from localtrace.exporters.atif_messages import (
    UNKNOWN,
    Context,
    content_of,
    other_fields,
    recorded_arguments,
    tool_call,
)
from localtrace.exporters.shape import (
    NO_PROMPT,
    answer_of,
    completion_tokens,
    count_no_turn,
    finite_logprobs,
    json_line,
    prompt_tokens,
    trajectory_fields,
)
from localtrace.field_names import OUTPUT_TEXT_NAMES, PROMPT_TEXT_NAMES
from localtrace.read.conversation import Conversation
from localtrace.read.flat_rows import named_lists
from localtrace.read.messages import Message, messages_of, model_of, said_of, sendable
from localtrace.read.turns import prompt_text
from localtrace.store.tokenizers import Decode
from localtrace.types import Span, Trajectory
from localtrace.values.fields import Fields, known

VERSION = "ATIF-v1.7"
OTHER_TOOLS = "lists of tools: another list was offered by the first turn"
ANSWERED = "calls of tools, times and errors: messages hold their answers"
MASKS = "masks that rule out tokens: the format has no field for them"
UNASKED = "calls of tools before the first turn"
_SOURCES = {"user": "user", "assistant": "agent"}


class Documents:
    """The documents of trajectories, one trajectory at a time.

    Args:
        decode: token ids to text, special tokens included.
        models: names of the models of runs, by run id and attempt.
    """

    def __init__(
        self, decode: Decode, models: Mapping[tuple[str, int], str | None] = MappingProxyType({})
    ) -> None:
        self.left_out: Counter[str] = Counter()
        """Counts of what the documents do not hold, by field."""
        self.decode = decode
        self._models = models

    def line(self, trajectory: Trajectory) -> Iterator[bytes]:
        """Yield the document of a trajectory as a line, in pieces; none if it has no turn."""
        document = self.document(trajectory)
        if document is not None:
            yield from json_line(document | {"steps": iter(document["steps"])})

    def document(self, trajectory: Trajectory) -> Fields | None:
        """Return the document of a trajectory; None if it has no turn."""
        turns = trajectory.turns
        if not turns:
            count_no_turn(trajectory, self.left_out)
            return None
        model = self._models.get((trajectory.run_id, trajectory.attempt)) or model_of(turns[0])
        steps = _Steps(trajectory, self.decode, model, self.left_out).steps
        extra = trajectory_fields(trajectory)
        agent: Fields = {
            "name": extra.pop("agent") or UNKNOWN, "version": UNKNOWN, "model_name": model,
            "tool_definitions": self._tools(turns),
        }  # fmt: skip
        return {
            "schema_version": VERSION,
            "session_id": trajectory.trace_id,
            "trajectory_id": trajectory.trace_id,
            "agent": known(agent),
            "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
            "final_metrics": _final_metrics(steps),
            "extra": known(extra),
        }

    def _tools(self, turns: list[Span]) -> list[Fields] | None:
        """Return the tools that the first turn offers."""
        offered = [_tools_of(turn) for turn in turns]
        self.left_out[OTHER_TOOLS] += sum(tools not in (None, offered[0]) for tools in offered)
        return offered[0]


class _Steps:
    """The steps of one trajectory, made turn by turn."""

    def __init__(
        self, trajectory: Trajectory, decode: Decode, model: str | None, left_out: Counter[str]
    ) -> None:
        self.steps: list[Fields] = []
        self._run_id = trajectory.run_id
        self._decode = decode
        self._model = model
        self._left_out = left_out
        self._asked: dict[str, list[tuple[Fields, str]]] = {}
        """The step and the unique id of each call that no message has answered, by given id."""
        self._agent: Fields | None = None
        """The newest step of the agent."""
        self._newest: set[int] = set()
        """Ids of the steps since the newest turn, with that turn."""
        self._context = Context()
        turns = [turn for turn in trajectory.turns if turn.status == "ok"]
        self._discarded = discarded(turns, lambda turn: said_of(turn, self._run_id, decode))
        left_out[AGAIN] += len(self._discarded)
        left_out[MASKS] += sum(not all(turn.response_mask or ()) for turn in turns)
        conversation = Conversation(trajectory, decode).turns
        of_turns = {}
        for turn in trajectory.turns:
            about = self._add_prompt(turn, conversation[turn.span_id].new)
            of_turns[turn.span_id] = self._add_turn(turn, about)
        self._add_calls(trajectory, of_turns)

    def _add_prompt(self, turn: Span, new: Iterable[Any]) -> Fields:
        """Add the steps of what is new in a prompt; return what the turn says of its prompt."""
        recorded: list[Any] | None = turn.messages
        if recorded is None:
            text = prompt_text(turn, partial(self._decode, self._run_id))
            if text is None:
                self._left_out[NO_PROMPT] += 1
                self._context.meets([])
                return {"messages": []}
            recorded = list(messages_of([{"role": "prompt", "content": text}]))
        for given in new:
            for message in messages_of([given]):
                if message["role"] in ("tool", "function"):
                    self._add_answer(message, given)
                else:
                    self._add_message(message, given, turn.start_ns)
        is_met = self._context.meets(recorded)
        return {} if is_met else {"messages": recorded}

    def _add_message(self, message: Message, recorded: Any, time_ns: int) -> None:
        extra = other_fields(recorded)
        source = _SOURCES.get(message["role"], "system")
        if source == "system" and message["role"] != "system":
            extra = {"role": message["role"], **extra}
        step: Fields = {"source": source, "timestamp": _timestamp(time_ns)}
        if source == "agent":
            self._add_said(step, message, recorded)
            step["is_copied_context"] = True
        else:
            step["message"] = content_of(recorded, message["content"])
        step |= {"extra": extra} if extra else {}
        self.steps.append(step)
        self._newest.add(id(step))
        self._context.add(step, message, recorded)

    def _add_answer(self, message: Message, recorded: Any) -> None:
        """Add the message of a tool to the step that asked for it, else to the agent's newest."""
        extra = other_fields(recorded)
        given_id = message.get("tool_call_id")
        waiting = [] if given_id is None else self._asked.get(given_id, [])
        step, call_id = waiting.pop(0) if waiting else (self._agent, None)
        if call_id is None and given_id is not None:
            extra = {"tool_call_id": given_id, **extra}
        if step is None or message["role"] != "tool":
            extra = {"role": message["role"], **extra}
        content = content_of(recorded, message["content"])
        if step is None:
            step = {"source": "system", "message": content, "extra": extra}
            self.steps.append(step)
            self._context.add(step, message)
        else:
            if id(step) in self._newest:
                self._context.answer(step, message)
            else:
                extra = {"is_message": False, **extra}  # no message of the turns before this one
            _observe(step, call_id, content, extra)

    def _add_turn(self, turn: Span, about: Fields) -> Fields:
        said = answer_of(turn, self._run_id, self._decode, self._left_out)
        step: Fields = {"source": "agent", "timestamp": _timestamp(turn.start_ns)}
        model = model_of(turn)
        if model not in (None, self._model):
            step["model_name"] = model
        said = said or {"role": "assistant", "content": ""}
        self._add_said(step, said, turn.output_message)
        extra = _turn_fields(turn) | about
        extra |= {"is_discarded": True} if turn.span_id in self._discarded else {}
        step |= {"llm_call_count": 1, "metrics": self._metrics(turn), "extra": extra}
        self.steps.append(step)
        self._newest = {id(step)}
        self._context.add(step, said, turn.output_message, is_said=True)
        return step

    def _add_said(self, step: Fields, message: Message, recorded: Any) -> None:
        """Add text, reasoning and calls of tools to a step of the agent."""
        self._agent = step
        step["message"] = message["content"]
        if "reasoning_content" in message:
            step["reasoning_content"] = message["reasoning_content"]
        calls: dict[str, Fields] = {}
        asked: dict[str, list[tuple[Fields, str]]] = {}
        called = message.get("tool_calls", ())
        for call, given in zip(called, recorded_arguments(recorded), strict=True):
            given_id, unique_id = call["id"], call["id"] or "call"
            while unique_id in calls:
                unique_id += "'"
            calls[unique_id] = tool_call(unique_id, call, given)
            asked.setdefault(given_id, []).append((step, unique_id))
        # An id that an earlier turn used means this turn's call from now on.
        self._asked |= asked
        if calls:
            step["tool_calls"] = list(calls.values())

    def _metrics(self, turn: Span) -> Fields:
        mask = turn.response_mask
        return known({
            "prompt_tokens": prompt_tokens(turn),
            "completion_tokens": completion_tokens(turn),
            "prompt_token_ids": turn.prompt_ids,
            "completion_token_ids": turn.output_ids,
            "logprobs": finite_logprobs(turn, self._left_out),
            "extra": None if mask is None else {"response_mask": mask},
        })  # fmt: skip

    def _add_calls(self, trajectory: Trajectory, of_turns: Mapping[str, Fields]) -> None:
        """Add the recorded calls of tools to the steps before them, and count all other calls."""
        told = {id(step) for step in self.steps if "observation" in step}
        batches = {span.parent_id for span in trajectory.generations}
        step: Fields | None = None
        for span in trajectory.every_span:
            if span.span_id in of_turns:
                step = of_turns[span.span_id]
            elif span.kind != "tool":
                self._left_out[f"calls of kind {span.kind}"] += span.span_id not in batches
            elif step is None:
                self._left_out[UNASKED] += 1
            elif id(step) in told:
                self._left_out[ANSWERED] += not _complete(step, span)
            else:
                said = sendable(span.outputs if span.status == "ok" else span.error)
                extra = {"is_message": False, **_tool_fields(span, said)}
                _observe(step, _call_id(step, span), said, extra)


def _observe(step: Fields, call_id: str | None, content: Any, extra: Fields) -> None:
    """Add the answer of a tool to a step."""
    result: Fields = {"source_call_id": call_id, "content": content, "extra": extra or None}
    step.setdefault("observation", {"results": []})["results"].append(known(result))


def _complete(step: Fields, span: Span) -> bool:
    """Add a recorded call to its answer in a step; return whether there is one."""
    # Calls that a model wrote as text have no names here: their answers are taken in order.
    names = {one["tool_call_id"]: one["function_name"] for one in step.get("tool_calls", ())}
    for result in step["observation"]["results"]:
        is_taken = "span_id" in result.get("extra", {})
        if not is_taken and names.get(result.get("source_call_id")) in (None, _tool_name(span)):
            result["extra"] = result.get("extra", {}) | _tool_fields(span, result["content"])
            return True
    return False


def _call_id(step: Fields, span: Span) -> str | None:
    """Return the only call in a step that names the tool of a span; None: none, or several."""
    calls = step.get("tool_calls", ())
    found = [one for one in calls if one["function_name"] == _tool_name(span)]
    return found[0]["tool_call_id"] if len(found) == 1 else None


def _tool_name(span: Span) -> str:
    return span.op.rpartition(".")[2]


def _tool_fields(span: Span, said: Any) -> Fields:
    """Return what was recorded of a tool's call, without outputs that equal its answer."""
    outputs = {} if span.outputs == said else {"outputs": span.outputs}
    return {**_call_fields(span), **known({"inputs": span.inputs}), **outputs}


def _turn_fields(turn: Span) -> Fields:
    """Return what a step says of its turn, besides what was asked and said."""
    inputs, outputs = named_lists(turn)
    more: Fields = {
        "finish_reason": turn.finish_reason,
        "batch_index": turn.batch_index,
        "inputs": _without(inputs, PROMPT_TEXT_NAMES),
        "outputs": None if isinstance(outputs, str) else _without(outputs, OUTPUT_TEXT_NAMES),
    }
    return _call_fields(turn) | known(more)


def _call_fields(span: Span) -> Fields:
    names = ("span_id", "parent_id", "op", "status", "error", "start_ns", "duration_ns")
    return known({name: getattr(span, name) for name in names})


def _without(value: Any, names: tuple[str, ...]) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if name not in names} or None


def _tools_of(turn: Span) -> list[Fields] | None:
    tools = turn.inputs.get("tools") if isinstance(turn.inputs, Mapping) else None
    is_list = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    return tools if is_list and tools else None


def _final_metrics(steps: list[Fields]) -> Fields:
    found = [step["metrics"] for step in steps if "metrics" in step]
    totals: Fields = {"total_steps": len(steps)}
    for name in ("prompt_tokens", "completion_tokens"):
        counts = [metrics[name] for metrics in found if name in metrics]
        if len(counts) == len(found):
            totals[f"total_{name}"] = sum(counts)
    return totals


def _timestamp(time_ns: int) -> str:
    seconds, rest = divmod(time_ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest // 1000:06}Z"
