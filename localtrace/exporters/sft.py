"""Rows for supervised fine-tuning, one JSON object per line.

    {"messages": [{"role", "content", …}, …, {"role": "assistant", "content": …}]}
    {"prompt": …, "completion": …}

A conversation is one row, written from its last turn, whose messages repeat all earlier ones. A
branch that no later turn continues, such as a sub-agent's, is a row of its own. Tool calls of the
last turn stand in its message. A turn without messages is a row of prompt and completion, special
tokens included, so that a completion holds generated text only. A turn with neither text nor tool
calls is left out and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from localtrace.exporters.shape import (
    count_no_turn,
    generations,
    given_text,
    given_tool_calls,
)
from localtrace.read.flat_rows import outcome_value, prompt_text
from localtrace.store.tokenizers import Decode
from localtrace.store.whole_prompts import shared_prefix
from localtrace.types import Span, Trajectory
from localtrace.values.codec import to_json

NO_TOKENIZER = "turns without text: the store keeps no tokenizer for their run"
NO_TEXT = "turns with neither text nor tool calls"
FAILED = "turns that failed"
REPEATED = "rows that were written already"


class Rows:
    """The rows of trajectories, one trajectory at a time.

    Args:
        decode: token ids to text, special tokens included.
        plain: token ids to text, without special tokens.
        is_deduped: leave out rows that equal an earlier one.
        has_meta: add trace id, reward, step and labels to each row.
    """

    def __init__(
        self, decode: Decode, plain: Decode, *, is_deduped: bool = False, has_meta: bool = False
    ) -> None:
        self.left_out: Counter[str] = Counter()
        """Counts of what gave no row, by reason."""
        self._decode = decode
        self._plain = plain
        self._has_meta = has_meta
        self._written: set[bytes] | None = set() if is_deduped else None

    def lines(self, trajectory: Trajectory) -> Iterator[bytes]:
        """Yield the JSON lines of a trajectory."""
        turns = generations(trajectory)
        if not turns:
            count_no_turn(trajectory, self.left_out)
        done = [turn for turn in turns if turn.status == "ok"]
        self.left_out[FAILED] += len(turns) - len(done)
        meta = {"trace_id": trajectory.trace_id, "reward": trajectory.reward,
                "step": trajectory.step, "labels": _labels(trajectory)}  # fmt: skip
        for turn in _last_of_conversations(done):
            row = self._row(turn, trajectory.run_id)
            if row is None:
                self.left_out[NO_TEXT if turn.output_ids is None else NO_TOKENIZER] += 1
            elif self._is_new(row):
                yield to_json(row | meta if self._has_meta else row).encode() + b"\n"

    def _is_new(self, row: dict[str, Any]) -> bool:
        if self._written is None:
            return True
        digest = sha256(to_json(row).encode()).digest()
        is_new = digest not in self._written
        self._written.add(digest)
        self.left_out[REPEATED] += not is_new
        return is_new

    def _row(self, turn: Span, run_id: str) -> dict[str, Any] | None:
        if turn.messages is not None:
            message = self._answer(turn, run_id)
            return None if message is None else {"messages": [*turn.messages, message]}
        prompt = prompt_text(turn, run_id, self._decode)
        completion = turn.output_text
        completion = _decoded(turn, run_id, self._decode) if completion is None else completion
        completion = given_text(turn) if completion is None else completion
        if prompt is None or completion is None:
            return None
        return {"prompt": prompt, "completion": completion}

    def _answer(self, turn: Span, run_id: str) -> dict[str, Any] | None:
        text, calls = given_text(turn), given_tool_calls(turn)
        if calls:
            # The decoded ids would repeat the calls as text. Content is never null: chat templates
            # would write it as "None".
            return {"role": "assistant", "content": text or "", "tool_calls": calls}
        # Without special tokens: a chat template adds them again.
        text = _decoded(turn, run_id, self._plain) if text is None else text
        text = turn.output_text if text is None else text
        return None if text is None else {"role": "assistant", "content": text}


def _labels(trajectory: Trajectory) -> list[dict[str, Any]]:
    return [
        {"name": one.name, "value": outcome_value(one), "who": one.source}
        for one in trajectory.labels
    ]


def _decoded(turn: Span, run_id: str, decode: Decode) -> str | None:
    return None if turn.output_ids is None else decode(run_id, turn.output_ids)


def _last_of_conversations(turns: list[Span]) -> Iterator[Span]:
    """Yield the turns whose messages no later turn continues, and those without messages."""
    for place, turn in enumerate(turns):
        messages = turn.messages
        if messages is None or not any(
            later.messages is not None
            and len(later.messages) > len(messages)
            and shared_prefix(messages, later.messages) == len(messages)
            for later in turns[place + 1 :]
        ):
            yield turn
