"""Rows for supervised fine-tuning, one JSON object per line.

    {"messages": [{"role", "content", …}, …, {"role": "assistant", "content": …}]}
    {"prompt": …, "completion": …}

A conversation is one row: its last turn, which repeats the ones before; a branch that no later turn
continues, such as a sub-agent's, is a row of its own. Where a turn has no messages, every turn is a
row of prompt and completion, special tokens included, so that nothing but generated text is in a
completion. Turns whose text nobody knows are counted and left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from localtrace.codec import to_json
from localtrace.exporters.shape import Decode, generations, given_text, prompt_text
from localtrace.tokens import shared_prefix
from localtrace.types import Span, Trajectory

NO_TEXT = "turns without text: the store keeps no tokenizer for their run"
NO_TURN = "trajectories without a turn"
FAILED = "turns that failed"


def rows(trajectory: Trajectory, decode: Decode, plain: Decode, left_out: Counter[str]) -> bytes:
    """The lines of a trajectory.

    Args:
        decode: ids as text, special tokens included; plain: without them.
        left_out: counts what gives no row, by reason.
    """
    turns = generations(trajectory.spans)
    left_out[NO_TURN] += not turns
    done = [turn for turn in turns if turn.status == "ok"]
    left_out[FAILED] += len(turns) - len(done)
    lines = []
    for turn in _last_of_conversations(done):
        row = _row(turn, trajectory.run_id, decode, plain)
        if row is None:
            left_out[NO_TEXT] += 1
        else:
            lines.append(to_json(row).encode() + b"\n")
    return b"".join(lines)


def _row(turn: Span, run_id: str, decode: Decode, plain: Decode) -> dict[str, Any] | None:
    given = given_text(turn)
    if turn.messages is not None:
        # A chat template puts the special tokens in again.
        answer = given if given is not None else _decoded(turn, run_id, plain)
        answer = turn.output_text if answer is None else answer
        message = {"role": "assistant", "content": answer}
        return None if answer is None else {"messages": [*turn.messages, message]}
    prompt = prompt_text(turn, run_id, decode)
    completion = turn.output_text
    completion = _decoded(turn, run_id, decode) if completion is None else completion
    completion = given if completion is None else completion
    if prompt is None or completion is None:
        return None
    return {"prompt": prompt, "completion": completion}


def _decoded(turn: Span, run_id: str, decode: Decode) -> str | None:
    return None if turn.output_ids is None else decode(run_id, turn.output_ids)


def _last_of_conversations(turns: list[Span]) -> Iterator[Span]:
    for place, turn in enumerate(turns):
        messages = turn.messages
        if messages is None or not any(
            later.messages is not None
            and len(later.messages) > len(messages)
            and shared_prefix(messages, later.messages) == len(messages)
            for later in turns[place + 1 :]
        ):
            yield turn
