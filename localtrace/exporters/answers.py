"""The answers of a trajectory, and the tokens of them, that a model may be trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from localtrace.field_names import PROMPT_TEXT_NAMES
from localtrace.read.turns import Turn, messages_of, repeats_answer, text_field
from localtrace.store.whole_prompts import shared_prefix
from localtrace.types import Trajectory

UNKNOWN_MASK = "answers whose mask is not known: that of the trajectory fits no layout of tokens"
AGAIN = "answers that were discarded: their prompt was generated again"


def discarded_turns(turns: Sequence[Turn]) -> set[str]:
    """Return the span ids of answers that no later prompt holds, though another answer came after.

    Turns are attempts at one answer if they have the same prompt and one ran after the other, which
    imported turns without times of their own do not tell. Of these, the answers that a later prompt
    holds count, otherwise the last one.
    """
    turns = [turn for turn in turns if turn.span.status == "ok"]
    single = [turn for turn in turns if turn.span.batch_index is None]
    discarded = set()
    for turn in single:
        if is_continued(turn, [other for other in turns if other.number > turn.number]):
            continue
        for other in single:
            is_attempt = other is not turn and _has_same_prompt(turn, other)
            is_newer = other.number > turn.number or is_continued(other, turns)
            if is_attempt and is_newer and _ran_apart(turn, other):
                discarded.add(turn.span.span_id)
                break
    return discarded


def has_unknown_mask(turn: Turn, trajectory: Trajectory) -> bool:
    """Return whether a mask came for the whole trajectory, but a turn's part of it is not known."""
    is_masked = any(outcome.name == "response_mask" for outcome in trajectory.outcomes)
    return is_masked and bool(turn.span.output_ids) and turn.span.response_mask is None


def is_continued(turn: Turn, others: Sequence[Turn]) -> bool:
    """Return whether the prompt of another turn holds a turn's prompt and its answer."""
    return any(other is not turn and continues(other, turn) for other in others)


def continues(later: Turn, turn: Turn) -> bool:
    """Return whether a turn's prompt begins with the prompt and the answer of another turn."""
    before, after = turn.span, later.span
    if before.messages is not None and after.messages is not None:
        count = len(before.messages)
        if len(after.messages) <= count or shared_prefix(before.messages, after.messages) < count:
            return False
        (again,) = messages_of([after.messages[count]])
        return turn.answer is not None and repeats_answer(again, turn.answer)
    if before.prompt_ids is not None and after.prompt_ids is not None:
        start, output = len(before.prompt_ids), before.output_ids or []
        is_next = after.prompt_ids[start : start + len(output)] == output  # first: it is short
        return bool(output) and is_next and after.prompt_ids[:start] == before.prompt_ids
    prompt, longer = (text_field(span.inputs, PROMPT_TEXT_NAMES) for span in (before, after))
    if prompt is None or longer is None or turn.answer is None or not turn.answer.text:
        return False
    return longer.startswith(prompt) and longer[len(prompt) :].lstrip().startswith(
        turn.answer.text.strip()
    )


def generated_runs(mask: list[bool]) -> Iterator[tuple[int, int]]:
    """Yield the places at which runs of generated tokens begin and end."""
    end = 0
    for is_generated, run in groupby(mask):
        start, end = end, end + len(list(run))
        if is_generated:
            yield start, end


def _ran_apart(turn: Turn, other: Turn) -> bool:
    first, second = sorted((turn.span, other.span), key=lambda span: span.start_ns)
    return first.start_ns != second.start_ns and first.end_ns <= second.start_ns


def _has_same_prompt(turn: Turn, other: Turn) -> bool:
    left, right = turn.span, other.span
    if left.messages is not None or right.messages is not None:
        return left.messages == right.messages
    if left.prompt_ids is not None or right.prompt_ids is not None:
        return left.prompt_ids == right.prompt_ids
    prompt = text_field(left.inputs, PROMPT_TEXT_NAMES)
    return prompt is not None and prompt == text_field(right.inputs, PROMPT_TEXT_NAMES)
