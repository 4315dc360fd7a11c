"""Messages, tools and usage of a generation's span, in the form of OpenAI's.

Conventions for them changed several times, and all are in use. The first one found counts:

    gen_ai.input.messages, gen_ai.output.messages    attributes, or those of one event
    gen_ai.user.message, …, gen_ai.choice            one event per message
    gen_ai.prompt.0.content, gen_ai.completion.0.…   attributes with numbers
    llm.input_messages.0.message.content, …          OpenInference's
    input.value, output.value; mlflow.spanInputs, …  arguments and result of any call
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from localtrace.importers.lines import BadLine, read_json
from localtrace.importers.otlp_spans import SpanIn
from localtrace.values.fields import known

_DETAILS = "gen_ai.client.inference.operation.details"
_EVENT_BODY = "gen_ai.event.content"
_WHOLE = {
    "gen_ai.content.prompt": "gen_ai.prompt", "gen_ai.content.completion": "gen_ai.completion"
}  # fmt: skip
_ANY_INPUT = ("input.value", "mlflow.spanInputs", "traceloop.entity.input")
_ANY_OUTPUT = ("output.value", "mlflow.spanOutputs", "traceloop.entity.output")
_MESSAGE_FIELDS = ("content", "reasoning_content", "tool_calls", "tool_call_id", "name")
_REQUEST = "gen_ai.request."
_SAMPLING = {"choice.count": "n", "stop_sequences": "stop"}
_USAGE = {
    "gen_ai.usage.prompt_tokens": "input_tokens",
    "gen_ai.usage.completion_tokens": "output_tokens",
    "llm.token_count.prompt": "input_tokens",
    "llm.token_count.completion": "output_tokens",
    "llm.token_count.total": "total_tokens",
    "llm.usage.total_tokens": "total_tokens",
}


@dataclass(slots=True)
class Attributes:
    """Attributes of a span, of which some are taken; the others are left."""

    left: dict[str, Any]

    def take(self, *names: str) -> Any:
        """Remove all of these, and return the first that has a value."""
        found = [self.left.pop(name, None) for name in names]
        return next((one for one in found if one is not None), None)

    def take_json(self, *names: str) -> Any:
        """Remove all of these, and return the first one's value, parsed where it is JSON."""
        return parsed(self.take(*names))

    def take_all(self, prefix: str) -> dict[str, Any]:
        """Remove all names with this prefix, and return their values by the rest of the name."""
        names = [name for name in self.left if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.left.pop(name) for name in names}

    def take_listed(self, prefix: str) -> list[Any]:
        """Remove names such as `PREFIX.0.role`, and return the list that they spell."""
        tree: dict[str, Any] = {}
        for path, value in self.take_all(prefix + ".").items():
            *above, last = path.split(".")
            node = tree
            for part in above:
                inner = node.setdefault(part, {})
                node = inner if isinstance(inner, dict) else node
            node[last] = value
        found = _lists(tree)
        return found if isinstance(found, list) else []


@dataclass(slots=True)
class Generation:
    """The messages to and from a model."""

    given: list[dict[str, Any]] = field(default_factory=list)
    said: list[dict[str, Any]] = field(default_factory=list)
    """One message per choice, with its finish reason."""

    @property
    def is_empty(self) -> bool:
        """True where neither is known."""
        return not self.given and not self.said


def arguments_and_result(span: SpanIn, attributes: Attributes) -> tuple[dict[str, Any], Any]:
    """Return the arguments and the result of a generation, taken from attributes."""
    asked = attributes.take_all(_REQUEST)
    inputs = {_SAMPLING.get(name, name): value for name, value in asked.items()}
    invocation = attributes.take_json("llm.invocation_parameters")
    inputs |= invocation if isinstance(invocation, dict) else {}
    tools = _tools(attributes)
    usage = _usage(attributes)
    finish = attributes.take("gen_ai.response.finish_reasons", "llm.finish_reason")
    finish = finish[0] if isinstance(finish, list) and finish else finish or None
    model = attributes.take("gen_ai.response.model", "llm.model_name")
    facts = {"model": model, "id": attributes.take("gen_ai.response.id"), "usage": usage or None}
    generation = _generation(span, attributes)
    given, said = attributes.take_json(*_ANY_INPUT), attributes.take_json(*_ANY_OUTPUT)
    if generation.is_empty:
        inputs = (given if isinstance(given, dict) else {"prompt": given}) | inputs
        result = said if isinstance(said, dict) else {"text": said}
    elif len(generation.said) > 1:
        result = {"choices": [_choice(one, number) for number, one in enumerate(generation.said)]}
    else:
        result = {name: one for name, one in (generation.said or [{}])[0].items() if name != "role"}
    if "choices" not in result and finish is not None:
        result.setdefault("finish_reason", finish)
    inputs |= {"messages": generation.given} if generation.given else {}
    inputs |= {"tools": tools} if tools else {}
    return known(inputs), known({**facts, **result})


def parsed(value: Any) -> Any:
    """Return a text that holds a JSON object, list or text as that; anything else as it is."""
    if isinstance(value, str) and value[:1] in ("{", "[", '"'):
        try:
            return read_json(value)
        except BadLine:
            pass
    return value


def _choice(message: dict[str, Any], number: int) -> dict[str, Any]:
    rest = {name: one for name, one in message.items() if name != "finish_reason"}
    return {"index": number, "message": rest, "finish_reason": message.get("finish_reason")}


def _generation(span: SpanIn, attributes: Attributes) -> Generation:
    for event in span.events:
        if event.name == _DETAILS or event.name in _WHOLE:
            attributes.left |= event.attributes
    indexed = Generation(
        _plain(attributes.take_listed("gen_ai.prompt")),
        _plain(attributes.take_listed("gen_ai.completion")),
    )
    inference = Generation(
        _plain(_unwrapped(attributes.take_listed("llm.input_messages"))),
        _plain(_unwrapped(attributes.take_listed("llm.output_messages"))),
    )
    prompts = [{"role": "user", "content": one.get("prompt", one).get("text")}
               for one in attributes.take_listed("llm.prompts")
               if isinstance(one, dict) and isinstance(one.get("prompt", one), dict)]  # fmt: skip
    found = (
        _of_parts(attributes),
        _of_events(span),
        indexed,
        inference,
        Generation(
            _whole(attributes.take_json("gen_ai.prompt"), "user") or prompts,
            _whole(attributes.take_json("gen_ai.completion"), "assistant"),
        ),
    )
    return next((one for one in found if not one.is_empty), Generation())


# -- messages with parts --------------------------------------------------------------------------


def _of_parts(attributes: Attributes) -> Generation:
    given = attributes.take_json("gen_ai.input.messages")
    said = attributes.take_json("gen_ai.output.messages")
    system = attributes.take_json("gen_ai.system_instructions")
    before = [{"role": "system", "parts": system}] if isinstance(system, list) and system else []
    if isinstance(system, str):
        before = [{"role": "system", "parts": [{"type": "text", "content": system}]}]
    messages = [*before, *(given if isinstance(given, list) else ())]
    return Generation(
        [one for message in _dicts(messages) for one in _from_parts(message)],
        [one for message in _dicts(said) for one in _from_parts(message)],
    )


def _from_parts(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of one message: answers of several tools are as many."""
    if not isinstance(message.get("parts"), list):
        yield from _plain([message])
        return
    content, thoughts, calls, answers = [], [], [], []
    for part in _dicts(message["parts"]):
        kind = part.get("type")
        if kind == "tool_call_response":
            answer = {"tool_call_id": part.get("id"), "content": _answer(part)}
            answers.append(known({"role": "tool", **answer}))
        elif kind == "tool_call":
            function = {"name": part.get("name"), "arguments": part.get("arguments")}
            calls.append(known({"id": part.get("id"), "type": "function", "function": function}))
        elif kind in ("reasoning", "thinking"):
            thoughts.append(str(part.get("content")))
        elif kind == "text":
            content.append({"type": "text", "text": part.get("content")})
        else:
            content.append(dict(part))
    if content or thoughts or calls or not answers:
        is_text = len(content) == 1 and content[0].get("type") == "text"
        said = {
            "role": message.get("role"),
            "content": content[0]["text"] if is_text else content or None,
            "reasoning_content": "\n".join(thoughts) or None,
            "tool_calls": calls or None,
            "name": message.get("name"),
            "finish_reason": message.get("finish_reason"),
        }
        yield known(said)
    yield from answers


def _answer(part: Mapping[str, Any]) -> Any:
    return part.get("response", part.get("result"))


# -- one event per message ------------------------------------------------------------------------


def _of_events(span: SpanIn) -> Generation:
    found = Generation()
    for event in span.events:
        stem, _, last = event.name.rpartition(".")
        if not (stem == "gen_ai" and last == "choice") and not event.name.endswith(".message"):
            continue
        body = parsed(event.attributes.get(_EVENT_BODY))
        fields = {**event.attributes, **(body if isinstance(body, dict) else {})}
        if last == "choice":
            message = parsed(fields.get("message"))
            inner = message if isinstance(message, dict) else {"content": message}
            outer = {name: fields[name] for name in (*_MESSAGE_FIELDS, "finish_reason")
                     if name in fields}  # fmt: skip
            found.said += _plain([{"role": "assistant", **outer, **inner}])
        elif stem.startswith("gen_ai."):
            role = stem.removeprefix("gen_ai.")
            if role == "tool" and "id" in fields:
                fields["tool_call_id"] = fields["id"]
            found.given += _plain([{"role": role, **fields}])
    return found


# -- attributes with numbers, and whole messages --------------------------------------------------


def _plain(messages: Iterable[Any]) -> list[dict[str, Any]]:
    """Return messages with only the fields that messages have, as values and not as JSON."""
    found = []
    for message in _dicts(messages):
        one = {name: message.get(name) for name in ("role", *_MESSAGE_FIELDS, "finish_reason")}
        content = one["content"]
        one["content"] = parsed(content) if str(content).startswith('[{"') else content
        calls = parsed(one["tool_calls"])
        one["tool_calls"] = [_tool_call(call) for call in _dicts(calls)] or None
        found.append(known(one))
    return found


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    call = call["tool_call"] if isinstance(call.get("tool_call"), dict) else call
    function = call.get("function")
    if not isinstance(function, dict):
        function = {name: call.get(name) for name in ("name", "arguments")}
    return known({"id": call.get("id"), "type": "function", "function": known(dict(function))})


def _unwrapped(messages: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield OpenInference's messages with the names of OpenAI's."""
    for message in _dicts(messages):
        inner = message.get("message")
        one = dict(inner) if isinstance(inner, dict) else {}
        contents = [part.get("message_content", part) for part in _dicts(one.get("contents"))]
        if contents and "content" not in one:
            texts = [part.get("text") for part in contents]
            is_text = len(texts) == 1 and isinstance(texts[0], str)
            one["content"] = texts[0] if is_text else contents
        yield one


def _whole(value: Any, role: str) -> list[dict[str, Any]]:
    if isinstance(value, str) and value:
        return [{"role": role, "content": value}]
    return _plain(value if isinstance(value, list) else [value])


def _lists(node: Any) -> Any:
    """Turn objects whose keys are all numbers into lists."""
    if not isinstance(node, dict):
        return node
    items = {key: _lists(value) for key, value in node.items()}
    if items and all(key.isdecimal() and len(key) < 7 for key in items):
        return [items[key] for key in sorted(items, key=int)]
    return items


def _dicts(values: Any) -> list[dict[str, Any]]:
    listed = values if isinstance(values, Iterable) and not isinstance(values, str | dict) else ()
    return [one for one in listed if isinstance(one, dict)]


# -- tools and usage ------------------------------------------------------------------------------


def _tools(attributes: Attributes) -> list[Any]:
    listed = attributes.take_json("gen_ai.tool.definitions", "mlflow.chat.tools")
    tools = listed if isinstance(listed, list) else []
    for one in attributes.take_listed("llm.tools"):
        inner = one.get("tool") if isinstance(one, dict) else None
        tools.append(parsed(inner.get("json_schema")) if isinstance(inner, dict) else one)
    for one in _dicts(attributes.take_listed("llm.request.functions")):
        function = {name: parsed(value) for name, value in one.items()}
        tools.append({"type": "function", "function": function})
    return tools


def _usage(attributes: Attributes) -> dict[str, Any]:
    usage = {}
    for name, short in _USAGE.items():
        if (count := attributes.take(name)) is not None:
            usage[short] = count
    usage |= attributes.take_all("gen_ai.usage.")
    counted = attributes.take_json("mlflow.chat.tokenUsage")
    return (counted if isinstance(counted, dict) else {}) | usage
