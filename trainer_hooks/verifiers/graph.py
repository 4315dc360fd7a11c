"""The message graph of a verifiers trace, read as turns and calls of tools.

A trace stores each message once, as a node that adds tokens to those of its parents. A sampled
node is a turn: its prompt is the path to it, and its own tokens begin with the template's and end
with the generated ones. A tool's message is the answer to a call of the turn before it; the time
between the two turns is all that is known of the call's times.

Nodes and calls are verifiers' own objects, or the JSON objects of a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec

_S_MAX = 2**32
Fields: TypeAlias = dict[str, Any]


class Node(msgspec.Struct):
    """One message, with the tokens that it adds to its path."""

    message: Any
    parent: int | None = None
    sampled: bool = False
    tools: list[Any] = []
    timestamp: float = 0.0
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    advantages: list[float] | None = None
    reference_logprobs: list[float] | None = None
    trainer_logprobs: list[float] | None = None
    entropies: list[float] | None = None

    @property
    def scaffold(self) -> int:
        """The number of tokens before the first generated one."""
        return next((place for place, own in enumerate(self.mask) if own), len(self.token_ids))

    def spread(self, values: list[float] | None) -> list[float]:
        """Return values of the generated tokens as one per token; the others get 0."""
        given = iter(values or ())
        return [next(given, 0.0) if own else 0.0 for own in self.mask]


class Times(msgspec.Struct):
    """Start and end, in seconds since the Unix epoch."""

    start: float = 0.0
    end: float = 0.0


class Failure(msgspec.Struct):
    """An error as verifiers keeps it."""

    type: str
    message: str = ""

    @property
    def text(self) -> str:
        """Its type and message, as a record has them."""
        return f"{self.type}: {self.message}"

    @property
    def status(self) -> str:
        """The status of what ended with it."""
        return "cancelled" if self.type.startswith("Cancel") else "error"


class Usage(msgspec.Struct):
    """Counts of tokens; those that the prompt took from a cache are not among its own."""

    prompt_tokens: int
    completion_tokens: int
    cached_input_tokens: int | None = None
    reasoning_tokens: int | None = None
    cost: float | None = None


class Call(msgspec.Struct):
    """One request to the model."""

    node: int | None = None
    model: str | None = None
    sampling: Any = None
    endpoint: str | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    time: Times = msgspec.field(default_factory=Times)
    error: Failure | None = None


class GraphCall(NamedTuple):
    """One request to the model, or one call of a tool that has an answer."""

    tool: str | None
    """Name of the tool; None for a request to the model."""
    inputs: Fields
    outputs: Any
    start_ns: int
    duration_ns: int
    error: Failure | None = None


class Graph:
    """The nodes of a trace so far, and which of their turns were read.

    Nodes are only added to a trace while it runs.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._messages: list[Fields] = []
        """The messages of the nodes, in OpenAI's form."""
        self._ends_ns: dict[int, int] = {}
        """End of the request that made a node."""
        self._read: set[int] = set()
        """Nodes that were part of a turn's path."""
        self._told: set[int] = set()
        """Answers of tools that were yielded."""

    def add(self, nodes: Iterable[Any]) -> None:
        """Add nodes.

        Raises:
            msgspec.ValidationError: they are not nodes of verifiers.
            ValueError: a node's parent does not come before it, or its mask is of another length.
        """
        for given in nodes:
            node = msgspec.convert(given, Node, from_attributes=True)
            place = len(self.nodes)
            if node.parent is not None and not 0 <= node.parent < place:
                raise ValueError(f"the parent of node {place} is not before it")
            if node.token_ids and not node.mask:
                node.mask = [False] * len(node.token_ids)
            if len(node.mask) != len(node.token_ids):
                raise ValueError(f"node {place} has {len(node.mask)} masks of its tokens")
            self.nodes.append(node)
            self._messages.append(_message(plain(node.message)))

    def turns(self, calls: Iterable[Any]) -> Iterator[GraphCall]:
        """Yield the turns of requests to the model, each after tools whose answers its prompt has.

        Raises:
            msgspec.ValidationError: they are not calls of verifiers.
            ValueError: a call names no node.
        """
        for given in calls:
            call = msgspec.convert(given, Call, from_attributes=True)
            start_ns, end_ns = nanoseconds(call.time.start), nanoseconds(call.time.end)
            if call.node is None:
                error = call.error or Failure("Unanswered", "the request has no answer")
                duration_ns = max(0, end_ns - start_ns)
                yield GraphCall(None, _asked(call), None, start_ns, duration_ns, error)
            elif not 0 <= call.node < len(self.nodes):
                raise ValueError(f"a call names the node {call.node}, which there is not")
            else:
                yield from self._turn(call.node, call, start_ns, end_ns)

    def rest(self) -> Iterator[GraphCall]:
        """Yield turns that no request names, and answers of tools that no request has."""
        for place, node in enumerate(self.nodes):
            if place not in self._read:
                at_ns = nanoseconds(node.timestamp)
                if node.sampled:
                    yield from self._turn(place, Call(node=place), at_ns, at_ns)
                elif place not in self._parents():
                    yield from self._answers(self.path(place), at_ns)

    def path(self, place: int | None) -> list[int]:
        """Return the places of the nodes from the root to this one."""
        found: list[int] = []
        while place is not None:
            found.append(place)
            place = self.nodes[place].parent
        return found[::-1]

    def branches(self) -> list[list[Node]]:
        """Return the path to each node that has no children."""
        parents = self._parents()
        return [
            [self.nodes[one] for one in self.path(place)]
            for place in range(len(self.nodes))
            if place not in parents
        ]

    def _parents(self) -> set[int | None]:
        return {node.parent for node in self.nodes}

    def _turn(self, place: int, call: Call, start_ns: int, end_ns: int) -> Iterator[GraphCall]:
        node, path = self.nodes[place], self.path(place)
        before = path[:-1]
        yield from self._answers(before, start_ns)
        new = [one for one in before if one not in self._read]
        self._read.update(path)
        self._ends_ns[place] = end_ns
        inputs: Fields = {"messages": [self._messages[one] for one in before]}
        if tools := self.nodes[path[0]].tools:
            inputs["tools"] = [_tool(plain(tool)) for tool in tools]
        inputs |= _asked(call)
        outputs: Fields = {"message": self._messages[place]}
        split = node.scaffold
        if any(self.nodes[one].token_ids for one in path):
            prompt = [one for index in before for one in self.nodes[index].token_ids]
            inputs["prompt_ids"] = prompt + node.token_ids[:split]
            outputs |= _generated(node, split)
        counts = [len(self.nodes[one].token_ids) for one in new]
        if any(counts):
            inputs["message_tokens"] = counts
        outputs |= _answered(call)
        yield GraphCall(None, inputs, outputs, start_ns, max(0, end_ns - start_ns), call.error)

    def _answers(self, path: list[int], until_ns: int) -> Iterator[GraphCall]:
        """Yield the calls of tools whose answers stand on a path and were not read before."""
        asked: dict[str, tuple[int, Fields]] = {}
        for place in path:
            message = self._messages[place]
            if message.get("role") != "tool":
                for call in message.get("tool_calls") or ():
                    asked[call["id"]] = place, call["function"]
                continue
            asker, function = asked.get(message.get("tool_call_id") or "", (None, {}))
            if place in self._told or asker is None:
                continue
            self._told.add(place)
            start_ns = self._ends_ns.get(asker, until_ns)
            name = str(function.get("name") or message.get("name") or "tool")
            inputs, duration_ns = _arguments(function.get("arguments")), until_ns - start_ns
            yield GraphCall(name, inputs, message.get("content"), start_ns, max(0, duration_ns))


def plain(value: Any) -> Any:
    """Return an object of verifiers as a dictionary without nulls, and anything else as it is."""
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_none=True)
    return value


def nanoseconds(seconds: Any) -> int:
    """Return a time in ns since the Unix epoch; 0 where it is none."""
    if not isinstance(seconds, int | float) or not 0 < seconds < _S_MAX:
        return 0
    return int(seconds * 1e9)


def _message(given: Any) -> Fields:
    """Return a message in OpenAI's form: calls of tools have their name below `function`."""
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise ValueError("a message without a role")
    message = _without_nulls(given)
    if calls := message.pop("tool_calls", None):
        if not isinstance(calls, list) or not all(isinstance(one, Mapping) for one in calls):
            raise ValueError("tool_calls is no list of calls")
        message["tool_calls"] = [_tool_call(plain(one)) for one in calls]
    return message


def _tool_call(call: Mapping[str, Any]) -> Fields:
    if isinstance(call.get("function"), Mapping):
        return {**call, "id": str(call.get("id"))}
    function = _without_nulls(call, "id", "type")
    return {"id": str(call.get("id")), "type": call.get("type", "function"), "function": function}


def _tool(given: Any) -> Any:
    if not isinstance(given, Mapping) or given.get("type", "function") != "function":
        return given
    return {"type": "function", "function": _without_nulls(given, "type")}


def _without_nulls(fields: Mapping[str, Any], *left_out: str) -> Fields:
    return {n: value for n, value in fields.items() if value is not None and n not in left_out}


def _asked(call: Call) -> Fields:
    sampling = plain(call.sampling)
    if isinstance(sampling, Mapping):
        sampling = _without_nulls(sampling)
    found = {"sampling_params": sampling or None, "model": call.model, "endpoint": call.endpoint}
    return _without_nulls(found)


def _generated(node: Node, split: int) -> Fields:
    outputs: Fields = {"output_ids": node.token_ids[split:]}
    mask = node.mask[split:]
    if node.logprobs:
        given = iter(node.logprobs)
        logprobs = [next(given, None) if own else None for own in node.mask]
        outputs["output_logprobs"] = logprobs[split:]
    if not all(mask):
        outputs["response_mask"] = [int(own) for own in mask]
    return outputs


def _answered(call: Call) -> Fields:
    outputs: Fields = {"finish_reason": call.finish_reason}
    if usage := call.usage:
        found = {
            **msgspec.structs.asdict(usage),
            "prompt_tokens": usage.prompt_tokens + (usage.cached_input_tokens or 0),
            "cached_tokens": usage.cached_input_tokens,
        }
        outputs["usage"] = _without_nulls(found, "cached_input_tokens")
    return _without_nulls(outputs)


def _arguments(text: Any) -> Fields:
    """Return the arguments of a tool by name; those that are no JSON object under one name."""
    if isinstance(text, str):
        try:
            found = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            found = None
        if isinstance(found, dict):
            return found
    return {} if text is None else {"arguments": text}
