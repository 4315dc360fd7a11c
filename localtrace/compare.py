"""Trajectories side by side: aligned turn by turn, and where they first differ.

Turn i of one stands beside turn i of the other. Of each turn three parts are compared: what it was
given, the calls before it, and what it generated. The work is bounded: of long parts that differ
only the beginning after the first difference is compared, and the result says what was left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, TypeVar

from localtrace.conversation import Conversation, as_text
from localtrace.tokens import shared_prefix
from localtrace.types import Span, Trajectory

UNITS_MAX = 2_000
"""Words or ids of each side that are compared between the same beginning and the same end."""

PARTS = ("given", "calls", "output", "finish reason")
"""The parts of a turn, in the order in which they came about."""

_EXACT_MAX = 300
"""Units up to which frequent ones count like all others."""

Unit = TypeVar("Unit", str, int)
_WORDS = re.compile(
    r"\s+|[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]"  # scripts without spaces: each sign alone
    r"|[^\W\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+|[^\w\s]"
)


@dataclass(frozen=True, slots=True)
class Part:
    """What a turn was given, called or generated."""

    name: str
    """One of PARTS."""
    text: str
    ids: list[int] | None = None
    logprobs: list[float] | None = None


Turn = dict[str, Part]
"""The parts of a turn by name."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two trajectories first differ."""

    turn: int
    part: str
    """The part's name, or turn where one of them has no such turn."""
    word: int | None = None
    """Words before it in the part."""
    token: int | None = None
    """Generated ids before it, where both have ids."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Words or ids that both have, or that stand in each other's place."""

    left: Sequence[Any]
    right: Sequence[Any]
    compared: bool = True
    """False for what was left out because there is too much of it."""

    @property
    def is_same(self) -> bool:
        """Whether both sides are equal."""
        return self.compared and self.left == self.right


def turn_parts(trajectory: Trajectory, conversation: Conversation) -> list[Turn]:
    """The parts of each turn; calls after the last turn stand in one more turn, alone."""
    around = _around_turns(trajectory.spans)
    turns: list[Turn] = []
    calls: list[str] = []
    for span in trajectory.spans:
        turn = conversation.turns.get(span.span_id)
        if turn is not None:
            parts = (
                Part("given", "\n".join(turn.given)),
                Part("calls", "\n".join(calls)),
                Part("output", turn.said, span.output_ids, span.output_logprobs),
                Part("finish reason", span.finish_reason or ""),
            )
            turns.append({part.name: part for part in parts})
            calls = []
        elif span.span_id not in around:
            calls.append(_call(span))
    return [*turns, {"calls": Part("calls", "\n".join(calls))}] if calls else turns


def pairs(left: Turn, right: Turn) -> Iterator[tuple[Part, Part]]:
    """The parts of two turns beside each other; what one lacks is empty."""
    for name in PARTS:
        if name in left or name in right:
            yield left.get(name, Part(name, "")), right.get(name, Part(name, ""))


def first_difference(left: list[Turn], right: list[Turn]) -> Difference | None:
    """Where two trajectories first differ; None where all their parts are equal."""
    for number, (ours, theirs) in enumerate(zip(left, right, strict=False)):
        for one, other in pairs(ours, theirs):
            if one.text != other.text or one.ids != other.ids:
                return _where(number, one, other)
    if len(left) != len(right):
        return Difference(min(len(left), len(right)), "turn")
    return None


def _where(turn: int, one: Part, other: Part) -> Difference:
    token = None
    if one.ids is not None and other.ids is not None:
        token = shared_prefix(one.ids, other.ids)
    word = None
    if one.text != other.text:
        ours, theirs = words(one.text), words(other.text)
        known = ours[: shared_prefix(ours, theirs)]
        word = sum(not unit.isspace() for unit in known)
    return Difference(turn, one.name, word, token)


def words(text: str) -> list[str]:
    """Words, single punctuation marks and white space; together they are the text."""
    return _WORDS.findall(text)


def align(left: list[Unit], right: list[Unit], units_max: int = UNITS_MAX) -> list[Stretch]:
    """Both lists as stretches that are the same or differ, in order."""
    start = shared_prefix(left, right)
    end = shared_prefix(left[start:][::-1], right[start:][::-1])
    ours, theirs = left[start : len(left) - end], right[start : len(right) - end]
    stretches = [Stretch(left[:start], right[:start])]
    ours_first, theirs_first = ours[:units_max], theirs[:units_max]
    # Passing over what is frequent keeps the work bounded where texts go round in loops.
    many = max(len(ours_first), len(theirs_first)) > _EXACT_MAX
    matcher = SequenceMatcher(None, ours_first, theirs_first, autojunk=many)
    for _, low, high, other_low, other_high in matcher.get_opcodes():
        stretches.append(Stretch(ours[low:high], theirs[other_low:other_high]))
    stretches.append(Stretch(ours[units_max:], theirs[units_max:], compared=False))
    stretches.append(Stretch(left[len(left) - end :], right[len(right) - end :]))
    return [stretch for stretch in stretches if stretch.left or stretch.right]


def _around_turns(spans: list[Span]) -> set[str]:
    """Calls that a turn was made in, or that were made for one: they are no calls of their own."""
    parents = {span.span_id: span.parent_id for span in spans}
    turns = {span.span_id for span in spans if span.is_turn}
    around = set()
    for span in spans:
        above = _above(span.span_id, parents)
        if span.is_turn:
            around |= above
        elif above & turns:
            around.add(span.span_id)
    return around


def _above(span_id: str, parents: dict[str, str | None]) -> set[str]:
    found: set[str] = set()
    above = parents.get(span_id)
    while above is not None and above not in found:
        found.add(above)
        above = parents.get(above)
    return found


def _call(span: Span) -> str:
    result = span.error if span.error is not None else as_text(span.outputs)
    return f"{span.op}({as_text(span.inputs)}) -> {result}"
