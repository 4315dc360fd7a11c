"""The turns of a trajectory as verifiers' message graph.

Each message is one node, linked to the one before it; a prompt that does not continue an earlier
path begins a branch. A node has the tokens that it adds. Where it is not known which tokens of a
prompt are whose, they stand on the answer's node before the generated ones, as verifiers itself
does; the ids along a path are the prompt and the answer in any case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

from localtrace.exporters.answers import AGAIN, UNKNOWN_MASK, discarded_turns, masks_of
from localtrace.exporters.shape import NO_ANSWER, NO_PROMPT, finite_logprobs
from localtrace.read.turns import Turn, chat_form, content_text, messages_of, sendable, turns_of
from localtrace.types import Span, Trajectory
from localtrace.values.fields import Fields

PARTS = "parts of messages that are neither text nor images"
OTHER_ROLES = "roles of messages that verifiers does not have"
_ROLES = {"developer": "system", "function": "tool"}
_KNOWN_ROLES = frozenset({"system", "user", "assistant", "tool"})
_Converted: TypeAlias = tuple[Fields, list[str]]
"""A message of verifiers, and the names of what it lacks."""


class MessageGraph:
    """The nodes of one trajectory.

    Args:
        left_out: counts of what the nodes do not hold, by field.
        is_own: whether verifiers itself made the trace, so that every branch is a sample.
    """

    def __init__(self, trajectory: Trajectory, left_out: Counter[str], *, is_own: bool) -> None:
        self.nodes: list[Fields] = []
        self._left_out = left_out
        self._known: dict[int, _Converted] = {}
        """Messages by the identity of what was recorded, which the trajectory keeps alive."""
        self._children: dict[int | None, list[int]] = {None: []}
        turns = turns_of(trajectory)
        gone = set() if is_own else discarded_turns(turns)
        done = [turn for turn in turns if turn.span.status == "ok"]
        self._masks = masks_of(trajectory, [t for t in done if t.span.span_id not in gone])
        left_out[UNKNOWN_MASK] += list(self._masks.values()).count(None)
        left_out[AGAIN] += len(gone)
        self._masks |= dict.fromkeys(gone)
        first = next(iter(trajectory.turns), None)
        self._response_start = 0 if first is None else len(first.prompt_ids or ())
        self.of_turns = {turn.span.span_id: self._add(turn) for turn in turns}
        """The node of each turn's answer, by span id."""

    def spread(self, values: list[float]) -> list[list[float]] | None:
        """Return numbers of the generated tokens for each node.

        Args:
            values: one number per token of the response, which is what follows the first prompt, or
                one per generated token. None: the graph has branches, or another number of tokens.
        """
        mask = [own for node in self.nodes for own in node["mask"]]
        is_line = all(node["parent"] == place - 1 for place, node in enumerate(self.nodes[1:], 1))
        if not is_line or len(values) not in (len(mask) - self._response_start, sum(mask)):
            return None
        if len(values) != sum(mask):
            response = zip(values, mask[self._response_start :], strict=True)
            values = [value for value, own in response if own]
        remaining = iter(values)
        return [[next(remaining) for own in node["mask"] if own] for node in self.nodes]

    def _add(self, read: Turn) -> int:
        """Add what a turn's prompt and answer add; return the node of the answer."""
        turn = read.span
        messages, parent = self._prompt(read)
        ids, tools = turn.prompt_ids or [], _tools_of(turn)
        kept, covered = 0, self._token_count(parent)
        if parent is None:
            parent, kept, covered = self._longest(messages, ids, tools)
        added = messages[kept:]
        counts = _message_tokens(turn, len(added), len(ids) - covered)
        for (message, lacking), count in zip(added, counts, strict=True):
            self._left_out.update(lacking)
            own = ids[covered : covered + count]
            node = {"message": message, "token_ids": own, "mask": [False] * count}
            parent = self._append(parent, node, turn, tools)
            covered += count
        return self._append(parent, self._answer(read, ids[covered:]), turn, tools)

    def _append(self, parent: int | None, node: Fields, turn: Span, tools: list[Any]) -> int:
        place = len(self.nodes)
        root = {"tools": tools} if parent is None and tools else {}
        at_s = turn.end_ns / 1e9
        common: Fields = {"parent": parent, "sampled": False, "timestamp": at_s, "logprobs": []}
        self.nodes.append({**root, **common, **node})
        self._children.setdefault(parent, []).append(place)
        self._children[place] = []
        return place

    def _prompt(self, read: Turn) -> tuple[list[_Converted], int | None]:
        """Return the prompt's messages; of one without messages, those after the node it continues.

        A prompt of ids or text has no messages of its own. It continues a turn whose ids it begins
        with; else it is read as one text.
        """
        turn = read.span
        if turn.messages is not None:
            return [self._converted(one) for one in turn.messages], None
        parent = self._continued(turn.prompt_ids or [])
        self._left_out[NO_PROMPT] += read.new is None
        return [_message(chat_form(one)) for one in read.new or ()], parent

    def _converted(self, recorded: Any) -> _Converted:
        """Return a recorded message as verifiers has it; equal ones of a rollout are one object."""
        known = self._known.get(id(recorded))
        if known is None:
            known = self._known[id(recorded)] = _message(_with_role(recorded))
        return known

    def _continued(self, ids: list[int]) -> int | None:
        """Return the newest answer whose path the ids begin with."""
        for place in range(len(self.nodes) - 1, -1, -1):
            if self.nodes[place]["sampled"]:
                before = self._path_ids(place)
                if before and before == ids[: len(before)]:
                    return place
        return None

    def _longest(
        self, messages: list[_Converted], ids: list[int], tools: list[Any]
    ) -> tuple[int | None, int, int]:
        """Return the node up to which a prompt is known, how many messages and how many tokens."""
        place, kept, covered = None, 0, 0
        for message, _ in messages:
            for child in self._children[place]:
                node = self.nodes[child]
                own = node["token_ids"]
                is_equal = node["message"] is message or node["message"] == message
                same = is_equal and (place is not None or node.get("tools", []) == tools)
                if same and own == ids[covered : covered + len(own)]:
                    place, kept, covered = child, kept + 1, covered + len(own)
                    break
            else:
                break
        return place, kept, covered

    def _answer(self, read: Turn, scaffold: list[int]) -> Fields:
        turn = read.span
        output = turn.output_ids or []
        every = [True] * len(output)
        mask = self._masks.get(turn.span_id, every) or [False] * len(output)
        logprobs = finite_logprobs(turn, self._left_out, mask) or []
        said = None if read.answer is None else chat_form(read.answer)
        given = turn.outputs.get("message") if isinstance(turn.outputs, Mapping) else None
        if isinstance(given, Mapping) and given.get("role") == "assistant":
            # It has fields of verifiers' own; reasoning and calls may stand beside it.
            known = {name: one for name, one in given.items() if one is not None}
            said = {**(said or {}), **known}
        if said is None:
            self._left_out[NO_ANSWER] += 1
        return {
            "message": _message({**(said or {}), "role": "assistant"})[0],
            "sampled": True,
            "token_ids": [*scaffold, *output],
            "mask": [False] * len(scaffold) + mask,
            "logprobs": [one for one, own in zip(logprobs, mask, strict=False) if own],
        }

    def _path_ids(self, place: int | None) -> list[int]:
        pieces = []
        while place is not None:
            pieces.append(self.nodes[place]["token_ids"])
            place = self.nodes[place]["parent"]
        return [one for piece in reversed(pieces) for one in piece]

    def _token_count(self, place: int | None) -> int:
        return len(self._path_ids(place))


def _with_role(recorded: Any) -> Mapping[str, Any]:
    """Return a message that has a role; any other in the common form."""
    if isinstance(recorded, Mapping) and isinstance(recorded.get("role"), str):
        return recorded
    return chat_form(*messages_of([recorded]))


def _message(given: Mapping[str, Any]) -> _Converted:
    """Return a message as verifiers has it, and counts of what it lacks."""
    role = _ROLES.get(given["role"], given["role"])
    if role not in _KNOWN_ROLES:
        role = "user"
    lacking: list[str] = [OTHER_ROLES] * (role != given["role"])
    if role != "assistant":
        content = given.get("content")
        if isinstance(content, list):
            parts = [part for part in content if _is_part(part)]
            lacking += [PARTS] * (len(content) - len(parts))
            content = parts
        else:
            content = sendable(content_text(content))
        message: Fields = {"role": role, "content": content}
        if role == "tool":
            message["tool_call_id"] = str(given.get("tool_call_id") or "")
            if isinstance(given.get("name"), str):
                message["name"] = given["name"]
        return message, lacking
    said = chat_form(*messages_of([given]))
    state = given.get("provider_state")
    whole = isinstance(state, list) and all(isinstance(one, dict) for one in state)
    found: Fields = {
        "content": said["content"] or None,
        "reasoning_content": said.get("reasoning_content"),
        "tool_calls": [_tool_call(call) for call in said.get("tool_calls", ())] or None,
        "provider_state": state if whole else None,
    }
    known = {name: one for name, one in found.items() if one is not None}
    return {"role": role, **known}, lacking


def _message_tokens(turn: Span, count: int, tokens: int) -> list[int]:
    """Return how many tokens each added message has; 0 for all where that is not known."""
    inputs = turn.inputs if isinstance(turn.inputs, Mapping) else {}
    given = inputs.get("message_tokens")
    if isinstance(given, list) and len(given) == count:
        whole = all(type(one) is int and one >= 0 for one in given)
        if whole and sum(given) <= tokens:
            return given
    return [0] * count


def _tool_call(call: Mapping[str, Any]) -> Fields:
    function = call["function"]
    return {
        "id": call["id"],
        "type": "function",
        "name": function["name"],
        "arguments": function["arguments"],
    }


def _tools_of(turn: Span) -> list[Any]:
    """Return the tools that a turn offers, without the level that OpenAI's form adds."""
    inputs = turn.inputs if isinstance(turn.inputs, Mapping) else {}
    found = []
    tools = inputs.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        own = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(own, Mapping) and isinstance(own.get("name"), str):
            kept = {name: own[name] for name in ("name", "description", "parameters", "strict")
                    if _fits(name, own.get(name))}  # fmt: skip
            found.append({"type": "function", **kept})
    return found


def _fits(name: str, value: Any) -> bool:
    kinds = {"parameters": dict, "strict": bool}
    return isinstance(value, kinds.get(name, str))


def _is_part(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    if part.get("type") == "text":
        return isinstance(part.get("text"), str)
    image = part.get("image_url")
    return part.get("type") == "image_url" and isinstance(image, Mapping) and "url" in image
