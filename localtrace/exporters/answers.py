"""The answers of a trajectory, and the tokens of them, that a model may be trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, groupby, pairwise
from typing import TypeAlias

from localtrace.exporters.shape import arguments_of
from localtrace.field_names import PROMPT_TEXT_NAMES
from localtrace.read.conversation import named_text
from localtrace.read.messages import Message, messages_of, split_thought
from localtrace.store.whole_prompts import shared_prefix
from localtrace.types import Span, Trajectory

UNKNOWN_MASK = "answers whose mask is not known: that of the trajectory fits no layout of tokens"
AGAIN = "answers that were discarded: their prompt was generated again"
Said: TypeAlias = Callable[[Span], Message | None]
"""A function that returns the answer of a turn; None where no text of it is known."""


def discarded(turns: list[Span], said: Said) -> set[str]:
    """Return the span ids of answers that no later prompt holds, though another answer came after.

    Turns are attempts at one answer if they have the same prompt and one ran after the other, which
    imported turns without times of their own do not tell. Of these, the answers that a later prompt
    holds count, else the last one.

    Args:
        turns: turns that ended well, in their order.
    """
    found: set[str] = set()
    for place, turn in enumerate(turns):
        if turn.batch_index is not None or is_continued(turn, turns[place + 1 :], said):
            continue
        others = (
            (other, number > place) for number, other in enumerate(turns)
            if other is not turn and other.batch_index is None and _asks_the_same(turn, other)
        )  # fmt: skip
        if any(
            (is_later or is_continued(other, turns, said)) and _ran_apart(turn, other)
            for other, is_later in others
        ):
            found.add(turn.span_id)
    return found


def masks_of(trajectory: Trajectory, turns: list[Span]) -> dict[str, list[bool] | None]:
    """Return which output ids of turns a model may be trained on, by span id.

    None: there is a mask of the whole trajectory, but which of its values are the turn's is not
    known. A turn without ids, or that no mask is about, is not among them.

    Args:
        turns: those that are not discarded. The trainer's mask does not count the others.
    """
    late = next((one.values for one in trajectory.outcomes if one.name == "response_mask"), None)
    turns = [turn for turn in turns if turn.output_ids]
    if late is None or all(turn.response_mask for turn in turns):
        return {turn.span_id: turn.response_mask for turn in turns if turn.response_mask}
    found: dict[str, list[bool] | None] = {}
    for turn, start in zip(turns, _places(len(late), turns), strict=True):
        own = [] if start is None else late[start : start + len(turn.output_ids or ())]
        is_known = bool(own) and None not in own
        found[turn.span_id] = turn.response_mask or (
            [one != 0 for one in own] if is_known else None
        )
    return found


def _places(count: int, turns: list[Span]) -> list[int | None]:
    """Return where the values of each turn begin in a list of so many for all of them."""
    starts = [len(turn.prompt_ids or ()) - len(turns[0].prompt_ids or ()) for turn in turns]
    lengths = [len(turn.output_ids or ()) for turn in turns]
    if count == starts[-1] + lengths[-1] and all(
        _continues_ids(later, turn) for turn, later in pairwise(turns)
    ):
        return [*starts]
    if count == sum(lengths):
        return [*accumulate(lengths[:-1], initial=0)]
    return [None] * len(turns)


def is_continued(turn: Span, others: list[Span], said: Said) -> bool:
    """Return whether the prompt of another turn holds a turn's prompt and its answer."""
    return any(other is not turn and continues(other, turn, said) for other in others)


def continues(later: Span, turn: Span, said: Said) -> bool:
    """Return whether a turn's prompt begins with the prompt and the answer of another turn."""
    if later.messages is not None and turn.messages is not None:
        count = len(turn.messages)
        if len(later.messages) <= count or shared_prefix(turn.messages, later.messages) < count:
            return False
        answer = said(turn)
        return answer is not None and _repeats(later.messages[count], answer)
    if later.prompt_ids is not None and turn.prompt_ids is not None:
        return _continues_ids(later, turn)
    asked, again = (named_text(one.inputs, PROMPT_TEXT_NAMES) for one in (turn, later))
    answer = said(turn)
    if asked is None or again is None or answer is None or not answer["content"]:
        return False
    return again.startswith(asked) and again[len(asked) :].lstrip().startswith(
        answer["content"].strip()
    )


def _continues_ids(later: Span, turn: Span) -> bool:
    if later.prompt_ids is None or turn.prompt_ids is None or not turn.output_ids:
        return False
    start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.output_ids)
    is_next = later.prompt_ids[start:end] == turn.output_ids  # first, because it is short
    return is_next and later.prompt_ids[:start] == turn.prompt_ids


def generated_runs(mask: list[bool]) -> Iterator[tuple[int, int]]:
    """Yield the places at which runs of generated tokens begin and end."""
    end = 0
    for is_generated, run in groupby(mask):
        start, end = end, end + len(list(run))
        if is_generated:
            yield start, end


def _ran_apart(turn: Span, other: Span) -> bool:
    is_before = turn.end_ns <= other.start_ns
    return turn.start_ns != other.start_ns and (is_before or other.end_ns <= turn.start_ns)


def _asks_the_same(turn: Span, other: Span) -> bool:
    if turn.messages is not None or other.messages is not None:
        return turn.messages == other.messages
    if turn.prompt_ids is not None or other.prompt_ids is not None:
        return turn.prompt_ids == other.prompt_ids
    asked = named_text(turn.inputs, PROMPT_TEXT_NAMES)
    return asked is not None and asked == named_text(other.inputs, PROMPT_TEXT_NAMES)


def _repeats(recorded: object, answer: Message) -> bool:
    """Return whether a message is an answer, perhaps without reasoning and outer white space."""
    message, answer = messages_of([recorded, answer])
    if message["role"] != "assistant":
        return False
    asked, answered = (
        [(call["function"]["name"], arguments_of(call["function"])) for call in one]
        for one in (message.get("tool_calls", ()), answer.get("tool_calls", ()))
    )
    if asked and answered and asked != answered:
        return False
    text, whole = (split_thought(one["content"])[1].strip() for one in (message, answer))
    if not text:
        return bool(asked) or not whole
    return whole.endswith(text) and not whole[: -len(text)][-1:].isalnum()
