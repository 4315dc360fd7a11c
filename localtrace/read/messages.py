"""The turns of a trajectory as chat messages, in the form of OpenAI's, which every tracker shows.

    {"role", "content"[, "reasoning_content"][, "tool_calls"][, "tool_call_id"][, "name"]}

Roles, ids, names and contents are text, whatever was recorded. A prompt of token ids is decoded,
and cut where its chat template begins a message. Trackers get long messages shortened
(`transcript_of`); files get them whole (`messages_of`, `said_of`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from localtrace.field_names import OUTPUT_TEXT_NAMES, PROMPT_TEXT_NAMES, REASONING_NAMES
from localtrace.read.conversation import Conversation, as_text, named_text
from localtrace.store.tokenizers import Decode
from localtrace.types import Span, Trajectory

Message: TypeAlias = dict[str, Any]

CONTENT_MAX_CHARS = 50_000
"""Longest content of one message; a note says what is missing."""
PROMPT_MAX_CHARS = 200_000
"""Longest prompt of one turn; the oldest messages are left out of a longer one."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_OTHER_ROLES = {"ipython": "tool", "environment": "tool", "model": "assistant", "ai": "assistant"}
_TEMPLATE_ROLE = re.compile(
    r"<\|im_start\|>(?P<chatml>\w{1,20})\n?|<\|start_header_id\|>(?P<llama>\w{1,20})<\|end_header_id\|>\s*"
    r"|<(?P<tag>system|user|assistant|tool)>"
)
"""The marks by which chat templates begin a message."""
_TEMPLATE_END = re.compile(
    r"\s*(?:<\|im_end\|>|<\|eot_id\|>|<\|endoftext\|>|<\|end_of_text\|>|</s>)\s*\Z"
)
"""The mark by which chat templates end one."""
_THINK = re.compile(r"<think>(.*?)(?:</think>|\Z)\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Chat:
    """One turn as messages."""

    given: list[Message]
    """The whole prompt; empty where no text of it is known."""
    said: Message | None
    """The answer; None where no text of it is known."""
    tools: list[Any] = field(default_factory=list)
    """The tools that the model was offered."""
    model: str | None = None
    """Name of the model, as the call or the run's configuration gives it."""
    usage: tuple[int, int] | None = None
    """Tokens of the prompt and tokens generated, without those that a mask rules out."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """A trajectory in a form to read, beside what was recorded."""

    chats: Mapping[str, Chat]
    """Turns, by span id."""
    conversation: list[Message]
    """The messages of all turns in order, each once."""
    prompt: list[Message] | str | None
    """The first prompt, or why its text is not known; None without a turn."""
    answer: str | None
    """The last answer's text, or why it is not known; None without a turn."""


def transcript_of(trajectory: Trajectory, decode: Decode, model: str | None = None) -> Transcript:
    """Return the trajectory's turns as messages.

    Args:
        decode: turns a run's ids into text, as `Store.decode` does.
        model: name of the run's model.
    """
    turns = trajectory.turns
    made = CommonMessages(_cut)
    chats = {turn.span_id: _chat(turn, trajectory.run_id, decode, model, made) for turn in turns}
    if not turns:
        return Transcript(chats, [], None, None)
    new = Conversation(trajectory, decode).turns
    conversation: list[Message] = []
    for turn in turns:
        said = chats[turn.span_id].said
        given = messages_of(new[turn.span_id].new) if chats[turn.span_id].given else ()
        conversation += _cut(list(given))
        conversation += () if said is None else (said,)
    prompt = chats[turns[0].span_id].given or prompt_lacks(turns[0])
    last = chats[turns[-1].span_id].said
    answer = answer_lacks(turns[-1]) if last is None else last["content"] or _asked(last)
    return Transcript(chats, _fitting(conversation, made.length), prompt, answer)


def template_parts(text: str) -> Iterator[tuple[str | None, str]]:
    """Yield role and text of the messages of a prompt; None is the role of text before the first.

    The mark for the answer, which has no text, is left out.
    """
    marks = list(_TEMPLATE_ROLE.finditer(text))
    starts = [mark.start() for mark in marks]
    if not marks or starts[0] > 0:
        yield None, text[: starts[0]] if marks else text
    for at, mark in enumerate(marks):
        end = starts[at + 1] if at + 1 < len(marks) else len(text)
        rest = text[mark.end() : end]
        if rest.strip() or at + 1 < len(marks):
            yield mark["chatml"] or mark["llama"] or mark["tag"], rest


def question(prompt: str) -> str:
    """Return what the user asked last in a prompt of a chat template; any other prompt whole."""
    asked = [text for role, text in template_parts(prompt) if role == "user"]
    return _TEMPLATE_END.sub("", asked[-1]) if asked else prompt


def split_thought(text: str) -> tuple[str | None, str]:
    """Return what was thought before an answer, and the answer."""
    thought = _THINK.match(text)
    return (thought[1], text[thought.end() :]) if thought else (None, text)


def content_text(content: Any) -> str:
    """Return the text of a message, whose content may be a list of parts."""
    if content is None:
        return ""
    if isinstance(content, list):
        parts = [
            one["text"]
            if isinstance(one, Mapping) and isinstance(one.get("text"), str)
            else as_text(one)
            for one in content
        ]
        return "\n".join(parts)
    return as_text(content)


def prompt_lacks(span: Span) -> str:
    """Return why a turn has no text of its prompt."""
    if span.prompt_ids is not None:
        return f"{len(span.prompt_ids):,} token ids, and no tokenizer in the store to read them"
    return "the prompt cannot be rebuilt: a call that it builds on is missing"


def answer_lacks(span: Span) -> str:
    """Return why a turn has no text of its answer."""
    if span.output_ids:
        return f"{len(span.output_ids):,} token ids, and no tokenizer in the store to read them"
    return span.error or "no text was recorded"


def _asked(message: Message) -> str:
    """Return the calls of tools in a message as text; empty if there are none."""
    calls = (call["function"] for call in message.get("tool_calls", ()))
    return "\n".join(f"{call['name']}({call['arguments']})" for call in calls)


def model_of(span: Span) -> str | None:
    """Return the name of the model among a call's results or arguments; None: there is none."""
    return named_text(span.outputs, ("model",)) or named_text(span.inputs, ("model",))


def usage_of(span: Span) -> tuple[int, int] | None:
    """Return the tokens that a turn read and generated, counted or as the engine says."""
    outputs = span.outputs if isinstance(span.outputs, Mapping) else {}
    if span.prompt_ids is not None and span.generated_count is not None:
        return len(span.prompt_ids), span.generated_count
    said = outputs.get("usage")
    said = said if isinstance(said, Mapping) else {}
    read, made = (
        next((said[name] for name in names if type(said.get(name)) is int), None)
        for names in (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))
    )
    return None if read is None or made is None else (read, made)


def _chat(span: Span, run_id: str, decode: Decode, model: str | None, made: CommonMessages) -> Chat:
    if span.messages is not None:
        given = made.of(span.messages)
    else:
        text = None if span.prompt_ids is None else decode(run_id, span.prompt_ids)
        text = named_text(span.inputs, PROMPT_TEXT_NAMES) if text is None else text
        text = named_text(span.outputs, ("prompt_text",)) if text is None else text
        prompt = [] if text is None else [{"role": "prompt", "content": text}]
        given = _cut(list(messages_of(prompt)))
    inputs = span.inputs if isinstance(span.inputs, Mapping) else {}
    tools = inputs.get("tools")
    return Chat(
        _fitting(given, made.length),
        _cut(said_of(span, run_id, decode)),
        tools if isinstance(tools, list) else [],
        model_of(span) or model,
        usage_of(span),
    )


def said_of(span: Span, run_id: str, decode: Decode) -> Message | None:
    """Return the answer of a turn, whole; None where no text of it is known."""
    if span.output_message is not None:
        return _message({"role": "assistant", **span.output_message})
    text = span.output_text
    text = named_text(span.outputs, OUTPUT_TEXT_NAMES) if text is None else text
    if text is None and span.output_ids is not None:
        text = decode(run_id, span.output_ids)
    return None if text is None else _of_text("assistant", text)


def messages_of(recorded: Iterable[Any]) -> Iterator[Message]:
    """Yield recorded messages in their common form, whole; a prompt's text in its parts."""
    for message in recorded:
        if not isinstance(message, Mapping):
            yield _of_text("user", as_text(message))
        elif message.get("role") == "prompt" and isinstance(message.get("content"), str):
            for role, text in template_parts(message["content"]):
                one = _of_text(role or "user", text)
                # Between two turns stands the mark that ends the first one's answer.
                if role is not None or one["content"].strip():
                    yield one
        else:
            yield _message(message)


class CommonMessages:
    """Recorded messages in their common form. One that many prompts repeat is made only once.

    Args:
        finish: function that is applied to each message that is made.
    """

    def __init__(self, finish: Callable[[Message], Message] = lambda message: message) -> None:
        self._finish = finish
        self._made: dict[int, tuple[Any, list[Message]]] = {}
        """The recorded message, which keeps its `id` from being given to another, and its form."""
        self._lengths: dict[int, tuple[Message, int]] = {}

    def of(self, recorded: Iterable[Any]) -> list[Message]:
        """Return recorded messages as `messages_of` yields them."""
        found: list[Message] = []
        for one in recorded:
            made = self._made.get(id(one))
            if made is None:
                made = (one, [self._finish(message) for message in messages_of([one])])
                self._made[id(one)] = made
            found += made[1]
        return found

    def length(self, message: Message) -> int:
        """Return the characters of a message."""
        known = self._lengths.get(id(message))
        if known is None:
            known = self._lengths[id(message)] = (message, sum(map(_length, message.values())))
        return known[1]


def _message(message: Mapping[Any, Any]) -> Message:
    role, content = _role(message.get("role")), content_text(message.get("content"))
    said: Message = {"role": role, "content": sendable(content)}
    thoughts = (message.get(name) for name in REASONING_NAMES)
    if thought := next((one for one in thoughts if one), None):
        said["reasoning_content"] = sendable(thought)
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        said["tool_calls"] = [_tool_call(call, place) for place, call in enumerate(calls)]
    for name in ("tool_call_id", "name"):
        if message.get(name) is not None:
            said[name] = sendable(message[name])
    return said


def _of_text(role: str, text: str) -> Message:
    role, text = _role(role), _TEMPLATE_END.sub("", text)
    thought, text = split_thought(text) if role == "assistant" else (None, text)
    said = {"role": role, "content": sendable(text)}
    return said | ({} if thought is None else {"reasoning_content": sendable(thought)})


def _role(role: Any) -> str:
    name = str(role).lower()
    return name if name in _ROLES else _OTHER_ROLES.get(name, "user")


def _tool_call(call: Any, place: int) -> dict[str, Any]:
    parts = call if isinstance(call, Mapping) else {}
    function = parts.get("function")
    if not isinstance(function, Mapping):
        function = parts if "name" in parts else {"name": "tool", "arguments": call}
    call_id = parts.get("id")
    return {
        "id": f"call_{place}" if call_id is None else sendable(call_id),
        "type": "function",
        "function": {
            "name": sendable(function.get("name")),
            "arguments": sendable(function.get("arguments")),
        },
    }


def sendable(value: Any) -> str:
    """Return a value as text that UTF-8 can hold: lone surrogates become escapes."""
    return as_text(value).encode("utf-8", "backslashreplace").decode()


def _cut(part: Any) -> Any:
    """Return a message, or a part or list of messages, with every long text cut."""
    if isinstance(part, dict):
        return {name: _cut(value) for name, value in part.items()}
    if isinstance(part, list):
        return [_cut(one) for one in part]
    left_out = 0 if part is None else len(part) - CONTENT_MAX_CHARS
    if left_out <= 0:
        return part
    return f"{part[:CONTENT_MAX_CHARS]}… [{left_out} of {len(part)} characters left out]"


def _fitting(messages: list[Message], length: Callable[[Message], int]) -> list[Message]:
    """Leave out messages after the first one, until the others are short enough together."""
    sizes = [*map(length, messages)]
    excess, left_out = sum(sizes) - PROMPT_MAX_CHARS, 0
    while excess > 0 and left_out < len(messages) - 2:
        left_out += 1
        excess -= sizes[left_out]
    if not left_out:
        return messages
    note = f"[{left_out} of {len(messages)} messages left out]"
    return [messages[0], {"role": "system", "content": note}, *messages[1 + left_out :]]


def _length(value: Any) -> int:
    return len(value if isinstance(value, str) else as_text(value))
