"""A trajectory in a form to read at trackers: chat messages of limited size.

Messages have the form of OpenAI's, which every tracker shows; see `read.turns.chat_form`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import isfinite
from typing import Any, TypeAlias

from localtrace.read.turns import Turn, Usage, as_text, chat_form, turns_of
from localtrace.types import Message as RecordedMessage
from localtrace.types import Trajectory

Message: TypeAlias = dict[str, Any]

CONTENT_MAX_CHARS = 50_000
"""Longest text of one message; a note says what is missing."""
PROMPT_MAX_CHARS = 200_000
"""Longest prompt of one turn; the oldest messages are left out of a longer one."""
CONTINUES: Message = {"role": "system", "content": "[continues the messages of earlier turns]"}
"""Stands in a turn for the messages that earlier turns show."""


@dataclass(frozen=True)
class Chat:
    """One turn as messages."""

    new: list[Message]
    """The prompt, with a note in place of messages of earlier turns where it adds some to them."""
    answer: Message | None
    """None where no text of it is known."""
    tools: list[Any]
    """The tools that the model was offered."""
    model: str | None
    """Name of the model, as the call or the run's configuration gives it."""
    usage: Usage
    _whole: Callable[[], list[Message]] = field(repr=False)

    @cached_property
    def prompt(self) -> list[Message]:
        """The whole prompt; empty where no text of it is known."""
        return self._whole()

    @property
    def messages(self) -> list[Message]:
        """What the turn adds to those before it: new messages and the answer, as far as known."""
        return self.new if self.answer is None else [*self.new, self.answer]


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

    def answer_with(self, reward: float | None) -> dict[str, Any]:
        """Return the last answer with the reward, as text where that is not finite."""
        if reward is None:
            return {"answer": self.answer}
        return {"answer": self.answer, "reward": reward if isfinite(reward) else str(reward)}


def transcript_of(trajectory: Trajectory) -> Transcript:
    """Return the trajectory's turns as messages."""
    turns = turns_of(trajectory)
    if not turns:
        return Transcript({}, [], None, None)
    forms = _Forms()
    chats = {
        turn.span.span_id: Chat(
            forms.new(turn),
            None if turn.answer is None else forms.of(turn.answer),
            turn.tools,
            turn.model,
            turn.usage,
            partial(forms.prompt, turn),
        )
        for turn in turns
    }
    conversation = [
        forms.of(message)
        for turn in turns
        for message in (*(turn.new or ()), *(() if turn.answer is None else (turn.answer,)))
    ]
    first, last = turns[0], turns[-1]
    return Transcript(
        chats,
        forms.fitting(conversation),
        chats[first.span.span_id].prompt or first.prompt_missing,
        last.answer_missing if last.answer is None else last.answer.text or _calls(last.answer),
    )


class _Forms:
    """Messages in their form for trackers; one that many prompts repeat is made once."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[RecordedMessage, Message]] = {}
        """The message, which keeps its `id` from being given to another, and its form."""
        self._sizes: dict[int, int] = {}

    def of(self, message: RecordedMessage) -> Message:
        made = self._made.get(id(message))
        if made is None:
            form = _cut(chat_form(message))
            made = self._made[id(message)] = (message, form)
            self._sizes[id(form)] = sum(len(as_text(value)) for value in form.values())
        return made[1]

    def new(self, turn: Turn) -> list[Message]:
        if not (turn.continues and turn.new):
            return self.prompt(turn)
        return [CONTINUES, *self.fitting([self.of(message) for message in turn.new])]

    def prompt(self, turn: Turn) -> list[Message]:
        return self.fitting([self.of(message) for message in turn.prompt or ()])

    def fitting(self, messages: list[Message]) -> list[Message]:
        """Leave out messages after the first one, until the others are short enough together."""
        sizes = [self._sizes[id(message)] for message in messages]
        excess, left_out = sum(sizes) - PROMPT_MAX_CHARS, 0
        while excess > 0 and left_out < len(messages) - 2:
            left_out += 1
            excess -= sizes[left_out]
        if not left_out:
            return messages
        note = f"[{left_out} of {len(messages)} messages left out]"
        return [messages[0], {"role": "system", "content": note}, *messages[1 + left_out :]]


def _calls(answer: RecordedMessage) -> str:
    """Return the calls of tools in an answer without text."""
    return "\n".join(f"{call.name}({as_text(call.arguments)})" for call in answer.tool_calls)


def _cut(part: Any) -> Any:
    """Return a message, or a part of one, with every long text cut."""
    if isinstance(part, dict):
        return {name: _cut(value) for name, value in part.items()}
    if isinstance(part, list):
        return [_cut(element) for element in part]
    left_out = len(part) - CONTENT_MAX_CHARS
    if left_out <= 0:
        return part
    return f"{part[:CONTENT_MAX_CHARS]}… [{left_out} of {len(part)} characters left out]"
