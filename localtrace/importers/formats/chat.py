"""Rollouts of any tool as lines of JSON: messages, a reward, and whatever else belongs to them.

    messages, conversations      in OpenAI's form, or with `from` and `value` -> turns and tools
    reward                       a number, or true and false                  -> reward
    tools                        tools on offer                               -> inputs of the turns
    step, sample_index, rollout_n, group_id, validate, name, agent, data_source
                                                                -> the fields of these names
    all others                                                  -> attributes of the same names

Each message of the assistant is a turn, whose prompt is all messages before it, unless its `weight`
is 0 or its `train` is false: such a message was not generated in this rollout. A call of a tool is
a call where a later message answers it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import click

from localtrace.importers.building import Calls, digest_id
from localtrace.importers.source import BadLine, Line, Source, read_json
from localtrace.read.turns import argument_object, messages_of
from localtrace.types import ToolCall, Trajectory
from localtrace.values.fields import Fields, known

PATTERN = "*.jsonl"
OPTIONS = (
    click.Option(
        ["--reward"], metavar="FIELD", default="reward", show_default=True,
        help="Field of a line that is the reward.",
    ),
)  # fmt: skip
OP = "chat.answer"
_LISTS = ("messages", "conversations")
_ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's words for roles."""
_FIELDS: dict[str, type] = {
    "step": int, "rollout_n": int, "sample_index": str, "group_id": str, "validate": bool,
    "name": str, "agent": str, "data_source": str,
}  # fmt: skip
_NO_NUMBER = "rewards that are not numbers: kept as attributes"
_OTHER_TYPE = "fields such as step and sample_index of another type: kept as attributes"
_AFTER = "messages after the last answer"
_NO_ANSWER = "rollouts without an answer: their messages are kept as an attribute"


def read(source: Source, *, reward: str) -> Iterator[Trajectory]:
    """Import rollouts of any tool: lines of JSON with messages and a reward.

    PATH is a file of one rollout per line, or a folder of files .jsonl. A line has messages in
    OpenAI's form, calls of tools and reasoning included (or conversations, with from and value),
    and reward, a number. Each message of the assistant is a turn, unless its weight is 0; calls of
    tools that a message answers are calls. step, sample_index, rollout_n, group_id, validate, name,
    agent and data_source are the fields of these names, everything else becomes an attribute. A
    line with an id is imported once, wherever it stands; a rollout gets the time of its file.
    Without --run the run id is derived from the folder.
    """
    for line in source.lines():
        with source.refusing(line.place):
            yield _trajectory(line, source.run_id, reward, source.report.left_out)


def _trajectory(line: Line, run_id: str, reward_name: str, left_out: Counter[str]) -> Trajectory:
    fields = line.fields()
    messages = _messages(fields)
    place = () if fields.get("id") is not None else (line.path.name, str(line.number))
    trace_id = digest_id(16, "trace", run_id, *place, line.data).hex()
    tools = _tools(fields.get("tools"))
    if tools is not None:
        del fields["tools"]
    calls = Calls(trace_id, line.modified_ns)
    after = _add_calls(calls, messages, tools)
    if calls.spans:
        left_out[_AFTER] += after
    else:
        left_out[_NO_ANSWER] += 1
        fields["messages"] = messages
    place_fields = _take_place(fields, left_out)
    reward = _take_reward(fields, reward_name, left_out)
    return Trajectory(
        trace_id=trace_id,
        run_id=run_id,
        start_ns=line.modified_ns,
        reward=reward,
        attributes=fields,
        spans=calls.spans,
        **place_fields,
    )


def _messages(fields: Fields) -> list[Fields]:
    """Take the messages out of a line.

    Raises:
        BadLine: there are none.
    """
    name = next((name for name in _LISTS if name in fields), None)
    listed = None if name is None else fields.pop(name)
    if not isinstance(listed, list) or not listed:
        raise BadLine(f"no list of messages in {' or '.join(_LISTS)}")
    messages = []
    for number, message in enumerate(listed, 1):
        is_object = isinstance(message, dict)
        if is_object and "role" not in message and isinstance(message.get("from"), str):
            role, content = message.pop("from"), message.pop("value", None)
            message = {"role": _ROLES.get(role, role), "content": content, **message}
        if not is_object or not isinstance(message.get("role"), str):
            raise BadLine(f"message {number} is not an object with a role")
        messages.append(message)
    return messages


def _tools(tools: Any) -> list[Any] | None:
    """Return the tools on offer, which may be JSON in a text; None: there are none."""
    if isinstance(tools, str):
        with suppress(BadLine):
            tools = read_json(tools)
    return tools if isinstance(tools, list) else None


def _take_place(fields: Fields, left_out: Counter[str]) -> Fields:
    """Take the fields of a trajectory out of a line; what has another type stays."""
    place = {}
    for name, kind in _FIELDS.items():
        value = fields.get(name)
        if kind is str and type(value) is int:
            value = str(value)
        is_long = isinstance(value, int) and not -(2**63) <= value < 2**63
        if type(value) is kind and not is_long:
            place[name] = value
            del fields[name]
        else:
            left_out[_OTHER_TYPE] += value is not None
    return place


def _take_reward(fields: Fields, name: str, left_out: Counter[str]) -> float | None:
    """Take the reward out of a line; what is none, or another field of its name, is renamed."""
    reward = fields.pop(name, None)
    if "reward" in fields:
        fields["given_reward"] = fields.pop("reward")
    if isinstance(reward, int | float):
        with suppress(OverflowError):
            return float(reward)
    if reward is not None:
        left_out[_NO_NUMBER] += 1
        fields["given_reward"] = reward
    return None


def _add_calls(calls: Calls, messages: list[Fields], tools: list[Any] | None) -> int:
    """Add the turns, and the calls of tools that messages answer.

    Returns:
        The count of messages since the last answer that are no answers of tools.
    """
    after = 0
    unanswered: list[ToolCall] = []
    for place, message in enumerate(messages):
        role = message["role"]
        is_generated = message.get("weight") != 0 and message.get("train") is not False
        if role == "assistant" and is_generated:
            inputs: Fields = {"messages": messages[:place], "tools": tools}
            calls.add(OP, known(inputs), {"message": message})
            unanswered += messages_of([message])[0].tool_calls
            after = 0
        elif not (role in ("tool", "function") and _add_tool(calls, message, unanswered)):
            after += 1
    return after


def _add_tool(calls: Calls, message: Fields, unanswered: list[ToolCall]) -> bool:
    """Add the call that a message answers; return whether there is one."""
    answered_id = message.get("tool_call_id")
    for place, call in enumerate(unanswered):
        if answered_id in (None, call.id):
            del unanswered[place]
            arguments = argument_object(call)
            inputs = {"arguments": call.arguments} if arguments is None else arguments
            calls.add(call.name or "tool", inputs, message.get("content"), kind="tool")
            return True
    return False
