"""Rollouts of any tool as lines of JSON: messages, a reward, and whatever else belongs to them.

    messages, conversations      in OpenAI's form, or with `from` and `value` -> turns and tools
    reward                       a number, or true and false                  -> reward
    tools                        tools on offer                               -> inputs of the turns
    step, sample_index, rollout_n, group_id, validate, name, agent, data_source
                                                                -> the fields of these names
    all others                                                  -> attributes of the same names

Each message of the assistant is a turn, whose prompt is all messages before it, unless its `weight`
is 0 or its `train` is false: such a message was not generated in this rollout. A call of a tool is
a call where a later message answers it. The files hold no token ids and no times; a rollout gets
the time of its file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from localtrace.importers.imported_rollouts import (
    MESSAGE_BYTES,
    REPEATED_MAX_BYTES,
    CallIn,
    Rollout,
    derived_span_id,
    digest_id,
    folder_run_id,
)
from localtrace.importers.lines import BadLine, Line, read_json
from localtrace.importers.source import Source
from localtrace.values.codec import to_json
from localtrace.values.fields import Fields, known

PATTERN = "*.jsonl"
OP = "chat.answer"
TOOL_OP = "chat.tool"
_LISTS = ("messages", "conversations")
_ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's words for roles."""
_FIELDS: dict[str, type] = {
    "step": int, "rollout_n": int, "sample_index": str, "group_id": str, "validate": bool,
    "name": str, "agent": str, "data_source": str,
}  # fmt: skip
_NO_NUMBER = "rewards that are no number: kept as attributes"
_OTHER_TYPE = (
    "fields such as step and sample_index of a type that these do not have: kept as attributes"
)
_AFTER = "messages after the last answer"
_NO_ANSWER = "rollouts without an answer: their messages are kept as an attribute"
default_run_id = partial(folder_run_id, "chat")


def read_rollouts(source: Source, *, reward: str) -> Iterator[Rollout]:
    """Yield the trajectory of each line; those that are none are counted in the report.

    A trace id is derived from the run and the line, and from its place unless it has an `id`.

    Args:
        reward: name of the field that holds the reward.
    """
    for line in source.lines():
        try:
            rollout = _rollout(line, source.run_id, reward, source.report.left_out)
        except (BadLine, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            source.report.refuse(line.place, reason)
        else:
            yield rollout


def _rollout(line: Line, run_id: str, reward_name: str, left_out: Counter[str]) -> Rollout:
    fields = line.fields()
    messages = _messages(fields)
    place = () if fields.get("id") is not None else (line.path.name, str(line.number))
    trace_id = digest_id(16, "trace", run_id, *place, line.data).hex()
    tools = _tools(fields.get("tools"))
    if tools is not None:
        del fields["tools"]
    calls = _Calls(messages, tools, trace_id, line.modified_ns)
    if calls.made:
        left_out[_AFTER] += calls.after
    else:
        left_out[_NO_ANSWER] += 1
        fields["messages"] = messages
    row = _row(fields, left_out)
    return Rollout(
        trace_id=trace_id,
        calls=tuple(calls.made),
        start_ns=line.modified_ns,
        values=_values(fields, reward_name, left_out),
        size_bytes=len(line.data),
        **row,
    )


def _messages(fields: Fields) -> list[Fields]:
    """Take the messages out of a line.

    Raises:
        BadLine: there are none.
    """
    name = next((name for name in _LISTS if name in fields), None)
    given = None if name is None else fields.pop(name)
    if not isinstance(given, list) or not given:
        raise BadLine(f"no list of messages in {' or '.join(_LISTS)}")
    found = []
    for number, one in enumerate(given, 1):
        if isinstance(one, dict) and "role" not in one and isinstance(one.get("from"), str):
            role = _ROLES.get(one["from"], one["from"])
            rest = {name: item for name, item in one.items() if name not in ("from", "value")}
            one = {"role": role, "content": one.get("value"), **rest}
        if not isinstance(one, dict) or not isinstance(one.get("role"), str):
            raise BadLine(f"message {number} is no object with a role")
        found.append(one)
    return found


def _tools(given: Any) -> list[Any] | None:
    """Return the tools on offer, which may be JSON in a text; None: there are none."""
    if isinstance(given, str):
        try:
            given = read_json(given)
        except BadLine:
            return None
    return given if isinstance(given, list) else None


def _row(fields: Fields, left_out: Counter[str]) -> Fields:
    """Take the fields of a trajectory's row out of a line; what has another type stays."""
    found = {}
    for name, kind in _FIELDS.items():
        value = fields.get(name)
        if kind is str and type(value) is int:
            value = str(value)
        is_long = isinstance(value, int) and not -(2**63) <= value < 2**63
        if type(value) is kind and not is_long:
            found[name] = value
            del fields[name]
        else:
            left_out[_OTHER_TYPE] += value is not None
    return found


def _values(fields: Fields, reward_name: str, left_out: Counter[str]) -> Fields:
    """Return reward and attributes."""
    reward = fields.pop(reward_name, None)
    values = {"given_reward" if name == "reward" else name: one for name, one in fields.items()}
    if isinstance(reward, int | float):
        with suppress(OverflowError):
            return values | {"reward": float(reward)}
    if reward is not None:
        left_out[_NO_NUMBER] += 1
        values["given_reward"] = reward
    return values


class _Calls:
    """The calls of one line: its turns, and the calls of tools that messages answer.

    Raises:
        BadLine: the turns repeat too much.
    """

    def __init__(
        self, messages: list[Fields], tools: list[Any] | None, trace_id: str, time_ns: int
    ) -> None:
        self.made: list[CallIn] = []
        self.after = 0
        """Messages since the last answer that are no answers of tools."""
        self._trace_id = trace_id
        self._time_ns = time_ns
        self._asked: list[tuple[Any, str, Any]] = []
        """Id, name and arguments of the calls that no message has answered."""
        size_bytes = repeated_bytes = 0
        for place, message in enumerate(messages):
            role = message["role"]
            if role == "assistant" and _is_generated(message):
                repeated_bytes += size_bytes
                if repeated_bytes > REPEATED_MAX_BYTES:
                    limit = REPEATED_MAX_BYTES // 2**20
                    raise BadLine(f"its turns repeat more than {limit} MiB of messages")
                given: Fields = {"messages": messages[:place], "tools": tools}
                self._add(OP, known(given), {"message": message}, kind="generation")
                self._asked = [*_asked(message)]
                self.after = 0
            elif not (role in ("tool", "function") and self._add_tool(message)):
                self.after += 1
            size_bytes += MESSAGE_BYTES + len(to_json(message))

    def _add_tool(self, message: Fields) -> bool:
        """Add the call that a message answers; return whether there is one."""
        call_id = message.get("tool_call_id")
        places = (
            place for place, (one, *_) in enumerate(self._asked) if call_id in (None, one)
        )  # fmt: skip
        place = next(places, None)
        if place is None:
            return False
        _, name, arguments = self._asked.pop(place)
        inputs = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        self._add(name, inputs, message.get("content"), kind="tool")
        return True

    def _add(self, op: str, inputs: Fields, outputs: Any, *, kind: str) -> None:
        seq = len(self.made)
        self.made.append(
            CallIn(
                span_id=derived_span_id("span", self._trace_id, str(seq)),
                op=op,
                start_ns=self._time_ns,
                duration_ns=0,
                inputs=inputs,
                outputs=outputs,
                seq=seq,
                takes_prompt=kind == "generation",
                kind=kind,
            )
        )


def _is_generated(message: Fields) -> bool:
    return message.get("weight") != 0 and message.get("train") is not False


def _asked(message: Fields) -> Iterator[tuple[Any, str, Any]]:
    """Yield id, name and arguments of the calls of tools in a message."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        parts = call if isinstance(call, dict) else {}
        function = parts.get("function")
        function = function if isinstance(function, dict) else parts
        name, arguments = function.get("name"), function.get("arguments")
        if isinstance(arguments, str):
            with suppress(BadLine):
                arguments = read_json(arguments)
        yield parts.get("id"), name if isinstance(name, str) else TOOL_OP, arguments
