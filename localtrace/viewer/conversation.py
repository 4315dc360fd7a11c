"""A trajectory as blocks to read: messages, reasoning, answers, calls and their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from localtrace.read.conversation import Conversation, as_text
from localtrace.read.messages import (
    answer_lacks,
    content_text,
    prompt_lacks,
    split_thought,
    template_parts,
)
from localtrace.types import Span, Trajectory

Block = dict[str, Any]
"""One part of a conversation: role, text, and what belongs to it."""

TEXT_MAX = 20_000
"""The characters of a block's text that a page holds; more is read in the page of the call."""
SEARCHED = ("name", "arguments", "text")
"""The fields of a block in which a text is found."""
_PROSE = frozenset({"system", "user", "assistant", "reasoning", "prompt"})
"""Roles whose texts are shown with their Markdown; others are shown as they are."""


def blocks_of(trajectory: Trajectory, conversation: Conversation) -> Iterator[Block]:
    """Yield the blocks of a trajectory in the order in which they came about."""
    results: set[str] = set()
    turns = conversation.turns
    callers = {span.parent_id for span in trajectory.turns}
    number = 0
    for span in trajectory.every_span:
        turn = turns.get(span.span_id)
        if turn is None:
            # A call that only holds turns is not shown beside them.
            if span.kind != "agent" and span.span_id not in callers:
                block = _call(span)
                results.add((block["text"] or "").strip())
                yield block
            continue
        for message in turn.new:
            # A tool's result that was just shown, and is now given to the model, is not repeated.
            given = list(_given(message, span, number))
            yield from (
                one for one in given if one["role"] != "tool" or one["text"].strip() not in results
            )
        results.clear()
        yield from _said(span, turn.text, number)
        number += 1


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


def _given(message: Any, span: Span, turn: int) -> Iterator[Block]:
    if not isinstance(message, Mapping):
        yield _block("message", as_text(message), span, turn)
        return
    role, content = str(message.get("role", "message")), message.get("content")
    if role == "prompt":
        yield from _template(content, span, turn)
        return
    text = content_text(content)
    calls = message.get("tool_calls")
    if text or not calls:
        name = message.get("name") or message.get("tool_call_id")
        yield _block(role, text, span, turn, name=None if name is None else str(name))
    yield from (_asked_call(call, span, turn) for call in _listed(calls))


def _template(text: str | None, span: Span, turn: int) -> Iterator[Block]:
    """Yield a prompt that is one text, cut where its chat template begins a message."""
    if text is None:
        yield _block("prompt", None, span, turn, why=prompt_lacks(span))
        return
    for role, part in template_parts(text):
        if role or part.strip() or part == text:  # a line may end before the first message
            yield _block(role or "prompt", part, span, turn)


def _said(span: Span, text: str | None, turn: int) -> Iterator[Block]:
    message = span.output_message or {}
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning:
        yield _block("reasoning", as_text(reasoning), span, turn)
    calls = list(_listed(message.get("tool_calls")))
    plain = span.output_text if span.output_message else text
    if plain is not None:
        thought, answer = split_thought(plain)
        if thought is not None and not reasoning:
            yield _block("reasoning", thought, span, turn)
            plain = answer
    if plain or not (calls or reasoning):
        yield _answer(span, plain, turn)
    yield from (_asked_call(call, span, turn) for call in calls)


def _answer(span: Span, text: str | None, turn: int) -> Block:
    why = answer_lacks(span) if text is None else None
    return _block("assistant", text, span, turn, why=why, is_answer=True,
                  finish_reason=span.finish_reason,
                  tokens=None if span.output_ids is None else len(span.output_ids))  # fmt: skip


def _asked_call(call: Any, span: Span, turn: int) -> Block:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return _block("tool call", as_text(call), span, turn)
    arguments = function.get("arguments")
    return _block("tool call", as_text(arguments), span, turn, name=str(function.get("name")))


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
        "tokens": None, "kind_derived": False,
    }  # fmt: skip
    return empty | {
        "role": role, "text": text, "turn": turn,
        "span_id": span.span_id, "duration_ns": span.duration_ns,
    } | more  # fmt: skip


def _listed(calls: Any) -> Iterator[Any]:
    yield from calls if isinstance(calls, list) else ()
