"""Messages in an ATIF document: their parts that a step holds, and what the steps add up to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from localtrace.exporters.shape import arguments_of
from localtrace.field_names import REASONING_NAMES
from localtrace.read.messages import Message, messages_of
from localtrace.store.whole_prompts import shared_prefix
from localtrace.values.fields import Fields

UNKNOWN = "unknown"
"""Harbor's word where an agent's name or version is not known; neither may be missing."""
_OWN_FIELDS = frozenset({"role", "content", "tool_calls", "tool_call_id", *REASONING_NAMES})
_IMAGES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})


@dataclass(slots=True)
class _Told:
    """One message that the steps tell."""

    step: Fields
    message: Message
    arguments: list[Any]
    """Those of its calls of tools, as they were recorded."""
    is_said: bool
    """Whether a turn generated it, and no prompt has repeated it."""


class Context:
    """The messages that the steps so far add up to, as an import adds them up."""

    def __init__(self) -> None:
        self._told: list[_Told] = []
        self._recorded: list[Any] = []
        """The newest prompt, as it was recorded."""
        self._given: list[tuple[Message, list[Any]]] = []
        """The newest prompt in the common form, each message with its calls' recorded arguments."""

    def add(
        self, step: Fields, message: Message, recorded: Any = None, *, is_said: bool = False
    ) -> None:
        """Add the message of a step."""
        self._told.append(_Told(step, message, recorded_arguments(recorded), is_said))

    def answer(self, step: Fields, message: Message) -> None:
        """Add an answer to a step, which stands beside the step whenever it came."""
        for place in range(len(self._told), 0, -1):
            if self._told[place - 1].step is step:
                self._told.insert(place, _Told(step, message, [], is_said=False))
                return

    def meets(self, recorded: list[Any]) -> bool:
        """Return whether the steps add up to a prompt; else they add up to it from now on.

        A prompt may repeat an answer in another form, such as without its reasoning. The answer's
        step then says so.
        """
        given = self._common_form(recorded)
        is_plain = _are_plain(recorded)
        others: list[tuple[_Told, int]] = []
        is_met = len(given) == len(self._told)
        for place, (one, (message, arguments)) in enumerate(zip(self._told, given, strict=False)):
            if one.message is message:
                continue
            if one.message != message or not _same(one.arguments, arguments):
                is_met &= is_plain and one.is_said and message["role"] == "assistant"
                others.append((one, place))
        if not is_met:
            self._told = [_Told({}, *one, is_said=False) for one in given]
            return False
        for one, place in others:
            one.step["extra"]["repeated"] = recorded[place]
        for one, (one.message, one.arguments) in zip(self._told, given, strict=True):
            one.is_said = False
        return True

    def _common_form(self, recorded: list[Any]) -> list[tuple[Message, list[Any]]]:
        """Return a prompt's messages in their common form; most of it is the one before again."""
        known = shared_prefix(recorded, self._recorded) if _are_plain(recorded) else 0
        new = ((one, recorded_arguments(one)) for one in recorded[known:])
        self._given = [
            *self._given[:known],
            *((message, given) for one, given in new for message in messages_of([one])),
        ]
        self._recorded = recorded
        return self._given


def _are_plain(recorded: list[Any]) -> bool:
    """Return whether each message is one in the common form too: a prompt's text may be several."""
    return all(not isinstance(one, Mapping) or one.get("role") != "prompt" for one in recorded)


def recorded_arguments(recorded: Any) -> list[Any]:
    """Return the arguments of a message's calls of tools: text, an object or any other value."""
    calls = recorded.get("tool_calls") if isinstance(recorded, Mapping) else None
    functions = (
        one.get("function", one) if isinstance(one, Mapping) else None
        for one in (calls if isinstance(calls, list) else ())
    )  # fmt: skip
    return [one.get("arguments") if isinstance(one, Mapping) else None for one in functions]


def _same(arguments: list[Any], others: list[Any]) -> bool:
    """Return whether arguments, whose texts are equal, are texts or values alike."""
    return list(map(type, arguments)) == list(map(type, others))


def tool_call(call_id: str, call: Mapping[str, Any], given: Any) -> Fields:
    """Return a call that a message asks for, under an id that is unique in its step.

    Args:
        given: its arguments as they were recorded; the step has an object, read from a text too.
    """
    arguments = arguments_of(call["function"])
    is_object = isinstance(arguments, dict)
    extra = {} if isinstance(given, dict) else {"arguments": given}
    extra |= {} if call["id"] == call_id else {"id": call["id"]}
    made: Fields = {
        "tool_call_id": call_id, "function_name": call["function"]["name"] or UNKNOWN,
        "arguments": arguments if is_object else {},
    }  # fmt: skip
    return made | ({"extra": extra} if extra else {})


def content_of(recorded: Any, text: str) -> str | list[Any]:
    """Return the content of a message as a step holds it: parts if it has images, else text."""
    content = recorded.get("content") if isinstance(recorded, Mapping) else None
    return content if isinstance(content, list) and _are_parts(content) else text


def other_fields(recorded: Any) -> Fields:
    """Return the fields of a message that a step does not have, and content that it cannot hold."""
    if not isinstance(recorded, Mapping):
        return {}
    fields = {name: value for name, value in recorded.items() if name not in _OWN_FIELDS}
    content = recorded.get("content")
    is_held = not isinstance(content, list) or _are_text(content) or _are_parts(content)
    found = {"message": fields or None, "content": None if is_held else content}
    return {name: value for name, value in found.items() if value is not None}


def _are_text(content: Iterable[Any]) -> bool:
    return all(isinstance(part, Mapping) and set(part) <= {"type", "text"} for part in content)


def _are_parts(content: list[Any]) -> bool:
    """Return whether content is a list of ATIF's parts, with an image."""
    return not _are_text(content) and all(
        isinstance(part, Mapping) and (_is_text(part) or _is_image(part)) for part in content
    )


def _is_text(part: Mapping[Any, Any]) -> bool:
    return set(part) == {"type", "text"} and part["type"] == "text" and type(part["text"]) is str


def _is_image(part: Mapping[Any, Any]) -> bool:
    source = part.get("source")
    return (
        set(part) == {"type", "source"}
        and part["type"] == "image"
        and isinstance(source, Mapping)
        and set(source) == {"media_type", "path"}
        and source["media_type"] in _IMAGES
        and type(source["path"]) is str
    )
