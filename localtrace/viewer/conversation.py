"""A trajectory as blocks to read: messages, reasoning, answers, calls and their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from localtrace.read.turns import Turn, as_text, seen, seen_text, turns_of
from localtrace.types import Message, Span, Trajectory

Block = dict[str, Any]
"""One part of a conversation: role, text, and what belongs to it."""

TEXT_MAX = 20_000
"""The characters of a block's text that a page holds; more is read in the page of the call."""
PICTURE_MAX = 4 * 2**20
"""The characters of the largest picture that a page draws, as a data URL."""
SEARCHED = ("name", "arguments", "text")
"""The fields of a block in which a text is found."""
_PROSE = frozenset({"system", "user", "assistant", "reasoning", "prompt"})
"""Roles whose texts are shown with their Markdown; others are shown as they are."""


def blocks_of(trajectory: Trajectory) -> Iterator[Block]:
    """Yield the blocks of a trajectory in the order in which they came about."""
    results: set[str] = set()
    turns = {turn.span.span_id: turn for turn in turns_of(trajectory)}
    callers = {turn.span.parent_id for turn in turns.values()}
    for span in trajectory.every_span:
        turn = turns.get(span.span_id)
        if turn is not None:
            # A tool's result that was just shown, and is now given to the model, is not repeated.
            for block in _prompt(turn):
                if block["role"] != "tool" or block["text"].strip() not in results:
                    yield block
            results.clear()
            yield from _answer(turn)
        elif span.kind != "agent" and span.span_id not in callers:
            # A call that only holds turns is not shown beside them.
            block = _call(span)
            results.add((block["text"] or "").strip())
            yield block


def cut_block(block: Block, starts: Mapping[str, int] | None = None) -> Block:
    """Return a block as a page holds it: of long texts a part, and `left_out`, what is beside it.

    Args:
        block: the whole block.
        starts: where the part begins, by field; at the beginning of others.
    """
    left_out = {}
    made = dict(block)
    for field in SEARCHED:
        text, start = block[field], (starts or {}).get(field, 0)
        if text is not None and (start or len(text) > TEXT_MAX):
            made[field] = text[start : start + TEXT_MAX]
            left_out[field] = {"before": start, "after": max(0, len(text) - start - TEXT_MAX)}
    return made | {"left_out": left_out, "hits": {}, "is_here": False}


def _prompt(turn: Turn) -> Iterator[Block]:
    """Yield what is new in a turn's prompt."""
    if turn.new is None:
        yield _block("prompt", None, turn.span, turn.number, why=turn.prompt_missing)
        return
    for message in turn.new:
        if message.reasoning:
            yield _block("reasoning", message.reasoning, turn.span, turn.number)
        if message.text or not message.tool_calls:
            name = message.name or message.tool_call_id
            pictures = [
                url for url, is_picture in seen(message) if is_picture and len(url) <= PICTURE_MAX
            ]
            yield _block(
                message.role, seen_text(message), turn.span, turn.number,
                name=name, pictures=pictures,
            )  # fmt: skip
        yield from _tool_calls(message, turn)


def _answer(turn: Turn) -> Iterator[Block]:
    span, answer = turn.span, turn.answer
    if answer is not None and answer.reasoning:
        yield _block("reasoning", answer.reasoning, span, turn.number)
    if answer is None or answer.text or not (answer.tool_calls or answer.reasoning):
        yield _block(
            "assistant",
            None if answer is None else seen_text(answer),
            span,
            turn.number,
            why=turn.answer_missing if answer is None else None,
            is_answer=True,
            finish_reason=span.finish_reason,
            tokens=None if span.output_ids is None else len(span.output_ids),
        )
    if answer is not None:
        yield from _tool_calls(answer, turn)


def _tool_calls(message: Message, turn: Turn) -> Iterator[Block]:
    for call in message.tool_calls:
        text = as_text(call.arguments)
        yield _block("tool call", text, turn.span, turn.number, name=call.name)


def _call(span: Span) -> Block:
    result = span.error if span.error is not None else as_text(span.outputs)
    role = span.kind if span.kind in ("tool", "reward") else "call"
    block = _block(role, result, span, None, name=span.op)
    return block | {
        "arguments": as_text(span.inputs),
        "is_error": span.error is not None,
        "kind_derived": span.kind_derived,
    }


def _block(role: str, text: str | None, span: Span, turn: int | None, **more: Any) -> Block:
    empty: Block = {
        "name": None, "why": None, "is_answer": False, "is_error": False,
        "arguments": None, "is_prose": role in _PROSE, "finish_reason": None,
        "tokens": None, "kind_derived": False, "pictures": [],
    }  # fmt: skip
    return empty | {
        "role": role, "text": text, "turn": turn,
        "span_id": span.span_id, "duration_ns": span.duration_ns,
    } | more  # fmt: skip
