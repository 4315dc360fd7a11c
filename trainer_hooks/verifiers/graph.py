"""The message graph of a verifiers trace, read as turns and calls of tools.

A trace stores each message once, as a node that adds tokens to those of its parents. A sampled
node is a turn: its prompt is the path to it, and its own tokens begin with the template's and end
with the generated ones. A tool's message is the answer to a call of the turn before it; the time
between the two turns is all that is known of the call's times.

Nodes and calls are verifiers' own objects, or the JSON objects of a file.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from localtrace.trainer_hooks.generations import FinishedCall
from localtrace.values.fields import Fields, known

OP = "verifiers.generate"
_S_MAX = 2**32


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
        rest = iter(values or ())
        return [next(rest, 0.0) if own else 0.0 for own in self.mask]


class Times(msgspec.Struct):
    """Start and end, in seconds since the Unix epoch."""

    start: float = 0.0
    end: float = 0.0


class Failure(msgspec.Struct):
    """An error as verifiers keeps it."""

    type: str
    message: str = ""

    @property
    def exception(self) -> BaseException:
        """An exception whose text in a record is that of verifiers' own."""
        if self.type.startswith("Cancel"):
            return CancelledError(self.message)
        kind: type[Exception] = type(self.type, (Exception,), {})
        return kind(self.message)


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
        for own in nodes:
            node = msgspec.convert(own, Node, from_attributes=True)
            place = len(self.nodes)
            if node.parent is not None and not 0 <= node.parent < place:
                raise ValueError(f"the parent of node {place} does not come before it")
            if node.token_ids and not node.mask:
                node.mask = [False] * len(node.token_ids)
            if len(node.mask) != len(node.token_ids):
                raise ValueError(f"the mask of node {place} has not one value for each token")
            self.nodes.append(node)
            self._messages.append(_message(plain(node.message)))

    def turns(self, calls: Iterable[Any]) -> Iterator[FinishedCall]:
        """Yield the turns of requests to the model, each after tools whose answers its prompt has.

        Raises:
            msgspec.ValidationError: they are not calls of verifiers.
            ValueError: a call names no node.
        """
        for own in calls:
            call = msgspec.convert(own, Call, from_attributes=True)
            start_ns, end_ns = nanoseconds(call.time.start), nanoseconds(call.time.end)
            if call.node is None:
                failure = call.error or Failure("Unanswered", "the request has no answer")
                times_ns = start_ns, max(0, end_ns - start_ns)
                yield FinishedCall(OP, *times_ns, _request(call), None, error=failure.exception)
            elif not 0 <= call.node < len(self.nodes):
                raise ValueError(f"a call names node {call.node}, which does not exist")
            else:
                yield from self._turn(call.node, call, start_ns, end_ns)

    def rest(self) -> Iterator[FinishedCall]:
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
        places: list[int] = []
        while place is not None:
            places.append(place)
            place = self.nodes[place].parent
        return places[::-1]

    def branches(self) -> list[list[Node]]:
        """Return the path to each node that has no children."""
        parents = self._parents()
        return [
            [self.nodes[step] for step in self.path(place)]
            for place in range(len(self.nodes))
            if place not in parents
        ]

    def _parents(self) -> set[int | None]:
        return {node.parent for node in self.nodes}

    def _turn(self, place: int, call: Call, start_ns: int, end_ns: int) -> Iterator[FinishedCall]:
        node, path = self.nodes[place], self.path(place)
        before = path[:-1]
        yield from self._answers(before, start_ns)
        new = [step for step in before if step not in self._read]
        self._read.update(path)
        self._ends_ns[place] = end_ns
        inputs: Fields = {"messages": [self._messages[step] for step in before]}
        if tools := self.nodes[path[0]].tools:
            inputs["tools"] = [_tool(plain(tool)) for tool in tools]
        inputs |= _request(call)
        outputs: Fields = {"message": self._messages[place]}
        split = node.scaffold
        if any(self.nodes[step].token_ids for step in path):
            prompt = [token for step in before for token in self.nodes[step].token_ids]
            inputs["prompt_ids"] = prompt + node.token_ids[:split]
            outputs |= _generated(node, split)
        counts = [len(self.nodes[step].token_ids) for step in new]
        if any(counts):
            inputs["message_tokens"] = counts
        outputs |= _answered(call)
        error = None if call.error is None else call.error.exception
        times_ns = start_ns, max(0, end_ns - start_ns)
        yield FinishedCall(OP, *times_ns, inputs, outputs, error=error)

    def _answers(self, path: list[int], until_ns: int) -> Iterator[FinishedCall]:
        """Yield the calls of tools whose answers stand on a path and were not read before."""
        requests: dict[str, tuple[int, Fields]] = {}
        for place in path:
            message = self._messages[place]
            if message.get("role") != "tool":
                for call in message.get("tool_calls") or ():
                    requests[call["id"]] = place, call["function"]
                continue
            turn, function = requests.get(message.get("tool_call_id") or "", (None, {}))
            if place in self._told or turn is None:
                continue
            self._told.add(place)
            start_ns = self._ends_ns.get(turn, until_ns)
            name = str(function.get("name") or message.get("name") or "tool")
            inputs, answer = _arguments(function.get("arguments")), message.get("content")
            times_ns = start_ns, max(0, until_ns - start_ns)
            yield FinishedCall(name, *times_ns, inputs, answer, is_tool=True)


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


def _message(own: Any) -> Fields:
    """Return a message in OpenAI's form: calls of tools have their name below `function`."""
    if not isinstance(own, Mapping) or not isinstance(own.get("role"), str):
        raise ValueError("a message without a role")
    message = _without_nulls(own)
    if calls := message.pop("tool_calls", None):
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise ValueError("tool_calls is not a list of calls")
        message["tool_calls"] = [_tool_call(plain(call)) for call in calls]
    return message


def _tool_call(call: Mapping[str, Any]) -> Fields:
    if isinstance(call.get("function"), Mapping):
        return {**call, "id": str(call.get("id"))}
    function = _without_nulls(call, "id", "type")
    return {"id": str(call.get("id")), "type": call.get("type", "function"), "function": function}


def _tool(own: Any) -> Any:
    if not isinstance(own, Mapping) or own.get("type", "function") != "function":
        return own
    return {"type": "function", "function": _without_nulls(own, "type")}


def _without_nulls(fields: Mapping[str, Any], *left_out: str) -> Fields:
    return {n: value for n, value in fields.items() if value is not None and n not in left_out}


def _request(call: Call) -> Fields:
    sampling = plain(call.sampling)
    if isinstance(sampling, Mapping):
        sampling = _without_nulls(sampling)
    return known(
        {"sampling_params": sampling or None, "model": call.model, "endpoint": call.endpoint}
    )


def _generated(node: Node, split: int) -> Fields:
    outputs: Fields = {"output_ids": node.token_ids[split:]}
    mask = node.mask[split:]
    if node.logprobs:
        rest = iter(node.logprobs)
        logprobs = [next(rest, None) if own else None for own in node.mask]
        outputs["output_logprobs"] = logprobs[split:]
    if not all(mask):
        outputs["response_mask"] = [int(own) for own in mask]
    return outputs


def _answered(call: Call) -> Fields:
    outputs: Fields = {"finish_reason": call.finish_reason}
    if usage := call.usage:
        counts = {
            **msgspec.structs.asdict(usage),
            "prompt_tokens": usage.prompt_tokens + (usage.cached_input_tokens or 0),
            "cached_tokens": usage.cached_input_tokens,
        }
        outputs["usage"] = _without_nulls(counts, "cached_input_tokens")
    return known(outputs)


def _arguments(text: Any) -> Fields:
    """Return the arguments of a tool by name; those that are no JSON object under one name."""
    if isinstance(text, str):
        with suppress(msgspec.DecodeError, UnicodeError, RecursionError):
            arguments = msgspec.json.decode(text)
            if isinstance(arguments, dict):
                return arguments
    return {} if text is None else {"arguments": text}
